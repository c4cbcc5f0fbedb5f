"""Chooses the microbatch and what is held, so that the peak fits and the time is least.

The outer choice is the microbatch, the inner one a price on held bytes (`_keep`). For each price the largest
microbatch that fits by estimate is found by bisection; the candidates are then tried in the order of their time,
with the exact costs of their operators, until one fits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fullbatch._cost._costs import Coster, estimated
from fullbatch._errors import BudgetError, Fault
from fullbatch._ir import Program
from fullbatch._plan._keep import choose_keep
from fullbatch._plan._schedule import Keep, Schedule, make_schedule
from fullbatch._plan._simulate import Simulated, simulate
from fullbatch._plan._stages import Stages
from fullbatch._size import format_bytes

PRICES = (0.0, 3.0, 6.0, 12.0, 30.0, 100.0, float("inf"))
"""Of a byte that is held across stages, in bytes moved to recompute it."""
WITHIN = (3.0, 10.0, 30.0, 60.0, 120.0, 250.0, 500.0, 1000.0, 2000.0, 4000.0)
"""Of a byte that is held from forward to backward within a stage."""

# Starting an operator costs about as much as moving this many bytes; it is what makes many tiny microbatches slow.
_OVERHEAD = 40_000


@dataclass(frozen=True)
class Choice:
    """A schedule, what it costs, and whether its costs were measured."""

    schedule: Schedule
    simulated: Simulated
    size: int
    exact: bool


@dataclass(frozen=True)
class _Candidate:
    price: float
    within: float
    size: int
    schedule: Schedule
    simulated: Simulated

    @property
    def time(self) -> float:
        return self.simulated.time + _OVERHEAD * self.schedule.count_runs()


class Planner:
    """Plans one program. `measure` gives exact costs for microbatches of the given sizes, or None where it cannot."""

    def __init__(self, program: Program, stages: Stages, measure: Callable[[frozenset[int]], Coster | None]) -> None:
        self._program, self._stages, self._measure = program, stages, measure
        self._estimate = estimated(program)
        self._plain: int | None = None
        self._keeps: dict[float, frozenset[int]] = {}

    def choose(self, room: int | None, microbatch: int | None, owned: int) -> Choice:
        """The fastest schedule whose peak above `owned` is at most `room` bytes (None: no limit)."""
        candidates = self._candidates(room, microbatch)
        best: Choice | None = None
        for candidate in candidates:
            choice = self._exact(candidate)
            while room is not None and choice.simulated.peak > room and microbatch is None and choice.size > 1:
                smaller = self._candidate(candidate.price, candidate.within, _next_smaller(self._program.batch, choice.size))
                choice = self._exact(smaller)
            if best is None or choice.simulated.peak < best.simulated.peak:
                best = choice
            if room is None or choice.simulated.peak <= room:
                return choice
        assert best is not None
        raise self._too_small(best, owned + (room or 0), owned)

    def plain_peak(self) -> int:
        """Bytes that the whole batch at once allocates, by estimate."""
        if self._plain is None:
            self._plain = self._candidate(0.0, 0.0, self._program.batch).simulated.peak
        return self._plain

    def _candidates(self, room: int | None, microbatch: int | None) -> list[_Candidate]:
        """At most one microbatch size for each price, fastest first; those that do not fit last, smallest first."""
        fits: list[_Candidate] = []
        others: list[_Candidate] = []
        sizes = [microbatch] if microbatch is not None else microbatch_sizes(self._program.batch)
        prices = PRICES if self._stages.count > 1 else PRICES[:1]
        if room is None:
            return [self._candidate(0.0, 0.0, sizes[0])]
        largest = len(sizes) - 1
        for price in prices:  # a higher price holds less, so that it fits at least as large a microbatch
            low, high = 0, largest
            while low < high:
                middle = (low + high) // 2
                if self._candidate(price, 0.0, sizes[middle]).simulated.peak <= room:
                    high = middle
                else:
                    low = middle + 1
            found = self._candidate(price, 0.0, sizes[low])
            (fits if found.simulated.peak <= room else others).append(found)
            if found in fits:
                largest = low
                if low == 0:
                    break
        if not fits:
            # The smallest microbatch is too large as a whole: recompute inside a stage too.
            for within in WITHIN:
                tried = [self._candidate(price, within, sizes[-1]) for price in prices]
                fits.extend(candidate for candidate in tried if candidate.simulated.peak <= room)
                others.extend(candidate for candidate in tried if candidate not in fits)
        return sorted(fits, key=lambda c: c.time) + sorted(others, key=lambda c: c.simulated.peak)

    def _candidate(self, price: float, within: float, size: int) -> _Candidate:
        keep = Keep(self._keep(price), self._keep(price), self._keep(within) if within else None)
        schedule = make_schedule(self._program, self._stages, keep, size)
        return _Candidate(price, within, size, schedule, simulate(self._program, schedule, self._estimate))

    def _keep(self, price: float) -> frozenset[int]:
        if price not in self._keeps:
            self._keeps[price] = choose_keep(self._program, price)
        return self._keeps[price]

    def _exact(self, candidate: _Candidate) -> Choice:
        cost = self._measure(frozenset(candidate.schedule.samples))
        if cost is None:
            return Choice(candidate.schedule, candidate.simulated, candidate.size, False)
        return Choice(candidate.schedule, simulate(self._program, candidate.schedule, cost), candidate.size, True)

    def _too_small(self, best: Choice, budget: int, owned: int) -> BudgetError:
        smallest = owned + best.simulated.peak
        action = best.simulated.at
        at = f"; its peak is at {self._program.by_id[action.subject].origin}" if action is not None and action.do.value != "free" else ""
        return BudgetError(
            Fault(
                "No plan fits the memory budget.",
                got=f"{budget:,} bytes ({format_bytes(budget)})",
                expected=(
                    f"at least {smallest:,} bytes ({format_bytes(smallest)}), of which {format_bytes(owned)} are parameters, "
                    f"buffers, gradients, optimizer state and the batch, and {format_bytes(best.simulated.peak)} are "
                    f"allocated while the step runs in microbatches of {best.size}{at}"
                ),
                next=f"memory={smallest}",
            ),
            smallest=smallest,
        )


def microbatch_sizes(batch: int) -> list[int]:
    """Sizes worth trying, largest first: the batch in 1, 2, 3, 4, 6, 8, ... equal microbatches."""
    counts, count = [], 1
    while count < batch:
        counts.append(count)
        count = count + 1 if count < 4 else count * 3 // 2 if count & (count - 1) == 0 else count * 4 // 3
    return list(dict.fromkeys([-(-batch // count) for count in counts] + [1]))


def _next_smaller(batch: int, size: int) -> int:
    return next(other for other in microbatch_sizes(batch) if other < size)
