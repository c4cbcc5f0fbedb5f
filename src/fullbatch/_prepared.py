"""`step.prepare`: plans for every shape that will come, before the first step runs.

Limit that forced it: objects per image or words per text make the memory of a step differ between batches, and a run
that starts on a small batch dies at the largest, hours later. Shape of the answer: each distinct form of a batch is
captured and planned without running; those that fit no budget are named together, and the rest are remembered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from rich.table import Table

from fullbatch._errors import BatchError, BudgetError, Fault, FullbatchError
from fullbatch._plan._plan import Plan
from fullbatch._printed import Printed
from fullbatch._size import format_bytes
from fullbatch._tree import leaves, map_tensors


@dataclass(frozen=True)
class PreparedShape:
    """One form of a batch: how many of the batches have it, and how it will run. Peaks are bytes.

    `overhead` is the predicted share of extra time; NaN in `fullbatch.eager.Step`, which predicts none.
    """

    form: str
    batches: int
    samples: int
    microbatch: int
    predicted_peak: int
    overhead: float


@dataclass(frozen=True)
class Prepared(Printed):
    """The forms that a step is prepared for, the one with the largest predicted peak first."""

    shapes: tuple[PreparedShape, ...]

    @property
    def worst(self) -> PreparedShape:
        """The form with the largest predicted peak."""
        return self.shapes[0]

    @property
    def batches(self) -> int:
        """How many batches were looked at."""
        return sum(shape.batches for shape in self.shapes)

    def __rich__(self) -> Table:
        title = f"prepared: {self.batches} batches in {len(self.shapes)} shapes, the worst first"
        table = Table(title=title, title_justify="left")
        for name in ("batch", "batches", "microbatch", "predicted peak", "extra time"):
            table.add_column(name, justify="left" if name == "batch" else "right")
        for shape in self.shapes[:20]:
            table.add_row(
                shape.form, str(shape.batches), f"{shape.microbatch} of {shape.samples}",
                format_bytes(shape.predicted_peak), "-" if math.isnan(shape.overhead) else f"{shape.overhead:.1%}",
            )  # fmt: skip
        if len(self.shapes) > 20:
            table.add_row(f"... and {len(self.shapes) - 20} more", "", "", "", "")
        return table


class Planned(Protocol):
    """What is read of a plan, of a captured step or of one that is run."""

    @property
    def batch(self) -> int:
        """Samples."""

    @property
    def microbatch(self) -> int:
        """Samples at once."""

    @property
    def predicted_peak(self) -> int:
        """Bytes."""


def prepare(
    plan: Callable[[Any], Planned], batches: Iterable[Any], device: torch.device,
    form: Callable[[Any], str] | None = None,
) -> Prepared:  # fmt: skip
    """Plans each distinct form in `batches`. Raises what `plan` raises, for all forms together.

    `form` says which batches are planned as one, and that `plan` runs them: they are then given to it as they are.
    """
    counts: dict[str, int] = {}
    plans: dict[str, tuple[str, Planned]] = {}
    failed: list[FullbatchError] = []
    for batch in _iterated(batches):
        key = repr(map_tensors(lambda tensor: form_of(tensor, device), batch)) if form is None else form(batch)
        counts[key] = counts.get(key, 0) + 1
        if counts[key] == 1:
            try:
                plans[key] = described(batch), plan(_with_storage(batch, device) if form is None else batch)
            except FullbatchError as error:
                failed.append(_about(batch, error))
    if failed:
        raise _together(failed)
    if not plans:
        raise _nothing("no batch")
    shapes = [
        PreparedShape(
            shape, counts[key], made.batch, made.microbatch, made.predicted_peak,
            made.overhead if isinstance(made, Plan) else math.nan,
        )
        for key, (shape, made) in plans.items()
    ]  # fmt: skip
    return Prepared(tuple(sorted(shapes, key=lambda shape: -shape.predicted_peak)))


def _iterated(batches: Any) -> Iterable[Any]:
    if isinstance(batches, (torch.Tensor, Mapping, str)) or not isinstance(batches, Iterable):
        raise _nothing(f"{type(batches).__name__}: {batches!r:.80}")
    return batches


def _nothing(got: str) -> BatchError:
    return BatchError.of(
        "There is nothing to prepare for.", got=got, expected="batches: a list of them, a loader, shapes on `meta`",
        next="step.prepare([batch])",
    )  # fmt: skip


def described(batch: Any) -> str:
    """The shapes and dtypes of a batch in one line."""
    found = [f"{path.removeprefix('batch') or 'batch'} {_sizes(tensor)}" for path, tensor in leaves(batch)]
    return ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")


def _sizes(tensor: torch.Tensor) -> str:
    return f"{'x'.join(str(size) for size in tensor.shape) or 'scalar'} {str(tensor.dtype).removeprefix('torch.')}"


def form_of(tensor: torch.Tensor, device: torch.device) -> tuple[Any, ...]:
    """What of a tensor makes it another form; one on `meta` stands for one on `device`."""
    where = device if tensor.device.type == "meta" else tensor.device
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, where.type, tensor.requires_grad


def _with_storage(batch: Any, device: torch.device) -> Any:
    """`batch` with memory behind its tensors on `meta`; it is not written, and not kept."""

    def real(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "meta":
            return tensor
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return made.requires_grad_(tensor.requires_grad)

    return map_tensors(real, batch)


def _about(batch: Any, error: FullbatchError) -> FullbatchError:
    form = described(batch)
    faults = [replace(fault, got=f"{form}: {fault.got}" if fault.got else form) for fault in error.faults]
    return BudgetError(*faults, smallest=error.smallest) if isinstance(error, BudgetError) else type(error)(*faults)


def _together(failed: list[FullbatchError]) -> FullbatchError:
    faults: list[Fault] = [fault for error in failed for fault in error.faults]
    small = [error.smallest for error in failed if isinstance(error, BudgetError)]
    if len(small) == len(failed):
        return BudgetError(*faults, smallest=max(small))
    return next(type(error) for error in failed if not isinstance(error, BudgetError))(*faults)
