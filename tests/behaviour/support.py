"""What the behaviour tests share: a small step, and its comparison with plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullbatch
from cases.reference import collect, compare, plain

BATCH = 6
LossFn = Callable[[Any, Any], Any]


def mlp() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def pair(size: int = BATCH) -> tuple[Tensor, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        x, y = torch.randn(BATCH, 3), torch.randn(BATCH, 2)
    return x[:size], y[:size]


def mse(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def make(loss_fn: LossFn, model: Any = None, batch: Any = None, **kwargs: Any) -> fullbatch.Step:
    """A step in microbatches of 4 and 2."""
    if "memory" not in kwargs:
        kwargs.setdefault("microbatch", 4)
    return fullbatch.Step(loss_fn, mlp() if model is None else model, pair() if batch is None else batch, **kwargs)


def clear(model: Any) -> None:
    for module in [model] if isinstance(model, nn.Module) else model.values() if isinstance(model, dict) else model:
        module.zero_grad(set_to_none=True)


def agrees(step: fullbatch.Step, loss_fn: LossFn, model: Any, batch: Any) -> Any:
    """Asserts that one call, from no gradient, does to the model what plain PyTorch does; returns its result."""
    clear(model)
    reference = plain(loss_fn, model, batch)
    out = step(batch)
    errors = compare(collect(out, model), reference)
    assert errors.within(1e-10), errors
    return out


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def captures(step: fullbatch.Step) -> int:
    return step._frontend.captures
