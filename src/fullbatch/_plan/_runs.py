"""A small step run by run: what each run reads, makes and needs in exact bytes, and orders of runs as tasks.

The holding problem knows segments and what is held between them. In a small step most of what decides comes and goes
inside of a segment: a gradient that could be made again, a value that is dropped before its last reader, the order of
two recomputes. So here nothing is merged: a run is one operator, and only views and joins, which take neither bytes nor
time where the batch is one microbatch, are left out. They are put in again where an order becomes tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fullbatch._cost._costs import Coster
from fullbatch._ir import Program, Task
from fullbatch._plan._reduced import Price
from fullbatch._plan._stages import TARGETS, Stages


@dataclass(frozen=True)
class Run:
    """One operator. `cost`: time of a run; `need`: most bytes allocated in it; storages that it reads and makes."""

    task: int
    cost: float
    need: int
    reads: tuple[int, ...]
    makes: tuple[int, ...]


class Runs:
    """`runs` in the order of their first time. By storage: `sizes` in bytes, `results`: those that stay once made."""

    def __init__(self, program: Program, order: Sequence[int], cost: Coster, price: Price) -> None:
        self._program = program
        self.runs: list[Run] = []
        self.sizes: list[int] = []
        self._root: dict[int, int] = {}  # value -> storage
        self._values: dict[int, list[int]] = {}  # storage -> values in it
        self._of_task: dict[int, int] = {}
        self.plain = True  # whether every operator is either a view or makes memory of its own
        by_id = program.by_id
        self._joins = [by_id[ident] for ident in order if by_id[ident].kind in TARGETS]
        for ident in order:
            if by_id[ident].kind not in TARGETS:
                self._add(by_id[ident], cost, price)
        joined = {self._root[task.inputs[0]] for task in self._joins if task.inputs[0] in self._root}
        self.results = [storage in joined for storage in range(len(self.sizes))]

    def _add(self, task: Task, cost: Coster, price: Price) -> None:
        found = cost(task, self._program.batch)
        own = [out for out in found.outs if out.alias is None and out.nbytes]
        reads = tuple(dict.fromkeys(self._root[value] for value in task.inputs if value in self._root))
        if not own:
            for out in found.outs:
                if out.alias is not None and out.alias in self._root:
                    self._name(out.value, self._root[out.alias])
            return
        self.plain &= len(own) == len(found.outs)
        makes = range(len(self.sizes), len(self.sizes) + len(own))
        for storage, out in zip(makes, own, strict=True):
            self.sizes.append(out.nbytes)
            self._name(out.value, storage)
        self._of_task[task.id] = len(self.runs)
        self.runs.append(Run(task.id, price(task), found.peak, reads, tuple(makes)))

    def _name(self, value: int, storage: int) -> None:
        self._root[value] = storage
        self._values.setdefault(storage, []).append(value)

    def order_of(self, tasks: Iterable[int]) -> Iterator[int]:
        """The runs among `tasks`."""
        return (self._of_task[task] for task in tasks if task in self._of_task)

    def tasks(self, order: Sequence[int]) -> list[int]:
        """The tasks of an order of runs: views are made before who reads them, results joined when they are made."""
        return _Tasks(self._program, self._joins, self._root, self._values).of([self.runs[at] for at in order])


class _Tasks:
    """Puts views and joins where runs need them. A view serves until what it shows is made again."""

    def __init__(
        self, program: Program, joins: Sequence[Task], root: dict[int, int], values: dict[int, list[int]]
    ) -> None:
        self._by_id, self._producers = program.by_id, program.producers
        self._root, self._values = root, values
        self._there = set(program.inputs.values())
        self._waiting: dict[int | None, list[Task]] = {}
        for task in joins:
            self._waiting.setdefault(root.get(task.inputs[0]), []).append(task)
        self._order: list[int] = []

    def of(self, runs: Sequence[Run]) -> list[int]:
        for run in runs:
            task = self._by_id[run.task]
            self._views(task)
            self._order.append(task.id)
            for storage in run.makes:
                self._there.difference_update(self._values[storage])
            self._there.update(out for out in task.outputs if out is not None)
            for storage in run.makes:
                self._join(storage)
        self._join(None)
        return self._order

    def _join(self, storage: int | None) -> None:
        for task in self._waiting.pop(storage, ()):
            self._views(task)
            self._order.append(task.id)

    def _views(self, task: Task) -> None:
        for value in task.inputs:
            if value not in self._there:
                maker = self._producers[value]
                self._views(maker)
                self._order.append(maker.id)
                self._there.update(out for out in maker.outputs if out is not None)


def first_order(stages: Stages, body: Iterable[int]) -> list[int] | None:
    """The tasks of a step's only stage in order; None where there are several, or something runs between them."""
    return list(body) if stages.count == 1 and not any(stages.once) else None
