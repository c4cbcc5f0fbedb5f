"""The optimizer's step within the budget: it comes after the planned step, and may need more memory than that.

A plan bounds what runs inside of `Step`. Gradients, state and the temporaries of `optimizer.step()` are alive after it,
under the same limit of the user's machine. So the optimizer's step is held against the same budget, before anything
runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from fullbatch._errors import BudgetError, Fault
from fullbatch._memory._owned import OptimizerStep
from fullbatch._plan._plan import Plan
from fullbatch._size import format_bytes

_Executor = TypeVar("_Executor")

UNKNOWN = (
    "the memory of the optimizer's step is not known (it could not be run on stand-ins, or a profiler was running): it "
    "is held against no budget"
)


def planned(
    make: Callable[[], tuple[Plan, _Executor]], budget: int | None, owned: int, after: OptimizerStep
) -> tuple[Plan, _Executor]:
    """What `make` gives, with notes of the optimizer's step. Raises BudgetError where either does not fit."""
    need = owned + after.total
    try:
        plan, executor = make()
    except BudgetError as error:
        if budget is not None and after.exact and need > error.smallest:
            raise _too_small(budget, owned, after) from None
        raise
    if budget is not None and after.exact and need > budget:
        raise _too_small(budget, owned, after)
    notes = [] if after.exact else [UNKNOWN]
    if after.exact and need > plan.predicted_peak:
        notes.append(f"optimizer.step() sets the peak: {format_bytes(need)}, more than the {_training(plan)}")
    return (replace(plan, notes=(*plan.notes, *notes)) if notes else plan), executor


def _training(plan: Plan) -> str:
    return f"{format_bytes(plan.predicted_peak)} of the step that is planned here"


def _too_small(budget: int, owned: int, after: OptimizerStep) -> BudgetError:
    need = owned + after.total
    return BudgetError(
        Fault(
            "The optimizer's step does not fit the memory budget.",
            got=f"{budget:,} bytes ({format_bytes(budget)})",
            expected=(
                f"at least {need:,} bytes ({format_bytes(need)}), of which {format_bytes(owned)} are parameters, "
                f"buffers, gradients, optimizer state and the batch, {format_bytes(after.gradients)} gradients that "
                f"are not there yet, and {format_bytes(after.working)} are allocated while optimizer.step() runs"
            ),
            next=(
                f"memory={need}, or an optimizer that works on less at once (fused=True, or foreach=False): "
                f"fullbatch.propose(loss_fn, model, batch, memory={budget}, optimizer=optimizer)"
            ),
        ),
        smallest=need,
    )
