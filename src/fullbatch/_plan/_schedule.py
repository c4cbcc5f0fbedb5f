"""The schedule: a linear program of actions, and nothing left to decide.

Whoever runs it walks it once; whoever wants its peak or its time walks it once too. A value is *kept* where no free
stands between its first run and its last use, *recomputed* where it is run again, *offloaded* where it leaves
the device and is fetched. Every microbatch does the same in a stage, so that a stage is written once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

    def count_launches(self, program: Program) -> int:
        """How many runs start an operator that makes something: a view is cut anew wherever that is convenient."""
        by_id, many = program.by_id, len(self.samples) - 1

        def launches(actions: Sequence[Action]) -> int:
            return sum(1 for do, subject, _ in actions if do is Do.RUN and not by_id[subject].stores_nothing)

        return sum(launches(p.once) + many * launches(p.body) + launches(p.last) for p in self.phases)

    def recomputes(self, program: Program) -> int:
        """How many runs of an operator repeat an earlier one; cutting a slice again is not one."""
        by_id = program.by_id
        tasks = [by_id[action.subject] for phase in self.phases for action in phase.last if action.do is Do.RUN]
        runs = [
            task.id if task.repeats is None else task.repeats
            for task in tasks
            if task.kind is not Kind.SLICE and not task.view
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
        each = tuple(action for action in last if action.microbatch == EACH) if len(samples) > 1 else ()
        phases.append(Phase(tuple(once), each, tuple(last)))
    return Schedule(tuple(phases), samples)


def _verb(task: Task) -> Do:
    return {Kind.GATHER: Do.GATHER, Kind.REDUCE: Do.REDUCE}.get(task.kind, Do.RUN)


def targets_early(order: list[int], by_id: dict[int, Task]) -> list[int]:
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
