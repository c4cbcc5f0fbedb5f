"""The peak and the time of a schedule, by one walk over it.

Storage is counted, not tensors: a view shares its base, and a base lives as long as any view of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fullbatch._cost._costs import Coster, Out, TaskCost
from fullbatch._ir import Program, Reduction, Task
from fullbatch._plan._schedule import ALL, Action, Do, Schedule


@dataclass(frozen=True)
class Simulated:
    """`peak` bytes above the start, the action at which it is reached, the bytes left at the end, and the time.

    At the end the step gives memory of their own to gradients that are views of something larger, or of each other.
    """

    peak: int
    at: Action | None
    retained: int
    time: float


class Ledger:
    """Live storages. A slot is (value, microbatch); several slots may show one storage."""

    def __init__(self) -> None:
        self.live = 0
        self._root: dict[tuple[int, int], int] = {}
        self._bytes: list[int] = []
        self._count: list[int] = []

    def add(self, slot: tuple[int, int], nbytes: int, alias: tuple[int, int] | None) -> None:
        if alias is not None and alias in self._root:
            root = self._root[alias]
        elif alias is not None:
            return  # a view of a step input: never freed, not counted here
        else:
            root = len(self._bytes)
            self._bytes.append(nbytes)
            self._count.append(0)
            self.live += nbytes
        self.drop(slot)
        self._count[root] += 1
        self._root[slot] = root

    def drop(self, slot: tuple[int, int]) -> int:
        """Frees a slot; returns the bytes that this gave back."""
        root = self._root.pop(slot, None)
        if root is None:
            return 0
        self._count[root] -= 1
        if self._count[root]:
            return 0
        self.live -= self._bytes[root]
        return self._bytes[root]

    def borrowed(self, values: Iterable[int], program: Program) -> list[int]:
        """Those of `values` whose storage is not theirs alone: of another size, of an input, or of one before."""
        seen: set[int] = set()
        found = []
        for value in values:
            root = self._root.get((value, ALL))
            if root is None or root in seen or self._bytes[root] != program.values[value].nbytes(None, program.batch):
                found.append(value)
            else:
                seen.add(root)
        return found

    def storage(self, slot: tuple[int, int]) -> tuple[int, int] | None:
        """The storage behind a slot, and its bytes; None for a view of a step input."""
        root = self._root.get(slot)
        return None if root is None else (root, self._bytes[root])

    def has(self, slot: tuple[int, int]) -> bool:
        return slot in self._root


def simulate(program: Program, schedule: Schedule, cost: Coster) -> Simulated:
    """Walks `schedule` once with the costs of each task."""
    walk = _Walk(program, schedule, cost)
    peak, at = 0, None
    for action in schedule.actions:
        high = walk.take(action)
        if high > peak:
            peak, at = high, action
    retained = walk.ledger.live
    copied = walk.ledger.borrowed(program.gradients, program)
    copies = sum(program.values[value].nbytes(None, program.batch) for value in copied)
    return Simulated(max(peak, retained + copies), at, retained, walk.time)


class _Walk:
    """The state of one walk over a schedule."""

    def __init__(self, program: Program, schedule: Schedule, cost: Coster) -> None:
        self._program, self._samples, self._cost = program, schedule.samples, cost
        self._tasks = program.by_id
        self._local = [value.local for value in program.values]
        self._away: dict[tuple[int, int], int] = {}
        self.ledger, self.time = Ledger(), 0.0

    def take(self, action: Action) -> int:
        """Takes one action; returns the most bytes alive during it."""
        ledger = self.ledger
        if action.do is Do.FREE:
            ledger.drop((action.subject, action.microbatch))
            return 0
        if action.do is Do.OFFLOAD:
            self._away[action.subject, action.microbatch] = ledger.drop((action.subject, action.microbatch))
            return 0
        if action.do is Do.FETCH:
            slot = (action.subject, action.microbatch)
            ledger.add(slot, self._away.pop(slot, 0), None)
            return ledger.live
        task = self._tasks[action.subject]
        found = self._cost(task, self._program.batch if action.microbatch == ALL else self._samples[action.microbatch])
        self.time += found.time
        if action.do is Do.RUN:
            high = ledger.live + found.peak
            _made(ledger, task, action, found, self._local)
        else:
            high = _joined(ledger, task, action, found, len(self._samples))
        return max(high, ledger.live)


def _made(ledger: Ledger, task: Task, action: Action, found: TaskCost, local: list[bool]) -> None:
    for out in found.outs:
        slot = (out.value, action.microbatch if local[out.value] else ALL)
        alias = None
        if out.alias is not None:
            alias = (out.alias, action.microbatch if local[out.alias] else ALL)
        ledger.add(slot, out.nbytes, alias)


def _joined(ledger: Ledger, task: Task, action: Action, found: TaskCost, count: int) -> int:
    """A gather or a reduce: the whole value is born at the first microbatch."""
    (value,) = task.outputs
    (source,) = task.inputs
    assert value is not None
    out: Out = found.outs[0]
    part = (source, action.microbatch)
    if action.microbatch == 0:
        shared = out.alias is not None or (count == 1)
        ledger.add((value, ALL), out.nbytes, part if shared and ledger.has(part) else None)
        return ledger.live
    extra = 4 * out.nbytes if task.reduction is Reduction.MOMENTS else 0
    return ledger.live + extra
