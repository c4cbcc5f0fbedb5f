"""The reference: a schedule walked action by action, with one table of live tensors.

The executor runs generated code, in which no action can be seen or stopped at. What must look between two actions (the
proof of every value, the record that compiling starts from) walks with this instead. Both give the same bits and reach
the same peak.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from fullbatch._ir import Kind, Program, Task
from fullbatch._plan._schedule import ALL, Action, Do, Schedule
from fullbatch._run._random import Drawn, seed_task, step_seed
from fullbatch._run._slices import add_summand, cut, first_summand, paste
from fullbatch._run._stored import fetch, offload

Slot = tuple[int, int]  # a value, and its microbatch or ALL


def ranges(samples: Sequence[int]) -> list[tuple[int, int]]:
    """[begin, end) of each microbatch within the batch."""
    bounds = [0, *accumulate(samples)]
    return list(zip(bounds, bounds[1:], strict=False))


class Interpreter:
    """A schedule of a program. `run` is the executor's; `begin` hands out a walk to step through."""

    def __init__(self, program: Program, schedule: Schedule) -> None:
        self.program, self.schedule = program, schedule
        self.ranges = ranges(schedule.samples)
        self.local = [value.local for value in program.values]
        self.kernels = {task.id: task.kernel.bind() for task in program.runnable if task.kernel is not None}

    def run(self, inputs: dict[int, torch.Tensor], drawn: Drawn | None = None) -> list[Any]:
        """Values of `program.outputs` for these inputs, given by their position among the captured ones."""
        with step_seed(self.program, inputs.values()) as seed, torch.no_grad():
            walk = self.begin(inputs, seed, drawn)
            for action in self.schedule.walk():
                walk.take(action)
            return [walk.live[value, ALL] for value in self.program.outputs]

    def begin(self, inputs: dict[int, torch.Tensor], seed: int, drawn: Drawn | None = None) -> Walk:
        """A walk at its start. The caller takes the actions, in order and under `torch.no_grad()`."""
        return Walk(self, inputs, seed, drawn)


class Walk:
    """One run of a schedule, between two of its actions. `live` holds the tensors, and may be changed."""

    def __init__(self, of: Interpreter, inputs: dict[int, torch.Tensor], seed: int, drawn: Drawn | None) -> None:
        self._of, self._seed, self._drawn = of, seed, drawn
        self.live: dict[Slot, Any] = {(value, ALL): inputs[at] for at, value in of.program.inputs.items()}

    def slot(self, value: int, microbatch: int) -> Slot:
        """Where a value is that this microbatch reads."""
        return (value, microbatch if self._of.local[value] else ALL)

    def take(self, action: Action) -> None:
        """Takes one action."""
        slot = (action.subject, action.microbatch)
        if action.do is Do.FREE:
            del self.live[slot]
        elif action.do is Do.OFFLOAD:
            self.live[slot] = offload(self.live[slot])
        elif action.do is Do.FETCH:
            self.live[slot] = fetch(self.live[slot])
        else:
            self._task(self._of.program.by_id[action.subject], action.do, action.microbatch)

    def _task(self, task: Task, do: Do, microbatch: int) -> None:
        if do is Do.GATHER:
            self._gather(task, microbatch)
        elif do is Do.REDUCE:
            self._reduce(task, microbatch)
        elif task.kind is Kind.SLICE:
            self._slice(task, microbatch)
        else:
            self._kernel(task, microbatch)

    def _kernel(self, task: Task, microbatch: int) -> None:
        samples = self._of.program.batch if microbatch == ALL else self._of.schedule.samples[microbatch]
        if task.random:
            seed_task(self._seed, task.id, microbatch)
        operands = [self.live[self.slot(value, microbatch)] for value in task.inputs]
        results = self._of.kernels[task.id](samples, *operands)
        if task.random and self._drawn is not None:
            self._drawn(task.id, microbatch, results)
        for value, result in zip(task.outputs, (results,) if task.single else results, strict=False):
            if value is not None:
                self.live[self.slot(value, microbatch)] = result

    def _slice(self, task: Task, microbatch: int) -> None:
        (value,), (begin, end) = task.outputs, self._of.ranges[microbatch]
        assert value is not None and task.layout is not None
        whole = self.live[self.slot(task.inputs[0], microbatch)]
        self.live[self.slot(value, microbatch)] = cut(whole, task.layout, begin, end, self._of.program.batch)

    def _gather(self, task: Task, microbatch: int) -> None:
        (value,), (begin, end) = task.outputs, self._of.ranges[microbatch]
        assert value is not None and task.layout is not None
        part = self.live[self.slot(task.inputs[0], microbatch)]
        if len(self._of.ranges) == 1:
            self.live[value, ALL] = part
            return
        if microbatch == 0:
            self.live[value, ALL] = part.new_empty(self._of.program.values[value].shape)
        paste(self.live[value, ALL], part, task.layout, begin, end, self._of.program.batch)

    def _reduce(self, task: Task, microbatch: int) -> None:
        (value,), (begin, end) = task.outputs, self._of.ranges[microbatch]
        assert value is not None
        part = self.live[self.slot(task.inputs[0], microbatch)]
        if len(self._of.ranges) == 1:
            self.live[value, ALL] = part
        elif microbatch == 0:
            self.live[value, ALL] = first_summand(part)
        else:
            add_summand(self.live[value, ALL], part, task.reduction, task.count, begin, end - begin)
