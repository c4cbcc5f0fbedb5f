"""What to hold into each segment, by linear programming: a lower bound, and a choice near it.

For each value and segment, S says that it is held into the segment, for each node R that it is run again there. What
is read is held or made again; what is made again has its inputs held or made again; what is held was held or made in
the segment before; what is held fits. The cost of R is least. This is the program of Checkmate (Jain et al. 2020) with
segments in place of single operators. Its relaxation, in which a fraction of a value may be held, is solved quickly,
and bounds every schedule that runs the backward's operators for the first time in the graph's order.

A choice comes by rounding: segment by segment what the relaxation holds most of is held, as long as it fits. Solving
again after each decision was tried and gained little; what `_polish` does afterwards gains more in less time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog
from scipy.sparse import coo_array, csr_array

from fullbatch._plan._reduced import Reduced

_Array = npt.NDArray[np.float64]

# Values of which the relaxation holds less than this share are not held.
_LITTLE = 0.05

# Solved programs of which the prices are kept.
_PRICES = 50

_INFEASIBLE = 2  # a status of scipy.optimize.linprog


@dataclass(frozen=True)
class Holding:
    """`held[t]`: values held into segment t. `bound`: the cost of what the relaxation runs again."""

    held: tuple[frozenset[int], ...]
    bound: float


@dataclass(frozen=True)
class Moment:
    """A first run in `segment` beside which `free` bytes may be held; its own `values` are there in any case."""

    segment: int
    free: float
    values: frozenset[int]


class HoldingProblem:
    """The linear program of one reduced step, solved for as many budgets as asked.

    `scale`: the share of a value's bytes that holding it takes (one microbatch of many, or all). `again`: the share of
    these that running it again takes while the segment runs. `unit`: the cost of the dearest node.
    """

    def __init__(self, reduced: Reduced, scale: float, again: float) -> None:
        self.reduced, self.scale, self._again = reduced, scale, again
        self._held: list[dict[int, int]] = [{} for _ in range(reduced.segments)]  # by segment: value -> column
        self._runs: list[dict[int, int]] = [{} for _ in range(reduced.segments)]  # by segment: node -> column
        costs: list[float] = []
        for node in reduced.nodes:
            for value in node.outputs:
                for segment in range(node.segment + 1, reduced.last[value] + 1):
                    self._held[segment][value] = len(costs)
                    costs.append(0.0)
            if node.outputs:
                for segment in range(node.segment + 1, node.last + 1):
                    self._runs[segment][node.index] = len(costs)
                    costs.append(node.cost)
        self._costs = np.array(costs)
        self.unit = float(self._costs.max(initial=0.0)) or 1.0
        self._bytes = max(float(sum(reduced.sizes.values())) * scale, 1.0)
        self._prices: deque[_Array] = deque(maxlen=_PRICES)  # of all rows, by programs that were solved, of any shares
        self._rows()

    def at(self, scale: float, again: float) -> HoldingProblem:
        """The same problem with other shares."""
        other = copy(self)
        other.scale, other._again = scale, again
        other._bytes = self._bytes / self.scale * scale
        return other

    def _rows(self) -> None:
        reduced = self.reduced
        at: list[int] = []
        columns: list[int] = []
        values: list[float] = []
        least: list[float] = []

        def row(terms: Sequence[tuple[int, float]], bound: float) -> None:
            for column, value in terms:
                at.append(len(least))
                columns.append(column)
                values.append(value)
            least.append(bound)

        def there(value: int, segment: int) -> list[tuple[int, float]]:
            maker = reduced.makers[value]
            return [(self._held[segment][value], 1.0), (self._runs[segment][maker.index], 1.0)]

        for node in reduced.nodes:
            for value in node.inputs:
                maker = reduced.makers[value]
                if maker.segment < node.segment:
                    row(there(value, node.segment), 1.0)
                if node.outputs:
                    for segment in range(node.segment + 1, node.last + 1):
                        row([*there(value, segment), (self._runs[segment][node.index], -1.0)], 0.0)
            for value in node.outputs:
                for segment in range(node.segment + 2, reduced.last[value] + 1):
                    row([*there(value, segment - 1), (self._held[segment][value], -1.0)], 0.0)
        for segment, wanted in enumerate(reduced.wanted):
            for value in wanted:
                if reduced.makers[value].segment < segment:
                    row(there(value, segment), 1.0)
        self._memory = len(least)
        for segment in range(1, reduced.segments):
            row([(c, -self._share(value)) for value, c in self._held[segment].items()], 0.0)
        shape = (len(least), len(self._costs))
        self._matrix = csr_array(coo_array((values, (at, columns)), shape=shape))
        self._least = np.array(least)
        self._own_runs = self._taken(shape)

    def _taken(self, shape: tuple[int, int]) -> csr_array:
        """In the rows of memory: what each node that is run again adds while its segment runs."""
        entries = [
            (self._memory + t - 1, column, -sum(self._share(v) for v in self.reduced.nodes[index].outputs if v in own))
            for t, own in enumerate(self.reduced.own) if t
            for index, column in self._runs[t].items()
        ]  # fmt: skip
        at, columns, values = zip(*entries, strict=True) if entries else ((), (), ())
        return csr_array(coo_array((np.array(values), (at, columns)), shape=shape))

    def _share(self, value: int) -> float:
        return self.reduced.sizes[value] * self.scale / self._bytes

    # ---- solving

    def bound(self, room: Sequence[float], moments: Sequence[Moment] = ()) -> float:
        """The least cost of what is run again, where `room[t]` bytes may be held into segment t; inf: not possible."""
        if min((*room[1:], *(moment.free for moment in moments)), default=0.0) < 0:
            return float("inf")
        return self._cost_of(self._solve(room, bounding=True, moments=moments))

    def outlook(self, room: Sequence[float]) -> float:
        """The same where all that is run again in a segment takes its room at once."""
        return self._cost_of(self._solve(room))

    def floor(self, room: Sequence[float], bounding: bool = True) -> float:
        """What `bound`, or `outlook`, is at least: by duality, with the prices of rows from what was solved before."""
        if min(room[1:], default=0.0) < 0:
            return float("inf")
        if not self._prices:
            return 0.0
        costs, matrix, least = self.program(room, bounding)
        prices = np.array(self._prices)
        # At these prices each variable, from 0 to 1, is as good as it gets by itself.
        left = np.minimum(costs - prices @ matrix, 0.0)
        return max(0.0, self.unit * float((prices @ least + left.sum(axis=1)).max()))

    def _cost_of(self, found: _Array | None) -> float:
        return float("inf") if found is None else float(self._costs @ found[: len(self._costs)])

    def _solve(self, room: Sequence[float], bounding: bool = False, moments: Sequence[Moment] = ()) -> _Array | None:
        if not len(self._costs):
            return np.zeros(0)
        costs, matrix, least = self.program(room, bounding)
        if moments:
            costs, matrix, least = self._beside(moments, costs, matrix, least)
        found = linprog(costs, A_ub=-matrix, b_ub=-least + 1e-9, bounds=(0, 1), method="highs-ds")
        if found.x is None and found.status != _INFEASIBLE:
            return np.zeros(len(costs))  # nothing is known, which bounds nothing
        if found.x is not None and not moments:
            self._prices.append(np.maximum(-np.asarray(found.ineqlin.marginals), 0.0))
        return None if found.x is None else np.asarray(found.x)

    def _rights(self, room: Sequence[float]) -> _Array:
        """The right hand side of all rows."""
        least = self._least.copy()
        # The solver takes no infinity; twice of all that there is to hold is as good.
        least[self._memory :] = -np.minimum(room[1:], 2 * self._bytes) / self._bytes
        return least

    def program(self, room: Sequence[float], bounding: bool = False) -> tuple[_Array, csr_array, _Array]:
        """Costs c, rows A and least b: least c x where A x >= b and 0 <= x <= 1. c is in units of `unit`.

        `bounding`: what is run again takes no room.
        """
        matrix = self._matrix
        if not bounding and self._again:
            matrix = csr_array(matrix + self._again * self._own_runs)
        return self._costs / self.unit, matrix, self._rights(room)

    def _beside(
        self, moments: Sequence[Moment], costs: _Array, matrix: csr_array, least: _Array
    ) -> tuple[_Array, csr_array, _Array]:
        """The program with columns for what lies through a segment: held into the next, not run again in it."""
        columns: dict[tuple[int, int], int] = {}  # (segment, value) -> column
        entries: list[tuple[int, int, float]] = []
        bounds = list(least)
        for segment in sorted({moment.segment for moment in moments}):
            after = self._held[segment + 1] if segment + 1 < len(self._held) else {}
            for value, held in after.items():
                run = self._runs[segment].get(self.reduced.makers[value].index)
                if run is not None:
                    lies = columns[segment, value] = len(costs) + len(columns)
                    entries += [(len(bounds), lies, 1.0), (len(bounds), held, -1.0), (len(bounds), run, 1.0)]
                    bounds.append(0.0)
        for moment in moments:
            entries += [
                (len(bounds), column, -self._share(value))
                for (segment, value), column in columns.items()
                if segment == moment.segment and value not in moment.values
            ]
            bounds.append(-moment.free / self._bytes)
        costs = np.concatenate([costs, np.zeros(len(columns))])
        old = coo_array(matrix)
        rows = np.concatenate([old.row, [row for row, _, _ in entries]]).astype(np.int64)
        places = np.concatenate([old.col, [column for _, column, _ in entries]]).astype(np.int64)
        shares = np.concatenate([old.data, [share for _, _, share in entries]])
        return costs, csr_array(coo_array((shares, (rows, places)), shape=(len(bounds), len(costs)))), np.array(bounds)

    def choose(self, room: Sequence[float]) -> Holding | None:
        """What to hold where `room[t]` bytes are for what is held into segment t and run again in it."""
        reduced = self.reduced
        answer = self._solve(room)
        if answer is None:  # what is run again may need less than all of it at once
            answer = self._solve(room, bounding=True)
        if answer is None:
            return None
        held: list[frozenset[int]] = [frozenset()]
        runs = reduced.closure(0, frozenset())
        for segment in range(1, reduced.segments):
            held.append(self._round(segment, answer, room[segment], held[-1], runs))
            runs = reduced.closure(segment, held[-1])
        return Holding(tuple(held), float(self._costs @ answer))

    def _round(
        self, segment: int, answer: _Array, room: float, before: frozenset[int], runs: set[int]
    ) -> frozenset[int]:
        """The values that the relaxation holds most of, as many as fit."""
        sizes, columns = self.reduced.sizes, self._held[segment]
        share = {v: round(float(answer[columns[v]]), 3) for v in self.reduced.available(columns, before, runs)}
        chosen: set[int] = set()
        used = 0.0
        for value in sorted(share, key=lambda v: (-share[v], sizes[v], v)):
            if share[value] < _LITTLE:
                break
            if used + sizes[value] * self.scale <= room:
                chosen.add(value)
                used += sizes[value] * self.scale
        return frozenset(chosen)

    def weight(self, here: int, made: int) -> float:
        """Bytes that the program counts in a segment: `here` held into it, `made` again in it, for the whole batch."""
        return self.scale * (here + self._again * made)

    def everything(self) -> tuple[frozenset[int], ...]:
        """All that could be of use is held."""
        return (frozenset(), *(frozenset(columns) for columns in self._held[1:]))
