"""A small training run with a step to resume, for tests of what a checkpoint must hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import fullbatch


def batch_at(at: int) -> Any:
    """The batch of step `at`: ten samples of six features, and their classes."""
    draws = torch.Generator().manual_seed(at)
    return torch.randn(10, 6, generator=draws), torch.randint(0, 3, (10,), generator=draws)


class Training:
    """`parts` are what a checkpoint has a state of. `hidden` stands behind the first layer, of 16 features."""

    def __init__(self, given: Any, seed: int, *hidden: nn.Module) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 16), *hidden, nn.Dropout(0.5), nn.Linear(16, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.step = fullbatch.Step(given, self.model, batch_at(0), microbatch=4, optimizer=self.optimizer)
        self.parts: list[Any] = [self.model, self.optimizer, self.step]

    def take(self, at: int) -> None:
        """Step `at`."""
        self.optimizer.zero_grad()
        self.step(batch_at(at))
        self.optimizer.step()
