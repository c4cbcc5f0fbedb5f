"""A schedule out of the order of tasks that a plan stores, checked.

A plan may have been saved, edited or put together by hand. Tasks are pure functions, so an order is right exactly where
each task finds what it reads and each sum over microbatches is formed once. That is checked by a walk; when values are
dropped is not read from the plan but derived again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fullbatch._errors import Fault, PlanError
from fullbatch._ir import Program
from fullbatch._plan._differences import REMAKE
from fullbatch._plan._schedule import EACH, Action, Do, Phase, Schedule, assemble
from fullbatch._plan._stages import PER_MICROBATCH, TARGETS, Stages

Order = tuple[tuple[int, ...], ...]
"""For each stage what one microbatch does: a task, or a move of value v off the device (-1 - 2v) or back (-2 - 2v)."""

_SHOWN = 6
_RUNS = (Do.RUN, Do.GATHER, Do.REDUCE)


def order_of(schedule: Schedule) -> Order:
    """What each stage of `schedule` does for a microbatch, without what follows from it."""
    return tuple(
        tuple(_code(action) for action in phase.last if action.do is not Do.FREE) for phase in schedule.phases[:-1]
    )


def _code(action: Action) -> int:
    if action.do is Do.OFFLOAD:
        return -1 - 2 * action.subject
    return -2 - 2 * action.subject if action.do is Do.FETCH else action.subject


def _move(code: int) -> Action:
    value, back = divmod(-1 - code, 2)
    return Action(Do.FETCH if back else Do.OFFLOAD, value, EACH)


def restore(program: Program, stages: Stages, order: Order, samples: tuple[int, ...]) -> Schedule:
    """The schedule that runs `order` for microbatches of `samples`. Raises PlanError, with all that is wrong."""
    faults = list(_unknown(program, stages, order, samples))
    if not faults:
        bodies = [[item for item in body if item >= 0] for body in order]
        schedule = _with_moves(assemble(program, stages, bodies, samples), order)
        faults = list(_impossible(program, schedule))
    if faults:
        more = len(faults) - _SHOWN
        rest = [_fault("The plan has more such places.", f"{more} more", "none")] if more > 0 else []
        raise PlanError(*faults[:_SHOWN], *rest)
    return schedule


def _fault(what: str, got: str, expected: str) -> Fault:
    return Fault(what, got=got, expected=expected, next=f"do not edit a plan's tasks; {REMAKE}")


def _unknown(program: Program, stages: Stages, order: Order, samples: Sequence[int]) -> Iterator[Fault]:
    if not samples or min(samples) < 1 or sum(samples) != program.batch:
        yield _fault(
            "The plan's microbatches are not the batch.", f"{sum(samples)} samples in {len(samples)} microbatches",
            f"{program.batch} samples, each in one microbatch",
        )  # fmt: skip
    if len(order) != stages.count:
        yield _fault("The plan has another number of stages.", f"{len(order)}", f"{stages.count}")
    for stage, body in enumerate(order):
        for item in body:
            wrong = _wrong_move(program, _move(item).subject) if item < 0 else _wrong_task(program, item)
            if wrong:
                what, got, expected = wrong
                yield _fault(f"Stage {stage} of the plan {what}.", got, expected)


def _wrong_move(program: Program, value: int) -> tuple[str, str, str] | None:
    count = len(program.values)
    if value >= count:
        return "moves a value that is unknown", f"value {value}", f"a value from 0 to {count - 1}"
    if not program.values[value].local:
        return "moves a value that all microbatches share", program.values[value].name, "a value of one microbatch"
    return None


def _wrong_task(program: Program, ident: int) -> tuple[str, str, str] | None:
    task = program.by_id.get(ident)
    if task is None:
        return "runs a task that is unknown", f"task {ident}", "a task of the step"
    if task.kind not in PER_MICROBATCH:
        return "repeats what runs once a step", f"task {ident} ({task.origin})", "tasks of a microbatch"
    return None


def _with_moves(schedule: Schedule, order: Order) -> Schedule:
    """`schedule` with the moves of `order`: away right behind the run before it, back right before the next."""
    if all(item >= 0 for body in order for item in body):
        return schedule
    phases = []
    for phase, body in zip(schedule.phases, (*order, ()), strict=True):
        body_of_many = _moved(phase.body, body) if phase.body else ()
        phases.append(Phase(phase.once, body_of_many, _moved(phase.last, body)))
    return Schedule(tuple(phases), schedule.samples)


def _moved(actions: Sequence[Action], body: Sequence[int]) -> tuple[Action, ...]:
    behind: list[list[Action]] = [[]]  # moves that follow each run, and before them those that come before any
    for item in body:
        if item >= 0:
            behind.append([])
        else:
            behind[-1].append(_move(item))
    result: list[Action] = [*behind[0]]
    waiting: list[Action] = []
    runs = 0
    for action in actions:
        if action.do in _RUNS:
            result.extend(waiting)
            runs += 1
            result.append(action)
            result.extend(move for move in behind[runs] if move.do is Do.OFFLOAD)
            waiting = [move for move in behind[runs] if move.do is Do.FETCH]
        else:
            result.append(action)
    return (*result, *waiting)


def _impossible(program: Program, schedule: Schedule) -> Iterator[Fault]:
    """What a microbatch would not find, and sums that are formed twice or never."""
    walk = _Walk(program)
    for stage, phase in enumerate(schedule.phases):
        for action in (*phase.once, *phase.last):
            yield from walk.take(action, stage)
        walk.there |= walk.forming
        walk.forming = set()
    made = walk.made
    for task in program.tasks:
        times = made.get(task.id, 0)
        if task.kind in TARGETS and times != 1:
            got = f"task {task.id} ({task.origin}) runs {times} times a microbatch"
            yield _fault("The plan does not form each sum over the batch once.", got, "exactly once")
    missing = [value for value in dict.fromkeys(program.outputs) if value not in walk.there]
    if missing:
        names = ", ".join(program.values[value].name for value in missing[:_SHOWN])
        yield _fault("The plan does not make all that the step returns.", f"without {names}", "every result")


class _Walk:
    """Which values are there for a microbatch. What it contributes to is `forming` until the stage is over."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.there = set(program.inputs.values())
        self.forming: set[int] = set()
        self._away: set[int] = set()
        self.made: dict[int, int] = {}

    def take(self, action: Action, stage: int) -> Iterator[Fault]:
        if action.do is Do.FREE:
            self.there.discard(action.subject)
            self._away.discard(action.subject)
        elif action.do in _RUNS:
            yield from self._run(action.subject, stage)
        else:
            away = action.do is Do.OFFLOAD
            source, target = (self.there, self._away) if away else (self._away, self.there)
            if action.subject not in source:
                what = f"Stage {stage} of the plan moves a value that is not {'there' if away else 'away'}."
                yield _fault(what, self._name(action.subject), "a move off the device, then one back")
            source.discard(action.subject)
            target.add(action.subject)

    def _run(self, ident: int, stage: int) -> Iterator[Fault]:
        task = self._program.by_id[ident]
        for value in task.inputs:
            if value not in self.there:
                when = "before all microbatches are through" if value in self.forming else "when it is not there"
                yield _fault(
                    f"Stage {stage} of the plan reads a value {when}.",
                    f"task {ident} ({task.origin}) reads {self._name(value)}", "each task after what it reads",
                )  # fmt: skip
        outs = {out for out in task.outputs if out is not None}
        if away := outs & self._away:
            yield _fault(f"Stage {stage} makes a value that is off the device.", self._name(min(away)), "to fetch it")
        self.made[ident] = self.made.get(ident, 0) + 1
        (self.forming if task.kind in TARGETS else self.there).update(outs)

    def _name(self, value: int) -> str:
        return self._program.values[value].name
