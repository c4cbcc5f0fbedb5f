"""The certificate is one of the plan that runs: what it makes again is made again in the comparison."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import fullbatch
from fullbatch._run import _source


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def _convolutions() -> tuple[nn.Module, torch.Tensor]:
    layers: list[nn.Module] = []
    for inputs in (3, 16, 16):
        layers += [nn.Conv2d(inputs, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers), torch.randn(6, 3, 24, 24)


def _one_sample() -> tuple[nn.Module, torch.Tensor]:
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())]
    return nn.Sequential(*layers), torch.randn(1, 256, 64)


def _tight(model: nn.Module, batch: torch.Tensor) -> fullbatch.Step:
    with pytest.raises(fullbatch.BudgetError) as caught:
        fullbatch.Step(_loss, model, batch, memory=1000)
    return fullbatch.Step(_loss, model, batch, memory=int(1.03 * caught.value.smallest))


@pytest.mark.parametrize("make", [_convolutions, _one_sample])
def test_the_order_of_the_plan_is_followed(make: Any) -> None:
    torch.manual_seed(0)
    model, batch = make()
    step = _tight(model, batch)
    certificate = step.verify()
    assert certificate.ok, certificate
    assert certificate
    assert certificate.microbatch == step.plan.microbatch
    assert certificate.recomputed == step.plan.recomputed > 0
    assert f"{certificate.recomputed} runs made again" in str(certificate)


def test_a_recompute_that_draws_other_masks_is_not_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, batch = _convolutions()
    step = _tight(model, batch)
    seed_task, calls = _source.seed_task, itertools.count()
    monkeypatch.setattr(_source, "seed_task", lambda seed, task, m: seed_task(seed + next(calls), task, m))
    certificate = step.verify()
    assert not certificate.ok
    assert not certificate


def test_another_precision_without_the_same_tasks_is_compared_all_the_same() -> None:
    torch.manual_seed(0)
    model, batch = _convolutions()
    model, batch = model.to(torch.bfloat16), batch.to(torch.bfloat16)
    assert _tight(model, batch).verify().ok
