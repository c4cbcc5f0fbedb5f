"""What was decided, as a value worth reading."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.table import Table

from fullbatch._ir import Barrier, FullBatchNode
from fullbatch._plan._schedule import Schedule
from fullbatch._printed import Printed
from fullbatch._size import format_bytes


@dataclass(frozen=True)
class Plan(Printed):
    """How a step runs. Bytes count what the step owns: parameters, buffers, gradients, batch, and what it allocates.

    `predicted_peak` is predicted from the schedule and from operators measured alone (`exact` is then true), or from
    shapes where they could not be run.
    """

    batch: int
    microbatch: int
    microbatches: int
    stages: int
    predicted_peak: int
    plain_peak: int
    budget: int | None
    owned: int
    activations: int
    recomputed: int
    held: int
    exact: bool
    overhead: float
    bound: float
    barriers: tuple[Barrier, ...] = field(repr=False)
    full_batch_nodes: tuple[FullBatchNode, ...] = field(repr=False)
    replicated: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    schedule: Schedule = field(repr=False, compare=False, default=Schedule((), ()))

    @property
    def gap(self) -> float:
        """How far the predicted time can be from the least possible at this budget, as a share of the step's time."""
        return self.overhead - self.bound

    def __rich__(self) -> Table:
        table = Table(title="fullbatch plan", show_header=False, title_justify="left")
        last = self.batch - self.microbatch * (self.microbatches - 1)
        table.add_row("batch", f"{self.batch} samples, the gradient is that of all of them")
        uneven = f", the last of {last}" if last != self.microbatch else ""
        table.add_row("microbatch", f"{self.microbatch} samples x {self.microbatches}{uneven}")
        table.add_row("stages", f"{self.stages}" + (f" ({len(self.barriers)} barriers)" if self.barriers else ""))
        how = "predicted, operators measured alone" if self.exact else "predicted from shapes"
        table.add_row("peak memory", f"{format_bytes(self.predicted_peak)} ({how})")
        table.add_row("  owned before", format_bytes(self.owned))
        table.add_row("  while it runs", format_bytes(self.activations))
        table.add_row("plain step", f"{format_bytes(self.plain_peak)} (predicted from shapes: the whole batch at once)")
        table.add_row("budget", format_bytes(self.budget) if self.budget is not None else "none given")
        table.add_row("held across stages", f"{self.held} values a microbatch")
        table.add_row("recomputed", f"{self.recomputed} runs of {self.schedule.count_runs()}")
        limit = f"; no schedule at this budget can take less than {self.bound:.1%}" if self.overhead > 0 else ""
        table.add_row("extra time", f"{self.overhead:.1%} (predicted from operations and bytes{limit})")
        for title, items in (("barriers", self.barriers), ("at full batch", self.full_batch_nodes)):
            shown = [str(item) for item in items]
            grouped = list(dict.fromkeys(shown))
            lines = grouped[:8] + ([f"... and {len(grouped) - 8} more"] if len(grouped) > 8 else [])
            table.add_row(title, "\n".join(lines) or "none")
        if self.replicated:
            table.add_row("same for all", ", ".join(self.replicated))
        for note in self.notes:
            table.add_row("note", note)
        return table
