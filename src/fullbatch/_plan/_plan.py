"""What was decided, as a value worth reading, keeping and comparing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from rich.table import Table

from fullbatch._ir import Barrier, FullBatchNode
from fullbatch._plan import _saved
from fullbatch._plan._diff import PlanDiff, diff
from fullbatch._plan._fingerprint import Fingerprint
from fullbatch._plan._frontier import Frontier, frontier
from fullbatch._plan._schedule import Schedule
from fullbatch._printed import Printed
from fullbatch._size import format_bytes

# The note of a plan that was chosen by measured seconds.
TIMED = "time: each distinct operator was timed alone on this machine"


@dataclass(frozen=True)
class Plan(Printed):
    """How a step runs. Bytes count what the step owns: parameters, buffers, gradients, batch, and what it allocates.

    `predicted_peak` is predicted from the schedule and from operators measured alone (`exact` is then true), or from
    shapes where they could not be run. `overhead` and `bound` are shares of the step's time, predicted from operations
    and bytes moved.

    A plan is a value: it can be saved and given to a step in another process, `fullbatch.Step(..., plan=path)`.
    `order` is what each stage does for one microbatch, `fingerprint` the program that it is for; `schedule`, with what
    follows from them, is empty until a step uses the plan.
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
    runs: int
    held: int
    exact: bool
    overhead: float
    bound: float
    barriers: tuple[Barrier, ...] = field(repr=False)
    full_batch_nodes: tuple[FullBatchNode, ...] = field(repr=False)
    whole: bool = False
    replicated: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    order: tuple[tuple[int, ...], ...] = field(repr=False, default=())
    fingerprint: Fingerprint | None = field(repr=False, default=None)
    schedule: Schedule = field(repr=False, compare=False, default=Schedule((), ()))

    @property
    def gap(self) -> float:
        """How far the predicted time can be from the least possible at this budget, as a share of the step's time."""
        return self.overhead - self.bound

    @property
    def loaded(self) -> bool:
        """Whether the step that has this plan was given it, and did not plan."""
        return any(note.startswith(_saved.LOADED) for note in self.notes)

    def to_json(self) -> str:
        """The plan as text that `from_json` reads, in any process."""
        return _saved.to_json(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes `to_json()` to `path`, whole or not at all. Raises PlanError where it cannot be written."""
        _saved.write(self.to_json(), path)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The plan that `to_json` gave. Raises PlanError, with all that is wrong in the text."""
        return cls(**_saved.parse(text))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The plan that `save` wrote. Raises PlanError where there is no such file, or with all that is wrong in it."""
        return cls.from_json(_saved.read(path))

    def diff(self, other: Plan) -> PlanDiff:
        """What this plan and `other` decided differently, and which operators only one of them runs again."""
        return diff(self, other)

    def frontier(self, budgets: Sequence[int | str] | None = None) -> Frontier:
        """What the step would cost at other budgets: predicted peaks in bytes and extra time, with the bound.

        Each budget is planned for as by `fullbatch.Step(..., memory=budget)`. The step does not run, but its operators
        are measured one by one, so that this takes seconds, or minutes for a large model.

        Args:
            budgets: bytes, or "2GiB", as `memory=` has them. None: eight, in equal ratios of what is allocated, from
                the least that works to what the whole batch at once takes, or to what is free now.

        Raises:
            PlanError: no step that this plan is for is alive.
            MemorySizeError: some budgets are no sizes; all of them are named.
            BudgetError: some budgets are too small for any plan; all of them are named.
        """
        return frontier(self, budgets)

    def __rich__(self) -> Table:
        table = Table(title="fullbatch plan", show_header=False, title_justify="left")
        last = self.batch - self.microbatch * (self.microbatches - 1)
        table.add_row("batch", f"{self.batch} samples")
        table.add_row("same mathematics", "yes: the gradient is that of all of them, to rounding")
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
        table.add_row("recomputed", f"{self.recomputed} runs of {self.runs}")
        limit = (
            f"; no schedule in microbatches of one size and in the graph's order can take less than {self.bound:.1%}"
            if self.overhead > 0
            else ""
        )
        source = "operators timed alone" if TIMED in self.notes else "operations and bytes"
        table.add_row("extra time", f"{self.overhead:.1%} (predicted from {source}{limit})")
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
