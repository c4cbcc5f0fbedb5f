"""Improves a choice of what is held, one gap at a time.

Rounding a relaxation leaves room unused in one place and pays for it in another. A *gap* is a value between two
segments that read or make it; it is held or not, and this decides only what runs in the segment at its end. So gaps
are tried: held where there is room and it saves work, or in exchange for others whose loss costs less.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fullbatch._plan._relaxed import HoldingProblem


@dataclass(frozen=True)
class Gap:
    """`value` into the segments from `first` to `last`; `worth`: what holding it there saves."""

    value: int
    first: int
    last: int
    worth: float


class Polish:
    """A choice of what is held that can be changed gap by gap.

    `limits[t]`: bytes for what is held into segment t and run again in it, as the problem's `weight` counts them.
    """

    def __init__(self, problem: HoldingProblem, held: Sequence[frozenset[int]], limits: Sequence[float]) -> None:
        self._reduced, self._problem, self._limits = problem.reduced, problem, limits
        self._scale = problem.scale
        self._held = [frozenset(values) for values in held]
        self._runs: list[set[int]] = [set() for _ in held]
        self._reads: list[set[int]] = [set() for _ in held]
        self._again = [0.0] * len(held)
        self._slack = [0.0] * len(held)
        self._trials = 0
        self._follow(0, len(held))

    @property
    def held(self) -> tuple[frozenset[int], ...]:
        """The choice as it is now."""
        return tuple(self._held)

    @property
    def cost(self) -> float:
        """Of what is run again."""
        return sum(self._again)

    def improve(self, trials: int) -> None:
        """Takes every exchange that saves work, until there is none or so many things were tried."""
        self._trials = trials
        while self._trials > 0:
            wishes = sorted(self.wishes(), key=lambda gap: -gap.worth / self._size(gap))
            if not any(self._grant(gap) for gap in wishes[:200]):
                return

    # ---- gaps

    def _size(self, gap: Gap) -> float:
        return self._scale * self._reduced.sizes[gap.value] * (gap.last - gap.first + 1)

    def _work(self, segment: int, held: frozenset[int]) -> float:
        self._trials -= 1
        return self._reduced.again(segment, self._reduced.closure(segment, held))

    def wishes(self) -> list[Gap]:
        """Gaps that are not held at whose end the value is made again."""
        found = []
        for segment in range(1, self._reduced.segments):
            now = self._again[segment]
            for index in self._runs[segment]:
                node = self._reduced.nodes[index]
                if node.segment >= segment:
                    continue
                for value in node.outputs:
                    first = self._last_there(value, segment)
                    worth = now - self._work(segment, self._held[segment] | {value})
                    if worth > 0:
                        found.append(Gap(value, first, segment, worth))
        return found

    def _last_there(self, value: int, segment: int) -> int:
        """The first segment into which `value` would have to be held to be there at the beginning of `segment`."""
        maker = self._reduced.makers[value].index
        before = segment - 1
        while maker not in self._runs[before] and value not in self._held[before] and before:
            before -= 1
        return before + 1

    def offers(self, segments: Iterable[int], wanted: int = -1) -> list[Gap]:
        """Gaps that are held into one of `segments`, with what letting them go costs."""
        found: dict[tuple[int, int], Gap] = {}
        for segment in segments:
            for value in self._held[segment]:
                if value == wanted:
                    continue
                first, last = self._gap_around(value, segment)
                if (value, last) not in found:
                    loss = self._work(last, self._held[last] - {value}) - self._again[last]
                    found[value, last] = Gap(value, first, last, loss)
        return list(found.values())

    def _gap_around(self, value: int, segment: int) -> tuple[int, int]:
        held, reads = self._held, self._reads
        first = last = segment
        while value in held[first - 1] and value not in reads[first - 1]:
            first -= 1
        while value not in reads[last] and last + 1 < len(held) and value in held[last + 1]:
            last += 1
        return first, last

    # ---- changes

    def _grant(self, gap: Gap) -> bool:
        """Holds `gap`, in exchange for others where there is no room, if that saves work."""
        if self._trials <= 0 or gap.value in self._held[gap.last]:
            return False
        worth = self._again[gap.last] - self._work(gap.last, self._held[gap.last] | {gap.value})
        size = self._scale * self._reduced.sizes[gap.value]
        span = range(gap.first, gap.last + 1)
        lacking = {t: size - self._slack[t] for t in span if self._slack[t] < size}
        given: list[Gap] = []
        offers = self.offers(list(lacking), gap.value) if lacking else []
        paid = 0.0
        while lacking:
            offers = [offer for offer in offers if any(offer.first <= t <= offer.last for t in lacking)]
            if not offers:
                return False
            offer = min(offers, key=lambda o: o.worth / self._helps(o, lacking))
            offers.remove(offer)
            given.append(offer)
            paid += offer.worth
            if paid >= 0.999 * worth:
                return False
            freed = self._scale * self._reduced.sizes[offer.value]
            lacking = {
                t: need - freed if offer.first <= t <= offer.last else need for t, need in lacking.items()
            }  # fmt: skip
            lacking = {t: need for t, need in lacking.items() if need > 0}
        return self._exchange(gap, given)

    def _helps(self, offer: Gap, lacking: dict[int, float]) -> float:
        freed = self._scale * self._reduced.sizes[offer.value]
        return sum(min(freed, need) for t, need in lacking.items() if offer.first <= t <= offer.last) or 1e-9

    def _exchange(self, gap: Gap, given: Sequence[Gap]) -> bool:
        """Makes the change and keeps it if it saves work as a whole."""
        kept = self.cost, list(self._held), list(self._runs), list(self._reads), list(self._again), list(self._slack)
        for item in given:
            self._set(item, False)
        self._set(gap, True)
        self._follow(min(item.first for item in (gap, *given)), max(item.last for item in (gap, *given)))
        fits = all(now >= min(0.0, then) for now, then in zip(self._slack, kept[-1], strict=True))
        if fits and self.cost < kept[0] * (1 - 1e-6):
            return True
        _, self._held, self._runs, self._reads, self._again, self._slack = kept
        return False

    def _set(self, gap: Gap, on: bool) -> None:
        for segment in range(gap.first, gap.last + 1):
            held = self._held[segment]
            self._held[segment] = held | {gap.value} if on else held - {gap.value}

    def _follow(self, first: int, last: int) -> None:
        """Finds again what runs from segment `first` on. What was made for another's sake only may be gone with it."""
        for segment in range(first, len(self._held)):
            held = self._held[segment]
            if segment:
                held = self._reduced.available(held, self._held[segment - 1], self._runs[segment - 1])
            if segment > last and held == self._held[segment]:
                return
            self._held[segment] = held
            self._runs[segment] = self._reduced.closure(segment, held)
            self._reads[segment] = self._reduced.reads(segment, self._runs[segment])
            self._again[segment] = self._reduced.again(segment, self._runs[segment])
            self._slack[segment] = self._limits[segment] - self._problem.weight(segment, held, self._runs[segment])
