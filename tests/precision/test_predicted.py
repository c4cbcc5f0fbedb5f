"""In mixed precision too the peak that a plan predicts is the one that is measured, and never below it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import fullbatch
from precision.support import MODELS, cross_entropy, under_autocast


def _scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=256.0)


def _step(name: str, microbatch: int, how: str) -> tuple[fullbatch.Step, Any, Any, dict[str, Any]]:
    make, data = MODELS[name]
    model, batch = make(), data()
    if how == "weights":
        model.bfloat16()
        batch = tuple(item.bfloat16() if item.is_floating_point() else item for item in batch)
    loss_fn = (
        cross_entropy if how == "weights" else under_autocast(torch.float16 if how == "scaler" else torch.bfloat16)
    )
    settings = {"scaler": _scaler()} if how == "scaler" else {}
    return fullbatch.Step(loss_fn, model, batch, microbatch=microbatch), model, batch, settings


@pytest.mark.parametrize("how", ["autocast", "weights", "scaler"])
@pytest.mark.parametrize("microbatch", [1, 5, 12])
@pytest.mark.parametrize("name", MODELS)
def test_predicted_peak_is_the_measured_one(name: str, microbatch: int, how: str) -> None:
    step, model, batch, settings = _step(name, microbatch, how)
    for _ in range(2):
        step(batch, **settings)
        model.zero_grad()
    measured = fullbatch.measure(lambda: step(batch, **settings)).peak
    plan = step.plan
    assert plan.exact
    assert measured <= plan.activations
    assert plan.predicted_peak <= 1.02 * (plan.owned + measured)


def test_the_scale_is_counted_to_the_byte() -> None:
    """For this model prediction and measurement are equal, with the scaler's four bytes and without."""
    for how in ("autocast", "scaler"):
        step, model, batch, settings = _step("mlp", 5, how)
        step(batch, **settings)
        model.zero_grad()
        assert fullbatch.measure(partial(step, batch, **settings)).peak == step.plan.activations
