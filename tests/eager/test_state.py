"""Planning, and a step that raises, leave parameters, `.grad`, buffers, generators and Python state as they were."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullbatch
from behaviour.test_after_errors import assert_same
from cases.reference import training_flags
from eager.support import squeezed


class Stateful(nn.Module):
    """Statistics, dropout, noise of NumPy, a counter, a list, a dict, a plain object and a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self._block() for _ in range(3))
        self.norm, self.last = nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.own = np.random.default_rng(1)
        self.calls, self.kept, self.sizes = 0, [0], {"last": 0}
        self.tracker = Tracker()
        self.failing: Callable[[int], None] = lambda call: None

    @staticmethod
    def _block() -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Dropout(0.3), nn.Linear(64, 8))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.kept.append(self.calls)
        self.sizes["last"] = len(x)
        self.tracker.history.append(len(x))
        self.tracker.best = len(x)
        for block in self.blocks:
            x = block(x * float(1 + 0.01 * np.random.rand() + 0.01 * self.own.random() + 0.01 * random.random()))
        out = self.last(self.norm(x))
        self.failing(self.calls)
        return out


class Tracker:
    def __init__(self) -> None:
        self.history: list[int] = []
        self.best = 0


def loss_fn(model: Any, batch: Any) -> tuple[Tensor, int]:
    x, y = batch
    return F.mse_loss(model(x), y, reduction="sum"), y.numel()


def pair(size: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 8), torch.randn(size, 2)


def state(model: Stateful) -> dict[str, Any]:
    return {
        "parameters": {name: value.clone() for name, value in model.state_dict().items()},
        "identity": {name: id(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]},
        "gradients": {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        "gradient identity": {name: id(p.grad) for name, p in model.named_parameters()},
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [*np.random.get_state()[1].tolist(), np.random.get_state()[2]],  # type: ignore[index]
        "own": str(model.own.bit_generator.state),
        "training": training_flags(model),
        "attributes": (
            model.calls,
            list(model.kept),
            dict(model.sizes),
            list(model.tracker.history),
            model.tracker.best,
        ),
        "forwards": [name for name, module in model.named_modules() if "forward" in vars(module)],
        "grad mode": torch.is_grad_enabled(),
    }


@pytest.fixture(params=["no gradients", "gradients there"])
def model(request: pytest.FixtureRequest) -> Stateful:
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    model = Stateful()
    if request.param == "gradients there":
        loss, count = loss_fn(model, pair())
        (loss / count).backward()
    return model


def options(microbatch: int = 2) -> dict[str, Any]:
    return {"microbatch": microbatch, "allow_inexact": True}


@pytest.mark.parametrize("memory", [None, "1GiB"])
def test_planning_changes_nothing(model: Stateful, memory: str | None) -> None:
    batch, before = pair(), state(model)
    fullbatch.eager.Step(loss_fn, model, batch, memory=memory, allow_inexact=True)
    assert_same(before, state(model))
    with pytest.raises(fullbatch.ModelError):
        fullbatch.eager.Step(loss_fn, model, batch, memory=memory)
    assert_same(before, state(model))


def test_planning_with_checkpoints_changes_nothing(model: Stateful) -> None:
    batch, before = pair(8), state(model)
    squeezed(loss_fn, model, batch, allow_inexact=True)
    assert_same(before, state(model))


def test_probing_changes_nothing(model: Stateful) -> None:
    model.eval()
    batch, before = pair(), state(model)
    fullbatch.eager.Step(loss_fn, model, batch, microbatch=1)
    assert_same(before, state(model))


class Broken(Exception):
    pass


@pytest.mark.parametrize("error", [Broken("forward"), torch.OutOfMemoryError("out"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_error_in_a_forward_changes_nothing(model: Stateful, at: int, error: BaseException) -> None:
    batch = pair()
    step = fullbatch.eager.Step(loss_fn, model, batch, **options())
    before, reached = state(model), [0]

    def failing(call: int) -> None:
        reached[0] += 1
        if reached[0] == at:
            raise error

    model.failing = failing
    with pytest.raises(type(error)) as caught:
        step(batch)
    assert caught.value is error
    assert_same(before, state(model))
    model.failing = lambda call: None
    step(batch)
    assert model.calls == before["attributes"][0] + 1
    assert model.last.weight.grad is not None


class Fails(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Fails.calls += 1
        if Fails.calls == 2:
            raise Broken("backward")
        return grad


def test_an_error_in_a_backward_changes_nothing(model: Stateful) -> None:
    def failing_loss(m: Any, batch: Any) -> tuple[Tensor, int]:
        loss, count = loss_fn(m, batch)
        return Fails.apply(loss), count

    batch = pair()
    Fails.calls = 10
    step = fullbatch.eager.Step(failing_loss, model, batch, **options())
    before = state(model)
    Fails.calls = 0
    with pytest.raises(Broken):
        step(batch)
    assert_same(before, state(model))


def test_a_hook_that_raises_changes_nothing(model: Stateful) -> None:
    def raising(gradient: Tensor) -> None:
        raise Broken("hook")

    batch = pair()
    step = fullbatch.eager.Step(loss_fn, model, batch, **options())
    model.last.bias.register_hook(raising)
    before = state(model)
    with pytest.raises(Broken):
        step(batch)
    assert_same(before, state(model))


def test_counters_move_by_one_a_step_and_draws_go_on(model: Stateful) -> None:
    batch = pair()
    step = fullbatch.eager.Step(loss_fn, model, batch, **options())
    before = state(model)
    step(batch)
    after = state(model)
    assert after["attributes"][0] == before["attributes"][0] + 1
    assert len(after["attributes"][1]) == len(before["attributes"][1]) + 1
    for generator in ("torch", "python", "numpy", "own"):
        with pytest.raises(AssertionError):
            assert_same(before[generator], after[generator])
    assert any("sizes" in note or "history" in note for note in step.plan.notes if note.startswith("left as"))


def test_lists_that_loss_fn_closes_over_are_as_before_after_planning() -> None:
    log: list[float] = []

    def logged(model: Any, x: Tensor) -> tuple[Tensor, int]:
        loss = model(x).square().sum()
        log.append(loss.item())
        return loss, len(x)

    model, x = nn.Linear(3, 1), torch.randn(4, 3)
    step = fullbatch.eager.Step(logged, model, x, microbatch=2)
    assert log == []
    step(x)
    assert len(log) == 2
