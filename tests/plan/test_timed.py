"""Plans that are chosen by measured seconds: the same result, and the plan says where its times come from."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fullbatch
from cases.reference import grads_of


def _loss(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).flatten(1), batch[1])


def _net() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers, nn.AdaptiveAvgPool2d(1))


def test_a_timed_plan_gives_the_bits_of_an_estimated_one() -> None:
    model, batch = _net(), (torch.randn(8, 3, 16, 16), torch.randint(0, 8, (8,)))
    free = fullbatch.Step(_loss, model, batch, microbatch=2)
    free(batch)
    grads = grads_of(model)
    model.zero_grad()
    budget = free.plan.owned + int(0.6 * free.plan.activations)
    step = fullbatch.Step(_loss, model, batch, memory=budget, microbatch=2, timed=True)
    assert step.plan.recomputed > 0
    assert any("timed alone" in note for note in step.plan.notes)
    assert "operators timed alone" in str(step.plan)
    assert not any("timed alone" in note for note in free.plan.notes)
    step(batch)
    assert all(torch.equal(grads[name], grad) for name, grad in grads_of(model).items())
    assert 0 <= step.plan.bound <= step.plan.overhead
