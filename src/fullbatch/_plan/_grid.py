"""Orders of a small step in which runs repeat, as choices that can be changed one by one.

A plan by segments comes near the best order only where there is room: below half of the memory of a small step its
model leaves the good orders out, or takes them for too large (`_runs`). Here, before each first run a set of earlier
runs is made again, in a few rounds, each in the order of the graph. What is not made again is held from when it was
made last, for as long as it is read. So every choice of sets is an order that works, and choices differ only in peak
and time. A change is walked backwards from where it is, as far as it changes what is alive: some ten microseconds,
where a walk over the schedule takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from fullbatch._plan._runs import Runs

Again = list[int]
"""For each place the runs that are made again there, as bits."""

# A place beyond the room counts for this share of it besides the excess, so that a few bytes too much do not pass.
_STEP = 0.03


class _Walked(NamedTuple):
    """One place, walked: what is alive before it, its bytes, the peak, those of its runs that serve, and their cost."""

    live: int
    nbytes: int
    peak: int
    runs: int
    cost: float


class Grid:
    """Places before first runs, `rounds` of them for each, and what is made again in each.

    `again`: cost of what is; `over`: by how much places exceed `room`.
    """

    def __init__(self, runs: Runs, room: int, rounds: int, launch: float) -> None:
        self.room, self._step, self.rounds = room, int(_STEP * room), rounds
        index = {storage: at for at, storage in enumerate(s for s, stays in enumerate(runs.results) if not stays)}
        self.makers = [0] * len(index)
        self.reads: list[list[tuple[int, int, int]]] = []  # bit, bytes, maker
        self._makes: list[list[tuple[int, int]]] = []  # bit, bytes
        self.first: list[int] = []  # the first run of a place; -1: of the rounds before the last
        self.limit: list[int] = []  # runs from here on cannot be made again in it
        self._stay: list[int] = []
        stay = 0
        for at, run in enumerate(runs.runs):
            self.first += [-1] * (rounds - 1) + [at]
            self.limit += [at] * rounds
            self._stay += [stay] * rounds
            for storage in run.makes:
                if storage in index:
                    self.makers[index[storage]] = at
                else:
                    stay += runs.sizes[storage]
            self._makes.append([(1 << index[s], runs.sizes[s]) for s in run.makes if s in index])
            self.reads.append([(1 << index[s], runs.sizes[s], self.makers[index[s]]) for s in run.reads if s in index])
        self._need = [run.need for run in runs.runs]
        self._cost = [run.cost + launch for run in runs.runs]
        self._masks = [sum(bit for bit, _ in makes) for makes in self._makes]
        self.places = len(self.first)
        self.walked = 0  # places that were walked so far
        self.start([0] * self.places)

    def start(self, again: Sequence[int]) -> None:
        """Walks a choice as a whole."""
        empty = _Walked(0, 0, 0, 0, 0.0)
        self._at = [empty] * (self.places + 1)
        for place in range(self.places - 1, -1, -1):
            behind = self._at[place + 1]
            self._at[place] = self._place(place, again[place], behind.live, behind.nbytes)
        self.again = sum(at.cost for at in self._at)
        self.over = sum(self._excess(at.peak) for at in self._at)

    def runs_at(self, place: int) -> int:
        """What is made again at a place, as bits."""
        return self._at[place].runs

    def live_before(self, place: int) -> int:
        """Storages alive before a place, as bits."""
        return self._at[place].live

    @property
    def choice(self) -> Again:
        """What is made again at each place."""
        return [at.runs for at in self._at[:-1]]

    def _excess(self, peak: int) -> int:
        return peak - self.room + self._step if peak > self.room else 0

    def _place(self, place: int, runs: int, live: int, nbytes: int) -> _Walked:
        """Walks a place backwards from what is alive behind it; what nobody reads is not run."""
        run = self.first[place]
        if run < 0 and not runs:
            return _Walked(live, nbytes, 0, 0, 0.0)
        makes, reads, masks, need = self._makes, self.reads, self._masks, self._need
        top = served = 0
        cost = 0.0
        first = run >= 0
        while first or runs:
            if not first:
                run = runs.bit_length() - 1
                runs ^= 1 << run
                if not live & masks[run]:
                    continue
                served |= 1 << run
                cost += self._cost[run]
            first = False
            for bit, size in makes[run]:
                if live & bit:
                    live ^= bit
                    nbytes -= size
            for bit, size, _ in reads[run]:
                if not live & bit:
                    live |= bit
                    nbytes += size
            if nbytes + need[run] > top:
                top = nbytes + need[run]
        return _Walked(live, nbytes, top + self._stay[place] if top else 0, served, cost)

    def tried(self, changes: dict[int, int]) -> tuple[list[tuple[int, _Walked]], float, int]:
        """Places as they would be with other runs at some, and what would be made again and exceeded then."""
        at, place, least = self._at, max(changes), min(changes)
        behind = at[place + 1]
        again, over = self.again, self.over
        found: list[tuple[int, _Walked]] = []
        while place >= 0:
            now = at[place]
            if place < least and behind.live == at[place + 1].live:
                break
            runs = changes.get(place, now.runs)
            behind = self._place(place, runs, behind.live, behind.nbytes)
            found.append((place, behind))
            again += behind.cost - now.cost
            over += self._excess(behind.peak) - self._excess(now.peak)
            place -= 1
        self.walked += len(found)
        return found, again, over

    def take(self, found: Iterable[tuple[int, _Walked]], again: float, over: int) -> None:
        """Makes a change that was tried."""
        for place, walked in found:
            self._at[place] = walked
        self.again, self.over = again, over

    def order(self, again: Sequence[int]) -> list[int]:
        """The runs of a choice, one after another."""
        order: list[int] = []
        for first, runs in zip(self.first, again, strict=True):
            order += [*bits(runs), *([first] if first >= 0 else [])]
        return order

    def choice_of(self, order: Iterable[int]) -> Again:
        """The choice nearest to an order of runs."""
        again = [0] * self.places
        done, round_, before = 0, 0, -1
        for run in order:
            if run == done:
                done, round_, before = done + 1, 0, -1
                continue
            if run <= before:
                round_ = min(round_ + 1, self.rounds - 1)
            again[done * self.rounds + round_] |= 1 << run
            before = run
        return again


def bits(mask: int) -> Iterator[int]:
    """Positions of the bits that are set, from the lowest on."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
