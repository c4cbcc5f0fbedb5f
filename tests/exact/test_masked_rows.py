"""A learned vector in the places that a mask of the batch names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullbatch
from cases.reference import collect, compare, plain


class _Special(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(9, 3), nn.Linear(3, 3)
        self.row, self.number = nn.Parameter(torch.randn(3)), nn.Parameter(torch.tensor(0.5))


def _rows(model: Any, ids: Tensor) -> Tensor:
    x = model.words(ids)
    x[ids == 2] = model.row
    return model.out(x).square().mean()


def _a_number(model: Any, ids: Tensor) -> Tensor:
    x = model.out(model.words(ids)) * model.row
    x[ids == 2] = model.number
    x[x > 0.5] = model.number * 1
    return x.square().mean()


def _transposed(model: Any, ids: Tensor) -> Tensor:
    """Through a view whose memory order a microbatch does not have."""
    x = model.words(ids)
    x.transpose(0, 1)[(ids == 2).T] = model.row.detach()
    return model.out(x).square().mean()


def _samples(model: Any, ids: Tensor) -> Tensor:
    x = model.words(ids)
    x[ids[:, 0] == 2] = model.row * x.detach().mean()
    return model.out(x).square().mean()


@pytest.mark.parametrize("loss_fn", [_rows, _a_number, _samples, _transposed])
@pytest.mark.parametrize("present", [True, False])
def test_it_is_exact(loss_fn: Any, present: bool) -> None:
    model = _Special().double()
    ids = torch.randint(0, 9, (6, 5))
    ids = torch.where(ids == 2, 3, ids)
    if present:
        ids[::2, ::3] = 2
    step = fullbatch.Step(loss_fn, model, ids, microbatch=4)
    reference = plain(loss_fn, model, ids)
    model.zero_grad()
    assert compare(collect(step(ids), model), reference).within(1e-10)
