"""Stages: how many barriers must pass before a task can run for one microbatch, and when it is best run.

A gather or a reduce is a *target*: every microbatch must have contributed before what reads its result goes on. A
target that is needed at once is forced to its stage; one with slack (the loss itself, a metric) waits for the
stage in which its inputs are computed anyway. So a count of valid targets is reduced before the main forward, and
the forward is not run once for the count's sake.
"""

from __future__ import annotations

from dataclasses import dataclass

from fullbatch._ir import Barrier, Kind, Program, Task

PER_MICROBATCH = (Kind.LOCAL, Kind.SLICE, Kind.GATHER, Kind.REDUCE)
TARGETS = (Kind.GATHER, Kind.REDUCE)


@dataclass(frozen=True)
class Stages:
    """`first_run`: the stage in which a local task first runs. `targets`: what each stage must produce.

    `once`: tasks that run at the beginning of a stage; the entry after the last stage is the end of the step.
    """

    count: int
    first_run: dict[int, int]
    targets: tuple[tuple[int, ...], ...]
    once: tuple[tuple[int, ...], ...]
    barriers: tuple[Barrier, ...]


def find_stages(program: Program) -> Stages:
    """The stages of `program`."""
    earliest = _earliest(program)
    per_microbatch = [task for task in program.tasks if task.kind in PER_MICROBATCH]
    count = 1 + max((earliest[task.id] for task in per_microbatch), default=0)
    deadline = _deadlines(program, count)
    first_run, placed = _place(program, earliest, deadline)
    targets: list[list[int]] = [[] for _ in range(count)]
    for ident, stage in placed.items():
        targets[stage].append(ident)
    once: list[list[int]] = [[] for _ in range(count + 1)]
    available = dict.fromkeys(program.inputs.values(), 0)
    for task in program.tasks:
        stage = max((available.get(value, 0) for value in task.inputs), default=0)
        if task.kind is Kind.ONCE:
            once[stage].append(task.id)
        if task.kind in TARGETS:
            stage = placed[task.id] + 1
        if task.kind in (Kind.ONCE, *TARGETS):
            available.update((out, stage) for out in task.outputs if out is not None)
    return Stages(
        count, first_run, tuple(tuple(sorted(group)) for group in targets),
        tuple(tuple(group) for group in once), _barriers(program, placed),
    )  # fmt: skip


def _earliest(program: Program) -> dict[int, int]:
    """For each task the number of barriers above it."""
    value_stage = dict.fromkeys(program.inputs.values(), 0)
    earliest: dict[int, int] = {}
    for task in program.tasks:
        stage = max((value_stage[value] for value in task.inputs), default=0)
        earliest[task.id] = stage
        for out in task.outputs:
            if out is not None:
                value_stage[out] = stage + (task.kind in TARGETS)
    return earliest


def _deadlines(program: Program, count: int) -> dict[int, int]:
    """For each task the latest stage that does not delay anything."""
    needed: dict[int, int] = {}
    deadline: dict[int, int] = {}
    for task in reversed(program.tasks):
        latest = count if task.kind is Kind.ONCE else count - 1
        for out in task.outputs:
            if out is not None and out in needed:
                latest = min(latest, needed[out] - (task.kind in TARGETS))
        deadline[task.id] = latest
        for value in task.inputs:
            needed[value] = min(needed.get(value, count), latest)
    return deadline


def _place(
    program: Program, earliest: dict[int, int], deadline: dict[int, int]
) -> tuple[dict[int, int], dict[int, int]]:
    """The stage of first run of every local task, and the stage of every target."""
    producers = program.producers
    first_run: dict[int, int] = {}
    placed: dict[int, int] = {}

    def claim(task: Task, stage: int) -> None:
        stack = [task]
        while stack:
            current = stack.pop()
            for value in current.inputs:
                producer = producers.get(value)
                if producer is None or producer.kind not in (Kind.LOCAL, Kind.SLICE):
                    continue
                if first_run.get(producer.id, stage + 1) > stage:
                    first_run[producer.id] = stage
                    stack.append(producer)

    targets = [task for task in program.tasks if task.kind in TARGETS]
    forced = sorted((task for task in targets if earliest[task.id] == deadline[task.id]), key=lambda t: earliest[t.id])
    for task in forced:
        placed[task.id] = earliest[task.id]
        claim(task, earliest[task.id])
    ready = dict.fromkeys(program.inputs.values(), 0)  # in which stage a value can be read, by what is placed
    for task in program.tasks:
        stage = max((ready[value] for value in task.inputs), default=0)
        if task.kind in TARGETS:
            if task.id not in placed:
                natural = max((_known(value, producers, first_run) for value in task.inputs), default=0)
                placed[task.id] = min(max(stage, natural), deadline[task.id])
                claim(task, placed[task.id])
            stage = placed[task.id] + 1
        ready.update((out, stage) for out in task.outputs if out is not None)
    return first_run, placed


def _known(value: int, producers: dict[int, Task], first_run: dict[int, int]) -> int:
    """The last stage among those in which what leads to `value` is run already."""
    answer, stack, seen = 0, [value], set[int]()
    while stack:
        producer = producers.get(stack.pop())
        if producer is None or producer.id in seen or producer.kind not in (Kind.LOCAL, Kind.SLICE):
            continue
        seen.add(producer.id)
        if producer.id in first_run:
            answer = max(answer, first_run[producer.id])
        else:
            stack.extend(producer.inputs)
    return answer


def _barriers(program: Program, placed: dict[int, int]) -> tuple[Barrier, ...]:
    """The targets that something local waits for; a gradient's last sum is not one."""
    reached: set[int] = set()
    for task in reversed(program.tasks):
        if task.kind in (Kind.LOCAL, Kind.SLICE) or any(out in reached for out in task.outputs if out is not None):
            reached.update(task.inputs)
    why = dict(program.coupled)
    return tuple(
        Barrier(why.get(task.id, ""), task.origin, placed[task.id])
        for task in program.tasks
        if task.kind in TARGETS and any(out in reached for out in task.outputs if out is not None)
    )
