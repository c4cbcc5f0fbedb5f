"""`step.prepare`: every shape is planned before the first step, and what does not fit is said at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullbatch
from cases.reference import collect, compare, plain


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_fn(net: Any, batch: Any) -> Tensor:
    return net(batch).square().mean()


def shapes(*lengths: int) -> list[Tensor]:
    return [torch.empty(4, length, 4, device="meta") for length in lengths]


def captures(step: fullbatch.Step) -> int:
    return step._frontend.captures


def agrees(step: fullbatch.Step, net: nn.Module, batch: Tensor) -> None:
    net.zero_grad()
    reference = plain(loss_fn, net, batch)
    errors = compare(collect(step(batch), net), reference)
    assert errors.within(1e-10), errors


def test_prepared_shapes_run_without_another_capture() -> None:
    """More shapes than Dynamo's own limit of recompilations, which is eight."""
    net = model()
    step = fullbatch.Step(loss_fn, net, torch.randn(4, 3, 4), microbatch=1)
    prepared = step.prepare([*shapes(*range(1, 13)), torch.randn(4, 12, 4)])
    assert len(prepared.shapes) == 12
    assert prepared.batches == 13
    assert all(parameter.grad is None for parameter in net.parameters())
    assert step.plan.batch == 4
    before = captures(step)
    assert before == 12
    for length in (12, 1, 7):
        agrees(step, net, torch.randn(4, length, 4))
    assert captures(step) == before
    agrees(step, net, torch.randn(4, 13, 4))  # beyond them: planned anew
    agrees(step, net, torch.randn(6, 2, 4))
    assert captures(step) == before + 2


def test_worst_shape_comes_first() -> None:
    net = model()
    step = fullbatch.Step(loss_fn, net, torch.randn(4, 3, 4), microbatch=1)
    prepared = step.prepare(shapes(5, 40, 9, 40))
    assert prepared.worst.form == "batch 4x40x4 float64"
    assert prepared.worst.batches == 2
    assert [shape.form.split()[1] for shape in prepared.shapes] == ["4x40x4", "4x9x4", "4x5x4"]
    step(torch.randn(4, 40, 4))
    assert step.plan.predicted_peak == prepared.worst.predicted_peak
    assert "4 batches in 3 shapes" in str(prepared)


def test_none_is_dropped_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures are dropped beyond a number of them, but not those that were asked for together."""
    net = model()
    step = fullbatch.Step(loss_fn, net, torch.randn(4, 3, 4), microbatch=1)
    step._frontend.room = 2
    step.prepare(shapes(1, 2, 3, 4, 5, 6))
    before = captures(step)
    for length in (1, 2, 3, 4, 5, 6):
        step(torch.randn(4, length, 4))
    assert captures(step) == before


def test_all_that_does_not_fit_is_said_at_once() -> None:
    net = model()
    step = fullbatch.Step(loss_fn, net, torch.randn(4, 3, 4), memory=20_000)
    with pytest.raises(fullbatch.BudgetError) as caught:
        step.prepare(shapes(2000, 3, 5000))
    assert len(caught.value.faults) == 2
    assert caught.value.faults[0].got.startswith("batch 4x2000x4 float64: 20,000 bytes")
    assert caught.value.faults[1].got.startswith("batch 4x5000x4 float64: 20,000 bytes")
    assert caught.value.faults[1].next.startswith(f"memory={caught.value.smallest}, ")
    agrees(step, net, torch.randn(4, 3, 4))
    with pytest.raises(fullbatch.BudgetError):
        step(torch.randn(4, 2000, 4))
    net.zero_grad()
    fullbatch.Step(loss_fn, net, torch.randn(4, 3, 4), memory=caught.value.smallest).prepare(shapes(2000, 5000))


def test_with_a_plan_that_was_given() -> None:
    net = model()
    plan = fullbatch.Step(loss_fn, net, torch.randn(4, 3, 4), microbatch=2).plan
    step = fullbatch.Step(loss_fn, net, torch.randn(4, 3, 4), plan=plan)
    assert step.prepare(shapes(3, 9)).worst.microbatch == 2
    assert step.plan.loaded


def test_bad_arguments() -> None:
    step = fullbatch.Step(loss_fn, model(), torch.randn(4, 3, 4), microbatch=1)
    for bad in ([], torch.randn(4, 3, 4), {"batch": torch.randn(4, 3, 4)}, 3, "batches"):
        with pytest.raises(fullbatch.BatchError, match="nothing to prepare for"):
            step.prepare(bad)  # type: ignore[arg-type]
    with pytest.raises(fullbatch.CaptureError, match="same reduction dim"):
        step.prepare([torch.empty(4, 3, 5, device="meta")])
