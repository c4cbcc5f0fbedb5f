"""Three small steps, each change made by hand as a user would, and what it then takes: predicted, and measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fullbatch


@dataclass(frozen=True)
class Case:
    """What a user hands over. `fresh` builds all of it anew, with the same weights."""

    loss_fn: Any
    model: nn.Module
    batch: Any
    optimizer: torch.optim.Optimizer

    def propose(self, memory: Any) -> fullbatch.Proposals:
        return fullbatch.propose(self.loss_fn, self.model, self.batch, memory=memory, optimizer=self.optimizer)

    def parts(self) -> tuple[Any, nn.Module, Any, torch.optim.Optimizer]:
        return self.loss_fn, self.model, self.batch, self.optimizer

    def step(self, **options: Any) -> fullbatch.Step:
        return fullbatch.Step(self.loss_fn, self.model, self.batch, optimizer=self.optimizer, **options)

    def peak(self, microbatch: int) -> int:
        """Predicted of the training step and of the optimizer's."""
        ledger = fullbatch.explain(*self.parts())
        return max(self.step(microbatch=microbatch).plan.predicted_peak, ledger.optimizer_peak)

    def least(self) -> int:
        with pytest.raises(fullbatch.BudgetError) as caught:
            self.step(memory=1)
        return caught.value.smallest

    def measured(self, microbatch: int) -> int:
        """The peak of one training step and one of the optimizer, run, with all that is there before and after."""
        step = self.step(microbatch=microbatch)
        owned = step.plan.owned
        running = fullbatch.measure(lambda: step(self.batch)).peak
        tensors = [*self.model.parameters(), *self.model.buffers(), *self.batch]
        there = sum(one.untyped_storage().nbytes() for one in tensors)
        there += sum(p.grad.nbytes for p in self.model.parameters() if p.grad is not None)
        return max(owned + running, there + fullbatch.measure(self.optimizer.step).peak)


class UNet(nn.Module):
    """Takes only sides that are even."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.deep, self.last = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(24, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = F.relu(self.norm(self.first(x)))
        deep = F.interpolate(F.relu(self.deep(F.max_pool2d(high, 2))), scale_factor=2)
        return self.last(torch.cat([high, deep], 1))


def _mask_loss(model: Any, batch: Any) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])


def images() -> Case:
    torch.manual_seed(0)
    model = UNet()
    batch = torch.randn(4, 3, 20, 20), torch.randint(2, (4, 1, 20, 20)).float()
    return Case(_mask_loss, model, batch, torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1))


def _words(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def _words_by_tiles(model: Any, batch: Any) -> torch.Tensor:
    hidden = model[1](model[0](batch[0]))
    return fullbatch.linear_cross_entropy(hidden, model[2].weight, batch[1], model[2].bias)


def words() -> Case:
    """Logits are most of it, and gradients are there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(300, 16), nn.Linear(16, 16), nn.Linear(16, 300))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    batch = torch.randint(300, (4, 32)), torch.randint(300, (4, 32))
    return Case(_words, model, batch, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def _squares(model: Any, batch: Any) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def wide() -> Case:
    """Weights are most of it, and the optimizer's step sets the peak."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    return Case(_squares, model, (torch.randn(4, 64), torch.randn(4, 64)), optimizer)


# ---- the changes, as a user makes them


def _autocast(case: Case) -> Case:
    def mixed(model: Any, batch: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return case.loss_fn(model, batch)

    return replace(case, loss_fn=mixed)


def _half(case: Case) -> Case:
    case.model.to(torch.bfloat16)
    shared = ("lr", "weight_decay", "momentum", "foreach")
    group = {name: value for name, value in case.optimizer.param_groups[0].items() if name in shared}
    optimizer = type(case.optimizer)(case.model.parameters(), **group)
    for parameter in case.model.parameters():
        parameter.grad = None
    batch = tuple(one.to(torch.bfloat16) if one.is_floating_point() else one for one in case.batch)
    return replace(case, batch=batch, optimizer=optimizer)


def _eight_bits(case: Case) -> Case:
    from torchao.optim import AdamW8bit

    return replace(case, optimizer=AdamW8bit(case.model.parameters()))


def _optimizer(kind: Any, **options: Any) -> Callable[[Case], Case]:
    return lambda case: replace(case, optimizer=kind(case.model.parameters(), **options))


def _sides(side: int) -> Callable[[Case], Case]:
    return lambda case: replace(case, batch=tuple(F.interpolate(one, size=(side, side)) for one in case.batch))


def _length(length: int) -> Callable[[Case], Case]:
    return lambda case: replace(case, batch=tuple(one[:, :length].clone() for one in case.batch))


def _cleared(case: Case) -> Case:
    case.optimizer.zero_grad()
    return case


CASES: dict[str, Callable[[], Case]] = {"images": images, "words": words, "wide": wide}
MEMORY = {"images": 500_000, "words": 400_000, "wide": 1_000_000}
BY_HAND: dict[tuple[str, str], Callable[[Case], Case]] = {
    ("images", "autocast to bfloat16"): _autocast,
    ("images", "weights in bfloat16"): _half,
    ("images", "optimizer state in 8 bits"): _eight_bits,
    ("images", "Adafactor: sums of rows and columns as state"): _optimizer(torch.optim.Adafactor),
    ("images", "images of 16 x 16"): _sides(16),
    ("images", "images of 10 x 10"): _sides(10),
    ("words", "autocast to bfloat16"): _autocast,
    ("words", "weights in bfloat16"): _half,
    ("words", "sequences of 24"): _length(24),
    ("words", "sequences of 16"): _length(16),
    ("words", "the loss without logits"): lambda case: replace(case, loss_fn=_words_by_tiles),
    ("words", "no gradients before the step"): _cleared,
    ("wide", "autocast to bfloat16"): _autocast,
    ("wide", "weights in bfloat16"): _half,
    ("wide", "optimizer state in 8 bits"): _eight_bits,
    ("wide", "Adafactor: sums of rows and columns as state"): _optimizer(torch.optim.Adafactor),
    ("wide", "optimizer.step() a tensor at a time"): _optimizer(torch.optim.AdamW, foreach=False),
    ("wide", "optimizer.step() in one kernel"): _optimizer(torch.optim.AdamW, fused=True),
}  # fmt: skip
