"""What an optimizer that evaluates the loss again (LBFGS) calls: one planned step, from gradients that are gone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fullbatch._tree import named_tensors


def closure_of(
    step: Callable[[Any], Any], model: Any, optimizers: Sequence[torch.optim.Optimizer], batch: Any
) -> Callable[[], torch.Tensor]:
    """A function that clears the gradients of `model` and `optimizers`, runs `step(batch)` and returns its loss."""

    def evaluate() -> torch.Tensor:
        for parameter in named_tensors(model, "parameters").values():
            parameter.grad = None
        for optimizer in optimizers:
            optimizer.zero_grad()
        found = step(batch)
        loss: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return loss

    return evaluate
