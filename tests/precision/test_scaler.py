"""`step(batch, scaler=scaler)` leaves what plain PyTorch leaves: scaled gradients, and a scaler that counts steps."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullbatch
from precision.support import MODELS, SAMPLES, Watched, cross_entropy, error, in_float64, under_autocast

FLOAT16 = under_autocast(torch.float16)
SCALE = 2.0**13


def _scaler(**settings: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=settings.pop("init_scale", SCALE), **settings)


def _plain(loss_fn: Any, model: nn.Module, batch: Any, scaler: torch.amp.GradScaler) -> Tensor:
    loss = loss_fn(model, batch)
    loss = loss[0] if isinstance(loss, tuple) else loss
    scaler.scale(loss).backward()
    return loss.detach()


def _mlp() -> tuple[nn.Module, Any]:
    make, data = MODELS["mlp"]
    return make(), data()


@pytest.mark.parametrize("microbatch", [1, 3, SAMPLES // 2])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_scaled_and_the_loss_is_not(name: str, microbatch: int) -> None:
    make, data = MODELS[name]
    model, batch = make(), data()
    plain, exact = copy.deepcopy(model), in_float64(cross_entropy, model, batch)
    expected = _plain(FLOAT16, plain, batch, _scaler())
    loss = fullbatch.Step(FLOAT16, model, batch, microbatch=microbatch)(batch, scaler=_scaler())
    assert abs(loss - expected) <= 1e-3 * expected
    assert error(model, exact, SCALE) <= 1.5 * error(plain, exact, SCALE)
    assert error(model, plain) <= 8 * torch.finfo(torch.float16).eps
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_what_vanishes_without_a_scale_does_not_with_one() -> None:
    """Gradients of 1e-6 are below what float16 can hold to three digits."""

    def loss_fn(model: Any, batch: Any) -> Tensor:
        return FLOAT16(model, batch) * 1e-5

    model, batch = _mlp()
    exact = in_float64(lambda m, b: cross_entropy(m, b) * 1e-5, model, batch)
    step = fullbatch.Step(loss_fn, model, batch, microbatch=3)
    step(batch, scaler=_scaler())
    scaled = error(model, exact, SCALE)
    model.zero_grad()
    step(batch)
    assert scaled <= 5e-3
    assert error(model, exact) > 4 * scaled


def test_another_scale_captures_nothing_anew() -> None:
    model, batch = _mlp()
    step, scaler, gradients = Watched(FLOAT16, model, batch, microbatch=5), _scaler(), []
    assert step.captures == 1
    for scale in (SCALE, SCALE / 4, SCALE * 2, 3.0):
        step(batch, scaler=scaler)
        assert step.captures == 2
        gradients.append(model[0].weight.grad / scaler.get_scale())
        model.zero_grad()
        scaler.update(float(scale))
    assert all(torch.allclose(gradient, gradients[0], rtol=0, atol=1e-4) for gradient in gradients)
    step(batch)
    step(batch, scaler=scaler)
    assert step.captures == 2


def test_a_disabled_scaler_is_none() -> None:
    model, batch = _mlp()
    step = Watched(FLOAT16, model, batch, microbatch=5)
    gradients = []
    for scaler in (None, _scaler(enabled=False)):
        step(batch, scaler=scaler)
        gradients.append([p.grad for p in model.parameters()])
        model.zero_grad()
    assert step.captures == 1
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 1e6], ids=["inf", "nan", "out of range"])
def test_an_infinity_in_one_microbatch_skips_the_step_once(bad: float) -> None:
    model, (x, y) = _mlp()
    x[5, 3] = bad
    twin, states = copy.deepcopy(model), []
    for planned, net in ((True, model), (False, twin)):
        optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), _scaler()
        calls: list[int] = []
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append(1))
        before = copy.deepcopy(net.state_dict())
        step = fullbatch.Step(FLOAT16, net, (x, y), microbatch=1) if planned else None
        for count in (1, 2):
            _ = step((x, y), scaler=scaler) if step else _plain(FLOAT16, net, (x, y), scaler)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert scaler.get_scale() == SCALE / 2**count
        assert not calls
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
        states.append(scaler.state_dict())
    assert states[0] == states[1]


def test_unscale_and_clipping_after_all_microbatches() -> None:
    model, batch = _mlp()
    twin, norms = copy.deepcopy(model), []
    for planned, net in ((True, model), (False, twin)):
        optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.5), _scaler()
        step = fullbatch.Step(FLOAT16, net, batch, microbatch=3) if planned else None
        _ = step(batch, scaler=scaler) if step else _plain(FLOAT16, net, batch, scaler)
        scaler.unscale_(optimizer)
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.1))
        scaler.step(optimizer)
        scaler.update()
    assert abs(norms[0] - norms[1]) <= 2e-3 * norms[1]
    assert norms[1] > 0.1
    assert error(model, twin) <= 5e-3
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-3)


def test_growth_is_counted_once_a_step_and_not_inside_a_window() -> None:
    model, batch = _mlp()
    step = fullbatch.Step(FLOAT16, model, batch, microbatch=2)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-3), _scaler(growth_interval=3)
    scales = []
    for _ in range(6):
        for _ in range(2):  # a window of two batches
            step(batch, scaler=scaler)
            scales.append(scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scales == [SCALE] * 6 + [SCALE * 2] * 6
    assert scaler.get_scale() == SCALE * 4


@pytest.mark.parametrize("name", ["mlp", "convolutions"])
def test_twenty_steps_end_where_plain_ones_do(name: str) -> None:
    make, data = MODELS[name]
    model, batches = make(), [data() for _ in range(20)]
    batches[2][0][2] = 1e6
    twin, losses, scales = copy.deepcopy(model), [], []
    for planned, net in ((True, model), (False, twin)):
        optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9), _scaler(growth_interval=5)
        step = Watched(FLOAT16, net, batches[0], microbatch=5) if planned else None
        for batch in batches:
            losses.append(step(batch, scaler=scaler) if step else _plain(FLOAT16, net, batch, scaler))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        assert step is None or step.captures == 2
    assert scales[:20] == scales[20:]
    assert min(scales) < SCALE < max(scales)
    ours, plain = (torch.stack(half) for half in (losses[:20], losses[20:]))
    finite = plain.isfinite()
    assert torch.equal(ours.isfinite(), finite) and finite.sum() >= 18
    assert torch.allclose(ours[finite], plain[finite], rtol=1e-2)
    moved = max((p - q).abs().max() for p, q in zip(model.parameters(), make().parameters(), strict=True))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert (p - q).abs().max() <= 2e-2 * moved


def test_aux_is_not_scaled_and_gradients_are_added_to() -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        loss = FLOAT16(model, batch)
        return loss, {"loss": loss}

    model, batch = _mlp()
    twin, scaler = copy.deepcopy(model), _scaler()
    step = fullbatch.Step(loss_fn, model, batch, microbatch=5)
    for _ in range(2):
        loss, aux = step(batch, scaler=scaler)
        _plain(loss_fn, twin, batch, _scaler())
    assert torch.equal(loss, aux["loss"]) and not loss.requires_grad and loss < 100
    assert error(model, twin) <= 8 * torch.finfo(torch.float16).eps


def test_a_plan_saved_with_a_scaler_is_used_again(tmp_path: Path) -> None:
    model, batch = _mlp()
    step = fullbatch.Step(FLOAT16, model, batch, microbatch=5)
    step(batch, scaler=_scaler())
    step.plan.save(tmp_path / "plan.json")
    again = Watched(FLOAT16, model, batch, plan=tmp_path / "plan.json")
    again(batch, scaler=_scaler())
    assert again.captures == 1
    assert again.plan.loaded and again.plan.microbatch == 5


def test_a_scaler_inside_of_loss_fn_is_refused_with_what_to_write() -> None:
    model, batch = _mlp()
    scaler = _scaler()
    with pytest.raises(fullbatch.CaptureError, match=r"step\(batch, scaler=scaler\)"):
        fullbatch.Step(lambda m, b: scaler.scale(FLOAT16(m, b)), model, batch)


def test_what_is_no_scaler_is_refused() -> None:
    model, batch = _mlp()
    step = fullbatch.Step(FLOAT16, model, batch, microbatch=5)
    with pytest.raises(fullbatch.ModelError, match=r"float: 2\.0"):
        step(batch, scaler=2.0)  # type: ignore[arg-type]
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_scaler_can_be_used_where_gradients_are_off(mode: Any) -> None:
    model, batch = _mlp()
    step, scaler = fullbatch.Step(FLOAT16, model, batch, microbatch=5), _scaler()
    with mode():
        step(batch, scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.step(optimizer)
    scaler.update()
    step(batch, scaler=scaler)
    assert all(p.grad.isfinite().all() for p in model.parameters())
