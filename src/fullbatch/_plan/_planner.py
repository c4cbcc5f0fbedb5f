"""Chooses the microbatch and what is held, so that the peak fits and the time is least.

First without recomputation: the largest microbatch at which everything may be held. Where none fits, the cut program
(`_cut`) says what to hold for a limit on held bytes, and the limit is lowered until the simulated peak fits. Where what
is held over near barriers stands in the way, the values that are cheapest to make again for their bytes are dropped at
the peak (`_relieve`), one peak after another. Estimates choose; the exact costs of the chosen schedule's operators
decide, and where these are larger the search is repeated with that much less room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fullbatch._cost._costs import Coster, estimated
from fullbatch._errors import BudgetError, Fault
from fullbatch._ir import Kind, Program
from fullbatch._plan._cut import Cut, CutProblem
from fullbatch._plan._keep import choose_keep, own_cost
from fullbatch._plan._schedule import Keep, Schedule, make_schedule
from fullbatch._plan._simulate import Simulated, live_at, simulate
from fullbatch._plan._stages import Stages
from fullbatch._size import format_bytes

# Shares of all that could be held, tried from the top until the peak fits.
_LIMITS = (0.9, 0.7, 0.55, 0.45, 0.37, 0.3, 0.24, 0.19, 0.15, 0.11, 0.08, 0.05, 0.02, 0.0)

# Shares at which holding is relieved at the peaks.
_RELIEVED = (0.3, 0.19, 0.11, 0.05)

# Prices of a byte held from forward to backward within a stage, in bytes moved to make it again.
_WITHIN = (3.0, 10.0, 30.0, 60.0, 120.0, 250.0, 500.0, 1000.0, 4000.0)

# Numbers of microbatches worth trying where each must hold something for all; a small one makes what is at work small.
_COUNTS = (4, 8, 16, 2, 32)

# Starting an operator costs about as much as moving this many bytes; it is what makes many tiny microbatches slow.
_OVERHEAD = 40_000

# Peaks that are relieved before a candidate is given up.
_PEAKS = 20

# A plan within this share of the least time that any could take is not searched further.
_CLOSE = 0.02


@dataclass(frozen=True)
class Choice:
    """A schedule, what it costs, and whether its bytes were measured.

    `overhead` is the time over the schedule that holds all, `bound` the least overhead of any schedule at this room,
    both as shares of the step's time, and estimates.
    """

    schedule: Schedule
    simulated: Simulated
    size: int
    exact: bool
    overhead: float
    bound: float


@dataclass(frozen=True)
class _Candidate:
    keep: Keep
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
        self._problem = CutProblem(program, stages)
        self._solved: dict[float, Cut | None] = {}
        self._prices: dict[float, frozenset[int]] = {}
        self._step = max(sum(own_cost(task, program) for task in program.tasks), 1.0)
        self._plain: int | None = None
        self._extra: dict[int, int] = {}  # bytes over the estimate, by microbatch size, as they were measured

    def choose(self, room: int | None, microbatch: int | None, owned: int) -> Choice:
        """The fastest schedule found whose peak above `owned` is at most `room` bytes (None: no limit)."""
        if room is None:
            return self._exact(self._hold_all(microbatch or self._program.batch), None)
        smallest: Choice | None = None
        for _ in range(8):
            best, least = self._search(room, microbatch)
            chosen = best or least
            choice = self._exact(chosen, room)
            if choice.simulated.peak <= room:
                return choice
            if smallest is None or choice.simulated.peak < smallest.simulated.peak:
                smallest = choice
            if best is None:
                break
            # What operators allocate inside themselves is not in the estimate: now it is known at this size.
            extra = choice.simulated.peak - chosen.simulated.peak
            self._extra[chosen.size] = max(extra, self._extra.get(chosen.size, 0) + room // 500)
        assert smallest is not None
        smallest = self._smallest(smallest, microbatch)
        if smallest.simulated.peak <= room:
            return smallest
        raise self._too_small(smallest, owned + room, owned)

    def plain_peak(self) -> int:
        """Bytes that the whole batch at once allocates, by estimate."""
        if self._plain is None:
            self._plain = self._hold_all(self._program.batch).simulated.peak
        return self._plain

    # ---- search by estimate

    def _search(self, room: int, microbatch: int | None) -> tuple[_Candidate | None, _Candidate]:
        """The fastest candidate that fits, and the one with the least peak of all that were tried."""
        tried: list[_Candidate] = []
        fits: list[_Candidate] = []
        for candidate in self._candidates(room, microbatch):
            tried.append(candidate)
            if self._peak(candidate) <= room:
                fits.append(candidate)
                if self._overhead(candidate.simulated) - self._bound(room) <= _CLOSE:
                    break
        best = min(fits, key=lambda c: c.time, default=None)
        return best, min(tried, key=self._peak)

    def _peak(self, candidate: _Candidate) -> int:
        """The estimated peak, with what operators were measured to allocate inside, in proportion to the microbatch."""
        known = self._extra.get(candidate.size)
        if known is None:
            known = max((extra * candidate.size // size for size, extra in self._extra.items()), default=0)
        return candidate.simulated.peak + known

    def _candidates(self, room: int, microbatch: int | None) -> Iterator[_Candidate]:
        batch = self._program.batch
        sizes = [microbatch] if microbatch is not None else microbatch_sizes(batch)
        held = self._largest_that_fits(sizes, room)
        yield held
        if self._peak(held) <= room and (not self._problem.across or held.size == sizes[0]):
            return
        if not self._problem.across:
            yield from self._limits(sizes[-1], room)
            # The cut does not care which of equal values it holds; a price spreads them, so that segments are short.
            for price in _WITHIN:
                keep = Keep(frozenset(), within=self._held_by_price(price))
                yield self._candidate(keep, sizes[-1])
            return
        tries = sizes if microbatch is not None else list(dict.fromkeys(-(-batch // count) for count in _COUNTS))
        for size in [*tries, *sizes[-1:]]:
            yield from self._limits(size, room)
            found = False
            for limit in _RELIEVED:
                cut = self._cut(limit)
                if cut is not None:
                    for candidate in self._relieve(self._candidate(Keep(cut.held), size), room):
                        yield candidate
                        found = found or self._peak(candidate) <= room
            if found:
                return

    def _largest_that_fits(self, sizes: list[int], room: int) -> _Candidate:
        low, high = 0, len(sizes) - 1
        while low < high:
            middle = (low + high) // 2
            if self._peak(self._hold_all(sizes[middle])) <= room:
                high = middle
            else:
                low = middle + 1
        return self._hold_all(sizes[low])

    def _limits(self, size: int, room: int) -> Iterator[_Candidate]:
        """Candidates for falling limits on held bytes until one fits, then one between it and the last that did not."""
        above = 1.0
        previous: frozenset[int] | None = None
        for limit in _LIMITS:
            cut = self._cut(limit)
            if cut is None or cut.held == previous:
                continue
            previous = cut.held
            candidate = self._with(cut, size)
            yield candidate
            if self._peak(candidate) <= room:
                between = self._cut(round((above + limit) / 2, 4))
                if between is not None and between.held != cut.held:
                    yield self._with(between, size)
                return
            above = limit

    def _relieve(self, candidate: _Candidate, room: int) -> Iterator[_Candidate]:
        """Drops, at each peak, what is cheapest to make again for the bytes it frees, until the peak fits."""
        lowest, stuck = candidate.simulated.peak, 0
        for _ in range(_PEAKS):
            excess = self._peak(candidate) - room
            if excess <= 0 or stuck > 3:
                return
            held = live_at(self._program, candidate.schedule, self._estimate, candidate.simulated.position)
            again = self._again(candidate.keep)
            droppable = [v for v, size in held.items() if size and v in again and v not in candidate.keep.dropped]
            droppable.sort(key=lambda v: again[v] / held[v])
            chosen: set[int] = set()
            for value in droppable:
                chosen.add(value)
                excess -= held[value]
                if excess <= 0:
                    break
            if not chosen:
                return
            keep = Keep(candidate.keep.across - chosen, candidate.keep.dropped | chosen)
            candidate = self._candidate(keep, candidate.size)
            yield candidate
            stuck = 0 if candidate.simulated.peak < lowest else stuck + 1
            lowest = min(lowest, candidate.simulated.peak)

    def _again(self, keep: Keep) -> dict[int, float]:
        """What making each local value once more costs, where all that is not dropped is there."""
        again: dict[int, float] = {}
        for task in self._program.tasks:
            if task.kind is not Kind.LOCAL:
                continue
            cost = own_cost(task, self._program)
            cost += sum(again.get(value, 0.0) for value in task.inputs if value in keep.dropped)
            again.update((out, cost) for out in task.outputs if out is not None)
        return again

    def _cut(self, limit: float) -> Cut | None:
        if limit not in self._solved:
            self._solved[limit] = self._problem.solve(limit * self._problem.total)
        return self._solved[limit]

    def _with(self, cut: Cut, size: int) -> _Candidate:
        keep = Keep(cut.held) if self._problem.across else Keep(frozenset(), within=cut.held)
        return self._candidate(keep, size)

    def _hold_all(self, size: int) -> _Candidate:
        return self._candidate(Keep(self._held_by_price(0.0)), size)

    def _held_by_price(self, price: float) -> frozenset[int]:
        if price not in self._prices:
            self._prices[price] = choose_keep(self._program, price)
        return self._prices[price]

    def _candidate(self, keep: Keep, size: int) -> _Candidate:
        schedule = make_schedule(self._program, self._stages, keep, size)
        return _Candidate(keep, size, schedule, simulate(self._program, schedule, self._estimate))

    # ---- exact costs

    def _exact(self, candidate: _Candidate, room: int | None) -> Choice:
        cost = self._measure(frozenset(candidate.schedule.samples))
        exact = simulate(self._program, candidate.schedule, cost) if cost is not None else candidate.simulated
        bound = 0.0 if room is None else self._bound(room)
        overhead = self._overhead(candidate.simulated)
        return Choice(candidate.schedule, exact, candidate.size, cost is not None, overhead, min(bound, overhead))

    def _smallest(self, found: Choice, microbatch: int | None) -> Choice:
        """The least peak of all: one sample at a time, and every way to hold little."""
        size = microbatch or 1
        if self._problem.across:
            everything = frozenset(range(len(self._program.values)))
            ways = [Keep(cut.held) for cut in self._few()]
            ways += [Keep(cut.held, everything - cut.held) for cut in self._few()]
        else:
            ways = [Keep(frozenset(), within=cut.held) for cut in self._few()]
            ways += [Keep(frozenset(), within=self._held_by_price(price)) for price in _WITHIN]
        candidates = sorted((self._candidate(keep, size) for keep in ways), key=lambda c: c.simulated.peak)
        choices = [found, *(self._exact(candidate, None) for candidate in candidates[:4])]
        return min(choices, key=lambda choice: choice.simulated.peak)

    def _few(self) -> list[Cut]:
        return [cut for limit in (0.3, 0.19, 0.11, 0.05, 0.0) if (cut := self._cut(limit)) is not None]

    def _overhead(self, simulated: Simulated) -> float:
        return max(0.0, simulated.time / self._step - 1)

    def _bound(self, room: int) -> float:
        """The least recomputation that this room allows, as a share of the step's time."""
        total = max(self._problem.total, 1)
        # Within a stage one sample at a time is held, so that a batch of them has that much more room.
        share = room / total * (1 if self._problem.across else self._program.batch)
        cut = self._cut(min(1.0, share))
        return 0.0 if cut is None else cut.bound / self._step

    def _too_small(self, best: Choice, budget: int, owned: int) -> BudgetError:
        smallest = owned + best.simulated.peak
        action = best.simulated.at
        by_id = self._program.by_id
        known = action is not None and action.subject in by_id
        at = f"; its peak is at {by_id[action.subject].origin}" if action is not None and known else ""
        return BudgetError(
            Fault(
                "No plan fits the memory budget.",
                got=f"{budget:,} bytes ({format_bytes(budget)})",
                expected=(
                    f"at least {smallest:,} bytes ({format_bytes(smallest)}), of which {format_bytes(owned)} are "
                    f"parameters, buffers, gradients, optimizer state and the batch, and "
                    f"{format_bytes(best.simulated.peak)} are allocated while the step runs in microbatches of "
                    f"{best.size}{at}"
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
