"""What is let go for the room of something else: the cheapest for what it gives, and nothing where that costs more."""

from __future__ import annotations

import random

import pytest

from fullbatch._plan._gaps import Gap, pay

SIZES = dict(enumerate([3, 8, 1, 5, 13, 2, 7, 4]))


def _gap(value: int, first: int, last: int, worth: float) -> Gap:
    return Gap(value, first, last, worth)


def test_nothing_is_let_go_where_it_costs_more_than_it_brings() -> None:
    offers = [_gap(0, 1, 2, 5.0), _gap(1, 2, 2, 9.0)]
    assert pay(offers, {2: 3.0}, 6.0, SIZES, 1.0) == [offers[0]]
    assert pay(offers, {2: 3.0}, 4.0, SIZES, 1.0) is None
    assert pay(offers, {2: 9.0}, 100.0, SIZES, 1.0) == [offers[1], offers[0]]
    assert pay(offers, {2: 12.0}, 100.0, SIZES, 1.0) is None, "they give eleven"
    assert pay([], {2: 1.0}, 100.0, SIZES, 1.0) is None


def test_what_gives_more_than_lacks_counts_for_what_lacks() -> None:
    """Thirteen bytes for 6 are no better a bargain than three for 5 where three lack."""
    offers = [_gap(4, 1, 1, 6.0), _gap(0, 1, 1, 5.0)]
    assert pay(offers, {1: 3.0}, 10.0, SIZES, 1.0) == [offers[1]]
    assert pay(offers, {1: 13.0}, 10.0, SIZES, 1.0) == [offers[0]]


def _slowly(offers: list[Gap], lacking: dict[int, float], most: float, scale: float) -> list[Gap] | None:
    """The same by trying each."""
    left, given = list(offers), []
    while any(need > 0 for need in lacking.values()):
        lacks = {t: need for t, need in lacking.items() if need > 0}
        helps = {
            at: sum(min(scale * SIZES[o.value], need) for t, need in lacks.items() if o.first <= t <= o.last)
            for at, o in enumerate(left)
        }
        rates = {at: left[at].worth / help_ for at, help_ in helps.items() if help_ > 0 and left[at].worth < most}
        total = sum(lacks.values())
        if not rates or min(rates.values()) * total > most:
            return None
        best = left.pop(min(rates, key=lambda at: rates[at]))
        given.append(best)
        most -= best.worth
        freed = scale * SIZES[best.value]
        lacking = {t: need - freed if best.first <= t <= best.last else need for t, need in lacking.items()}
    return given


@pytest.mark.parametrize("seed", range(20))
def test_it_is_what_trying_each_finds(seed: int) -> None:
    dice = random.Random(seed)
    paid = 0
    for _ in range(200):
        offers = []
        for value in range(dice.randrange(1, 8)):
            first = dice.randrange(1, 7)
            offers.append(_gap(value, first, first + dice.randrange(4), dice.uniform(0.5, 9.0)))
        lacking = {t: dice.uniform(0.1, 12.0) for t in sorted(dice.sample(range(1, 10), dice.randrange(1, 5)))}
        most, scale = dice.uniform(1.0, 40.0), dice.choice([1.0, 0.25, 2.0])
        expected = _slowly(offers, lacking, most, scale)
        assert pay(offers, lacking, most, SIZES, scale) == expected
        paid += expected is not None
    assert paid > 5


def test_of_equals_the_first_is_let_go() -> None:
    """Blocks of a network are alike; which of them goes is not left to rounding."""
    dice = random.Random(0)
    for _ in range(500):
        worth, need = dice.uniform(0.1, 5.0), dice.uniform(0.1, 3.0)
        offers = [_gap(value, 1, 2, worth) for value in (0, 0, 0)]
        (given,) = pay(offers, {1: need, 2: need}, 6.0, SIZES, 1.0) or [None]
        assert given is offers[0]
