"""The schedule: a linear program of actions, and nothing left to decide.

Whoever runs it walks it once; whoever wants its peak or its time walks it once too. A value is *kept* where no free
stands between its first run and its last use, *recomputed* where it is run again, *offloaded* where it leaves
the device and is fetched. Every microbatch does the same in a stage, so that a stage is written once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from fullbatch._ir import Kind, Program, Task
from fullbatch._plan._stages import Stages


class Do(Enum):
    """What an action does to a task or a value."""

    RUN = "run"  # a task of kind LOCAL, ONCE or SLICE
    GATHER = "gather"  # write this microbatch's slice into the whole value
    REDUCE = "reduce"  # add this microbatch's summand to the whole value
    FREE = "free"  # drop a value
    OFFLOAD = "offload"  # move a value off the device
    FETCH = "fetch"  # bring it back


ALL = -1  # the microbatch of what runs once a step
EACH = -2  # in a stage's body: whichever microbatch runs it


class Action(NamedTuple):
    """`subject` is a task for RUN, GATHER and REDUCE, a value for FREE, OFFLOAD and FETCH."""

    do: Do
    subject: int
    microbatch: int = ALL


@dataclass(frozen=True)
class Phase:
    """One stage: `once` before it, then `body` for each microbatch but the last, which runs `last`.

    `last` is the body with the frees of what no microbatch reads after it.
    """

    once: tuple[Action, ...]
    body: tuple[Action, ...] = ()
    last: tuple[Action, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """The stages in order, and the number of samples of each microbatch."""

    phases: tuple[Phase, ...]
    samples: tuple[int, ...]

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """All actions in order, of every microbatch."""
        return tuple(self.walk())

    def walk(self) -> Iterator[Action]:
        """The same, one by one."""
        final = len(self.samples) - 1
        for phase in self.phases:
            yield from phase.once
            for microbatch in range(len(self.samples)):
                for action in phase.last if microbatch == final else phase.body:
                    yield Action(action.do, action.subject, microbatch) if action.microbatch == EACH else action

    def count(self, do: Do) -> int:
        """How many actions of this sort."""
        many = len(self.samples) - 1
        return sum(
            _count(phase.once, do) + many * _count(phase.body, do) + _count(phase.last, do) for phase in self.phases
        )

    def count_runs(self) -> int:
        """How many times a task runs."""
        return self.count(Do.RUN)

    def recomputes(self, program: Program) -> int:
        """How many runs of an operator repeat an earlier one; cutting a slice again is not one."""
        by_id = program.by_id
        runs = [
            action.subject
            for phase in self.phases
            for action in phase.last
            if action.do is Do.RUN and by_id[action.subject].kind is not Kind.SLICE and not by_id[action.subject].view
        ]
        return (len(runs) - len(set(runs))) * len(self.samples)

    def held(self, program: Program) -> int:
        """Values of one microbatch that live while another runs."""
        if len(self.samples) == 1:
            return 0
        live: set[int] = set()
        held: set[int] = set()
        local = [value.local for value in program.values]
        for phase in self.phases:
            for action in phase.last:
                if action.do is Do.FREE:
                    live.discard(action.subject)
                elif action.do is Do.RUN:
                    live.update(out for out in program.by_id[action.subject].outputs if out is not None and local[out])
            held |= live
        return len(held)

    def with_offload(self, value: int, program: Program) -> Schedule:
        """The same schedule with a value of each microbatch off the device between its two uses furthest apart."""
        uses = [
            (stage, position)
            for stage, phase in enumerate(self.phases)
            for position, action in enumerate(phase.last)
            if _touches(action, value, program)
        ]
        spans = [_distance(self.phases, before, after) for before, after in zip(uses, uses[1:], strict=False)]
        if not spans:
            return self
        widest = spans.index(max(spans))
        phases = list(self.phases)
        for (stage, position), do, behind in ((uses[widest + 1], Do.FETCH, 0), (uses[widest], Do.OFFLOAD, 1)):
            phases[stage] = _inserted(phases[stage], position, Action(do, value, EACH), behind)
        return Schedule(tuple(phases), self.samples)


def _count(actions: Sequence[Action], do: Do) -> int:
    return sum(1 for action in actions if action.do is do)


def _touches(action: Action, value: int, program: Program) -> bool:
    if action.do not in (Do.RUN, Do.GATHER, Do.REDUCE):
        return False
    task = program.by_id[action.subject]
    return value in task.inputs or value in task.outputs


def _distance(phases: Sequence[Phase], before: tuple[int, int], after: tuple[int, int]) -> int:
    """Actions of one microbatch between two places."""
    if before[0] == after[0]:
        return after[1] - before[1]
    between = sum(len(phase.last) for phase in phases[before[0] + 1 : after[0]])
    return len(phases[before[0]].last) - before[1] + between + after[1]


def _inserted(phase: Phase, position: int, action: Action, behind: int) -> Phase:
    """`phase` with one more action before or behind the action at `position` of its last microbatch."""
    at = phase.last[position]
    count = phase.last[: position + 1].count(at)
    body = list(phase.body)
    if body:
        where = [index for index, item in enumerate(body) if item == at][count - 1]
        body.insert(where + behind, action)
    last = list(phase.last)
    last.insert(position + behind, action)
    return Phase(phase.once, tuple(body), tuple(last))


def microbatches(batch: int, size: int) -> tuple[int, ...]:
    """Samples of each microbatch: `size` each, and what is left in the last."""
    whole, rest = divmod(batch, size)
    return (size,) * whole + ((rest,) if rest else ())


@dataclass(frozen=True)
class Keep:
    """Which values are held until they are read again; the others are recomputed then.

    `across` the end of the forward, for all microbatches at once; over a barrier on one side of it, likewise, but for
    those in `dropped`; and `within` a stage, from its forward to its backward, for one microbatch (None holds all).
    """

    across: frozenset[int]
    dropped: frozenset[int] = frozenset()
    within: frozenset[int] | None = None


class _Held:
    """In which stage each local value was last there, and whether it is still there in a later one."""

    def __init__(self, stages: Stages, keep: Keep, program: Program) -> None:
        self._keep, self._last = keep, dict[int, int]()
        self._forward_reads = last_forward_reads(program, stages)

    def at(self, value: int, stage: int) -> bool:
        """Whether `value` was made before `stage` and held until it."""
        last = self._last.get(value)
        if last is None or last >= stage:
            return False
        if value in self._keep.across:
            return True
        if last <= self._forward_reads.get(value, -1) < stage:
            return False
        return value not in self._keep.dropped

    def note(self, values: Iterable[int], stage: int) -> None:
        """These values are there in `stage`."""
        self._last.update(dict.fromkeys(values, stage))


def last_forward_reads(program: Program, stages: Stages) -> dict[int, int]:
    """For each local value of the forward the last stage in which the forward itself reads it."""
    when = dict(stages.first_run)
    for stage, targets in enumerate(stages.targets):
        when.update(dict.fromkeys(targets, stage))
    reads: dict[int, int] = {}
    for task in program.tasks:
        if task.origin.backward or task.id not in when:
            continue
        for value in task.inputs:
            reads[value] = max(reads.get(value, 0), when[task.id])
        for out in task.outputs:
            if out is not None:
                reads.setdefault(out, when[task.id])
    return reads


def make_schedule(program: Program, stages: Stages, keep: Keep, size: int) -> Schedule:
    """All stages in order, each for all microbatches, recomputing what is not in `keep` where it is read later."""
    held = _Held(stages, keep, program)
    bodies = [stage_body(program, stages, keep, held, stage) for stage in range(stages.count)]
    return assemble(program, stages, bodies, microbatches(program.batch, size))


def assemble(program: Program, stages: Stages, bodies: Sequence[Sequence[int]], samples: tuple[int, ...]) -> Schedule:
    """The schedule that runs these tasks in each stage, and frees every value behind its last use."""
    by_id = program.by_id
    walk: list[list[Action]] = []
    for stage in range(stages.count + 1):
        walk.append([Action(Do.RUN, task) for task in stages.once[stage]])
        body = bodies[stage] if stage < stages.count else ()
        walk.append([Action(_verb(by_id[task]), task, EACH) for task in body])
    freed = _with_frees(walk, program)
    phases = []
    for once, last in zip(freed[::2], freed[1::2], strict=True):
        body = tuple(action for action in last if action.microbatch == EACH) if len(samples) > 1 else ()
        phases.append(Phase(tuple(once), body, tuple(last)))
    return Schedule(tuple(phases), samples)


def _verb(task: Task) -> Do:
    return {Kind.GATHER: Do.GATHER, Kind.REDUCE: Do.REDUCE}.get(task.kind, Do.RUN)


def stage_body(program: Program, stages: Stages, keep: Keep, held: _Held, stage: int) -> list[int]:
    """Tasks of one stage for one microbatch: its own in order, each recompute just before its first reader.

    A task may stand twice: for the forward, and again for the backward, where its value is not kept within the stage.
    """
    producers = program.producers
    by_id = program.by_id
    own = _needed(stages.targets[stage], by_id, producers, held, stage)
    done: set[int] = set()
    order: list[int] = []
    mains = sorted(task for task in own if by_id[task].kind not in (Kind.SLICE,) and _runs_first(task, stages, stage))
    mains += stages.targets[stage]
    forward = sorted(task for task in mains if not by_id[task].origin.backward)
    backward = sorted(task for task in mains if by_id[task].origin.backward)
    _emit(forward, own, done, order, by_id, producers)
    if keep.within is not None:
        done = {task for task in done if not _dropped(by_id[task], keep)}
    _emit(backward, own, done, order, by_id, producers)
    return _targets_early(order, by_id)


def _dropped(task: Task, keep: Keep) -> bool:
    """Whether the backward must run this task again for what it reads."""
    if task.kind is Kind.SLICE:
        return True
    outs = {out for out in task.outputs if out is not None}
    assert keep.within is not None
    return task.kind is Kind.LOCAL and not outs <= (keep.within | keep.across)


def _emit(
    mains: Sequence[int], own: set[int], done: set[int], order: list[int], by_id: dict[int, Task],
    producers: dict[int, Task],
) -> None:  # fmt: skip
    """Appends `mains` to `order`, each after what it reads and is not done yet."""
    for main in mains:
        stack: list[tuple[int, bool]] = [(main, False)]
        while stack:
            task, ready = stack.pop()
            if task in done:
                continue
            if ready:
                done.add(task)
                order.append(task)
                continue
            stack.append((task, True))
            for value in reversed(by_id[task].inputs):
                producer = producers.get(value)
                if producer is not None and producer.id in own and producer.id not in done:
                    stack.append((producer.id, False))


def _runs_first(task: int, stages: Stages, stage: int) -> bool:
    return stages.first_run.get(task, stage) == stage


def _targets_early(order: list[int], by_id: dict[int, Task]) -> list[int]:
    """Moves each gather and reduce to just behind the first run of what it reads, so that summands do not pile up."""
    waiting: dict[int, list[int]] = {}
    targets = {task for task in order if by_id[task].kind in (Kind.GATHER, Kind.REDUCE)}
    made = {out for task in order if task not in targets for out in by_id[task].outputs if out is not None}
    result = [task for task in order if task in targets and by_id[task].inputs[0] not in made]
    for task in order:
        if task in targets and by_id[task].inputs[0] in made:
            waiting.setdefault(by_id[task].inputs[0], []).append(task)
    for task in order:
        if task not in targets:
            result.append(task)
            for out in by_id[task].outputs:
                result.extend(waiting.pop(out, ()) if out is not None else ())
    return result


def _needed(
    targets: Sequence[int], by_id: dict[int, Task], producers: dict[int, Task], held: _Held, stage: int
) -> set[int]:
    """Local tasks that must run in this stage for its targets, given what is held."""
    needed: set[int] = set()
    there: set[int] = set()
    stack = [by_id[target] for target in targets]
    while stack:
        for value in stack.pop().inputs:
            producer = producers.get(value)
            if producer is None or producer.kind not in (Kind.LOCAL, Kind.SLICE) or producer.id in needed:
                continue
            if producer.kind is Kind.LOCAL and held.at(value, stage):
                there.add(value)
                continue
            needed.add(producer.id)
            stack.append(producer)
    there.update(out for task in needed for out in by_id[task].outputs if out is not None)
    held.note(there, stage)
    return needed


def _with_frees(walk: Sequence[Sequence[Action]], program: Program) -> list[list[Action]]:
    """Adds a free behind the last use of every value that a run made; step inputs and results stay.

    A gathered or reduced value is born at its first microbatch and has no run: its readers free it.
    """
    by_id = program.by_id
    stay = set(program.inputs.values()) | set(program.outputs)
    locals_ = [value.local for value in program.values]
    live: set[int] = set()
    result: list[list[Action]] = []
    for actions in reversed(walk):
        backwards: list[Action] = []
        for action in reversed(actions):
            task = by_id[action.subject]
            made = [out for out in task.outputs if out is not None] if action.do is Do.RUN else []
            dead = [value for value in (*made, *task.inputs) if value not in live and value not in stay]
            live.update(task.inputs)
            live.difference_update(made)
            for value in dict.fromkeys(dead):
                backwards.append(Action(Do.FREE, value, EACH if locals_[value] else ALL))
            backwards.append(action)
        result.append(backwards[::-1])
    return result[::-1]
