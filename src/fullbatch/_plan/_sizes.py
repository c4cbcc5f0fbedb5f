"""Which sizes of microbatch to look at, and in what order.

A smaller microbatch has less at work and leaves more to hold, but reads the weights more often. Where something is held
for all microbatches, which size is best is not known before a linear program is solved for each, and that takes longer
than all else. So each size has a time that it cannot go below, and only the size whose time is least is looked at more
closely: a plan's own search asks for a few sizes, the most promising first, and the others are never solved.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fullbatch._plan._side import Side


def microbatch_sizes(batch: int) -> list[int]:
    """Sizes worth trying, largest first: the batch in 1, 2, 3, 4, 6, 8, ... equal microbatches."""
    counts, count = [], 1
    while count < batch:
        counts.append(count)
        count = count + 1 if count < 4 else count * 3 // 2 if count & (count - 1) == 0 else count * 4 // 3
    return list(dict.fromkeys([-(-batch // count) for count in counts] + [1]))


def by_bisection(sizes: list[int], fits: Callable[[int], bool]) -> list[int]:
    """The largest size that fits, the next smaller one, and the smallest. Sizes fall."""
    low, high = 0, len(sizes) - 1
    while low < high:
        middle = (low + high) // 2
        if fits(sizes[middle]):
            high = middle
        else:
            low = middle + 1
    return list(dict.fromkeys([sizes[low], sizes[min(low + 1, len(sizes) - 1)], sizes[-1]]))


def by_outlook(side: Side, sizes: Sequence[int], room: int) -> Iterator[int]:
    """`sizes`, those with the least time by relaxation first; each is solved only when it may be the next."""
    waiting = [(side.fixed(size), size, _closer(side, size, room)) for size in sizes]
    heapq.heapify(waiting)
    while waiting:
        least, size, closer = waiting[0]
        known = next(closer, None)
        if known is None:
            heapq.heappop(waiting)
            yield size
        else:
            heapq.heapreplace(waiting, (max(least, known), size, closer))


def _closer(side: Side, size: int, room: int) -> Iterator[float]:
    """What `size` takes at least, ever closer, each at more expense; the last is what it is taken for.

    That is half way between two relaxations, for what is made again in a segment takes room there too: all of it at
    once is too much to count, none too little.
    """
    time, limits, problem = side.hold_all(size).time, side.limits(size, room), side.problem(size)
    yield time + problem.floor(limits)
    relaxed = problem.bound(limits)
    yield time + relaxed
    yield time + (relaxed + problem.floor(limits, bounding=False)) / 2
    yield time + (relaxed + problem.outlook(limits)) / 2
