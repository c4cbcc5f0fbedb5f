"""The step as the holding problem sees it: few nodes, few values, and what cannot decide anything left out.

Views share their base, an intermediate with one reader that is no smaller than what is made of it is part of
its reader, and what is a negligible share of all is always held. So is what the backward makes, where it stands in one
stage with its forward: to make a gradient again takes all that led to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property

from fullbatch._ir import Kind, Program, Task
from fullbatch._plan._pieces import Segments

# Values smaller than this share of all are held in any case: together they are a few rows of numbers.
_NEGLIGIBLE = 3e-4


@dataclass
class Node:
    """Tasks that run together. `cost`: of running them again, whole batch; `segment`: that of the first run."""

    index: int
    cost: float
    inputs: set[int]
    outputs: list[int]
    segment: int
    last: int = 0  # the last segment in which running it again could serve anything


@dataclass
class Reduced:
    """`sizes`: bytes of each value for the whole batch. `wanted[t]`: values that targets read in segment t.

    `last[v]`: the last segment in which v could be read. `held`: values that are always held.
    """

    nodes: list[Node]
    sizes: dict[int, int]
    makers: dict[int, Node]
    last: dict[int, int]
    wanted: list[list[int]]
    segments: int
    held: frozenset[int]
    mains: list[list[Node]] = field(default_factory=list)

    @property
    def columns(self) -> int:
        """Decisions of the holding problem: each value and each node in each segment where it could be of use."""
        spans = sum(self.last[value] - maker.segment for value, maker in self.makers.items())
        return spans + sum(node.last - node.segment for node in self.nodes)

    def available(self, wished: Iterable[int], before: AbstractSet[int], runs: AbstractSet[int]) -> frozenset[int]:
        """Those of `wished` that a segment leaves, into which `before` was held and in which `runs` ran."""
        wished = frozenset(wished)
        missing = [value for value in wished - before if self.makers[value].index not in runs]
        return wished.difference(missing) if missing else wished

    def closure(self, segment: int, held: AbstractSet[int]) -> set[int]:
        """Nodes that run in `segment` where `held` is there at its beginning."""
        stack = list(self.mains[segment])
        runs = {node.index for node in stack}
        makers = self.makers

        def need(value: int) -> None:
            maker = makers[value]
            if value not in held and maker.index not in runs:
                runs.add(maker.index)
                stack.append(maker)

        for value in self.wanted[segment]:
            need(value)
        while stack:
            for value in stack.pop().inputs:
                need(value)
        return runs

    def reads(self, segment: int, runs: AbstractSet[int]) -> set[int]:
        """Values that `runs` and the targets of `segment` read."""
        nodes = self.nodes
        return set(self.wanted[segment]).union(*(nodes[index].inputs for index in runs))

    def useful(self, held: Sequence[AbstractSet[int]], runs: Sequence[AbstractSet[int]]) -> tuple[frozenset[int], ...]:
        """Of what is held into each segment that which is read before it is made again, or not held any more."""
        kept: list[frozenset[int]] = [frozenset()] * self.segments
        later: AbstractSet[int] = frozenset()
        for segment in range(self.segments - 1, 0, -1):
            read = self.reads(segment, runs[segment]) | later
            kept[segment] = frozenset(
                v for v in held[segment] if v in read and self.makers[v].index not in runs[segment]
            )
            later = kept[segment]
        return tuple(kept)

    def follow(self, held: Sequence[AbstractSet[int]]) -> tuple[list[frozenset[int]], list[frozenset[int]]]:
        """What of `held` can be there in each segment, held or made in the one before, and the nodes that run then."""
        there: list[frozenset[int]] = []
        runs: list[frozenset[int]] = []
        for segment, wished in enumerate(held):
            now = self.available(wished, there[-1], runs[-1]) if segment else frozenset()
            there.append(now)
            runs.append(frozenset(self.closure(segment, now)))
        return there, runs

    @cached_property
    def own(self) -> list[set[int]]:
        """What the nodes of each segment itself read: all at once, where what only leads to it comes and goes."""
        return [self.reads(t, {node.index for node in mains}) for t, mains in enumerate(self.mains)]

    def nbytes(self, values: Iterable[int]) -> int:
        """Bytes of `values` for the whole batch."""
        sizes = self.sizes
        return sum([sizes[value] for value in values])

    def made_again(self, segment: int, runs: AbstractSet[int]) -> int:
        """Bytes of what those of `runs` that are not first runs make for the segment's own nodes."""
        own, nodes = self.own[segment], self.nodes
        again = (nodes[index] for index in runs if nodes[index].segment < segment)
        return self.nbytes(value for node in again for value in node.outputs if value in own)

    def again(self, segment: int, runs: AbstractSet[int]) -> float:
        """Cost of those of `runs` that are not first runs."""
        nodes = self.nodes
        return sum(nodes[index].cost for index in runs if nodes[index].segment < segment)


Price = Callable[[Task], float]  # time of one run over the whole batch


def reduce_program(program: Program, segments: Segments, price: Price) -> Reduced:
    """The holding problem of a program cut into segments, where running a task again costs its price."""
    tasks = [task for task in program.tasks if task.id in segments.of_task]
    roots = _roots(tasks)
    sizes = {out: program.values[out].nbytes(None, program.batch) for out, root in roots.items() if out == root}
    small = _NEGLIGIBLE * max(sum(sizes.values()), 1)
    gradients = (
        set() if segments.across else {out for task in tasks if segments.of_task[task.id] for out in task.outputs}
    )
    held = frozenset(value for value, size in sizes.items() if size < small or value in gradients)
    nodes, wanted = _nodes(tasks, segments, roots, held, program.again, price)
    _merge(nodes, wanted, sizes)
    nodes = [node for node in nodes if node.index >= 0]
    for index, node in enumerate(nodes):
        node.index = index
    makers = {value: node for node in nodes for value in node.outputs}
    last = _last_reads(nodes, wanted)
    reduced = Reduced(
        nodes, {value: sizes[value] for value in makers}, makers, last, wanted, segments.count, held,
        [[] for _ in range(segments.count)],
    )  # fmt: skip
    for node in nodes:
        reduced.mains[node.segment].append(node)
    return reduced


def _roots(tasks: Sequence[Task]) -> dict[int, int | None]:
    """The storage behind each local value; None where it is that of an input."""
    roots: dict[int, int | None] = {}
    for task in tasks:
        for out in task.outputs:
            if out is None or task.kind is not Kind.LOCAL:
                continue
            roots[out] = (roots.get(task.inputs[0]) if task.inputs else None) if task.stores_nothing else out
    return roots


def _nodes(
    tasks: Sequence[Task],
    segments: Segments,
    roots: dict[int, int | None],
    held: frozenset[int],
    again: Mapping[int, Task],
    price: Price,
) -> tuple[list[Node], list[list[int]]]:
    nodes: list[Node] = []
    wanted: list[set[int]] = [set() for _ in range(segments.count)]
    for task in tasks:
        read = {root for value in task.inputs if (root := roots.get(value)) is not None and root not in held}
        if task.kind is Kind.LOCAL and not task.stores_nothing:
            outputs = [out for out in task.outputs if out is not None and out not in held]
            nodes.append(Node(len(nodes), price(again[task.id]), read, outputs, segments.of_task[task.id]))
        elif task.kind in (Kind.GATHER, Kind.REDUCE):
            wanted[segments.of_task[task.id]] |= read
    return nodes, [sorted(values) for values in wanted]


def _merge(nodes: list[Node], wanted: Sequence[Sequence[int]], sizes: dict[int, int]) -> None:
    """Makes nodes part of their only reader where holding their value instead of the reader's never pays."""
    fixed = {value for values in wanted for value in values}
    readers: dict[int, list[Node]] = {}
    for node in nodes:
        for value in node.inputs:
            readers.setdefault(value, []).append(node)
    for node in nodes:
        if len(node.outputs) != 1 or node.outputs[0] in fixed:
            continue
        (value,) = node.outputs
        mine = readers.get(value, [])
        if len(mine) != 1 or mine[0].segment != node.segment or not mine[0].outputs:
            continue
        reader = mine[0]
        if sizes[value] < sum(sizes[out] for out in reader.outputs):
            continue
        reader.cost += node.cost
        reader.inputs = (reader.inputs - {value}) | node.inputs
        for read in node.inputs:
            others = [reader if item is node else item for item in readers[read]]
            readers[read] = list({id(item): item for item in others}.values())
        node.index = -1


def _last_reads(nodes: Sequence[Node], wanted: Sequence[Sequence[int]]) -> dict[int, int]:
    """For each value the last segment that reads it, or that may make again something that reads it."""
    last: dict[int, int] = {}
    for segment, values in enumerate(wanted):
        last.update(dict.fromkeys(values, segment))
    for node in reversed(nodes):
        node.last = max([node.segment, *(last.get(value, node.segment) for value in node.outputs)])
        for value in node.inputs:
            last[value] = max(last.get(value, 0), node.last)
    for node in nodes:
        for value in node.outputs:
            last.setdefault(value, node.segment)
    return last
