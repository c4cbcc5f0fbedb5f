"""A step that is captured once and planned for several budgets and optimizers, and never run.

Limit that forced it: `Step` is made for one budget, and a budget that is too small leaves no step to ask. Shape of the
answer: the step is captured at a microbatch of one, for which there is always a plan; after that only budgets change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fullbatch._captured import Captured
from fullbatch._cost._probe import NOT_RUN
from fullbatch._errors import BudgetError
from fullbatch._memory._owned import optimizer_step
from fullbatch._memory._twin import Optimizers, each_of
from fullbatch._plan._plan import Plan
from fullbatch._step import Step
from fullbatch._tree import named_tensors

Graph = Callable[[fx.GraphModule], None]


@dataclass(frozen=True)
class Taken:
    """One plan: its peak in bytes, the optimizer's step included, and its time in units of bytes moved (or seconds)."""

    plan: Plan
    peak: int
    time: float


class Tried(Step):
    """A step of `loss_fn` as `Step` would capture it, that answers what it would take.

    `rewrite` changes the graph that Dynamo found before it is traced. `reads` are the ids of the tensors of the step.
    """

    def __init__(
        self, loss_fn: Any, model: Any, batch: Any, *, optimizer: Optimizers | None, batch_dims: Any,
        timed: bool, rewrite: Graph | None = None,
    ) -> None:  # fmt: skip
        self._rewrite, self._example = rewrite, batch
        self.reads: frozenset[int] = frozenset()
        super().__init__(loss_fn, model, batch, microbatch=1, optimizer=optimizer, batch_dims=batch_dims, timed=timed)

    def _on_graph(self, graph: fx.GraphModule) -> Callable[..., Any]:
        if self._rewrite is not None:
            self._rewrite(graph)
        return super()._on_graph(graph)

    def _run(self, captured: Captured, inputs: Sequence[torch.Tensor]) -> Any:
        self.captured, self.reads = captured, frozenset(id(tensor) for tensor in inputs)
        return super()._run(captured, inputs)

    @property
    def optimizer(self) -> Optimizers | None:
        """What is counted besides the step; another may be put in its place, and nothing is captured anew."""
        return self._optimizers

    @optimizer.setter
    def optimizer(self, optimizer: Optimizers | None) -> None:
        self._optimizers = each_of(optimizer)

    @property
    def fails(self) -> str:
        """Operators that do not run alone: without storage a wrong dtype passes that torch refuses when it runs."""
        notes = [note.removeprefix(NOT_RUN) for note in self.plan.notes if note.startswith(NOT_RUN)]
        return ", ".join(notes)

    @property
    def plain_time(self) -> float:
        """The time of the whole batch at once, nothing made again."""
        return self.captured.plain_time

    def split(self, microbatch: int) -> Taken:
        """At this microbatch, with no budget: nothing is made again."""
        return self._taken(None, microbatch)

    def within(self, budget: int | None) -> Taken:
        """At this budget; None: what is free. Raises BudgetError."""
        return self._taken(budget, None)

    def least(self) -> int:
        """The least budget that a plan is found for, and in which the optimizer can step, in bytes."""
        try:
            return self._taken(1, None).peak
        except BudgetError as error:
            return error.smallest

    def _taken(self, budget: int | None, microbatch: int | None) -> Taken:
        self._memory, self._microbatch = budget, microbatch
        plan = self._prepare(self._example)
        after = optimizer_step(self._device, named_tensors(self._model, "parameters").values(), self._optimizers)
        peak = max(plan.predicted_peak, plan.owned + after.total if after.exact else 0)
        return Taken(plan, peak, self.plain_time * (1 + plan.overhead))
