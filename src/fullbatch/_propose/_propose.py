"""`propose`: what would make a step take less memory, what it would cost, and whether it is the same mathematics.

Limit that forced it: where a budget is too small for any plan, or the time for it too long, what is left is to change
the step, and that is the user's to decide. Shape of the answer: each change is made on a copy, captured and planned as
the user's own step is, so that the bytes are those that `Step` would predict after it; nothing runs, and nothing of
the user's is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from fullbatch._arguments import check_callable, check_memory
from fullbatch._errors import check_all
from fullbatch._memory._after import UNKNOWN
from fullbatch._plan._plan import Plan
from fullbatch._printed import Printed
from fullbatch._propose._changed import Asked, Change, gradients, head, precision, refusal
from fullbatch._propose._logits import Head, find_head
from fullbatch._propose._now import Now, Proposal
from fullbatch._propose._optimizers import optimizers
from fullbatch._propose._smaller import smaller
from fullbatch._propose._tried import Tried
from fullbatch._propose._twin import Untried
from fullbatch._size import format_bytes, parse_bytes
from fullbatch._split import split_of
from fullbatch._tree import check_devices, find_batch
from fullbatch._undone import generators


@dataclass(frozen=True)
class Proposals(Printed):
    """What would take less memory than the step does, the same mathematics first.

    `budget` in bytes; `microbatch` is what peaks are compared at, with nothing made again. `peak` (at that microbatch)
    and `least` are the present step's, `planned` is the peak of its plan within the budget, and `plan` that plan: None
    where none fits, `planned` is then `peak`, and times are ratios to the plain step's.
    """

    budget: int
    microbatch: int
    peak: int
    planned: int
    least: int
    rows: tuple[Proposal, ...]
    notes: tuple[str, ...] = ()
    timed: bool = False
    plan: Plan | None = field(repr=False, default=None)

    def __rich__(self) -> Table:
        title = f"proposals for {format_bytes(self.budget)}: predicted, nothing is changed"
        table = Table(title=title, title_justify="left", show_lines=True)
        table.caption, table.caption_justify = self._caption(), "left"
        table.add_column("change", overflow="fold")
        for name in ("same mathematics", f"saved at microbatch {self.microbatch}", "saved of the least"):
            table.add_column(name, justify="right", max_width=13)
        for name in ("fits", "time"):
            table.add_column(name, justify="right")
        for row in self.rows:
            text = "\n".join(part for part in (row.what, row.line, row.reason) if part)
            fits = {True: "yes", False: "no", None: ""}[row.fits]
            time = "" if row.time is None else f"{row.time:.2f} x"
            saved = _saved(row.saved, row.peak), _saved(row.saved_least, row.least)
            table.add_row(escape(text), "yes" if row.same else "no", *saved, fits, time)
        return table

    def _caption(self) -> str:
        source = "seconds of operators timed alone" if self.timed else "operations and bytes, alike in every dtype"
        fits = f"a plan of {format_bytes(self.planned)} fits" if self.plan is not None else "no plan fits"
        split = f"at microbatch {self.microbatch} with nothing made again it takes {format_bytes(self.peak)}"
        lines = [
            f"now: {fits}; {split}, at least {format_bytes(self.least)}",
            f"time: a ratio to {'the present plan' if self.plan else 'the plain step'}, predicted from {source}",
        ]
        return "\n".join([*lines, *self.notes])


def _saved(nbytes: int | None, left: int | None) -> str:
    if nbytes is None or left is None:
        return "not known"
    return f"{format_bytes(nbytes)}\nto {format_bytes(left)}"


def propose(
    loss_fn: Any,
    model: Any,
    batch: Any,
    *,
    memory: int | str | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    batch_dims: Any = None,
    timed: bool = False,
) -> Proposals:
    """What would make the step take less memory: bytes saved, time, and whether it is the same mathematics.

    Each change is made on a copy without numbers (weights), on tensors without numbers (images), or beside what is
    there (an optimizer), then captured and planned as `Step` would; nothing is run and nothing of the user's changes.
    Looked at are a smaller microbatch and budget, gradients that are there, the working memory of `optimizer.step()`, a
    loss over a vocabulary without its logits: the same mathematics. And autocast to bfloat16, weights in bfloat16,
    optimizer state in 8 bits (torchao), Adafactor, smaller images or shorter sequences: other mathematics.

    Each takes a capture and three plans: minutes for a deep model and a small budget.

    Args:
        loss_fn, model, batch, memory, optimizer, batch_dims, timed: as for `Step`. Of several optimizers all that can
            be changed are changed together.

    Raises:
        FullbatchError: what `Step` raises of the step as it is, but for BudgetError: a budget that nothing fits is
            where this serves.
    """
    check_all(
        lambda: check_devices(model),
        lambda: split_of(loss_fn),
        lambda: check_callable(loss_fn, optimizer),
        lambda: check_memory(memory, model),
        lambda: find_batch(batch, batch_dims),
    )
    device = check_devices(model)
    asked = Asked(loss_fn, model, batch, device, optimizer, batch_dims, timed)
    with generators(device):  # a hook or a factory of the user's may draw
        return _proposals(asked, None if memory is None else parse_bytes(memory))


def _proposals(asked: Asked, memory: int | None) -> Proposals:
    heads: list[Head | None] = []
    step = asked.tried(rewrite=lambda graph: heads.append(find_head(graph)))
    now = Now.of(step, memory)
    changes = [
        *head(asked, heads[0]), *gradients(asked), *optimizers(asked, step), *precision(asked), *smaller(asked)
    ]  # fmt: skip
    rows = [*now.frontier(step)]
    for change in changes:
        found = _row(change, now, step)
        if found is not None:
            rows.append(found)
    rows.sort(key=lambda row: not row.same)
    return Proposals(
        now.budget,
        now.microbatch,
        now.peak,
        now.planned,
        now.least,
        tuple(rows),
        _notes(asked, now),
        asked.timed,
        now.plan,
    )


def _notes(asked: Asked, now: Now) -> tuple[str, ...]:
    notes = []
    if asked.optimizer is None:
        notes.append("optimizer= was not given: its state is not counted, and nothing is proposed for it")
    if now.unknown:
        notes.append(UNKNOWN)
    return tuple(notes)


def _row(change: Change, now: Now, step: Tried) -> Proposal | None:
    """What `change` would bring; None where it is of interest only if it saves, and does not."""
    kept = step.optimizer
    try:
        made = change.make()
        if made.optimizer is not None:
            made.step.optimizer = made.optimizer
        if made.step.fails and not step.fails:
            raise Untried(f"it could be captured, but would not run: {made.step.fails}")
        found = now.compared(change, made)
    except Exception as error:  # whatever a changed step raises is why it cannot be had, and is said
        return Proposal(change.what, change.line, change.same, reason=refusal(error))
    finally:
        step.optimizer = kept
    assert found.saved is not None and found.saved_least is not None
    return found if not change.if_less or max(found.saved, found.saved_least) > 0 else None
