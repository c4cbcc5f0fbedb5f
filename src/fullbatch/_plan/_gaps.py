"""Gaps between the segments that read or make a value, and which of them to let go for the room of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple


class Gap(NamedTuple):
    """`value` into the segments from `first` to `last`; `worth`: what holding it there saves."""

    value: int
    first: int
    last: int
    worth: float


class Offered:
    """What `Polish` knows of gaps that may be let go, until something changes: most tries change nothing."""

    __slots__ = ("coming", "gaps", "held")

    def __init__(self) -> None:
        self.gaps: dict[int, dict[int, Gap]] = {}  # by segment and value; a gap is in each of its segments
        self.held: dict[int, list[Gap]] = {}  # by segment: all that are held into it
        self.coming: dict[int, list[Gap]] = {}  # by segment: those of them that are not through the segment before


def pay(
    offers: Sequence[Gap], lacking: dict[int, float], most: float, sizes: Mapping[int, int], scale: float
) -> list[Gap] | None:
    """Offers that give what lacks, the cheapest for what it gives first; None where they cost more than `most`.

    `lacking`: bytes by segment. A value takes `scale` times its size.
    """
    given: list[Gap] = []
    while lacking:
        best = cheapest(offers, lacking, most, sizes, scale)
        if best is None:
            return None
        offers = [offer for offer in offers if offer is not best]
        given.append(best)
        most -= best.worth
        freed = scale * sizes[best.value]
        lacking = {t: need - freed if best.first <= t <= best.last else need for t, need in lacking.items()}
        lacking = {t: need for t, need in lacking.items() if need > 0}
    return given


def cheapest(
    offers: Sequence[Gap], lacking: dict[int, float], most: float, sizes: Mapping[int, int], scale: float
) -> Gap | None:
    """What is cheapest for what it gives; None where all that lacks costs more than `most` at that rate."""
    low, high = min(lacking), max(lacking) + 1
    needs = [lacking.get(t, 0.0) for t in range(low, high)]
    upto = list(accumulate(needs, initial=0.0))
    best, rate = None, most / upto[-1]
    for offer in offers:  # no calls in here: it is where a search spends its time
        worth = offer.worth
        begin = offer.first if offer.first > low else low
        end = offer.last + 1 if offer.last < high else high
        if begin >= end or worth >= most or worth > rate * (upto[end - low] - upto[begin - low]):
            continue
        freed = scale * sizes[offer.value]
        if worth <= rate * freed * (end - begin):
            helps = sum([need if need < freed else freed for need in needs[begin - low : end - low]])
            if helps > 0 and (worth / helps < rate or (best is None and worth / helps <= rate)):
                best, rate = offer, worth / helps
    return best
