"""Rates over the batch, and warm-up counted in optimizer steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import fullbatch
from fullbatch.lr import scaled, warmup


def test_rules() -> None:
    assert scaled(0.1, 256, 8192) == pytest.approx(3.2)  # Goyal et al. 2017, section 5
    assert scaled(1e-3, 512, 32768, rule="sqrt") == pytest.approx(8e-3)
    assert scaled(0.1, 256, 64, "linear") == pytest.approx(0.025)


def test_all_that_is_wrong_is_named() -> None:
    with pytest.raises(fullbatch.OptimizerError) as caught:
        scaled(0.0, -1, 8, rule="cubic")  # type: ignore[arg-type]
    assert [fault.got for fault in caught.value.faults] == ["base_lr=0.0", "base_batch=-1", "rule='cubic'"]
    with pytest.raises(fullbatch.OptimizerError) as caught:
        warmup(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), 0, start=1.5)
    assert len(caught.value.faults) == 2


@pytest.mark.parametrize("wrong", ["0.1", None, True, float("inf"), float("nan"), 1j])
def test_what_is_no_number_is_named(wrong: Any) -> None:
    with pytest.raises(fullbatch.OptimizerError) as caught:
        scaled(wrong, wrong, wrong)
    assert [fault.what for fault in caught.value.faults] == [
        f"{name} is not above zero." for name in ("base_lr", "base_batch", "batch")
    ]
    if wrong is not None:
        with pytest.raises(fullbatch.OptimizerError, match="The warm-up starts nowhere"):
            warmup(_sgd(), 4, start=wrong)


def test_what_is_no_optimizer_and_no_scheduler_of_it_is_named() -> None:
    with pytest.raises(fullbatch.OptimizerError, match="no optimizer to warm up") as caught:
        warmup(None, 0)  # type: ignore[arg-type]
    assert len(caught.value.faults) == 2
    optimizer = _sgd()
    rates = [group["lr"] for group in optimizer.param_groups]
    for after in (3, CosineAnnealingLR(_sgd(), T_max=4)):
        with pytest.raises(fullbatch.OptimizerError, match="no scheduler of this optimizer"):
            warmup(optimizer, 4, after=after)  # type: ignore[arg-type]
    assert [group["lr"] for group in optimizer.param_groups] == rates


def _rates(optimizer: Any, scheduler: Any, steps: int) -> list[float]:
    """The rate that each optimizer step ran at."""
    used = []
    for _ in range(steps):
        used.append(float(optimizer.param_groups[-1]["lr"]))
        optimizer.step()
        scheduler.step()
    return used


def _sgd(lr: Any = 0.8) -> torch.optim.Optimizer:
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    for weight in weights:
        weight.grad = torch.zeros(1)
    return torch.optim.SGD([{"params": weights[:1], "lr": 5.0}, {"params": weights[1:]}], lr=lr)


@pytest.mark.parametrize("lr", [0.8, torch.tensor(0.8)])
def test_warm_up_takes_that_many_optimizer_steps(lr: Any) -> None:
    optimizer = _sgd(lr)
    rates = _rates(optimizer, warmup(optimizer, 4, start=0.25), 7)
    assert rates == pytest.approx([0.8 * share for share in (0.25, 0.4375, 0.625, 0.8125, 1, 1, 1)])
    optimizer = _sgd(lr)
    rates = _rates(optimizer, warmup(optimizer, 4), 6)
    assert rates == pytest.approx([0.8 * share for share in (0.2, 0.4, 0.6, 0.8, 1, 1)])


def test_what_comes_after_begins_at_its_beginning() -> None:
    optimizer = _sgd()
    cosine = CosineAnnealingLR(optimizer, T_max=4)
    rates = _rates(optimizer, warmup(optimizer, 3, start=0.1, after=cosine), 7)
    expected = [0.08, 0.32, 0.56, 0.8, 0.8 * 0.8535533905932737, 0.4, 0.8 * 0.14644660940672624]
    assert rates == pytest.approx(expected)


def test_a_schedule_resumes_from_its_state() -> None:
    whole, part = _sgd(), _sgd()
    full = _rates(whole, warmup(whole, 5, after=CosineAnnealingLR(whole, T_max=10)), 12)
    scheduler = warmup(part, 5, after=CosineAnnealingLR(part, T_max=10))
    begun = _rates(part, scheduler, 3)
    resumed = _sgd()
    again = warmup(resumed, 5, after=CosineAnnealingLR(resumed, T_max=10))
    resumed.load_state_dict(part.state_dict())
    again.load_state_dict(scheduler.state_dict())
    assert begun + _rates(resumed, again, 9) == pytest.approx(full, rel=1e-12)


def test_a_planned_step_is_one_step_however_many_microbatches() -> None:
    model, batch = nn.Linear(4, 1), torch.randn(12, 4)
    optimizer = fullbatch.optim.LAMB(model.parameters(), lr=0.1)
    scheduler = warmup(optimizer, 3, start=0.1)
    step = fullbatch.Step(lambda m, b: m(b).square().mean(), model, batch, microbatch=2, optimizer=optimizer)
    for share in (0.1, 0.4, 0.7, 1.0):
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        step(batch)
        optimizer.step()
        scheduler.step()
        assert ((model.weight - before).norm() / before.norm()).item() == pytest.approx(0.1 * share, rel=1e-5)
