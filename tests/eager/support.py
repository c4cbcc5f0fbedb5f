"""Steps that cannot be captured, and what plain PyTorch makes of them on the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullbatch
from cases.reference import Result, collect, compare

LossFn = Callable[[Any, Any], tuple[Tensor, Any]]


def plain(loss_fn: LossFn, model: Any, batch: Any) -> Result:
    """The undivided step in plain PyTorch on a copy of the model."""
    model = copy.deepcopy(model)
    loss, count = loss_fn(model, batch)
    mean = loss / count
    mean.backward()
    return collect(mean, model)


def agrees(
    step: fullbatch.eager.Step, loss_fn: LossFn, model: nn.Module, batch: Any, tolerance: float = 1e-10
) -> Tensor:
    """Asserts that one call, from no gradient, does to the model what the plain step does; returns its loss."""
    model.zero_grad(set_to_none=True)
    reference = plain(loss_fn, model, batch)
    loss = step(batch)
    errors = compare(collect(loss, model), reference)
    assert errors.within(tolerance), errors
    return loss


class Block(nn.Module):
    """A residual block that holds several times what it reads."""

    def __init__(self, width: int, p: float = 0.0) -> None:
        super().__init__()
        self.wide, self.back, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(self.drop(torch.tanh(self.wide(x))))


class Net(nn.Module):
    """(N, T, width) to (N, T, 3). Each sample branches on its own values, and NumPy computes a gate."""

    def __init__(self, width: int = 8, blocks: int = 4, block: Callable[..., nn.Module] = Block, **kwargs: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(width, **kwargs) for _ in range(blocks))
        self.out = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x = torch.stack([sample * 2 if sample.sum() > 0 else sample.sin() for sample in x])
        return self.out(x * torch.from_numpy(np.tanh(x.detach().numpy())))


def token_loss(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Cross entropy over the tokens whose target is not -100, and how many there are."""
    x, targets = batch
    logits = model(x).flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten(), reduction="sum"), (targets != -100).sum()


def tokens(lengths: list[int], width: int = 8, longest: int = 32, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Samples of `longest` positions, of which the first few count."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        x, targets = torch.randn(len(lengths), longest, width), torch.randint(0, 3, (len(lengths), longest))
    for row, length in enumerate(lengths):
        targets[row, length:] = -100
    return x, targets


def squeezed(loss_fn: LossFn, model: Any, batch: Any, **kwargs: Any) -> fullbatch.eager.Step:
    """A step whose budget is what checkpoints everywhere need: they are in use at a microbatch of one."""
    try:
        fullbatch.eager.Step(loss_fn, model, batch, memory=1000, **kwargs)
    except fullbatch.BudgetError as error:
        step = fullbatch.eager.Step(loss_fn, model, batch, memory=error.smallest, **kwargs)
        assert step.plan.checkpointed
        return step
    raise AssertionError("a step in 1000 bytes")
