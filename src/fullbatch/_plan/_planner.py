"""Chooses the program, the microbatch and what is held, so that the peak fits and the time is least.

Where the whole batch fits at once it runs as it is. Else microbatches as large as fit without running anything again;
else, at a few microbatch sizes, what is held is chosen (`_side`). A single sample, or a microbatch that the user sets
to the whole batch, has only its own operators to run again. The plan that is fastest by estimate is walked exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from math import inf

from fullbatch._cost._costs import Coster
from fullbatch._errors import BudgetError, Fault
from fullbatch._ir import Kind, Program, Task
from fullbatch._plan._bound import least_time, least_with
from fullbatch._plan._schedule import Schedule
from fullbatch._plan._side import BETTER, Candidate, Side
from fullbatch._plan._simulate import Simulated, simulate
from fullbatch._plan._sizes import by_bisection, by_outlook, microbatch_sizes
from fullbatch._plan._stages import Stages
from fullbatch._plan._storages import Storages
from fullbatch._size import format_bytes

# Sizes of microbatch that are searched until so many fit, the most promising first.
_SIZES = 3

# With fewer samples than this the whole batch at once may be better than the few ways to split it.
_FEW = 4

# Of the plans found, so many are searched further.
_DEEP = 2

# Times that the room is lowered in search of the least that is enough.
_SHRINKS = 12

# Below this many tasks the least room is searched for to the byte.
_SMALL = 600

# A plan within this share of the least time that any could take is not searched further.
_CLOSE = 0.02

# A size of microbatch whose plan takes longer than the best by more than this share of the latter's gap is left alone.
_WORTH = 0.2

# One that is further from it than this is searched with more patience.
_FAR = 0.1


@dataclass(frozen=True)
class Choice:
    """A schedule of `program`, what it costs, and whether its bytes were measured.

    `overhead` is the time over the plain step's, `bound` the least of any schedule in the graph's order, both as
    shares of the plain step's time, and estimates. `whole`: the batch runs as one microbatch, by the captured graph.
    """

    program: Program
    stages: Stages
    schedule: Schedule
    simulated: Simulated
    size: int
    exact: bool
    overhead: float
    bound: float
    whole: bool


_Found = tuple[Candidate, Choice]


class Planner:
    """Plans one captured step: `split` into microbatches, or `whole`."""

    def __init__(self, split: Side, whole: Side) -> None:
        self._split, self._whole = split, whole
        self._batch = whole.program.batch
        self._plain = whole.work + whole.hold_all(self._batch).launched
        self._bounds: dict[tuple[int, int], float] = {}
        self._least: dict[int | None, Choice] = {}

    def choose(self, room: int | None, microbatch: int | None, owned: int) -> Choice:
        """The fastest schedule found whose peak above `owned` is at most `room` bytes (None: no limit)."""
        if room is None:
            size = microbatch or self._batch
            return self._exact(self._side(size).hold_all(size), None)
        found = self._search(room, microbatch) if room > 0 else None  # there is nothing to search where nothing fits
        if found is not None:
            return found
        smallest = self._smallest(microbatch)
        if smallest.simulated.peak <= room:
            return smallest
        raise self._too_small(smallest, owned + room, owned)

    def _search(self, room: int, microbatch: int | None, deep: bool = True) -> Choice | None:
        """The fastest choice that fits, of all searches that are worth making; `deep`: the best are searched on."""
        fits: list[_Found] = []
        for candidates in self._searches(room, microbatch, fits, deep):
            found = self._that_fit(candidates, room)
            best = min((choice.overhead for _, choice in fits), default=inf)
            fits.extend(found)
            if found and not any(choice.overhead < best - BETTER for _, choice in found):
                break  # another size brings nothing any more
            if any(choice.overhead - choice.bound <= _CLOSE for _, choice in found):
                break
        for start, far in _best_by_size(fits)[: _DEEP if deep else 0]:
            tried = start.side.search(start, room, start.side.costs(start.size, room), far)
            fits += self._that_fit(_likely(tried, room), room)
        return min((choice for _, choice in fits), key=lambda choice: choice.overhead, default=None)

    def _that_fit(self, candidates: Sequence[Candidate], room: int) -> list[_Found]:
        """Those whose exact peak is at most `room`."""
        walked = [(candidate, self._exact(candidate, room)) for candidate in candidates]
        return [(candidate, choice) for candidate, choice in walked if choice.simulated.peak <= room]

    def plain_peak(self) -> int:
        """Bytes that the whole batch at once allocates, by estimate."""
        return self._whole.hold_all(self._batch).peak

    @property
    def plain_time(self) -> float:
        """The time of the whole batch at once, with no operator run again; `overhead` is a share of it."""
        return self._plain

    def _side(self, size: int) -> Side:
        return self._whole if size == self._batch else self._split

    def _parts(self) -> list[int]:
        """Sizes worth trying that split the batch, the largest first."""
        return [size for size in microbatch_sizes(self._batch) if size < self._batch]

    # ---- search

    def _searches(
        self, room: int, microbatch: int | None, fits: Sequence[_Found], deep: bool
    ) -> Iterator[list[Candidate]]:
        """Candidates of one program at one size, the most promising first, search by search. `fits`: found so far."""
        if microbatch is not None:
            yield self._fitting(self._side(microbatch), microbatch, room, deep=deep)
            return
        whole = self._whole.hold_all(self._batch)
        if whole.peak <= room:
            cost = self._whole.costs(self._batch, room)
            yield [self._whole.hold_all(self._batch, cost)]
        if self._batch > 1:
            yield from self._split_searches(room, fits, deep)
        if self._batch < _FEW or not fits:
            yield self._fitting(self._whole, self._batch, room, deep=deep)

    def _split_searches(self, room: int, fits: Sequence[_Found], deep: bool) -> Iterator[list[Candidate]]:
        sizes, split = self._parts(), self._split
        if not split.across:
            fitting, *smaller = by_bisection(sizes, lambda size: split.hold_all(size).peak <= room)
            yield self._fitting(split, fitting, room)
            # Larger ones, with something run again, read the weights less often; none fits where the smallest does not.
            for size in reversed(sizes[: sizes.index(fitting)]):
                best = min((choice.overhead for _, choice in fits), default=inf if smaller else 0.0)
                if least_with(split, size, room) / self._plain - 1 > best - BETTER:
                    break
                yield self._fitting(split, size, room)
            for size in smaller:
                yield self._fitting(split, size, room)
            return
        yield from self._searches_across(room, fits, deep)

    def _searches_across(self, room: int, fits: Sequence[_Found], deep: bool) -> Iterator[list[Candidate]]:
        """Where something is held for all microbatches: a few sizes, compared before any but one is measured."""
        if deep:
            yield from self._compared(by_outlook(self._split, self._parts(), room), room, fits)
        if fits:
            return
        for size in by_outlook(self._split, self._parts(), room):
            if len(_sizes_of(fits)) >= _SIZES:
                return
            yield self._fitting(self._split, size, room, deep=deep)

    def _compared(self, order: Iterator[int], room: int, fits: Sequence[_Found]) -> Iterator[list[Candidate]]:
        """The first size, where that may be enough; else the best by costs in proportion to those of the smallest."""
        split, first = self._split, next(order)
        if self._is_close(self._fitting(split, first, room, split.estimate)[0], room):
            yield self._fitting(split, first, room)
        sizes = [first, *islice(order, _SIZES - 1)]
        cost = split.in_proportion(min(sizes), room)
        if cost is None:
            return
        for tried in self._trials(chain(sizes, order), room, fits, cost):
            best = min((choice for _, choice in fits), key=lambda choice: choice.overhead, default=None)
            if best and tried[0].time / self._plain - 1 > best.overhead + _WORTH * (best.overhead - best.bound):
                return
            yield self._fitting(split, tried[0].size, room)
            if tried[0].size not in _sizes_of(fits):
                yield tried

    def _trials(self, sizes: Iterable[int], room: int, fits: Sequence[_Found], cost: Coster) -> list[list[Candidate]]:
        """Candidates that fit by `cost`, of a few sizes, until another brings nothing; the fastest size first."""
        times = [candidate.time for candidate, _ in fits]
        found: list[list[Candidate]] = []
        for size in sizes:
            if size in _sizes_of(fits):
                continue
            tried = self._fitting(self._split, size, room, cost)
            if tried[0].peak <= room:
                found.append(tried)
                if len(found) == _SIZES or tried[0].time > min(times, default=inf) - BETTER * self._plain:
                    break
                times.append(tried[0].time)
        return sorted(found, key=lambda tried: tried[0].time)

    def _is_close(self, candidate: Candidate, room: int) -> bool:
        """Whether it fits, and hardly anything can be faster."""
        far = candidate.time / self._plain - 1 - _CLOSE
        return candidate.peak <= room and (far <= 0 or far <= self._bound(room, candidate.size))

    def _fitting(
        self, side: Side, size: int, room: int, cost: Coster | None = None, deep: bool = True
    ) -> list[Candidate]:
        """The fastest candidates that fit by the costs they were planned with; else the one with least peak."""
        cost = cost or side.costs(size, room)
        return _likely(side.fit(size, room, cost, hurried=not deep), room)

    def _exact(self, candidate: Candidate, room: int | None) -> Choice:
        side = candidate.side
        cost = side.costs(candidate.size, room)
        simulated = simulate(side.program, candidate.schedule, cost)
        overhead = max(0.0, candidate.time / self._plain - 1)
        bound = 0.0 if room is None or overhead <= _CLOSE else min(overhead, self._bound(room, candidate.size))
        return Choice(
            side.program, side.stages, candidate.schedule, simulated, candidate.size, cost is not side.estimate,
            overhead, bound, side is self._whole,
        )  # fmt: skip

    def _bound(self, room: int, size: int) -> float:
        """The least overhead that this room allows, in either program, also with microbatches of `size`."""
        parts = self._parts()
        known = not parts or size <= parts[0] or size == self._batch  # else a user's: larger than any that is tried
        key = room, 0 if known else size
        if key not in self._bounds:
            least = least_time(self._whole, [self._batch], room)
            least = min(least, least_time(self._split, parts, room)) if parts else least
            least = least if known else min(least, least_with(self._split, size, room))
            self._bounds[key] = max(0.0, least / self._plain - 1)
        return self._bounds[key]

    # ---- what does not fit

    def _smallest(self, microbatch: int | None) -> Choice:
        """The least peak that is found, whatever the room: little held, in small microbatches, with ever less room."""
        if microbatch not in self._least:
            sizes = [microbatch] if microbatch else [1] if self._batch >= _FEW else [1, self._batch]
            found = [self._least_at(self._side(size), size) for size in dict.fromkeys(sizes)]
            least = min(found, key=lambda choice: choice.simulated.peak)
            for _ in range(_SHRINKS if len(self._whole.program.tasks) < _SMALL else 1):
                closer = self._search(least.simulated.peak - 1, microbatch, deep=False)
                if closer is None:
                    break
                least = closer
            self._least[microbatch] = least
        return self._least[microbatch]

    def _least_at(self, side: Side, size: int) -> Choice:
        cost = side.costs(size, None)
        lowest = min((side.hold_nothing(size, cost), side.hold_all(size, cost)), key=lambda c: c.peak)
        for _ in range(_SHRINKS):
            closer = min(side.fit(size, int(0.85 * lowest.peak), cost, hurried=True), key=lambda c: c.peak)
            if closer.peak >= lowest.peak:
                break
            lowest = closer
        return self._exact(lowest, None)

    def _alone(self, task: Task, best: Choice) -> str:
        """What `task` takes, whatever else is held."""
        side, size = self._side(best.size), best.size
        if task.kernel is None:
            return ""
        read = sum(Storages(best.program, size).of(task.inputs).values())
        samples = size if task.kind is Kind.LOCAL else self._batch
        most = read + side.costs(size, None)(task, samples).peak
        return f", which takes {format_bytes(most)} of them by itself"

    def _too_small(self, best: Choice, budget: int, owned: int) -> BudgetError:
        smallest = owned + best.simulated.peak
        action = best.simulated.at
        task = None if action is None else best.program.by_id.get(action.subject)
        at = "" if task is None else f"; the peak is at {task.origin}{self._alone(task, best)}"
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
                next=f"memory={smallest}, or less with fullbatch.propose(loss_fn, model, batch, memory={budget})",
            ),
            smallest=smallest,
        )


def _sizes_of(found: Sequence[_Found]) -> set[int]:
    return {candidate.size for candidate, _ in found}


def _likely(tried: Sequence[Candidate], room: int) -> list[Candidate]:
    """The fastest candidates that fit by the costs they were planned with; else the one with least peak."""
    fits = sorted((c for c in tried if c.peak <= room), key=lambda c: c.time)
    return fits[:2] or sorted(tried, key=lambda c: c.peak)[:1]


def _best_by_size(found: Sequence[_Found]) -> list[tuple[Candidate, bool]]:
    """Of each size the fastest, the fastest first, but for those that are near their bound; and whether it is far."""
    best: dict[tuple[int, bool], tuple[Candidate, bool]] = {}
    for candidate, choice in sorted(found, key=lambda pair: pair[1].overhead):
        gap = choice.overhead - choice.bound
        if gap > _CLOSE:
            best.setdefault((candidate.size, choice.whole), (candidate, gap > _FAR))
    return list(best.values())
