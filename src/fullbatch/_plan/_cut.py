"""What to hold when the forward ends: the least recomputation that a byte limit allows, and a bound on it.

Cut any schedule where the loss is known. Each forward value that the backward reads is held there or computed again
later; what is computed again needs its own inputs held or computed again. Any order and any number of recomputes
satisfies this, so the cheapest solution is a lower bound on the recomputation of every schedule, and its held values
are the ones to keep. A mixed-integer program of one binary a value and a task; HiGHS solves it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from fullbatch._ir import Kind, Program, Task
from fullbatch._plan._keep import own_cost
from fullbatch._plan._stages import Stages

_SECONDS = 3.0  # for one solve; what is found by then is used, and the bound stays valid


@dataclass(frozen=True)
class Cut:
    """`held`: values to keep; `cost` of recomputing the rest; `bound`, the least any schedule needs. In bytes moved."""

    held: frozenset[int]
    cost: float
    bound: float


class CutProblem:
    """The program of one captured step, solved for as many limits as asked.

    `across` says that values are held for all microbatches at once, from one stage to another. Where nothing is (the
    forward and the backward of a microbatch are one stage), they are held within the stage for one microbatch.
    Bytes are those of the whole batch in both cases.
    """

    def __init__(self, program: Program, stages: Stages) -> None:
        forward = [task for task in program.tasks if task.kind is Kind.LOCAL and not task.origin.backward]
        self._tasks = {task.id: column for column, task in enumerate(forward)}
        made = {out: task for task in forward for out in task.outputs if out is not None}
        self._values = [out for task in forward if not task.view for out in task.outputs if out is not None]
        columns = {value: len(forward) + at for at, value in enumerate(self._values)}
        self._costs = np.array([own_cost(task, program) for task in forward])
        self._sizes = np.array([program.values[value].nbytes(None, program.batch) for value in self._values], float)
        rows: list[tuple[dict[int, float], float]] = []
        read = {v for task in program.tasks if task.origin.backward for v in task.inputs if v in made}
        late = _late_reads(program, stages, made)
        # Labels that were counted before the forward are read across a barrier too: a few bytes decide nothing.
        self.across = _bytes(late, program) > 0.01 * _bytes(read, program)
        read = late if self.across else read
        for value in sorted(read):
            rows.append((self._have(value, made, columns), 1.0))
        for task in forward:
            for value in task.inputs:
                if value in made:
                    rows.append(({**self._have(value, made, columns), self._tasks[task.id]: -1.0}, 0.0))
        self._needs = _matrix([row for row, _ in rows], len(forward) + len(self._values))
        self._least = np.array([least for _, least in rows])
        self.total = int(self._sizes.sum())

    def _have(self, value: int, made: dict[int, Task], columns: dict[int, int]) -> dict[int, float]:
        """Held, or computed again."""
        row = {self._tasks[made[value].id]: 1.0}
        if value in columns:
            row[columns[value]] = 1.0
        return row

    def solve(self, limit: float) -> Cut | None:
        """The cheapest recomputation with at most `limit` bytes (of the whole batch) held, if one is found."""
        count = len(self._costs) + len(self._values)
        if not count:
            return Cut(frozenset(), 0.0, 0.0)
        # Among equal recomputation the solution that holds less.
        objective = np.concatenate([self._costs, self._sizes * 1e-6])
        budget = np.concatenate([np.zeros(len(self._costs)), self._sizes])
        constraints = [LinearConstraint(budget[None, :], -np.inf, limit)]
        if len(self._least):
            constraints.append(LinearConstraint(self._needs, self._least, np.inf))
        found = milp(
            objective, integrality=np.ones(count), bounds=Bounds(0, 1), constraints=constraints,
            options={"time_limit": _SECONDS, "mip_rel_gap": 0.01},
        )  # fmt: skip
        if found.x is None:
            return None
        chosen = found.x > 0.5
        held = frozenset(value for value, on in zip(self._values, chosen[len(self._costs) :], strict=True) if on)
        cost = float(self._costs @ chosen[: len(self._costs)])
        least = found.mip_dual_bound if found.mip_dual_bound is not None else 0.0
        return Cut(held, cost, max(0.0, float(least) - 1e-6 * self.total))


def _bytes(values: set[int], program: Program) -> int:
    return sum(program.values[value].nbytes(None, program.batch) for value in values)


def _late_reads(program: Program, stages: Stages, made: dict[int, Task]) -> set[int]:
    """Forward values that the backward reads in a later stage than they are made in."""
    when = stages.first_run
    return {
        value
        for task in program.tasks
        if task.origin.backward and task.id in when
        for value in task.inputs
        if value in made and when[task.id] > when[made[value].id]
    }


def _matrix(rows: list[dict[int, float]], width: int) -> coo_array:
    entries = [(at, column, value) for at, row in enumerate(rows) for column, value in row.items()]
    if not entries:
        return coo_array((0, width))
    at, columns, values = zip(*entries, strict=True)
    return coo_array((values, (at, columns)), shape=(len(rows), width))
