"""What was decided for a step that is run and not captured, as a value worth reading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.table import Table

from fullbatch._printed import Printed
from fullbatch._size import format_bytes

NO_CERTIFICATE = (
    "no certificate is given: the step is not captured, and that samples do not meet in it was tried on the example, "
    "not derived"
)


@dataclass(frozen=True)
class Trial:
    """One configuration that was run on the example batch. Bytes are those allocated above what the step owns.

    `predicted` is what earlier trials made of it, None for the first. `measured` is None where memory ran out.
    `complete` says that all microbatches were run, and not the first two.
    """

    microbatch: int
    checkpointed: tuple[str, ...]
    predicted: int | None
    measured: int | None
    complete: bool

    def __str__(self) -> str:
        modules = f", {len(self.checkpointed)} modules checkpointed" if self.checkpointed else ""
        predicted = "" if self.predicted is None else f", predicted {format_bytes(self.predicted)}"
        measured = "out of memory" if self.measured is None else format_bytes(self.measured)
        part = "" if self.complete else " (first two microbatches)"
        return f"microbatch {self.microbatch}{modules}: {measured}{predicted}{part}"


@dataclass(frozen=True)
class Plan(Printed):
    """How a step runs that is not captured. Bytes are exact for the example batch; another may take other branches.

    `owned` is what the step owns before it runs (parameters, buffers, gradients, optimizer state, batch), `activations`
    what it allocated above that when this configuration was run on the example, all microbatches of it. `microbatch` is
    the most samples in one: a batch is cut evenly, 33 samples in eights as 7, 7, 7, 6, 6.
    """

    batch: int
    microbatch: int
    checkpointed: tuple[str, ...]
    owned: int
    activations: int
    budget: int | None
    inexact: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    trials: tuple[Trial, ...] = field(repr=False, default=())

    @property
    def microbatches(self) -> int:
        """How many microbatches the batch is run in."""
        return -(-self.batch // self.microbatch)

    @property
    def predicted_peak(self) -> int:
        """Bytes that the step takes in all: owned, and measured on the example."""
        return self.owned + self.activations

    @property
    def exact(self) -> bool:
        """Whether nothing is known to differ from the whole batch's gradient and buffers beyond rounding."""
        return not self.inexact

    def __rich__(self) -> Table:
        table = Table(title="fullbatch eager plan", show_header=False, title_justify="left")
        least = self.batch // self.microbatches
        table.add_row("batch", f"{self.batch} samples")
        same = "as far as was tried: the gradient is that of all of them, to rounding; no certificate"
        table.add_row("same mathematics", same if self.exact else "no: see below")
        most, rest = ("", "") if least == self.microbatch else ("at most ", f", none of less than {least}")
        table.add_row("microbatch", f"{most}{self.microbatch} samples x {self.microbatches}{rest}")
        table.add_row("checkpointed", ", ".join(self.checkpointed) or "nothing")
        table.add_row("peak memory", f"{format_bytes(self.predicted_peak)} (measured on the example)")
        table.add_row("  owned before", format_bytes(self.owned))
        table.add_row("  while it runs", format_bytes(self.activations))
        table.add_row("budget", format_bytes(self.budget) if self.budget is not None else "none given")
        table.add_row("tried", "\n".join(map(str, self.trials)))
        for what in self.inexact:
            table.add_row("inexact", what)
        for note in self.notes:
            table.add_row("note", note)
        return table


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
