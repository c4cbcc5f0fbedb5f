"""An optimizer whose state is on the host: what is left on the device is known before it runs, and trains as planned.

torchao's own class runs here, without streams and page-locked memory (`benchmarks/optimizers/offload.py`).
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import fullbatch
from fullbatch._memory._live import NUMBER
from fullbatch._memory._owned import optimizer_step

CPU = torch.device("cpu")
FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "optimizers"


@pytest.fixture(scope="module")
def offload() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield importlib.import_module("offload")


def _model() -> nn.Module:
    """Two matrices are offloaded; the last one, biases and the normalisation are small (less than 4096 values)."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 96), nn.Tanh(), nn.Linear(96, 8))


LARGE = 64 * 128 + 128 * 96
SMALL = 128 + 2 * 128 + 96 + 96 * 8 + 8


def _loss(model: Any, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


def _options(name: str) -> dict[str, Any]:
    import torchao.optim

    if name == "SGD":
        return {"optimizer_class": optim.SGD, "lr": 0.1, "momentum": 0.9}
    return {"optimizer_class": getattr(optim, name, None) or getattr(torchao.optim, name)}


@pytest.mark.parametrize("offload_gradients", [False, True])
@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "AdamW8bit"])
def test_what_is_predicted_of_device_and_host_is_what_is_measured(
    name: str, offload_gradients: bool, offload: Any
) -> None:
    options, batch = {**_options(name), "offload_gradients": offload_gradients}, torch.randn(16, 64)
    found = offload.predicted(_loss, _model, batch, **options)
    ran = offload.measured(_loss, _model, batch, **options)
    assert found.gradients == ran.gradients == 4 * (SMALL if offload_gradients else SMALL + LARGE)
    assert found.state == ran.state < 8 * SMALL + 4 * 8
    assert ran.working <= found.working <= ran.working + NUMBER
    assert abs(found.peak - ran.peak) <= 0.01 * ran.peak
    assert found.copies == ran.copies == 8 * LARGE
    assert found.host_state == ran.host_state
    assert ran.host_working <= found.host_working <= ran.host_working + NUMBER


@pytest.mark.parametrize("offload_gradients", [False, True])
def test_planned_steps_train_as_plain_ones_without_offload(offload_gradients: bool, offload: Any) -> None:
    ours, batches = _model().double(), torch.randn(4, 7, 64, dtype=torch.float64)
    plain = copy.deepcopy(ours)
    reference = optim.AdamW(plain.parameters(), lr=1e-2)
    with offload.without_cuda() as offloading:
        optimizer = offloading(ours.parameters(), lr=1e-2, offload_gradients=offload_gradients)
        step = fullbatch.Step(_loss, ours, batches[0], microbatch=2, optimizer=optimizer)
        for batch in batches:
            reference.zero_grad()
            optimizer.zero_grad()
            loss = _loss(plain, batch)
            loss.backward()
            assert abs(step(batch) - loss) <= 1e-10
            assert (ours[0].weight.grad is None) == offload_gradients
            reference.step()
            optimizer.step()
    pairs = zip(ours.parameters(), plain.parameters(), strict=True)
    furthest = max((p - q).detach().abs().max().item() for p, q in pairs)
    assert furthest <= 1e-10
    assert not torch.equal(ours[0].weight, _model().double()[0].weight)


def test_another_hook_is_not_taken_for_one_that_drops_the_gradient() -> None:
    """Nothing is known of a user's hook, so its gradient is counted."""
    model, offload_gradients = nn.Linear(64, 128), True

    def own(parameter: torch.Tensor) -> None:
        if not offload_gradients:
            parameter.grad = None

    model.weight.register_post_accumulate_grad_hook(own)
    model.bias.register_post_accumulate_grad_hook(partial(print, "made"))
    after = optimizer_step(CPU, model.parameters(), optim.AdamW(model.parameters()))
    assert after.gradients == 4 * (64 * 128 + 128)
