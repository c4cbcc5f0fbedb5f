"""In float32 the planned step rounds no worse than the accumulation that people write by hand."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import fullbatch


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        layer for _ in range(4) for layer in (nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64))
    ]
    return nn.Sequential(*layers, nn.Linear(64, 8))


def _loss(model: Any, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def _error(model: nn.Module, reference: nn.Module) -> float:
    pairs = list(zip(model.parameters(), reference.parameters(), strict=True))
    largest = max(float(other.grad.abs().max()) for _, other in pairs if other.grad is not None)
    return max(float((p.grad.double() - q.grad).abs().max()) for p, q in pairs if p.grad is not None) / largest


def test_no_worse_than_twice_plain_accumulation() -> None:
    batch = torch.randn(64, 64), torch.randn(64, 8)
    exact = _model().double()
    _loss(exact, [tensor.double() for tensor in batch]).backward()

    by_hand = _model()
    for x, y in zip(batch[0].split(4), batch[1].split(4), strict=True):
        (_loss(by_hand, (x, y)) / 16).backward()

    planned = copy.deepcopy(_model())
    fullbatch.Step(_loss, planned, batch, microbatch=4)(batch)
    assert _error(planned, exact) <= 2 * _error(by_hand, exact)
