"""Improves a choice of what is held, one gap at a time.

Rounding a relaxation leaves room unused in one place and pays for it in another. A *gap* is a value between two
segments that read or make it; it is held or not, and this decides only what runs in the segment at its end. So gaps
are tried: held where there is room and it saves work, or in exchange for others whose loss costs less.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from math import inf

from fullbatch._plan._gaps import Gap, Offered, cheapest, pay
from fullbatch._plan._needs import Needs
from fullbatch._plan._relaxed import HoldingProblem

Held = tuple[frozenset[int], ...]
"""Values held into each segment."""

# A shake lets go of what is held into so many segments in a row this share, by chance.
_WIDTH, _LET_GO = 2, 0.4

# Gaps that are tried, the worthiest first, before they are looked for again.
_WISHES = 200

# A search that has been at every place so often for nothing ends: a small step has no more to find.
_IN_VAIN = 6

_State = tuple[list[frozenset[int]], list[Needs], list[float], Offered]


class Polish:
    """A choice of what is held that can be changed gap by gap.

    `limits[t]`: bytes for what is held into segment t and run again in it, as the problem's `weight` counts them.
    """

    def __init__(self, problem: HoldingProblem, held: Sequence[frozenset[int]], limits: Sequence[float]) -> None:
        self._reduced, self._problem, self._limits = problem.reduced, problem, limits
        self._scale = problem.scale
        self._held = [frozenset(values) for values in held]
        self._needs = [Needs(self._reduced, t, values) for t, values in enumerate(self._held)]
        self._slack = [0.0] * len(held)
        self._trials = 0
        self._offered = Offered()
        self._changed: set[int] | None = None  # segments where something did; None: not noted, so perhaps everywhere
        self._follow(0, len(held))

    @property
    def held(self) -> Held:
        """The choice as it is now."""
        return tuple(self._held)

    @property
    def cost(self) -> float:
        """Of what is run again."""
        return _cost(self._needs)

    def within(self, limits: Sequence[float]) -> bool:
        """Keeps to other limits: lets go what costs least for the room that it gives. Whether that was enough."""
        self._slack = [slack + new - old for slack, new, old in zip(self._slack, limits, self._limits, strict=True)]
        self._limits = list(limits)
        while lacking := {t: -slack for t, slack in enumerate(self._slack) if t and slack < 0}:
            offer = cheapest(self.offers(lacking), lacking, inf, self._reduced.sizes, self._scale)
            if offer is None:
                return False
            self._set(offer, False)
            self._follow(offer.first, offer.last)
        return True

    def improve(self, trials: int) -> None:
        """Takes every exchange that saves work, until there is none or so many things were tried."""
        self._trials = trials
        self._climb()

    def search(self, trials: int, seed: int = 0) -> None:
        """Lets go some of what is held about one place and climbs again, in turn at every place; keeps what is better.

        Exchanges of one gap for others end where only several at once would help. Ends when so many things were tried,
        or all places several times in vain.
        """
        self._trials = trials
        dice = random.Random(seed)  # the same search for the same problem
        places, in_vain = len(self._held), 0
        while self._trials > 0 and places > 1 and in_vain < _IN_VAIN:
            before = self.cost
            for segment in dice.sample(range(1, places), places - 1):
                self._shake(range(segment, min(places, segment + _WIDTH)), dice)
            in_vain = 0 if self.cost < before else in_vain + 1

    def _shake(self, segments: range, dice: random.Random) -> None:
        if self._trials <= 0:
            return
        kept = self._state()
        gone = [gap for gap in self.offers(segments) if dice.random() < _LET_GO]
        if not gone:
            return
        self._changed = set()
        for gap in gone:
            self._set(gap, False)
        self._follow(min(gap.first for gap in gone), max(gap.last for gap in gone))
        self._climb()
        self._changed = None
        fits = all(now >= min(0.0, then) for now, then in zip(self._slack, kept[2], strict=True))
        if not (fits and self.cost < _cost(kept[1]) * (1 - 1e-6)):
            self._restore(kept)

    def _climb(self) -> None:
        while self._trials > 0:
            wishes = sorted(self.wishes(), key=lambda gap: -gap.worth / self._size(gap))
            granted = [self._grant(gap) for gap in wishes[:_WISHES]]
            if not any(granted):
                return

    # ---- gaps

    def _size(self, gap: Gap) -> float:
        return self._scale * self._reduced.sizes[gap.value] * (gap.last - gap.first + 1)

    def wishes(self) -> list[Gap]:
        """Gaps that are not held at whose end the value is made again; while changes are noted, only where they are."""
        changed = self._changed
        found = []
        for segment in range(1 if changed is None else min(changed, default=1), self._reduced.segments):
            wished = self._needs[segment].wished
            self._trials -= len(wished)
            for value, worth in wished:
                first = self._last_there(value, segment)
                if changed is None or not changed.isdisjoint(range(first, segment + 1)):
                    found.append(Gap(value, first, segment, worth))
        return found

    def _last_there(self, value: int, segment: int) -> int:
        """The first segment into which `value` would have to be held to be there at the beginning of `segment`."""
        maker = self._reduced.makers[value].index
        before = segment - 1
        while maker not in self._needs[before].runs and value not in self._held[before] and before:
            before -= 1
        return before + 1

    def offers(self, segments: Iterable[int], wanted: int = -1) -> list[Gap]:
        """Gaps that are held into one of `segments`, with what letting them go costs."""
        found: list[Gap] = []
        before, apart = -2, False
        for segment in segments:
            if segment == before + 1:
                found += self._coming(segment)
            else:
                apart = apart or bool(found)
                found += self._into(segment)
            before = segment
        if apart:  # one gap may be in several of them
            found = list({id(gap): gap for gap in found}.values())
        if wanted >= 0:
            found = [gap for gap in found if gap.value != wanted]
        self._trials -= len(found)
        return found

    def _into(self, segment: int) -> list[Gap]:
        if segment not in self._offered.held:
            self._offered.held[segment] = self._offers(self._held[segment], segment)
        return self._offered.held[segment]

    def _coming(self, segment: int) -> list[Gap]:
        """Other gaps into `segment` than those that come through the segment before."""
        if segment not in self._offered.coming:
            through = self._held[segment - 1] - self._needs[segment - 1].readers.keys()
            self._offered.coming[segment] = self._offers(self._held[segment] - through, segment)
        return self._offered.coming[segment]

    def _offers(self, values: Iterable[int], segment: int) -> list[Gap]:
        there = self._offered.gaps.setdefault(segment, {})
        return [there.get(value) or self._offer(value, segment) for value in values]

    def _offer(self, value: int, segment: int) -> Gap:
        first, last = self._gap_around(value, segment)
        gap = Gap(value, first, last, self._needs[last].lost(value))
        for at in range(first, last + 1):
            self._offered.gaps.setdefault(at, {})[value] = gap
        return gap

    def _gap_around(self, value: int, segment: int) -> tuple[int, int]:
        held, needs = self._held, self._needs
        first = last = segment
        while value in held[first - 1] and value not in needs[first - 1].readers:
            first -= 1
        while value not in needs[last].readers and last + 1 < len(held) and value in held[last + 1]:
            last += 1
        return first, last

    # ---- changes

    def _grant(self, gap: Gap) -> bool:
        """Holds `gap`, in exchange for others where there is no room, if that saves work."""
        if self._trials <= 0 or gap.value in self._held[gap.last]:
            return False
        self._trials -= 1
        worth = self._needs[gap.last].saved(gap.value)
        size = self._scale * self._reduced.sizes[gap.value]
        span = range(gap.first, gap.last + 1)
        lacking = {t: size - self._slack[t] for t in span if self._slack[t] < size}
        offers = self.offers(list(lacking), gap.value)
        given = pay(offers, lacking, 0.999 * worth, self._reduced.sizes, self._scale)
        return given is not None and self._exchange(gap, given)

    def _exchange(self, gap: Gap, given: Sequence[Gap]) -> bool:
        """Makes the change and keeps it if it saves work as a whole."""
        kept, cost = self._state(), self.cost
        for item in given:
            self._set(item, False)
        self._set(gap, True)
        self._follow(min(item.first for item in (gap, *given)), max(item.last for item in (gap, *given)))
        fits = all(now >= min(0.0, then) for now, then in zip(self._slack, kept[2], strict=True))
        if fits and self.cost < cost * (1 - 1e-6):
            return True
        self._restore(kept)
        return False

    def _state(self) -> _State:
        return list(self._held), list(self._needs), list(self._slack), self._offered

    def _restore(self, state: _State) -> None:
        self._held, self._needs, self._slack, self._offered = state

    def _set(self, gap: Gap, on: bool) -> None:
        self._offered = Offered()
        if self._changed is not None:
            self._changed.update(range(gap.first, gap.last + 1))
        for segment in range(gap.first, gap.last + 1):
            held = self._held[segment]
            self._held[segment] = held | {gap.value} if on else held - {gap.value}

    def _follow(self, first: int, last: int) -> None:
        """Finds again what runs from segment `first` on. What was made for another's sake only may be gone with it."""
        self._offered = Offered()
        for segment in range(first, len(self._held)):
            held = self._held[segment]
            if segment:
                held = self._reduced.available(held, self._held[segment - 1], self._needs[segment - 1].runs)
            if segment > last and held == self._held[segment]:
                return
            if self._changed is not None:
                self._changed.add(segment)
            self._held[segment] = held
            self._needs[segment] = needs = self._needs[segment].unless_read(held) or Needs(self._reduced, segment, held)
            self._slack[segment] = self._limits[segment] - self._problem.weight(needs.here, needs.made)


def _cost(needs: Sequence[Needs]) -> float:
    return sum(segment.again for segment in needs)
