"""One program of a step, and plans of it at one microbatch size: what is held so that the peak fits.

A step has two programs: split into microbatches, and the whole batch as one. The search is the same for both. A linear
program (`_relaxed`) says what to hold for a limit on held bytes at the beginning of each segment; a walk (`_profile`)
says which bytes come on top while the segment runs; with these taken off the limits the program is solved again, until
the peak fits and nothing is left to hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from fullbatch._cost._costs import LAUNCH, Coster, estimated, own_cost
from fullbatch._cost._proportion import in_proportion
from fullbatch._ir import Kind, Program
from fullbatch._plan._anneal import find_orders
from fullbatch._plan._descent import descend
from fullbatch._plan._pieces import Bodies, find_segments
from fullbatch._plan._polish import Held, Polish
from fullbatch._plan._profile import Profile, profile
from fullbatch._plan._reduced import Price, Reduced, reduce_program
from fullbatch._plan._relaxed import HoldingProblem
from fullbatch._plan._runs import Runs, first_order
from fullbatch._plan._schedule import Action, Do, Schedule, assemble, microbatches, targets_early
from fullbatch._plan._stages import Stages
from fullbatch._plan._storages import Storages

# Segments at most, the first number for which the linear program has no more columns than it can be solved often with.
_SEGMENTS = (1000, 60, 30, 15)
_COLUMNS = 60_000

# Times that limits are corrected by what the walk found.
_ROUNDS = 8

# Walks that may exceed the room before more than the excess is taken off the limits; how much more each time.
_PATIENT, _PUSH = 1, 0.5

# A candidate this close to its relaxation, as a share of the step's time, is not searched further.
_CLOSE = 0.01

# The relaxation is solved again where less than this share of the room is used, or more than all; so often at most.
_FULL, _RELAXATIONS = 0.97, 3

# Limits are set for this share of the room: what an exchange moves about is not known to the byte.
_AIM = 0.998

# Nodes of a program that is small enough to try every gap on the walk itself, and walks for that.
_SMALL = 150
_WALKS = 800

# Tasks that such walks take together, at most: a small program may stand for a long one (a network unrolled over time).
_WALKED = 80_000

# Of the orders found run by run, the fastest so many are walked.
_ORDERS = 2

# Changes of what is held that are tried each time limits are corrected.
_TRIALS = 30_000

# A search that is better by less than this share of the step's time is the last.
BETTER = 0.01

# Searches in a row, each from where the last one came to; more, and for less, where a plan is far from its bound.
_SEARCHES, _MORE = 3, 5
_LESS = 0.003

# Changes that each of them tries, where a plan is near its bound and where it is far.
_NEAR, _FAR = 200_000, 600_000

# Shares of the limits at which the relaxation is another start.
_RELAXED = (1.0, 1.1)

# Decisions of a problem up to which the search begins at relaxations as well, however near the plan is.
_BRIEF = 10_000


@dataclass(frozen=True)
class Candidate:
    """A way to run a program: `time` in bytes moved, `peak` by the costs it was planned with.

    `held`: values held into each segment; empty where an order was found run by run.
    """

    side: Side
    size: int
    held: tuple[frozenset[int], ...]
    schedule: Schedule
    profile: Profile
    again: float  # cost of what is run again
    runs: tuple[frozenset[int], ...]  # nodes that run in each segment

    @property
    def peak(self) -> int:
        """Most bytes at any time."""
        return self.profile.peak

    @property
    def peaks(self) -> tuple[int, ...]:
        """Most bytes in each segment."""
        return self.profile.peaks

    @property
    def time(self) -> float:
        """Operators run, in bytes moved, with what starting them costs."""
        side, more = self.side, len(self.schedule.samples) - 1
        return side.work + self.again + side.shared * more + self.launched

    @property
    def launched(self) -> float:
        """What starting its operators costs."""
        return self.side.launch * self.schedule.count_launches(self.side.program)


def _shared(program: Program) -> int:
    """Bytes that each further microbatch moves again: weights that are read, summands that are written and added."""
    return sum(
        program.values[value].nbytes(None, program.batch)
        for task in program.tasks
        if task.kind in (Kind.LOCAL, Kind.REDUCE) and not task.stores_nothing
        for value in (*task.inputs, *task.outputs)
        if value is not None and program.values[value].layout is None
    )


class Side:
    """A program and its stages. `measure(sizes)` gives exact costs, or None where operators cannot be run.

    `measures`: planning may run operators. `price` is the time of a task's run over the whole batch, `launch` what
    starting it takes besides; by default both are in bytes moved.
    """

    def __init__(
        self,
        program: Program,
        stages: Stages,
        measure: Callable[[frozenset[int]], Coster | None],
        measures: bool = True,
        price: Price | None = None,
    ) -> None:
        self.program, self.stages, self._measure, self._measures = program, stages, measure, measures
        self.price, self.launch = price or (lambda task: own_cost(task, program)), LAUNCH if price is None else 0
        self.work = sum(self.price(task) for task in program.tasks)
        self.shared = _shared(program) if price is None else 0
        self.estimate = estimated(program)
        for most in _SEGMENTS:
            self.segments = find_segments(program, stages, most)
            self.reduced: Reduced = reduce_program(program, self.segments, self.price)
            if self.reduced.columns <= _COLUMNS:
                break
        self.splits = any(value.layout is not None for value in program.values)
        self._bodies = Bodies(program, self.segments)
        self._problems: dict[int, HoldingProblem] = {}
        self._whole: dict[int, Candidate] = {}

    @property
    def across(self) -> bool:
        """Whether something is held for all microbatches at once."""
        return self.segments.across

    def problem(self, size: int) -> HoldingProblem:
        """The holding problem for microbatches of `size`."""
        if size not in self._problems:
            share = size / max(self.program.batch, 1)
            scale, again = (1.0, share) if self.across else (share, 1.0)
            first = next(iter(self._problems.values()), None)
            self._problems[size] = first.at(scale, again) if first else HoldingProblem(self.reduced, scale, again)
        return self._problems[size]

    def least_room(self, size: int) -> int:
        """Bytes of the largest operator's operands and results: less room than this fits no plan."""
        return Storages(self.program, size).largest()

    def costs(self, size: int, room: int | None) -> Coster:
        """Exact costs at this size where they can be had within `room` bytes, else estimates."""
        if room is not None and self.least_room(size) > room:
            return self.estimate
        return (self.exact(size) if self._measures else None) or self.estimate

    def exact(self, size: int) -> Coster | None:
        """Exact costs for microbatches of `size`, the uneven last one included."""
        return self._measure(frozenset(microbatches(self.program.batch, size)))

    def in_proportion(self, size: int, room: int) -> Coster | None:
        """Costs at any size, by those that were measured at `size`; None where they were not."""
        measured = self.costs(size, room)
        return None if measured is self.estimate else in_proportion(self.program, measured, size)

    # ---- candidates

    def hold_all(self, size: int, cost: Coster | None = None) -> Candidate:
        """Nothing is run again."""
        held = self.problem(size).everything()
        if cost is not None:
            return self._candidate(held, size, cost)
        if size not in self._whole:
            self._whole[size] = self._candidate(held, size, self.estimate)
        return self._whole[size]

    def _candidate(self, held: Sequence[frozenset[int]], size: int, cost: Coster) -> Candidate:
        reduced = self.reduced
        held, runs = reduced.follow(held)
        held = reduced.useful(held, runs)
        there = [values | reduced.held for values in held]
        tasks, where = self._bodies.make(there)
        by_id = self.program.by_id
        bodies = [targets_early(body, by_id) for body in tasks]
        schedule = assemble(self.program, self.stages, bodies, microbatches(self.program.batch, size))
        found = profile(self.program, schedule.phases, where, self.segments.count, size, cost)
        again = sum(reduced.again(t, ran) for t, ran in enumerate(runs))
        return Candidate(self, size, held, schedule, found, again, tuple(runs))

    def fit(self, size: int, room: int, cost: Coster, hurried: bool = False) -> list[Candidate]:
        """Candidates whose peak comes down to `room`, those that come nearest last.

        `hurried`: of a small step, where many rooms are tried one after another.
        """
        candidate = self.hold_all(size, cost)
        tried = [candidate]
        if candidate.peak <= room:
            return tried
        problem = self.problem(size)
        for _ in range(_RELAXATIONS):
            holding = problem.choose(self._limits(candidate, room))
            if holding is None:
                break
            found = list(self._settled(holding.held, candidate, room, cost, holding.bound))
            tried += found
            candidate = found[-1]
            if _FULL * room < candidate.peak <= room:
                break
        if len(self.reduced.nodes) <= _SMALL and not self.across and len(tried) > 1:
            runs = self._runs(size, cost)
            if runs is None or not hurried:
                tried += self._descended(tried, room, cost)
            if runs is not None:
                tried += self._ordered(runs, tried, room, cost, hurried)
        return tried

    def search(self, start: Candidate, room: int, cost: Coster, far: bool) -> list[Candidate]:
        """Candidates that may be faster than `start`, which fits; `far`: it is far from the least time."""
        found: list[Candidate] = []
        most, worth = (_MORE, _LESS) if far else (_SEARCHES, BETTER)
        for seed in range(most if start.held and start.again else 0):
            tried = list(self._searched(start, room, cost, seed, far))
            found += tried
            best = min((c for c in tried if c.peak <= room), key=lambda c: c.again, default=start)
            if best.again > start.again - worth * self.work:
                break
            start = best
        return found

    def _searched(self, start: Candidate, room: int, cost: Coster, seed: int, far: bool) -> Iterator[Candidate]:
        """From `start`, and first of all from relaxations."""
        problem, limits = self.problem(start.size), self._limits(start, room)
        anew = not seed and (far or self.reduced.columns <= _BRIEF)
        relaxed = (problem.choose([share * limit for limit in limits]) for share in (_RELAXED if anew else ()))
        for held in (start.held, *(holding.held for holding in relaxed if holding)):
            polish = Polish(problem, held, limits)
            polish.within(limits)
            polish.search(_FAR if far else _NEAR, seed)
            yield from self._settled(polish.held, start, room, cost, 0.0)

    def _limits(self, candidate: Candidate, room: int) -> list[float]:
        """Bytes that may be held into each segment, where what comes on top is as in `candidate`."""
        return [max(0.0, _AIM * room - most) for most in self._besides(candidate)]

    def _settled(self, held: Held, walked: Candidate, room: int, cost: Coster, bound: float) -> Iterator[Candidate]:
        """`held` improved, as a candidate; then with limits corrected by the walk over it, and so on.

        Limits are those of `walked` at first. Where a walk exceeds the room they never rise again, and the longer it
        does, the more is taken off them: what is made again for want of room takes room itself.
        """
        problem, best = self.problem(walked.size), float("inf")
        limits = self._limits(walked, room)
        polish = Polish(problem, held, limits)
        most = [float("inf")] * len(limits)
        beyond = 0  # walks that exceeded the room
        for _ in range(_ROUNDS):
            within = polish.within(limits)
            polish.improve(_TRIALS)
            candidate = self._candidate(polish.held, walked.size, cost)
            yield candidate
            if candidate.peak <= room:
                close = candidate.again - bound <= _CLOSE * self.work and candidate.peak > _FULL * room
                if close or candidate.again > 0.995 * best:
                    return
                best = candidate.again
            elif not within:
                return
            else:
                beyond += 1
            limits = self._limits(candidate, room)
            for t, excess in _exceeding(candidate.peaks, room):
                most[t] = min(most[t], limits[t] - _PUSH * max(0, beyond - _PATIENT) * excess)
            limits = [min(pair) for pair in zip(limits, most, strict=True)]

    def _descended(self, tried: Sequence[Candidate], room: int, cost: Coster) -> list[Candidate]:
        """Some of `tried` improved on the walk itself: that which is nearest to the room, and the first two."""
        size = tried[0].size
        problem = self.problem(size)
        free = [float("inf")] * self.segments.count
        nearest = min(tried[1:], key=lambda c: (max(0, c.peak - room), c.again))
        starts = {id(candidate): candidate for candidate in (nearest, *tried[:2])}
        walks = min(_WALKS, _WALKED // len(self.program.tasks))
        return [
            descend(
                start,
                room,
                self.work,
                lambda held: self._candidate(held, size, cost),
                lambda held: Polish(problem, held, free),
                walks,
            )
            for start in starts.values()
        ]

    def _runs(self, size: int, cost: Coster) -> Runs | None:
        """The step run by run, where it is one microbatch and nothing else lies between."""
        if size < self.program.batch:
            return None
        phases = self.hold_all(size, cost).schedule.phases
        order = first_order(self.stages, _tasks(phases[0].last))
        runs = None if order is None else Runs(self.program, order, cost, self.price)
        return runs if runs is not None and runs.plain else None

    def _ordered(
        self, runs: Runs, tried: Sequence[Candidate], room: int, cost: Coster, hurried: bool
    ) -> list[Candidate]:
        """Orders found run by run, also from the fastest of `tried` that fits."""
        size = tried[0].size
        start = min((c for c in tried if c.peak <= room), key=lambda c: c.again, default=None)
        begin = None if start is None else runs.order_of(_tasks(start.schedule.phases[0].last))
        orders = find_orders(runs, room, self.launch, begin, hurried)
        return [self._in_order(runs.tasks(order), size, cost) for order in orders[-_ORDERS:]]

    def _in_order(self, tasks: list[int], size: int, cost: Coster) -> Candidate:
        """The candidate that runs `tasks` in this order, in one segment."""
        program = self.program
        schedule = assemble(program, self.stages, [tasks], microbatches(program.batch, size))
        found = profile(program, schedule.phases, [[0] * len(tasks)], 1, size, cost)
        again = sum(self.price(program.by_id[task]) for task in tasks) - self.work
        return Candidate(self, size, (), schedule, found, max(0.0, again), ())

    def _besides(self, candidate: Candidate) -> list[float]:
        """Bytes alive at the peak around each segment's beginning, besides those that the program counts."""
        problem, reduced = self.problem(candidate.size), self.reduced
        weights = [
            problem.weight(reduced.nbytes(held), reduced.made_again(t, runs))
            for t, (held, runs) in enumerate(zip(candidate.held, candidate.runs, strict=True))
        ]
        inside = [
            peak - max(now, then)
            for peak, now, then in zip(candidate.profile.peaks, weights, [*weights[1:], 0.0], strict=True)
        ]
        return [inside[0], *(max(pair) for pair in zip(inside, inside[1:], strict=False))]

    def fixed(self, size: int) -> float:
        """The time of microbatches of `size`, at least, if nothing is run again: what each of them reads anew."""
        return self.work + self.shared * (-(-self.program.batch // size) - 1)

    def limits(self, size: int, room: int) -> list[float]:
        """Bytes that may be held into each segment by microbatches of `size`, if nothing else were run again."""
        return self._limits(self.hold_all(size), room)

    def hold_nothing(self, size: int, cost: Coster) -> Candidate:
        """All that can be run again is."""
        nothing = tuple(frozenset[int]() for _ in range(self.segments.count))
        return self._candidate(nothing, size, cost)


def _tasks(actions: Iterable[Action]) -> list[int]:
    """What is run and joined, in order."""
    return [action.subject for action in actions if action.do is not Do.FREE]


def _exceeding(peaks: Sequence[int], room: int) -> Iterator[tuple[int, int]]:
    """Segments whose beginning or end has a peak above `room` beside it, and by how much."""
    for t, peak in enumerate(peaks):
        if peak > room:
            yield t, peak - room
            if t + 1 < len(peaks):
                yield t + 1, peak - room
