"""One captured graph and everything derived from it: its program, its plans, and how to run it.

Capture knows tensors by where it found them; a batch knows them by path. Here the two meet, by identity of the
tensors at a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fullbatch._axis._build import RESLICE_ABOVE, build
from fullbatch._capture._joint import Joint, trace_joint
from fullbatch._cost._costs import Coster
from fullbatch._cost._probe import Prober
from fullbatch._errors import Fault, ModelError
from fullbatch._ir import Layout, Program
from fullbatch._memory._free import held_by_others
from fullbatch._plan._plan import Plan
from fullbatch._plan._planner import Choice, Planner
from fullbatch._plan._stages import Stages, find_stages
from fullbatch._run._commit import Pending
from fullbatch._run._executor import RANDOM_BYTES, Executor
from fullbatch._tree import BatchShape


@dataclass(frozen=True)
class Request:
    """What a plan is made for, besides the program."""

    budget: int | None
    microbatch: int | None
    owned: int
    note: str = ""


_PLANS = 16
"""Plans that one captured graph remembers."""


@dataclass(frozen=True)
class _Planned:
    """A plan and the room that it was made for: bytes above what the step owns."""

    room: int | None
    microbatch: int | None
    choice: Choice
    executor: Executor
    plan: Plan

    def serves(self, room: int | None, microbatch: int | None) -> bool:
        """Whether the plan is as good for this much room: it fits, and was made for nearly as much."""
        if microbatch != self.microbatch or (room is None) != (self.room is None):
            return False
        if room is None or self.room is None:
            return True
        return self.choice.simulated.peak <= room and abs(room - self.room) <= 0.02 * max(room, self.room)


class Captured:
    """The graph of one call signature. `run` executes it; `plan` says how."""

    def __init__(self, graph: fx.GraphModule, reslice_above: int = RESLICE_ABOVE, measure: bool = True) -> None:
        self._graph = graph
        self._reslice_above = reslice_above
        self._measures = measure
        self._planned: list[_Planned] = []  # the newest last
        self._ready = False
        self.free_budget: int | None = None  # the budget where the user named none

    def prepare(self, inputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], shape: BatchShape) -> None:
        """Traces forward and backward and derives the program, once."""
        if self._ready:
            return
        self.joint: Joint = trace_joint(self._graph, inputs)
        dims = {id(leaf): dim for leaf, dim in zip(leaves, shape.dims, strict=True)}
        self.batch_positions = [at for at, tensor in enumerate(inputs) if id(tensor) in dims]
        layouts: dict[int, Layout] = {}
        for at in self.batch_positions:
            dim = dims[id(inputs[at])]
            if dim is not None:
                layouts[at] = Layout(dim)
        self._refuse_mutated_batch()
        self.program: Program = build(self.joint, layouts, shape.size, self._reslice_above)
        self.stages: Stages = find_stages(self.program)
        used = set(self.program.inputs)
        self._device = inputs[0].device if inputs else torch.device("cpu")
        prober = Prober(self.program, {at: tensor for at, tensor in enumerate(inputs) if at in used})
        self._prober = prober
        self._planner = Planner(self.program, self.stages, self._measure)
        self._replicated = shape.replicated
        self._shape = shape
        self._ready = True

    def _measure(self, samples: frozenset[int]) -> Coster | None:
        return self._prober.costs(samples) if self._measures else None

    def measured(self, samples: int) -> Coster | None:
        """Exact costs of all tasks for one microbatch size."""
        return self._prober.costs(frozenset([samples]))

    def _refuse_mutated_batch(self) -> None:
        wrong = [self.joint.sources[at] for at in self.joint.mutated if at in self.batch_positions]
        if wrong:
            raise ModelError(
                *(
                    Fault(
                        f"The step changes {source}, a tensor of the batch, in place.",
                        expected="in-place changes of buffers and of the step's own values only",
                        next="x = x.clone() before the in-place operation",
                    )
                    for source in wrong
                )
            )

    @property
    def random(self) -> bool:
        """Whether the step draws from the default generator."""
        return any(task.random for task in self.program.tasks)

    def plan(self, request: Request) -> tuple[Plan, Executor]:
        """The plan for `request`. Raises BudgetError.

        What a step owns may change a little at every call (a tensor of another size that nothing reads), so a plan that
        was made for nearly as much room, and fits, serves again.
        """
        draws = RANDOM_BYTES if self.random else 0
        room = None if request.budget is None else request.budget - request.owned - draws
        for planned in self._planned:
            if planned.serves(room, request.microbatch):
                break
        else:
            choice = self._planner.choose(room, request.microbatch, request.owned + draws)
            executor = Executor(self.program, choice.schedule)
            planned = _Planned(room, request.microbatch, choice, executor, self._describe(choice, request))
        self._planned = [*(other for other in self._planned if other is not planned), planned][-_PLANS:]
        plan = planned.plan
        if plan.owned != request.owned or plan.budget != request.budget:
            more = request.owned - plan.owned
            plan = replace(
                plan, budget=request.budget, owned=request.owned, predicted_peak=plan.predicted_peak + more,
                plain_peak=plan.plain_peak + more,
            )  # fmt: skip
        return plan, planned.executor

    def _describe(self, choice: Choice, request: Request) -> Plan:
        draws = RANDOM_BYTES if self.random else 0
        activations = choice.simulated.peak + draws
        return Plan(
            batch=self.program.batch,
            microbatch=choice.size,
            microbatches=len(choice.schedule.samples),
            stages=self.stages.count,
            predicted_peak=request.owned + activations,
            plain_peak=request.owned + self._planner.plain_peak(),
            budget=request.budget,
            owned=request.owned,
            activations=activations,
            recomputed=choice.schedule.recomputes(self.program),
            held=choice.schedule.held(self.program),
            exact=choice.exact,
            overhead=choice.overhead,
            bound=choice.bound,
            barriers=self.stages.barriers,
            full_batch_nodes=tuple(self.program.full_batch),
            replicated=self._replicated,
            notes=tuple(
                note
                for note in (request.note, *self.joint.notes, *self._prober.notes, held_by_others(self._device))
                if note
            ),
            schedule=choice.schedule,
        )

    def run(
        self, executor: Executor, inputs: Sequence[torch.Tensor], drawn: Callable[[int, int, Any], None] | None = None
    ) -> tuple[list[Any], Pending]:
        """Runs one step; returns the graph's outputs, and the gradients and buffers that are to be written."""
        results = executor.run({at: inputs[at] for at in self.program.inputs}, drawn)
        values = dict(zip(self.joint.wanted, results, strict=False))

        def result(node: Any) -> Any:
            return values[node] if isinstance(node, fx.Node) else node

        gradients = [
            (inputs[at], result(node)) for at, node in sorted(self.joint.gradients.items()) if node is not None
        ]
        buffers = [(inputs[at], result(node)) for at, node in self.joint.mutated.items()]
        outputs = [result(node) for node in self.joint.outputs]
        return outputs, Pending(gradients, buffers)
