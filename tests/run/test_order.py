"""What happens when: operators run in the schedule's order, and a tensor dies at its free, neither before nor after."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fullbatch._ir import Kernel, Program
from fullbatch._plan._schedule import Do
from fullbatch._run._executor import Executor
from fullbatch._run._interpreter import Interpreter
from run.support import Built, build

Event = tuple[str, int]


def _model() -> Built:
    """Values that cross barriers, and values that live within a stage."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.SiLU())]
    model = nn.Sequential(*layers, nn.Linear(16, 1))
    return build(lambda m, b: m(b).exp().mean(), model, torch.randn(6, 16), microbatch=2)


def _watched(program: Program) -> set[int]:
    """Values whose tensor nothing else can hold: of no view, and no first summand of a sum."""
    made = {task.outputs[0] for task in program.tasks if task.kernel is not None and task.single and not task.view}
    shared = {value for task in program.tasks if task.view or task.kernel is None for value in task.inputs}
    return {value for value in made - shared if value is not None} - set(program.outputs)


class _Log:
    """Events as they happen, of a program whose kernels tell."""

    def __init__(self, found: Built) -> None:
        self.events: list[Event] = []
        self.watched = _watched(found.program)
        self._refs: list[Any] = []
        tasks = [
            task if task.kernel is None else replace(task, kernel=self._telling(task.id, task.outputs, task.kernel))
            for task in found.program.tasks
        ]
        self.program = replace(found.program, tasks=tasks)

    def _telling(self, task: int, outputs: Any, kernel: Kernel) -> Kernel:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.events.append(("run", task))
            result = kernel.fn(*args, **kwargs)
            if outputs[0] in self.watched:
                free = ("free", outputs[0])
                self._refs.append(weakref.ref(result, lambda ref, free=free: self.events.append(free)))
            return result

        return replace(kernel, fn=run)


def _expected(found: Built, watched: set[int]) -> list[Event]:
    by_id = found.program.by_id
    events: list[Event] = []
    for action in found.schedule.walk():
        if action.do is Do.RUN and by_id[action.subject].kernel is not None:
            events.append(("run", action.subject))
        elif action.do is Do.FREE and action.subject in watched:
            events.append(("free", action.subject))
    return events


@pytest.mark.parametrize("runner", [Executor, Interpreter])
def test_operators_and_frees_are_those_of_the_schedule(runner: Any) -> None:
    found = _model()
    log = _Log(found)
    expected = _expected(found, log.watched)
    assert sum(1 for what, _ in expected if what == "free") > 30
    runner(log.program, found.schedule).run(found.inputs)
    assert log.events == expected


@pytest.mark.parametrize("runner", [Executor, Interpreter])
def test_a_free_that_is_left_out_is_seen(runner: Any) -> None:
    """The log is worth something: without one of the schedule's frees it is another."""
    found = _model()
    log = _Log(found)
    expected = _expected(found, log.watched)
    stage, at = next(
        (stage, at)
        for stage, phase in enumerate(found.schedule.phases)
        for at, action in enumerate(phase.last)
        if action.do is Do.FREE and action.subject in log.watched
    )
    phases = list(found.schedule.phases)
    last = phases[stage].last
    phases[stage] = replace(phases[stage], last=last[:at] + last[at + 1 :])
    runner(log.program, replace(found.schedule, phases=tuple(phases))).run(found.inputs)
    assert log.events != expected
