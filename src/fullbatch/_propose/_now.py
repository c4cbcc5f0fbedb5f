"""One change beside the step as it is: bytes at one microbatch, the least budget, and the time within the budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fullbatch._errors import BudgetError
from fullbatch._memory._after import UNKNOWN
from fullbatch._plan._plan import Plan
from fullbatch._propose._changed import Change, Made
from fullbatch._propose._tried import Taken, Tried


@dataclass(frozen=True)
class Proposal:
    """One change, and what the step would take after it. Bytes are predicted, `optimizer.step()` included.

    `what` it is, `line` to type, `same`: whether it is the same mathematics, to rounding. `peak` is that of the step at
    the microbatch that all proposals are compared at, with nothing made again, and `saved` what that is below the
    present one's; for a line `memory=` or `microbatch=` it is that of its own plan, and below the present plan's.
    `least` is the least budget that a plan was found for, `saved_least` what that is below the present one's. `fits`:
    whether a plan is within the budget; `plan` is that plan, None where none fits (a line `memory=` or `microbatch=`
    always has its own). `time`: the predicted time of that plan, else of the one for `least`, as a ratio to the present
    one. `reason`: why the change could not be looked at, all numbers then None, or what else is to be known.
    """

    what: str
    line: str
    same: bool
    peak: int | None = None
    saved: int | None = None
    least: int | None = None
    saved_least: int | None = None
    fits: bool | None = None
    time: float | None = None
    reason: str = ""
    plan: Plan | None = field(repr=False, default=None)


@dataclass(frozen=True)
class Now:
    """The step as it is, which all changes are compared with.

    `peak` at `microbatch` with nothing made again; `planned` that of the plan within the budget, where there is one.
    """

    budget: int
    microbatch: int
    peak: int
    planned: int
    least: int
    time: float
    plan: Plan | None
    unknown: bool

    @classmethod
    def of(cls, step: Tried, memory: int | None) -> Now:
        try:
            taken = step.within(memory)
        except BudgetError as error:
            budget = memory or step.captured.free_budget or 0
            split = step.split(1)
            unknown = UNKNOWN in split.plan.notes
            return cls(budget, 1, split.peak, split.peak, error.smallest, step.plain_time, None, unknown)
        plan = taken.plan
        assert plan.budget is not None
        peak = step.split(plan.microbatch).peak
        unknown = UNKNOWN in plan.notes
        return cls(plan.budget, plan.microbatch, peak, taken.peak, step.least(), taken.time, plan, unknown)

    def compared(self, change: Change, made: Made) -> Proposal:
        step = made.step
        peak, reason = step.split(self.microbatch).peak, made.reason
        plan = None
        try:
            taken = step.within(self.budget)
        except BudgetError as error:
            least = error.smallest
            time, reason = step.within(least).time / self.time, _and(reason, "time: at its least budget")
        else:
            least, plan, time = step.least(), taken.plan, taken.time / self.time
            if UNKNOWN in taken.plan.notes:
                reason = _and(reason, UNKNOWN)
        return Proposal(
            made.what or change.what, made.line, change.same, peak, self.peak - peak, least,
            self.least - least, plan is not None, time, reason, plan,
        )  # fmt: skip

    def frontier(self, step: Tried) -> Iterator[Proposal]:
        """What the step as it is could do with less: smaller microbatches, and more made again."""
        if self.plan is None:
            yield self._at("a larger budget", step.within(self.least))
            return
        if self.microbatch > 1:
            half = self.microbatch // 2
            split = step.split(half)
            if split.peak < self.planned:  # not where something is made again, or the optimizer's step sets the peak
                yield self._own("a smaller microbatch", f"microbatch={half}", split)
        budgets = (self.least + self.planned) // 2, self.least
        taken = [step.within(budget) for budget in budgets if budget < self.planned]
        for one in {one.peak: one for one in taken}.values():
            yield self._at("a smaller budget", one)

    def _at(self, what: str, taken: Taken) -> Proposal:
        plan = taken.plan
        how = f"microbatches of {plan.microbatch}, {plan.recomputed} of {plan.runs} runs made again"
        return self._own(what, f"memory={plan.budget}", taken, how)

    def _own(self, what: str, line: str, taken: Taken, reason: str = "") -> Proposal:
        return Proposal(
            what, line, True, taken.peak, self.planned - taken.peak, self.least, 0, taken.peak <= self.budget,
            taken.time / self.time, reason, taken.plan,
        )  # fmt: skip


def _and(reason: str, more: str) -> str:
    return f"{reason}; {more}" if reason else more
