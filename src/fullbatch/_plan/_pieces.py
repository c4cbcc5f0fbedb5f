"""Where holding is decided: the step cut into segments, and the tasks that each stage runs for what is held.

Between two segments something may be held, and what is not is made again in the segment that reads it. Where the
forward and its backward stand in different stages (a barrier lies between), each stage of the backward is a segment,
and what is held over its beginning is held for all microbatches at once. Where they stand in one stage, the backward
is cut softly, at places where few gradients are alive, and what is held is held for one microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from fullbatch._ir import Kind, Program, Task
from fullbatch._plan._stages import Stages

_LOCAL = (Kind.LOCAL, Kind.SLICE)

# Forward values that the backward reads in a later stage, as a share of the bytes of all that it reads: below it
# (labels that were counted before the forward) they decide nothing.
_FEW = 0.01

_SOFT = 96  # segments into which the backward of one stage is cut, at most


@dataclass(frozen=True)
class Piece:
    """The part of a segment that is in one stage: the tasks that run there for the first time, and its targets."""

    stage: int
    segment: int
    mains: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True)
class Segments:
    """`pieces` in order of time. `across`: what is held between segments is held for all microbatches."""

    count: int
    pieces: tuple[Piece, ...]
    across: bool
    of_task: dict[int, int]  # local task -> the segment of its first run


def find_segments(program: Program, stages: Stages, most: int) -> Segments:
    """The segments of a step, `most` of them at most."""
    across = _held_across(program, stages)
    late = _of_backward(program)
    first = _first_backward_stage(program, stages, late)
    pieces: list[Piece] = []
    for stage in range(stages.count):
        mains = _mains(program, stages, stage, late)
        if across:
            pieces.extend(_by_stage(program, stage, mains, stages.targets[stage], late, first))
        else:
            pieces.extend(_cut_softly(program, stage, mains, stages.targets[stage], late, min(most, _SOFT)))
    pieces = _merged(pieces, most) if across else _numbered(pieces)
    of_task = {task: piece.segment for piece in pieces for task in (*piece.mains, *piece.targets)}
    views = (task for task in stages.first_run if program.by_id[task].stores_nothing)
    of_task.update(dict.fromkeys(views, 0))  # they run wherever they are read
    return Segments(1 + max(piece.segment for piece in pieces), tuple(pieces), across, of_task)


def _held_across(program: Program, stages: Stages) -> bool:
    made = {
        out for task in program.tasks if task.kind is Kind.LOCAL and not task.origin.backward
        for out in task.outputs if out is not None
    }  # fmt: skip
    read = {v for task in program.tasks if task.origin.backward for v in task.inputs if v in made}
    when, makers = stages.first_run, program.producers
    late = {
        value
        for task in program.tasks
        if task.origin.backward and task.id in when
        for value in task.inputs
        if value in made and when[task.id] > when.get(makers[value].id, when[task.id])
    }
    return _bytes(late, program) > _FEW * _bytes(read, program)


def _bytes(values: AbstractSet[int], program: Program) -> int:
    return sum(program.values[value].nbytes(None, program.batch) for value in values)


def _first_backward_stage(program: Program, stages: Stages, late: AbstractSet[int]) -> int:
    """The stage in which the backward begins; the forward may end in it."""
    by_id = program.by_id
    return min((stages.first_run[task] for task in late if task in stages.first_run and _works(by_id[task])), default=0)


def _by_stage(
    program: Program, stage: int, mains: tuple[int, ...], targets: tuple[int, ...], late: AbstractSet[int], first: int
) -> list[Piece]:
    """A stage as one piece, but that in which the backward begins as two."""
    if stage != first:
        return [Piece(stage, max(0, stage - first + 1), mains, targets)]
    by_id = program.by_id
    forward = tuple(task for task in mains if task not in late)
    backward = tuple(task for task in mains if task in late)
    made = {out for task in backward for out in by_id[task].outputs}
    behind = tuple(target for target in targets if _source(program, by_id[target].inputs[0]) in made)
    before = tuple(target for target in targets if target not in behind)
    return [Piece(stage, 0, forward, before), Piece(stage, 1, backward, behind)]


def _source(program: Program, value: int) -> int:
    """The value that `value` is a view of, however far."""
    producers = program.producers
    while (maker := producers.get(value)) is not None and maker.stores_nothing and maker.inputs:
        value = maker.inputs[0]
    return value


def _works(task: Task) -> bool:
    return task.kind is Kind.LOCAL and not task.stores_nothing


def _of_backward(program: Program) -> set[int]:
    """Tasks of the backward, and whatever reads what they make (a gradient that the loss itself uses)."""
    late: set[int] = set()
    made: set[int | None] = set()
    for task in program.tasks:
        if task.origin.backward or not made.isdisjoint(task.inputs):
            late.add(task.id)
            made.update(task.outputs)
    return late


def _mains(program: Program, stages: Stages, stage: int, late: AbstractSet[int]) -> tuple[int, ...]:
    by_id = program.by_id
    mine = [task for task, when in stages.first_run.items() if when == stage and _works(by_id[task])]
    # The forward first: tracing may put a backward's constants before it.
    return tuple(sorted(mine, key=lambda task: (task in late, task)))


def _cut_softly(
    program: Program, stage: int, mains: Sequence[int], targets: tuple[int, ...], late: AbstractSet[int], most: int
) -> list[Piece]:
    """The forward of a stage as one piece, its backward as several."""
    by_id = program.by_id
    forward = tuple(task for task in mains if task not in late)
    backward = [task for task in mains if task in late]
    count = min(most - 1, len(backward))
    if count < 2:
        return [Piece(stage, 0, tuple(mains), targets)]
    cuts = _quiet_places(program, backward, count)
    groups = [forward] + [tuple(backward[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]
    where = {out: at for at, group in enumerate(groups) for task in group for out in by_id[task].outputs}
    mine: list[list[int]] = [[] for _ in groups]
    for target in targets:
        mine[where.get(_source(program, by_id[target].inputs[0]), 0)].append(target)
    return [Piece(stage, at, group, tuple(mine[at])) for at, group in enumerate(groups)]


def _quiet_places(program: Program, backward: Sequence[int], count: int) -> list[int]:
    """Positions that cut the backward into `count` parts where few bytes of its own values are alive."""
    by_id = program.by_id
    alive, size = [0] * (len(backward) + 1), program.values
    last: dict[int, int] = {}
    for at, task in enumerate(backward):
        last.update(dict.fromkeys(by_id[task].inputs, at))
    change = [0] * (len(backward) + 2)
    for at, task in enumerate(backward):
        for out in by_id[task].outputs:
            if out is not None and out in last:
                nbytes = size[out].nbytes(None, program.batch)
                change[at + 1] += nbytes
                change[last[out] + 1] -= nbytes
    for at in range(len(backward)):
        alive[at + 1] = alive[at] + change[at + 1]
    cuts, width = [0], len(backward) / count
    for part in range(1, count):
        low, high = int((part - 0.4) * width), int((part + 0.4) * width) + 1
        cuts.append(
            min(range(max(low, cuts[-1] + 1), max(high, cuts[-1] + 2)), key=lambda at: alive[min(at, len(alive) - 1)])
        )
    return [cut for cut in cuts if cut < len(backward)] + [len(backward)]


def _merged(pieces: Sequence[Piece], most: int) -> list[Piece]:
    """Consecutive stages share a segment where there are more of them than `most`."""
    top = max(piece.segment for piece in pieces)
    width = -(-top // max(most - 1, 1)) if top else 1
    return [Piece(p.stage, 0 if p.segment == 0 else 1 + (p.segment - 1) // width, p.mains, p.targets) for p in pieces]


def _numbered(pieces: Sequence[Piece]) -> list[Piece]:
    """Segments of several stages in a row: the stage with most of them has its own, the others join neighbours."""
    counts: dict[int, int] = {}
    for piece in pieces:
        counts[piece.stage] = counts.get(piece.stage, 0) + 1
    main = max(counts, key=lambda stage: counts[stage])
    last = counts[main] - 1
    return [
        Piece(p.stage, 0 if p.stage < main else last if p.stage > main else p.segment, p.mains, p.targets)
        for p in pieces
    ]


class Bodies:
    """Tasks that each stage runs for one microbatch, for a choice of what is held."""

    def __init__(self, program: Program, segments: Segments) -> None:
        self._segments = segments
        self._by_id, self._producers, self._again = program.by_id, program.producers, program.again

    def make(self, held: Sequence[AbstractSet[int]]) -> tuple[list[list[int]], list[list[int]]]:
        """The tasks of each stage in order, and the segment of each run. `held[t]`: values held into segment t."""
        stages = 1 + max(piece.stage for piece in self._segments.pieces)
        tasks: list[list[int]] = [[] for _ in range(stages)]
        where: list[list[int]] = [[] for _ in range(stages)]
        there: set[int] = set()
        segment = 0
        for piece in self._segments.pieces:
            if piece.segment != segment:
                segment = piece.segment
                there &= held[segment]
            order = self._piece(piece, there)
            tasks[piece.stage].extend(order)
            for ident in order:
                task = self._by_id[ident]
                if task.kind in _LOCAL:
                    where[piece.stage].append(segment)
                if _works(task):
                    there.update(out for out in task.outputs if out is not None)
        return tasks, where

    def _piece(self, piece: Piece, there: AbstractSet[int]) -> list[int]:
        """The piece's own tasks, each after what it reads and is not there."""
        order: list[int] = []
        done: set[int] = set()
        by_id, producers = self._by_id, self._producers
        for main in (*piece.mains, *piece.targets):
            stack: list[tuple[int, bool]] = [(main, False)]
            while stack:
                ident, ready = stack.pop()
                if ident in done:
                    continue
                if ready:
                    done.add(ident)
                    order.append(ident)
                    continue
                stack.append((ident, True))
                for value in reversed(by_id[ident].inputs):
                    maker = producers.get(value)
                    if maker is None or maker.kind not in _LOCAL or maker.id in done:
                        continue
                    if value in there:
                        continue
                    stack.append((maker.id, False))
        return self._without_summands(order, set(piece.mains))

    def _without_summands(self, order: Sequence[int], mains: AbstractSet[int]) -> list[int]:
        """`order` with what is run again for its slices alone in place of tasks that make summands too."""
        read = {value for ident in order for value in self._by_id[ident].inputs}
        return [ident if ident in mains else self._instead(ident, read) for ident in order]

    def _instead(self, ident: int, read: AbstractSet[int]) -> int:
        task = self._by_id[ident]
        less = self._again.get(ident, task)
        return less.id if read.isdisjoint({*task.outputs} - {*less.outputs}) else ident
