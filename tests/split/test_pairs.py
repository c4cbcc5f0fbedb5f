"""`(forward, loss)` gives the loss, gradients, buffers and aux of the plain step, at every microbatch and budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fullbatch
from fullbatch import _captured
from fullbatch._ir import Kind, Program
from split.support import BATCH, CASES, agrees, images, step_of


@pytest.mark.parametrize("microbatch", [1, 3, (BATCH + 1) // 2, BATCH])
@pytest.mark.parametrize("name", CASES)
def test_every_microbatch(name: str, microbatch: int) -> None:
    case = CASES[name]()
    step = step_of(case, microbatch=microbatch)
    agrees(step, case)
    agrees(step, case)  # now the loss's memory is known, and the plan another


@pytest.mark.parametrize("name", CASES)
def test_budgets_down_to_the_least(name: str) -> None:
    forward, loss, model, batch = CASES[name]()
    calls: list[int] = []

    def counted(outputs: Any, batch: Any) -> Any:
        calls.append(1)
        return loss(outputs, batch)

    case = forward, counted, model, batch
    probe = step_of(case, microbatch=BATCH)
    agrees(probe, case)
    owned, plain = probe.plan.owned, probe.plan.plain_peak
    recomputed = 0
    for share in (0.8, 0.6, 0.45, 0.3):
        budget = int(owned + share * (plain - owned))
        case[2].zero_grad(set_to_none=True)
        try:
            step = step_of(case, memory=budget)
        except fullbatch.BudgetError as error:
            step = step_of(case, memory=error.smallest)
        calls.clear()
        agrees(step, case)
        assert len(calls) == 2  # the plain step's, and one
        recomputed += step.plan.recomputed
    if name in ("boolean_mask", "hungarian_matching"):
        assert recomputed


def test_no_plan_can_run_the_loss_again(monkeypatch: pytest.MonkeyPatch) -> None:
    programs: list[Program] = []
    for name in ("build", "build_whole"):
        made = getattr(_captured, name)
        monkeypatch.setattr(_captured, name, lambda *args, made=made: programs.append(made(*args)) or programs[-1])
    step_of(CASES["boolean_mask"](), microbatch=3)
    assert len(programs) == 2
    for program in programs:
        (loss,) = (task for task in program.tasks if task.eager)
        assert loss.kind is Kind.ONCE
        assert not any(program.values[value].local for value in (*loss.inputs, *loss.outputs) if value is not None)


def test_a_short_batch_and_accumulation() -> None:
    case = CASES["boolean_mask"]()
    step = step_of(case, microbatch=3)
    agrees(step, case)
    agrees(step, case, images(5))
    before = [parameter.grad.clone() for parameter in case[2].parameters()]
    step(images(5))
    for parameter, grad in zip(case[2].parameters(), before, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * grad, rtol=1e-9, atol=1e-12)


def test_compiled_steps_run_the_loss_once() -> None:
    forward, loss, model, batch = CASES["boolean_mask"]()
    calls = []

    def counted(outputs: Tensor, batch: Any) -> Tensor:
        calls.append(outputs.shape)
        return loss(outputs, batch)

    case = forward, counted, model, batch
    step = step_of(case, microbatch=3, compile=True)
    assert not calls
    step(batch)
    assert calls == [(BATCH, 4, 8, 8)]
    agrees(step, case)


@pytest.mark.parametrize("microbatch", [3, BATCH])
def test_a_saved_plan_is_for_the_same_step(tmp_path: Any, microbatch: int) -> None:
    case = CASES["boolean_mask"]()
    step_of(case, microbatch=microbatch).plan.save(tmp_path / "plan.json")
    step = step_of(CASES["boolean_mask"](), plan=tmp_path / "plan.json")
    assert step.plan.loaded
    other = CASES["nest_with_unused_and_integer_outputs"]()
    with pytest.raises(fullbatch.PlanError):
        step_of(other, plan=tmp_path / "plan.json")


@pytest.mark.parametrize("name", CASES)
def test_the_certificate(name: str) -> None:
    case = CASES[name]()
    step = step_of(case, microbatch=3)
    step(case[3])
    before = [None if p.grad is None else p.grad.clone() for p in case[2].parameters()]
    certificate = step.verify()
    assert certificate.ok and certificate.gradient_error < 1e-11, certificate
    for parameter, grad in zip(case[2].parameters(), before, strict=True):
        assert (parameter.grad is None) == (grad is None)
        assert grad is None or torch.equal(parameter.grad, grad)


def test_the_peak_is_as_predicted_once_the_loss_has_run() -> None:
    case = CASES["boolean_mask"]()
    for microbatch in (1, 3, BATCH):
        step = step_of(case, microbatch=microbatch)
        assert any("not in the predicted peak" in note for note in step.plan.notes)
        for _ in range(2):
            step(case[3])
            case[2].zero_grad(set_to_none=True)
        measured = fullbatch.measure(lambda step=step: step(case[3]))
        case[2].zero_grad(set_to_none=True)
        assert any("it took" in note for note in step.plan.notes)
        assert measured.peak <= step.plan.activations <= 1.05 * measured.peak
