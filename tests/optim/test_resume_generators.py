"""Draws of Python's `random` and of NumPy that are live in a step go on in a resumed run where they stopped."""

from __future__ import annotations

import io
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fullbatch
from cases.training import Training

STEPS = 4


def _captured(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1]) * random.uniform(0.5, 2.0)


def _forward(model: Any, batch: Any) -> Tensor:
    return model(batch[0])


def _loss(outputs: Tensor, batch: Any) -> Tensor:
    kept = torch.from_numpy(np.random.rand(len(outputs)) < 0.7)
    kept[random.randrange(len(kept))] = True
    return F.cross_entropy(outputs[kept], batch[1][kept])


def _found(model: Any, batch: Any) -> Tensor:
    outputs = model(batch[0])
    kept = outputs[:, 0] > outputs[:, 0].median()
    return F.cross_entropy(outputs[kept], batch[1][kept]) * random.uniform(0.5, 2.0)


GIVEN = {"captured": _captured, "a pair": (_forward, _loss), "a split that is found": _found}


class Run(Training):
    def __init__(self, given: Any, seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed)
        super().__init__(given, seed)

    def train(self, first: int, last: int) -> None:
        for at in range(first, last):
            self.take(at)

    def save(self) -> bytes:
        kept = io.BytesIO()
        torch.save([part.state_dict() for part in self.parts], kept)
        return kept.getvalue()

    def load(self, kept: bytes) -> None:
        for part, state in zip(self.parts, torch.load(io.BytesIO(kept), weights_only=True), strict=True):
            part.load_state_dict(state)


@pytest.mark.parametrize("name", GIVEN)
def test_resumed_after_any_step(name: str) -> None:
    whole = Run(GIVEN[name], seed=0)
    whole.train(0, STEPS)
    expected = whole.model.state_dict()
    for stop in range(STEPS):
        killed = Run(GIVEN[name], seed=0)
        killed.train(0, stop)
        kept = killed.save()
        resumed = Run(GIVEN[name], seed=9)
        resumed.load(kept)
        resumed.train(stop, STEPS)
        assert all(torch.equal(value, expected[name]) for name, value in resumed.model.state_dict().items()), stop


def test_states_that_cannot_be_set_are_named_and_nothing_is() -> None:
    step = Run(_captured, seed=0).step
    state = step.state_dict()
    assert {"cpu", "python", "numpy"} <= state["generators"].keys()
    broken = {**state["generators"], "python": [3, torch.zeros(2), None], "numpy": {"bit_generator": "other"}}
    before = random.getstate(), torch.get_rng_state()
    with pytest.raises(fullbatch.PlanError, match="generator python cannot be set") as caught:
        step.load_state_dict({**state, "generators": broken})
    assert len(caught.value.faults) == 2
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_a_state_without_them_leaves_them_alone() -> None:
    """As states were that an earlier version saved."""
    step = Run(_captured, seed=0).step
    state = step.state_dict()
    before = random.getstate()
    step.load_state_dict({**state, "generators": {"cpu": state["generators"]["cpu"]}})
    assert random.getstate() == before
