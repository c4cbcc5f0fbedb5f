"""What one call of a step knows while it runs.

Limit that forced it: Dynamo calls the runner of a captured graph with the graph's inputs, and nothing else. Shape of
the answer: what else the runner must know of the call that it serves, and what it leaves for the end of that call, is
one value that `Step` holds meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fullbatch._captured import Captured
from fullbatch._past import Past
from fullbatch._plan._plan import Plan
from fullbatch._run._commit import Pending
from fullbatch._run._executor import Executor
from fullbatch._tree import BatchShape, map_tensors


class PlannedOnly(Exception):
    """Leaves the captured call once its plan is known, before anything runs."""


@dataclass
class Call:
    """One call of a step, or one question for its plan."""

    leaves: list[torch.Tensor]
    shape: BatchShape
    device: torch.device  # the model's
    only_plan: bool
    scale: torch.Tensor | None = None  # what the loss is multiplied by before the backward
    drawn: Callable[[int, int, Any], None] | None = None  # receives what random operators draw
    generator: bytes | None = None  # state of the default generator before the step, where it draws
    pending: Pending | None = None
    inputs: Sequence[torch.Tensor] = ()
    plan: Plan | None = None
    captured: Captured | None = None
    past: Past | None = None  # of that, where a budget decides the microbatch
    executor: Executor | None = None  # of a forward whose loss is still to run
    outputs: list[Any] = field(default_factory=list)  # what that forward returned
    owned: Sequence[torch.Tensor] = ()  # of the batch, where `leaves` are arguments made of it
    before: tuple[int, int] = (0, 0)  # bytes that making them keeps, and takes, besides
    anew: bool = False  # planned for, whatever plan the step was given
    again: Callable[[], None] = lambda: None  # called where the step begins again

    @property
    def moved(self) -> torch.device | None:
        """The device to bring batch tensors to, where one is elsewhere."""
        return self.device if any(leaf.device != self.device for leaf in self.leaves) else None

    def brought(self, batch: Any) -> Any:
        """The batch on the model's device."""
        moved = self.moved
        return batch if moved is None else map_tensors(lambda leaf: leaf.to(moved), batch)
