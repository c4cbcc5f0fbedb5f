"""Memory against time: what a step would cost at other budgets.

A plan is a value and cannot plan. The planner of a living step is found by the program that the plan is for; it is
known weakly, so that a plan keeps no step alive.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rich.table import Table

from fullbatch._errors import BudgetError, Fault, FullbatchError, MemorySizeError, PlanError
from fullbatch._memory._free import free_bytes
from fullbatch._printed import Printed
from fullbatch._size import format_bytes, parse_bytes

if TYPE_CHECKING:
    from fullbatch._plan._plan import Plan

POINTS = 8
"""Budgets of a frontier where the user names none."""

_TRIES = 6
"""Times that the least budget is asked for again."""


class Point(NamedTuple):
    """One budget: bytes, samples a microbatch, and extra time as a share of the step's time.

    `bound` is the least extra time, at this budget, of any schedule in microbatches of one size that first runs
    operators in the graph's order.
    """

    budget: int
    predicted_peak: int
    microbatch: int
    overhead: float
    bound: float

    @property
    def gap(self) -> float:
        """How far the plan can be from the best one."""
        return self.overhead - self.bound


@dataclass(frozen=True)
class Frontier(Printed):
    """The memory-time curve of a step, from the smallest budget to the largest. `batch` is in samples."""

    batch: int
    points: tuple[Point, ...]

    def to_json(self) -> str:
        """The curve as JSON: bytes, samples and shares."""
        rows = [{**point._asdict(), "gap": point.gap} for point in self.points]
        return json.dumps({"format": "fullbatch-frontier", "version": 1, "batch": self.batch, "points": rows}, indent=1)

    def __rich__(self) -> Table:
        table = Table(title=f"memory against time, batch of {self.batch} (predicted)", title_justify="left")
        for name in ("budget", "peak", "microbatch", "extra time", "at least", "gap"):
            table.add_column(name, justify="right")
        for point in self.points:
            table.add_row(
                format_bytes(point.budget), format_bytes(point.predicted_peak), str(point.microbatch),
                f"{point.overhead:.1%}", f"{point.bound:.1%}", f"{point.gap:.1%}",
            )  # fmt: skip
        return table


class Live:
    """The planner of a living step. `choose` plans for bytes above what is owned; `draws` are bytes on top of that."""

    def __init__(
        self, choose: Callable[[int | None, int | None, int], Any], plain_peak: Callable[[], int], draws: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.choose, self.plain_peak, self.draws, self.device = choose, plain_peak, draws, device


_LIVE: weakref.WeakKeyDictionary[Live, set[str]] = weakref.WeakKeyDictionary()


def register(live: Live, digest: str) -> None:
    """Makes a step's planner known under the digest of a program of its own, for as long as the step lives."""
    _LIVE.setdefault(live, set()).add(digest)


def frontier(plan: Plan, budgets: Sequence[int | str] | None) -> Frontier:
    """The frontier of the step that `plan` is for. See `Plan.frontier`."""
    digest = "" if plan.fingerprint is None else plan.fingerprint.digest
    live = next((live for live, digests in _LIVE.items() if digest in digests), None)
    if live is None:
        raise PlanError.of(
            "No step that this plan is for is alive, and only a step can plan.",
            got=f"a plan for {plan.batch} samples by itself", expected="its step in this process",
            next="step = fullbatch.Step(loss_fn, model, batch, plan=plan); step.plan.frontier()",
        )  # fmt: skip
    owned = plan.owned + live.draws
    wanted = _spread(live, owned) if budgets is None else _parsed(budgets)
    points, failed, least = [], [], 0.0
    for budget in reversed(wanted):
        try:
            choice = live.choose(budget - owned, None, owned)
        except BudgetError as error:
            failed.append(error)
            continue
        peak = owned + choice.simulated.peak
        least = max(least, choice.bound)  # what no schedule can do in more memory, none can do in less
        points.append(Point(budget, peak, choice.size, choice.overhead, min(least, choice.overhead)))
    if failed and budgets is not None:
        faults = [fault for error in reversed(failed) for fault in error.faults]
        raise BudgetError(*faults, smallest=min(error.smallest for error in failed))
    return Frontier(plan.batch, tuple(reversed(points)))


def _parsed(budgets: Sequence[int | str]) -> list[int]:
    """Budgets in bytes, from the smallest. Raises MemorySizeError with every one that is no size."""
    found, faults = set(), list[Fault]()
    for budget in [budgets] if isinstance(budgets, (int, str)) else budgets:
        try:
            found.add(parse_bytes(budget))
        except FullbatchError as error:
            faults += error.faults
    if faults:
        raise MemorySizeError(*faults)
    if not found:
        raise MemorySizeError.of(
            "There is no budget to plan for.", got=f"budgets={budgets!r:.80}", expected="at least one, or None",
            next='step.plan.frontier(["2GiB", "4GiB"]), or step.plan.frontier()',
        )  # fmt: skip
    return sorted(found)


def _spread(live: Live, owned: int) -> list[int]:
    """Budgets in equal ratios of what is allocated, from the least that works to what the whole batch at once takes.

    No more than what is free now: no operator is tried that this machine could not run.
    """
    least = _least(live, owned)
    free = free_bytes(live.device)
    fits = live.plain_peak() * 5 // 4 <= free  # the estimate, and more for what operators allocate inside themselves
    most = max(live.choose(None, None, owned).simulated.peak if fits else free, least)
    steps = [least * (most / least) ** (at / (POINTS - 1)) for at in range(POINTS)]
    return sorted({owned + room for room in (least, *(int(step) for step in steps[1:-1]), most)})


def _least(live: Live, owned: int) -> int:
    """The least bytes above `owned` that a plan is found for: what a refusal says is tried before it is believed."""
    room = 1
    for _ in range(_TRIES):
        try:
            return int(live.choose(room, None, owned).simulated.peak)
        except BudgetError as error:
            room = max(error.smallest - owned, room + 1)
    return room
