"""`largest`: the largest batch, image side or length that fits, for plain PyTorch and for a planned step.

Limit that forced it: a batch is found by halving after out-of-memory errors, or by a line through the memory of a few
small batches. Public logs show such lines choose 281 and run out, or come out negative and fall back to 16: memory
jumps where an operator chooses another algorithm, and grows with the square of a length. Shape of the answer: the bytes
of a size are predicted from the captured graph, which takes no memory; the search evaluates the neighbour of what it
returns (`_search`); and what it returns has run, measured, within the memory (`_trial`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table

from fullbatch._arguments import check_memory, check_optimizers
from fullbatch._errors import BatchError, LossError, check_all
from fullbatch._memory._free import RESERVE, free_bytes
from fullbatch._memory._twin import Optimizers
from fullbatch._printed import Printed
from fullbatch._size import format_bytes, parse_bytes
from fullbatch._sized import Axis, Sizes, check_axis
from fullbatch._split import split_of
from fullbatch._tree import check_devices
from fullbatch._trial import Fit, LossFn, Trial, owned_by
from fullbatch._undone import generators


@dataclass(frozen=True)
class Largest(Printed):
    """What fits in `memory` bytes along `axis`. `plain` is None where plain PyTorch runs no size in it."""

    axis: str
    memory: int
    plain: Fit | None
    fullbatch: Fit
    notes: tuple[str, ...] = ()

    def __rich__(self) -> Table:
        title = f"the largest {self.axis} in {format_bytes(self.memory)}, confirmed by running it"
        table = Table(title=title, title_justify="left", caption=self._caption(), caption_justify="left")
        for name in ("", self.axis, "predicted peak", "measured peak", "sizes run", "sizes predicted"):
            table.add_column(name, justify="right" if name else "left")
        for name, fit in (("plain PyTorch", self.plain), ("fullbatch", self.fullbatch)):
            if fit is None:
                table.add_row(name, "none fits", "", "", "", "")
                continue
            run = ", ".join(f"{one.size}{'' if one.measured is not None else ' (ran out)'}" for one in fit.tried)
            peaks = format_bytes(fit.predicted), format_bytes(fit.measured)
            table.add_row(name, str(fit.size), *peaks, run, str(len(fit.looked_at)))
        return table

    def _caption(self) -> str:
        plan, lines = self.fullbatch.plan, list(self.notes)
        if plan is not None:
            how = f"{plan.microbatches} microbatches of {plan.microbatch} samples"
            lines.insert(0, f"fullbatch: {how}, {plan.overhead:.1%} extra time (predicted)")
        return "\n".join(lines)


def largest(
    loss_fn: LossFn,
    model: Any,
    example: Any,
    *,
    memory: int | str | None = None,
    axis: Axis = "batch",
    multiple_of: int = 1,
    most: int = 4096,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    batch_dims: Any = None,
) -> Largest:
    """The largest batch (or image side, or length) that fits, for plain PyTorch and for `fullbatch.Step`.

    Bytes of a size are predicted without running it; the size that is returned was run, and its measured peak is within
    `memory`. Nothing is left of the runs: weights, gradients, buffers, attributes of modules, the example and default
    generators are as before, hooks on parameters do not run, `optimizer.step()` is predicted and not run. State of
    Python's outside of the model (a counter in a closure) is as `loss_fn` leaves it. For one `memory` the answer is
    always the same. Where bytes grow with the size there is no larger one: the next size is predicted not to fit, or
    was run and did not.

    Args:
        loss_fn: as for `Step`, one function that returns a loss or `(loss, aux)`, or a pair `(forward, loss)`. A loss
            that is not captured is run at each size that is tried, on samples of the example, and counted with what it
            takes there.
        example: a batch. With `axis="batch"` its samples are repeated or cut.
        memory: bytes, or "6GiB". None: what is free on the device now and what the model owns, less a reserve of 10 %.
        axis: "batch", or `axis(size) -> batch` for any other: an image's side, a text's length. Values matter little,
            but for what the model does with them (valid words).
        multiple_of: sizes are multiples of this, and for a function the search begins with it.
        most: no larger size is asked for. A planned step's batch has no end but that of its own tensors.
        optimizer: counted, as in `Step`: one, or a list or tuple of them.
        batch_dims: as in `Step`.

    Raises:
        BudgetError: not even the least size fits a planned step. `.smallest` is the memory that it needs.
        BatchError: `axis`, `multiple_of` or `most` is none; `axis` returns no batch, or one batch for two sizes.
        FullbatchError: what `Step` raises.
    """
    check_all(
        lambda: check_axis(axis),
        lambda: _check_sizes(multiple_of, most),
        lambda: check_memory(memory, model),
        lambda: _check_function(loss_fn),
        lambda: check_optimizers(optimizer),
    )
    device = check_devices(model)
    budget, notes = _budget(memory, model, device, optimizer)
    sizes = Sizes(example, axis, batch_dims)
    asked = {"multiple_of": multiple_of, "most": most, "optimizer": optimizer, "batch_dims": batch_dims}
    trial = Trial(loss_fn, model, device, sizes, budget, **asked)
    with generators(device):  # a function of the user's may draw
        ours, plain = trial.planned(), trial.plain()
    if ours.size + multiple_of > most:
        notes.append(f"fullbatch: {ours.size} is all that most={most} allows; more may fit")
    return Largest(sizes.name, budget, plain, ours, tuple(notes))


def _budget(
    memory: int | str | None, model: Any, device: torch.device, optimizer: Optimizers | None
) -> tuple[int, list[str]]:
    """Bytes to stay within, and a note where they are not those that were asked for: what is run must be able to."""
    free = free_bytes(device) + owned_by(model, device, None, optimizer)
    what = f"what is free now and what the model owns, less a reserve of {RESERVE:.0%}"
    if memory is None:
        return free, [f"memory: {what}"]
    asked = parse_bytes(memory)
    return (asked, []) if asked <= free else (free, [f"memory: {what}, not the {format_bytes(asked)} asked for"])


def _check_function(loss_fn: Any) -> None:
    if split_of(loss_fn) is None and not callable(loss_fn):
        raise LossError.of(
            "loss_fn is not a function.", got=f"{type(loss_fn).__name__}: {loss_fn!r:.80}",
            expected="a function of (model, batch), or a pair (forward, loss)",
            next="fullbatch.largest(loss_fn, model, batch)",
        )  # fmt: skip


def _check_sizes(multiple_of: Any, most: Any) -> None:
    for name, value, least in (("multiple_of", multiple_of, 1), ("most", most, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise BatchError.of(
                f"{name}= is no size.", got=f"{name}={value!r}", expected=f"an int, {least} or more",
                next="multiple_of=32, most=1024",
            )  # fmt: skip
    if most < multiple_of:
        raise BatchError.of(
            "There is no size to try.", got=f"multiple_of={multiple_of}, most={most}",
            expected="most= of a multiple or more", next=f"most={multiple_of}",
        )  # fmt: skip
