"""The last improvement of a small step: gaps tried one by one on the walk itself.

The linear program counts what is held; what comes and goes inside a segment it knows only from the last walk. In a
small step of one microbatch that is most of the memory. There a walk takes milliseconds, so that every gap (`_polish`)
is tried on it: let go or held, alone or in exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from fullbatch._plan._gaps import Gap
from fullbatch._plan._polish import Held, Polish

# What a share of the room too much weighs against a share of the step's time: more than any recomputation.
_OVER = 30.0


class Walked(Protocol):
    """A choice of what is held, walked."""

    @property
    def held(self) -> Held:
        """What is held into each segment."""

    @property
    def again(self) -> float:
        """Cost of what is run again."""

    @property
    def peaks(self) -> Sequence[int]:
        """Most bytes in each segment."""


C = TypeVar("C", bound=Walked)


def descend(
    start: C, room: int, work: float, walk: Callable[[Held], C], gaps_of: Callable[[Held], Polish], walks: int
) -> C:
    """The best choice that is found with so many walks: within the room first, then with the least run again."""

    def score(choice: C) -> float:
        over = sum(max(0, peak - room) for peak in choice.peaks) / room
        return choice.again / work + _OVER * over

    best, value = start, score(start)
    while walks > 0:
        found = False
        for held in _neighbours(gaps_of(best.held), best.held):
            if walks <= 0:
                break
            walks -= 1
            choice = walk(held)
            if score(choice) < value - 1e-9:
                best, value, found = choice, score(choice), True
                break
        if not found:
            break
    return best


def _neighbours(polish: Polish, held: Held) -> Iterator[Held]:
    """Choices that differ in one gap, the most promising first; then in two, one held for another let go."""
    wishes = sorted(polish.wishes(), key=lambda gap: -gap.worth)
    offers = sorted(polish.offers(range(1, len(held))), key=lambda gap: gap.worth)
    for at in range(max(len(wishes), len(offers))):
        if at < len(wishes):
            yield _changed(held, wishes[at], True)
        if at < len(offers):
            yield _changed(held, offers[at], False)
    for wish in wishes[:8]:
        for offer in offers:
            if offer.worth < wish.worth and offer.value != wish.value:
                yield _changed(_changed(held, offer, False), wish, True)


def _changed(held: Held, gap: Gap, on: bool) -> Held:
    return tuple(
        (values | {gap.value} if on else values - {gap.value}) if gap.first <= t <= gap.last else values
        for t, values in enumerate(held)
    )
