"""The least time that any schedule of a program could take within so many bytes.

The linear program of `_relaxed` bounds what must be run again for the room that is left to hold. How much that is
depends on the microbatch: a large one has much at work at once, a small one reads the weights more often. So
microbatches of each size have their own bound, and the least of them holds for all. It speaks of microbatches of one
size, the last of which may be smaller, of at most half the batch or all of it, and of schedules that run the backward's
operators for the first time in the graph's order, by estimates from shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fullbatch._ir import Kind
from fullbatch._plan._relaxed import Moment
from fullbatch._plan._storages import Storages

if TYPE_CHECKING:
    from fullbatch._plan._side import Side

# First runs of a segment at which its memory is looked at: those with the largest operands and results.
_MOMENTS = 2


def least_time(side: Side, sizes: list[int], room: int) -> float:
    """The least time, in bytes moved, with microbatches of one of `sizes`, which fall, or between them.

    Infinite where none fits.
    """
    asked = [_Asked.of(side, point, room) for point in _points(side, sizes)]
    every, best = 0.0, float("inf")
    while asked:
        next_one = min(asked, key=lambda one: one.floor(side))
        asked.remove(next_one)
        if best < float("inf") and not every and not side.across:
            every = _Asked.of(side, _Point(sizes[-1], sizes[0], 0.0), room).least(side)
        if max(next_one.floor(side), next_one.point.fixed + every) >= best:
            break
        best = min(best, next_one.least(side))
    return best


def least_with(side: Side, size: int, room: int) -> float:
    """The least time with microbatches of `size`."""
    (point,) = _points(side, [size])
    return _Asked.of(side, point, room).least(side)


@dataclass(frozen=True)
class _Point:
    """Sizes from `size` to `largest`. `fixed`: what any of them takes at least if nothing is run again."""

    size: int
    largest: int
    fixed: float


def _points(side: Side, sizes: list[int]) -> Iterator[_Point]:
    batch = side.program.batch
    least, many = side.hold_all(batch).launched, side.hold_all(sizes[-1])
    more = (many.launched - least) / max(len(many.schedule.samples) - 1, 1)  # for each further microbatch
    largest = sizes[0]
    for size in sizes:
        count = -(-batch // largest)
        yield _Point(size, largest, side.fixed(largest) + least + more * (count - 1))
        largest = size - 1


@dataclass(frozen=True)
class _Asked:
    """The room that microbatches of these sizes have: the smallest have the least at work."""

    point: _Point
    room: list[float]
    moments: list[Moment]

    @classmethod
    def of(cls, side: Side, point: _Point, room: int) -> _Asked:
        batch, size = side.program.batch, point.size
        moments = _moments(side, size)
        if side.across and size < batch:
            return cls(point, _across(side, point, room, moments), [])
        profile = side.hold_all(size).profile
        beside = [float(room - first) for first in profile.whole]
        if size < batch:
            more = _second(batch, point)
            beside = [min(first, more * (room - sums)) for first, sums in zip(beside, profile.during, strict=True)]
        found = [
            Moment(segment, beside[segment] - sum(storages.values()), frozenset(storages))
            for segment, some in moments.items() for storages in some
        ]  # fmt: skip
        return cls(point, beside, found)

    def floor(self, side: Side) -> float:
        """What `least` is at least, by what was solved before."""
        return self.point.fixed + side.problem(self.point.size).floor(self.room)

    def least(self, side: Side) -> float:
        """The least time: with the least cost of what they run again."""
        return self.point.fixed + side.problem(self.point.size).bound(self.room, self.moments)


def _second(batch: int, point: _Point) -> float:
    """How much more than its own bytes a microbatch of `point.size` may take for those of the second to fit.

    The second finds the sums of the first beside it; it is the smaller one where there are two and they are uneven.
    """
    return max(point.size / min(size, batch - size) for size in range(point.size, point.largest + 1))


def _across(side: Side, point: _Point, room: int, moments: Mapping[int, list[dict[int, int]]]) -> list[float]:
    """Bytes that all microbatches may hold into each segment, where each has its first runs to make.

    The first microbatch of a stage runs while the others hold what came in, the last but one while those before it
    hold what goes on; all sums over microbatches are there by then. Of the largest size the others are fewest.
    """
    batch, profile = side.program.batch, side.hold_all(point.size).profile
    whole, during = profile.whole, profile.during
    done = min((-(-batch // size) - 2) * size / batch for size in range(point.size, point.largest + 1))
    others = 1 - point.largest / batch
    limits = [float(room - fixed) for fixed in whole]
    for segment, some in moments.items():
        work = max(sum(storages.values()) for storages in some)
        limits[segment] = min(limits[segment], (room - whole[segment] - work) / others)
        if done > 0 and segment + 1 < len(limits):
            limits[segment + 1] = min(limits[segment + 1], (room - during[segment] - work) / done)
    return limits


def _moments(side: Side, size: int) -> dict[int, list[dict[int, int]]]:
    """For each segment that is in one stage: the storages that its largest first runs read and write."""
    owners = Storages(side.program, size)
    by_id, values = side.program.by_id, side.program.values
    results = owners.of([task.inputs[0] for task in side.program.tasks if task.kind in (Kind.GATHER, Kind.REDUCE)])
    stages: dict[int, set[int]] = {}
    found: dict[int, list[dict[int, int]]] = {}
    for piece in side.segments.pieces:
        stages.setdefault(piece.segment, set()).add(piece.stage)
        for ident in piece.mains:
            task = by_id[ident]
            made = owners.of(task.outputs)
            read = owners.of(task.inputs)
            mine = (owner for owner in read if values[owner].local or size == side.program.batch)
            read = {owner: read[owner] for owner in mine if owner not in results}
            found.setdefault(piece.segment, []).append({**read, **made})
    largest = {t: sorted(some, key=lambda s: -sum(s.values()))[:_MOMENTS] for t, some in found.items()}
    return {t: some for t, some in largest.items() if t and len(stages[t]) == 1}
