"""The certificate says in which precision it compared, and what it therefore did not see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fullbatch
from precision.support import MODELS, cross_entropy, under_autocast


def _step(loss_fn: Any, name: str = "mlp") -> fullbatch.Step:
    make, data = MODELS[name]
    model, batch = make(), data()
    step = fullbatch.Step(loss_fn, model, batch, microbatch=5)
    step(batch)
    _step.alive = batch  # type: ignore[attr-defined]  # verify() compares on the last batch while it lives
    return step


@pytest.mark.parametrize("name", MODELS)
def test_float64_is_compared_without_the_conversions_and_says_so(name: str) -> None:
    found = _step(under_autocast(torch.bfloat16), name).verify()
    assert found.ok and found.dtype == torch.float64 and found.tolerance == 1e-10
    assert found.autocast == ()
    assert any("without its conversions" in note and "dtype=None" in note for note in found.notes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_its_own_precision_is_compared_with_them(dtype: torch.dtype) -> None:
    found = _step(under_autocast(dtype)).verify(dtype=None)
    assert found.ok and found.dtype == torch.float32 and found.autocast == (dtype,)
    assert found.gradient_error > 1e-6
    assert f"torch.float32 under autocast to {dtype}" in str(found)
    assert not found.notes


def test_autocast_around_the_call() -> None:
    step = _step(cross_entropy)
    with torch.autocast("cpu", torch.bfloat16):
        found = step.verify(dtype=None)
    assert found.ok and found.autocast == (torch.bfloat16,)
    assert step.verify(dtype=None).autocast == ()


def test_a_step_that_computes_in_float32_itself_is_held_to_float32() -> None:
    """A loss in float32 of a model in bfloat16, as language models are written."""
    make, data = MODELS["mlp"]
    model, (x, y) = make().bfloat16(), data()

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])

    batch = x.bfloat16(), y
    step = fullbatch.Step(loss_fn, model, batch, microbatch=5)
    step(batch)
    found = step.verify()
    assert found.ok and found.dtype == torch.float64 and found.tolerance == 1e-3
    assert any("computes in torch.float32" in note for note in found.notes)
    own = step.verify(dtype=None)
    assert own.ok and own.dtype == torch.bfloat16 and not own.notes
