"""A GradScaler whichever microbatch overflows, and with several optimizers and clipping by value."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fullbatch
from precision.support import MODELS, SAMPLES, cross_entropy, under_autocast

FLOAT16 = under_autocast(torch.float16)
SCALE = 256.0


def _scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=SCALE)


@pytest.mark.parametrize("at", [0, SAMPLES // 2, SAMPLES - 1], ids=["the first", "one between", "the last"])
def test_whichever_microbatch_overflows_the_step_is_skipped_once(at: int) -> None:
    make, data = MODELS["mlp"]
    model, (x, y) = make(), data()
    step = fullbatch.Step(FLOAT16, model, (x, y), microbatch=5)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), _scaler()
    bad = x.clone()
    bad[at, 0] = float("inf")
    before = copy.deepcopy(model.state_dict())
    step((bad, y), scaler=scaler)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == SCALE / 2
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimizer.zero_grad()
    step((x, y), scaler=scaler)  # nothing of it is left
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == SCALE / 2
    assert not all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_several_optimizers_and_clipping_by_value() -> None:
    make, data = MODELS["mlp"]
    model, batch = make(), data()
    plain, start, limit = copy.deepcopy(model), copy.deepcopy(model), 0.02
    step = fullbatch.Step(FLOAT16, model, batch, microbatch=5)
    scaled = 0.0
    for net in (plain, model):
        first, *rest = net.parameters()
        optimizers, scaler = [torch.optim.SGD([first], lr=0.5), torch.optim.SGD(rest, lr=0.2, momentum=0.9)], _scaler()
        for _ in range(3):
            if net is model:
                step(batch, scaler=scaler)
            else:
                scaler.scale(FLOAT16(net, batch)).backward()
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
                with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
                    scaler.unscale_(optimizer)
            scaled = max(scaled, *(p.grad.abs().max().item() for p in net.parameters()))
            nn.utils.clip_grad_value_(net.parameters(), limit)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad()
    assert scaled > limit, "it did clip"
    for p, q, s in zip(model.parameters(), plain.parameters(), start.parameters(), strict=True):
        assert (p - q).abs().max() <= 2e-2 * (q - s).abs().max()


def test_the_loss_that_a_bad_batch_has_is_shown() -> None:
    """An infinity is no error: the loss says it, as in plain PyTorch."""
    make, data = MODELS["mlp"]
    model, (x, y) = make(), data()
    x[3, 1] = float("nan")
    loss = fullbatch.Step(FLOAT16, model, (x, y), microbatch=5)((x, y), scaler=_scaler())
    assert loss.isnan() and cross_entropy(model, (x, y)).isnan()
