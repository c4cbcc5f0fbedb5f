"""Running statistics after a batch with an infinity in it: infinite, or NaN, where they are in plain PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullbatch


def _loss(model: Any, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def _batch(shape: tuple[int, ...], at: dict[tuple[int, ...], float]) -> Tensor:
    torch.manual_seed(3)
    batch = torch.randn(shape, dtype=torch.float64)
    for place, value in at.items():
        batch[place] = value
    return batch


PLACES = {
    "in the first microbatch": {(0, 1): torch.inf},
    "in the last": {(7, 1): -torch.inf},
    "in two, of one sign": {(1, 1): torch.inf, (6, 1): torch.inf, (4, 0): -torch.inf},
    "in two, of both": {(1, 1): torch.inf, (6, 1): -torch.inf},
    "beside a NaN": {(1, 1): torch.inf, (6, 1): torch.nan},
}


@pytest.mark.parametrize("rest", [(), (3, 2), (160, 160)], ids=["vectors", "small images", "large images"])
@pytest.mark.parametrize("where", PLACES, ids=list(PLACES))
def test_running_statistics(where: str, rest: tuple[int, ...]) -> None:
    places = {(*place, *(0 for _ in rest)): value for place, value in PLACES[where].items()}
    batch = _batch((8, 3, *rest), places)
    model = nn.Sequential(nn.BatchNorm2d(3) if rest else nn.BatchNorm1d(3)).double()
    expected = copy.deepcopy(model)
    _loss(expected, batch)
    for microbatch in (2, 3, 8):
        ours = copy.deepcopy(model)
        fullbatch.Step(_loss, ours, batch, microbatch=microbatch)(batch)
        for name, buffer in expected.named_buffers():
            found = dict(ours.named_buffers())[name]
            assert torch.allclose(found, buffer, rtol=1e-10, atol=1e-12, equal_nan=True), (name, found, buffer)
