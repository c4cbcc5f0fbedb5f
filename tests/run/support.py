"""The program, the schedule and the inputs of a planned step, to be run by whatever a test has in mind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import fullbatch
from cases import all_cases
from fullbatch._ir import Program
from fullbatch._plan._schedule import Schedule


class Watched(fullbatch.Step):
    """A step that tells which executor it runs, on what."""

    def _run(self, captured: Any, inputs: Any) -> Any:
        self.inputs = dict(enumerate(inputs))
        return super()._run(captured, inputs)

    def _plan_for(self, captured: Any, call: Any) -> Any:
        plan, self.executor = super()._plan_for(captured, call)
        return plan, self.executor


@dataclass
class Built:
    program: Program
    schedule: Schedule
    inputs: dict[int, torch.Tensor]


def built(step: Watched) -> Built:
    inputs = {at: step.inputs[at].detach() for at in step.executor.program.inputs}
    return Built(step.executor.program, step.executor.schedule, inputs)


def build(loss_fn: Any, model: Any, batch: Any, **settings: Any) -> Built:
    """The step as it is planned."""
    return built(Watched(loss_fn, model, batch, **settings))


def build_case(name: str, microbatch: int) -> Built:
    """A case of tests/cases by name, in microbatches of so many samples."""
    return build(*next(case for case in all_cases() if case.name == name).build(), microbatch=microbatch)
