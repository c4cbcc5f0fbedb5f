"""A step whose loss is not captured resumes with the same bits too: both draw from one generator."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases.training import Training

STEPS = 3


def _forward(model: Any, batch: Any) -> Tensor:
    return model(batch[0])


def _loss(outputs: Tensor, batch: Any) -> Tensor:
    """Over samples that are drawn: how many there are depends on the draw."""
    chosen = torch.rand(len(outputs)) > 0.3
    return F.cross_entropy(outputs[chosen], batch[1][chosen])


def _composed(model: Any, batch: Any) -> Tensor:
    return _loss(_forward(model, batch), batch)


class Run(Training):
    def __init__(self, given: Any, seed: int) -> None:
        super().__init__(given, seed, nn.BatchNorm1d(16))

    def train(self) -> list[Any]:
        """Up to the last step; the state after each."""
        states = []
        for at in range(self.step.state_dict()["steps"], STEPS):
            self.take(at)
            states.append(copy.deepcopy([part.state_dict() for part in self.parts]))
        return states


@pytest.mark.parametrize("given", [(_forward, _loss), _composed], ids=["a pair", "a split that is found"])
def test_resumed_after_any_step(given: Any) -> None:
    whole = Run(given, seed=0)
    states = whole.train()
    assert len(states) == STEPS
    for state in states[:-1]:
        torch.rand(5)
        resumed = Run(given, seed=9)
        for part, kept in zip(resumed.parts, state, strict=True):
            part.load_state_dict(copy.deepcopy(kept))
        resumed.train()
        expected = whole.model.state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in resumed.model.state_dict().items())
