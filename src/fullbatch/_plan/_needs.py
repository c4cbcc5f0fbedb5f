"""What runs in one segment for what is held into it, and what one more or one less would change.

A search over what to hold asks this many thousands of times. Walking the segment's whole graph for each question would
take most of its time; with the readers of each value counted, only the part that changes is walked.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from functools import cached_property

from fullbatch._plan._reduced import Reduced


class Needs:
    """One segment with `held` at its beginning. Never changed: another choice has another.

    `runs`: nodes that run. `readers[v]`: how many of them, and of the targets, read value v. `again`: cost of those
    that do not run for the first time. `here`: bytes of what is held; `made`: of what is made again and stays.
    """

    def __init__(self, reduced: Reduced, segment: int, held: AbstractSet[int]) -> None:
        self._reduced, self._segment, self._held = reduced, segment, held
        self.runs = reduced.closure(segment, held)
        self.readers: dict[int, int] = dict.fromkeys(reduced.wanted[segment], 1)
        for index in self.runs:
            for value in reduced.nodes[index].inputs:
                self.readers[value] = self.readers.get(value, 0) + 1
        self.again = reduced.again(segment, self.runs)
        self.here, self.made = reduced.nbytes(held), reduced.made_again(segment, self.runs)
        self._saved: dict[int, float] = {}  # answers, since the same are asked for again while other segments change
        self._lost: dict[int, float] = {}

    def unless_read(self, held: AbstractSet[int]) -> Needs | None:
        """The same runs with `held` at the beginning instead, if nothing here reads what is held besides or no more."""
        more, less = held - self._held, self._held - held
        if not (self.readers.keys().isdisjoint(more) and self.readers.keys().isdisjoint(less)):
            return None
        other = Needs.__new__(Needs)  # `copy.copy` takes as long as all the rest
        other.__dict__.update(self.__dict__)  # what would not run is the same as well
        other._held, other._lost = held, {}
        other.here = self.here + self._reduced.nbytes(more) - self._reduced.nbytes(less)
        return other

    @cached_property
    def wished(self) -> list[tuple[int, float]]:
        """Values that are made again here, each with what would not run if it were held as well."""
        nodes = self._reduced.nodes
        again = (nodes[index] for index in self.runs if nodes[index].segment < self._segment)
        worth = ((value, self.saved(value)) for node in again for value in node.outputs)
        return [(value, saved) for value, saved in worth if saved > 0]

    def saved(self, value: int) -> float:
        """Cost of what would not run if `value` were held as well."""
        if value in self._held or value not in self.readers:
            return 0.0
        if value not in self._saved:
            self._saved[value] = self._find_saved(value)
        return self._saved[value]

    def lost(self, value: int) -> float:
        """Cost of what would run as well if `value` were not held."""
        if value not in self._held or value not in self.readers:
            return 0.0
        if value not in self._lost:
            self._lost[value] = self._find_lost(value)
        return self._lost[value]

    def _find_saved(self, value: int) -> float:
        makers, readers = self._reduced.makers, self.readers
        gone: dict[int, int] = {value: readers[value]}  # readers that a value loses
        total, stack = 0.0, [value]
        while stack:
            node = makers[stack.pop()]
            if node.segment >= self._segment:
                continue
            if any(readers.get(out, 0) > gone.get(out, 0) and out not in self._held for out in node.outputs):
                continue
            total += node.cost
            for read in node.inputs:
                gone[read] = gone.get(read, 0) + 1
                if gone[read] == readers[read] and read not in self._held:
                    stack.append(read)
        return total

    def _find_lost(self, value: int) -> float:
        makers, total = self._reduced.makers, 0.0
        started: set[int] = set()
        stack = [value]
        while stack:
            node = makers[stack.pop()]
            if node.index in self.runs or node.index in started:
                continue
            started.add(node.index)
            total += node.cost
            stack += [read for read in node.inputs if read == value or read not in self._held]
        return total
