"""A captured step as a graph of runs and storages, and what a sequence of runs takes.

What the planner decides about is small: a view shares its base, a result joined by a single microbatch shares its
summand, and neither takes time or bytes. Left out, with readers of a view reading its base, no schedule is lost: a view
can be made again at any time, for nothing, while its base is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import fullbatch
from fullbatch._cost._costs import estimated
from fullbatch._ir import Kind, Program, Task
from fullbatch._plan._schedule import ALL, EACH, Action, Do, Phase, Schedule

JOINS = (Kind.GATHER, Kind.REDUCE)


@dataclass(frozen=True)
class Run:
    """A task that takes time or bytes: `cost` by estimate, the storages that it reads and makes."""

    task: int
    cost: float
    reads: tuple[int, ...]
    makes: tuple[int, ...]


@dataclass(frozen=True)
class Graph:
    """`runs` in an order that respects data. By storage: bytes, whether it has a result of the step, its value."""

    runs: tuple[Run, ...]
    sizes: tuple[int, ...]
    results: tuple[bool, ...]
    values: tuple[int, ...] = ()

    @cached_property
    def producers(self) -> dict[int, int]:
        """The run that makes each storage."""
        return {storage: at for at, run in enumerate(self.runs) for storage in run.makes}

    @property
    def work(self) -> float:
        """Time of the step that runs nothing twice."""
        return sum(run.cost for run in self.runs)

    def time(self, order: Sequence[int]) -> float:
        """Time of runs one after another."""
        return sum(self.runs[at].cost for at in order)

    def peak(self, order: Sequence[int]) -> int:
        """Most bytes alive while runs follow one another, each storage dropped after its last reader.

        Raises ValueError where a run reads what is not there, or a result is never made.
        """
        dead = list(self.drops(order))
        live: set[int] = set()
        most = 0
        for at, drop in zip(order, dead, strict=True):
            run = self.runs[at]
            if not live.issuperset(run.reads):
                raise ValueError(f"run {at} reads storages that are not there: {set(run.reads) - live}")
            # What is made once more stands beside an old result, and in the place of anything else.
            live -= {storage for storage in run.makes if not self.results[storage]}
            most = max(most, sum(self.sizes[s] for s in live) + sum(self.sizes[s] for s in run.makes))
            live |= set(run.makes)
            live -= drop
        if any(result and storage not in live for storage, result in enumerate(self.results)):
            raise ValueError("not every result is made")
        return most

    def drops(self, order: Sequence[int]) -> Iterator[set[int]]:
        """Storages that nobody reads any more, or not before they are made again, after each run."""
        found: list[set[int]] = []
        later: set[int] = set()
        for at in reversed(order):
            run = self.runs[at]
            touched = {*run.reads, *run.makes}
            found.append({storage for storage in touched if storage not in later and not self.results[storage]})
            later -= set(run.makes)
            later |= set(run.reads)
        return reversed(found)


def reduce_program(program: Program) -> Graph:
    """The graph of a program that runs as one microbatch."""
    cost = estimated(program)
    root: dict[int, int] = {}
    runs: list[Run] = []
    sizes: list[int] = []
    values: list[int] = []
    for task in program.tasks:
        found = cost(task, program.batch)
        makes = []
        for out in found.outs:
            source = task.inputs[0] if task.kind in JOINS else out.alias
            if source is not None:
                if source in root:
                    root[out.value] = root[source]
            elif out.nbytes:
                root[out.value] = len(sizes)
                makes.append(len(sizes))
                sizes.append(out.nbytes)
                values.append(out.value)
        if makes or found.time:
            reads = dict.fromkeys(root[value] for value in task.inputs if value in root)
            runs.append(Run(task.id, found.time, tuple(reads), tuple(makes)))
    results = {root[value] for value in program.outputs if value in root}
    flags = tuple(storage in results for storage in range(len(sizes)))
    return Graph(tuple(runs), tuple(sizes), flags, tuple(values))


class Expansion:
    """Runs of a graph as a schedule of its program: views are made just before who reads them."""

    def __init__(self, program: Program, graph: Graph, order: Sequence[int]) -> None:
        self._program, self._graph = program, graph
        self._tasks, self._makers = program.by_id, program.producers
        self._counted = {run.task for run in graph.runs}
        self._given = set(program.inputs.values())
        self._actions: list[Action] = []
        self._made: set[int] = set()
        joins = {task.id: self._base(task.inputs[0]) for task in program.tasks if task.kind in JOINS}
        for at, drop in zip(order, graph.drops(order), strict=True):
            self._step(graph.runs[at], drop, joins)
        rest = [task for task in joins if task not in self._made]
        for task in rest:
            self._join(task)
        self.schedule = Schedule((Phase((), (), tuple(self._actions)),), (program.batch,))

    def _step(self, run: Run, drop: set[int], joins: dict[int, int | None]) -> None:
        task = self._tasks[run.task]
        views = self._views(task)
        self._actions.append(Action(Do.RUN, task.id, EACH))
        self._free(views)
        graph = self._graph
        made = {graph.values[storage] for storage in run.makes}
        for join, base in joins.items():
            if base in made and join not in self._made:
                self._join(join)
        # A result that was joined keeps its bytes without the value that it was joined from.
        joined = {s for s in run.makes if graph.results[s] and not any(s in other.reads for other in graph.runs)}
        self._free([graph.values[storage] for storage in sorted(drop | joined)])

    def _base(self, value: int) -> int | None:
        """The value whose storage this one shares; None where it is an input's."""
        while value not in self._given:
            maker = self._makers[value]
            if maker.id in self._counted:
                return value
            if not maker.inputs:
                return None
            value = maker.inputs[0]
        return None

    def _views(self, task: Task) -> list[int]:
        """Makes the views that a task reads; returns them."""
        made: list[int] = []

        def make(value: int) -> None:
            maker = self._makers.get(value)
            if maker is None or maker.id in self._counted or value in made or maker.kind in JOINS:
                return
            for source in maker.inputs:
                make(source)
            self._actions.append(Action(Do.RUN, maker.id, EACH))
            made.extend(out for out in maker.outputs if out is not None)

        for value in task.inputs:
            make(value)
        return made

    def _join(self, task: int) -> None:
        self._made.add(task)
        join = self._tasks[task]
        views = self._views(join)
        self._actions.append(Action(Do.GATHER if join.kind is Kind.GATHER else Do.REDUCE, task, EACH))
        self._free(views)

    def _free(self, values: Sequence[int]) -> None:
        local = self._program.values
        self._actions.extend(Action(Do.FREE, value, EACH if local[value].local else ALL) for value in values)


class _Capturing(fullbatch.Step):
    _measures = False  # plans by estimate, as the solver does

    def _run(self, captured: Any, inputs: Any) -> Any:
        assert self._call is not None
        captured.prepare(inputs, self._call.leaves, self._call.shape)
        self.program: Program = captured.side(captured.program.batch).program
        return super()._run(captured, inputs)


def step_of(loss_fn: Any, model: Any, batch: Any, room: int | None = None) -> Any:
    """A step that runs its batch at once within `room` bytes above what it owns (None: all there is), by estimate.

    Its `program` is the one that it plans. Raises BudgetError where no plan fits.
    """
    size = len(batch[0] if isinstance(batch, tuple) else batch)
    free = _Capturing(loss_fn, model, batch, microbatch=size)
    if room is None:
        return free
    return _Capturing(loss_fn, model, batch, memory=free.plan.owned + room, microbatch=size)
