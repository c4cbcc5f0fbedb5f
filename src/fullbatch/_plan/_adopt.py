"""A plan that was made earlier, used for a step: where the step is the same, nothing is searched.

The order of tasks is taken from the plan, and everything that could be wrong here and now is not: the program is
compared, the order is walked, and the peak is that of the operators as this machine runs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fullbatch._cost._costs import Coster
from fullbatch._errors import Fault, PlanError
from fullbatch._ir import Program
from fullbatch._plan._differences import REMAKE, differences
from fullbatch._plan._fingerprint import Fingerprint
from fullbatch._plan._restore import restore
from fullbatch._plan._saved import LOADED
from fullbatch._plan._schedule import Schedule, microbatches
from fullbatch._plan._simulate import Simulated, simulate
from fullbatch._plan._stages import Stages
from fullbatch._size import format_bytes

if TYPE_CHECKING:
    from fullbatch._plan._plan import Plan


@dataclass(frozen=True)
class Limits:
    """What a plan must keep to: bytes in all (None: no limit), of which `owned` are there before the step runs.

    `microbatch` is the number of samples that the user asked for, None for any.
    """

    budget: int | None
    owned: int
    microbatch: int | None = None


def compare(saved: Plan, now: Fingerprint, limits: Limits) -> None:
    """Raises PlanError with all by which `saved` is not for this program and these limits, as far as it says itself."""
    if saved.fingerprint is None:
        faults = [
            Fault(
                "The plan does not say which program it is for.", got="a Plan put together by hand",
                expected="step.plan, or what Plan.load gives", next=REMAKE,
            )
        ]  # fmt: skip
    else:
        faults = differences(saved.fingerprint, now)
    if limits.microbatch not in (None, saved.microbatch):
        faults.append(
            Fault(
                "The plan has another microbatch.", got=f"microbatch={limits.microbatch}",
                expected=f"{saved.microbatch}, which the plan has, or None", next=f"microbatch={saved.microbatch}",
            )
        )  # fmt: skip
    if saved.whole and saved.microbatch != saved.batch:
        faults.append(
            Fault(
                "The plan runs the batch unsplit, and in microbatches.", got=f"microbatches of {saved.microbatch}",
                expected=f"one microbatch of {saved.batch}", next=REMAKE,
            )
        )  # fmt: skip
    faults += over_budget(saved.activations, limits)
    if faults:
        raise PlanError(*faults)


def over_budget(activations: int, limits: Limits) -> list[Fault]:
    """A fault where a plan that allocates `activations` bytes does not keep to the budget."""
    peak = limits.owned + activations
    if limits.budget is None or peak <= limits.budget:
        return []
    return [
        Fault(
            "The plan needs more than the memory budget.",
            got=f"{limits.budget:,} bytes ({format_bytes(limits.budget)})",
            expected=(
                f"at least {peak:,} bytes ({format_bytes(peak)}), the plan's predicted peak, of which "
                f"{format_bytes(limits.owned)} are owned before the step runs"
            ),
            next=f"memory={peak} with this plan, or no plan= to plan for this budget",
        )
    ]


def adopt(
    saved: Plan, program: Program, stages: Stages, cost: Coster, draws: int, limits: Limits
) -> tuple[Schedule, Simulated]:
    """The schedule of `saved` and its peak with the operators' `cost` here, in bytes. `draws` are bytes on top of it.

    Raises PlanError where its order is impossible, or where it takes more memory here than the budget.
    """
    schedule = restore(program, stages, saved.order, microbatches(program.batch, max(saved.microbatch, 1)))
    simulated = simulate(program, schedule, cost)
    if faults := over_budget(simulated.peak + draws, limits):
        raise PlanError(*faults)
    return schedule, simulated


def bound_of(saved: Plan, limits: Limits) -> float:
    """The least extra time at these limits, as far as `saved` knows it: its bound holds for its room and for less."""
    if saved.budget is None or limits.budget is None:
        return 0.0
    return saved.bound if limits.budget - limits.owned <= saved.budget - saved.owned else 0.0


def note(saved: Plan, now: Fingerprint, activations: int) -> str:
    """What the plan of a step says of its origin."""
    there = saved.fingerprint
    parts = [f"{LOADED}: the same program, in an order that was checked"]
    if there is not None and there.threads != now.threads:
        parts.append(f"made for {there.threads} threads, measured again for {now.threads}")
    if activations != saved.activations:
        parts.append(f"{format_bytes(saved.activations)} while it ran where it was made")
    return "; ".join(parts)


ANEW = "planned anew: the plan that was given is not for this"
"""The note of a plan that a step made although it was given one: another shape, another mode, a smaller room."""
