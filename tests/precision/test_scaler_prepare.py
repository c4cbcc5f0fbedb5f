"""`step.prepare(batches, scaler=scaler)`: what is prepared is the step that runs, with its scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullbatch

LENGTHS = (2, 5, 9)


def _loss(model: Any, batch: Any) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        return model(batch).float().square().mean()


def _forward(model: Any, batch: Any) -> Tensor:
    return model(batch)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).float()


def _batch(length: int) -> Tensor:
    return torch.randn(4, length, 4, dtype=torch.float32)


def _scaler(**settings: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=8.0, **settings)


def test_prepared_shapes_run_without_another_capture() -> None:
    model, scaler = _model(), _scaler()
    step = fullbatch.Step(_loss, model, _batch(3), microbatch=1)
    prepared = step.prepare([_batch(length) for length in LENGTHS], scaler=scaler)
    assert len(prepared.shapes) == len(LENGTHS)
    assert all(parameter.grad is None for parameter in model.parameters())
    captures = step._frontend.captures
    for length, scale in zip(LENGTHS, (8.0, 2.0, 5.0), strict=True):
        scaler.update(scale)
        model.zero_grad()
        step(_batch(length), scaler=scaler)
    assert step._frontend.captures == captures
    assert step.plan.predicted_peak == prepared.worst.predicted_peak


def test_the_least_budget_of_what_is_prepared_holds_when_it_runs() -> None:
    example, batch = _batch(3), _batch(900)
    with pytest.raises(fullbatch.BudgetError) as caught:
        fullbatch.Step(_loss, _model(), example, memory=20_000).prepare([batch], scaler=_scaler())
    step = fullbatch.Step(_loss, _model(), example, memory=caught.value.smallest)
    prepared = step.prepare([batch], scaler=_scaler())
    step(batch, scaler=_scaler())
    assert step.plan.predicted_peak == prepared.worst.predicted_peak <= caught.value.smallest
    with pytest.raises(fullbatch.BudgetError):
        fullbatch.Step(_loss, _model(), example, memory=caught.value.smallest - 1).prepare([batch], scaler=_scaler())


def test_a_disabled_one_is_none() -> None:
    step = fullbatch.Step(_loss, _model(), _batch(3), microbatch=1)
    step.prepare([_batch(5)], scaler=_scaler(enabled=False))
    captures = step._frontend.captures
    step(_batch(5))
    assert step._frontend.captures == captures


def test_of_a_pair() -> None:
    step = fullbatch.Step((_forward, lambda outputs, batch: outputs[outputs > -9].mean()), _model(), _batch(3))
    step.prepare([_batch(5)], scaler=_scaler())
    captures = step._frontend.captures
    step(_batch(5), scaler=_scaler())
    assert step._frontend.captures == captures


def test_what_is_no_scaler_is_refused_before_anything_is_planned() -> None:
    step = fullbatch.Step(_loss, _model(), _batch(3), microbatch=1)
    captures = step._frontend.captures
    with pytest.raises(fullbatch.ModelError, match="no GradScaler"):
        step.prepare([_batch(5)], scaler=2.0)  # type: ignore[arg-type]
    assert step._frontend.captures == captures
