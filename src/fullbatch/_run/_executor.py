"""Runs a schedule and nothing else.

Every decision has been made; what remains are calls of functions that were generated from the schedule (`_source`):
each stage's for every microbatch, with the samples it owns. `_interpreter` walks the same schedule action by action.
"""

from __future__ import annotations

from typing import Any

import torch

from fullbatch._eager_loss import Turns, finished, rehearsal
from fullbatch._ir import Program
from fullbatch._plan._schedule import ALL, Schedule
from fullbatch._run._fuse import fuse
from fullbatch._run._generated import Generated
from fullbatch._run._interpreter import ranges
from fullbatch._run._random import RANDOM_BYTES, Drawn, step_seed
from fullbatch._run._slices import add_moments, cut, owns_dense_storage, paste


class Executor:
    """A schedule bound to its program, ready to run many times.

    `compile` hands groups of cheap operators to TorchInductor, at the first run (`_fuse`).
    """

    def __init__(self, program: Program, schedule: Schedule, *, compile: bool = False) -> None:
        self.program, self.schedule = program, schedule
        self._ranges = ranges(schedule.samples)
        self._generated = Generated(program, schedule)
        self._to_compile = compile

    def run(self, inputs: dict[int, torch.Tensor], drawn: Drawn | None = None) -> list[Any]:
        """Values of `program.outputs` for these inputs, given by their position among the captured ones.

        `drawn`, where given, receives every random task's outputs as (task, microbatch, tensors). An exception of an
        operator passes through, with a note that names where in the user's code the operator came from.
        """
        with torch.no_grad():
            return finished(self.turns(inputs, drawn))

    def turns(self, inputs: dict[int, torch.Tensor], drawn: Drawn | None = None) -> Turns[list[Any]]:
        """`run`, to be taken further under `torch.no_grad()`: it waits where its loss is run by somebody else."""
        with step_seed(self.program, inputs.values()) as seed:
            if self._to_compile:
                with rehearsal():
                    fused = fuse(self.program, self.schedule, inputs, seed)
                if fused is not None:
                    self._generated, self._to_compile = Generated(self.program, self.schedule, fused), False
            try:
                whole = {value: inputs[at] for at, value in self.program.inputs.items()}
                return (yield from self._walk(whole, seed, drawn))
            except Exception as error:
                self._generated.explain(error)
                raise

    def _walk(self, whole: dict[int, Any], seed: int, drawn: Drawn | None) -> Turns[list[Any]]:
        batch, final = self.program.batch, len(self._ranges) - 1
        held: list[dict[int, Any]] = [{} for _ in self._ranges]
        for stage in self._generated.stages:
            for part in stage.once:
                waiting = part(whole, {}, batch, 0, batch, ALL, seed, drawn)
                if waiting is not None:  # the part with the eager loss
                    yield from waiting
            for microbatch, (begin, end) in enumerate(self._ranges):
                for part in stage.last if microbatch == final else stage.body:
                    part(whole, held[microbatch], end - begin, begin, end, microbatch, seed, drawn)
        return [whole[value] for value in self.program.outputs]


__all__ = ["RANDOM_BYTES", "Executor", "add_moments", "cut", "owns_dense_storage", "paste"]
