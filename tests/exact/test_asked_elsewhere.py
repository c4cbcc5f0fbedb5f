"""Questions that a forward asks of its inputs in another way than by torch: `torch.jit.isinstance`, NumPy on shapes."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fullbatch
from cases.reference import collect, compare, plain
from exactly import exactly

__all__ = ["exactly"]


def _joined(model: Any, batch: dict[str, Tensor | None]) -> Tensor:
    """As in the decoders of monai: a skip that may not be there."""
    found, skip = model(batch["image"]), batch["skip"]
    if skip is not None and torch.jit.isinstance(skip, torch.Tensor):
        found = found * skip
    if torch.jit.isinstance(skip, str):
        raise AssertionError
    return found.square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("has_skip", [True, False])
def test_isinstance_of_torchscript(has_skip: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    batch = {"image": torch.randn(5, 3, 6, 6), "skip": torch.randn(5, 4, 4, 4) if has_skip else None}
    expected = plain(_joined, copy.deepcopy(model), batch)
    step = fullbatch.Step(_joined, model, batch, microbatch=2)
    errors = compare(collect(step(batch), model), expected)
    assert errors.within(1e-10), errors


def _of_sides(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """As SwinUNETR checks its input: NumPy on shapes."""
    image = batch["image"]
    sides = np.array(image.shape[2:])
    if (sides % np.power(2, 2) > 0).any():
        image = image[:, :, : image.shape[2] // 4 * 4, : image.shape[3] // 4 * 4]
    return model(image).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("side", [8, 10])
def test_numpy_on_shapes(side: int) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    batch = {"image": torch.randn(5, 3, side, side)}
    expected = plain(_of_sides, copy.deepcopy(model), batch)
    step = fullbatch.Step(_of_sides, model, batch, microbatch=2)
    errors = compare(collect(step(batch), model), expected)
    assert errors.within(1e-10), errors


def _changed_by_numpy(model: Any, batch: dict[str, Tensor]) -> Tensor:
    sides = np.array((3, 1, 2))
    sides.sort()
    if (sides[:1] == 1).any():
        return model(batch["image"]).square().mean()  # type: ignore[no-any-return]
    return model(batch["image"]).mean()  # type: ignore[no-any-return]


def test_numpy_that_changes_its_array_is_not_taken_for_known() -> None:
    """Before it was sorted the array says the other branch."""
    batch, model = {"image": torch.randn(5, 3, 8, 8)}, nn.Conv2d(3, 4, 3)
    expected = plain(_changed_by_numpy, copy.deepcopy(model), batch)
    with contextlib.suppress(fullbatch.CaptureError):  # refused, or right
        step = fullbatch.Step(_changed_by_numpy, model, batch, microbatch=2)
        errors = compare(collect(step(batch), model), expected)
        assert errors.within(1e-10), errors
