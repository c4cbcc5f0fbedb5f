"""The memory-time curve of a step: planned by its own planner, without running it."""

from __future__ import annotations

import gc
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fullbatch


def _loss(model: Any, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh())]
    return nn.Sequential(*layers)


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(32, 16), torch.randn(32, 16)


def test_the_curve_goes_from_the_least_budget_to_that_of_the_plain_step() -> None:
    model, batch = _model(), _batch()
    step = fullbatch.Step(_loss, model, batch, microbatch=2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    curve = step.plan.frontier()
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in before.items()), "nothing ran"
    assert all(parameter.grad is None for parameter in model.parameters())
    points = curve.points
    assert 6 <= len(points) <= 8
    assert [point.budget for point in points] == sorted({point.budget for point in points})
    for point in points:
        assert point.predicted_peak <= point.budget
        assert 1 <= point.microbatch <= step.plan.batch
        assert 0 <= point.bound <= point.overhead
        assert point.gap == point.overhead - point.bound
    assert points[0].predicted_peak == points[0].budget
    assert points[0].overhead > points[-1].overhead
    assert points[-1].overhead < 0.05
    with pytest.raises(fullbatch.BudgetError):
        fullbatch.Step(_loss, model, batch, memory=points[0].budget // 2)


def test_each_point_is_the_plan_that_a_step_makes() -> None:
    model, batch = _model(), _batch()
    step = fullbatch.Step(_loss, model, batch, microbatch=8)
    ample = step.plan.frontier().points[-1].budget
    for point in step.plan.frontier([ample, ample * 3 // 4]).points:
        plan = fullbatch.Step(_loss, model, batch, memory=point.budget).plan
        assert plan.predicted_peak == point.predicted_peak
        assert plan.microbatch == point.microbatch
        assert plan.overhead == point.overhead
        assert plan.bound <= point.bound


def test_budgets_may_be_named_as_memory_is() -> None:
    step = fullbatch.Step(_loss, _model(), _batch(), microbatch=8)
    curve = step.plan.frontier(["1GiB", 2**29])
    assert [point.budget for point in curve.points] == [2**29, 2**30]
    assert [point.budget for point in step.plan.frontier([2**30, "1GiB"]).points] == [2**30]


def test_all_wrong_budgets_are_named_at_once() -> None:
    plan = fullbatch.Step(_loss, _model(), _batch(), microbatch=8).plan
    with pytest.raises(fullbatch.MemorySizeError) as caught:
        plan.frontier(["1GiB", "much", -3, True])
    assert len(caught.value.faults) == 3
    assert all(text in str(caught.value) for text in ("'much'", "-3", "True"))
    with pytest.raises(fullbatch.MemorySizeError, match="no budget"):
        plan.frontier([])
    with pytest.raises(fullbatch.BudgetError) as small:
        plan.frontier([1000, "1GiB", 2000])
    assert len(small.value.faults) == 2
    assert "1,000 bytes" in str(small.value)
    assert "2,000 bytes" in str(small.value)
    assert plan.frontier([small.value.smallest]).points[0].predicted_peak <= small.value.smallest


def test_the_curve_prints_and_is_json() -> None:
    curve = fullbatch.Step(_loss, _model(), _batch(), microbatch=8).plan.frontier(["1MiB", "1GiB"])
    text = str(curve)
    assert "1 GiB" in text
    assert "batch of 32" in text
    found = json.loads(curve.to_json())
    assert found["format"] == "fullbatch-frontier"
    assert [row["budget"] for row in found["points"]] == [2**20, 2**30]
    assert set(found["points"][0]) == {"budget", "predicted_peak", "microbatch", "overhead", "bound", "gap"}


def test_a_plan_by_itself_says_to_make_the_step_first() -> None:
    model, batch = _model(), _batch()
    step = fullbatch.Step(_loss, model, batch, microbatch=8)
    plan = fullbatch.Plan.from_json(step.plan.to_json())
    assert plan.frontier(["1GiB"]).points, "a step for this program is alive"
    del step
    torch._dynamo.reset()
    gc.collect()
    with pytest.raises(fullbatch.PlanError, match=r"plan=plan\)"):
        plan.frontier()
    step = fullbatch.Step(_loss, model, batch, plan=plan)
    assert step.plan.frontier(["1GiB"]).points
    assert plan.frontier(["1GiB"]).points
