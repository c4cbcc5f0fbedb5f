"""What runs again makes no sum a second time: of a convolution's gradients only that of its input."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import fullbatch
from cases.watched import Watched
from fullbatch._ir import Kind, Program, Task
from fullbatch._plan._restore import order_of
from fullbatch._plan._schedule import Do, Schedule
from fullbatch._plan._side import Candidate
from fullbatch._run._executor import Executor
from fullbatch._run._interpreter import Interpreter


def _loss(model: Any, batch: Any) -> Any:
    return model(batch).square().mean()


class _Net(nn.Module):
    """Convolutions of every kind, each between two normalisations: its input's gradient is read in two stages."""

    def __init__(self, conv: type[nn.Module], norm: type[nn.Module], **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            *(layer for _ in range(3) for layer in (conv(4, 4, 3, padding=1, **settings), norm(4), nn.ReLU()))
        )
        self.double()

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


NETS = {
    "plain": (_Net(nn.Conv2d, nn.BatchNorm2d), (4, 8, 8)),
    "without_bias": (_Net(nn.Conv2d, nn.BatchNorm2d, bias=False), (4, 8, 8)),
    "grouped": (_Net(nn.Conv2d, nn.BatchNorm2d, groups=2), (4, 8, 8)),
    "transposed": (_Net(nn.ConvTranspose2d, nn.BatchNorm2d), (4, 8, 8)),
    "one_dimension": (_Net(nn.Conv1d, nn.BatchNorm1d), (4, 8)),
    "three_dimensions": (_Net(nn.Conv3d, nn.BatchNorm3d), (4, 4, 4, 4)),
}


def _nothing_held(name: str, dtype: torch.dtype = torch.float64) -> tuple[Watched, Candidate]:
    model, shape = NETS[name]
    torch.manual_seed(0)
    step = Watched(_loss, deepcopy(model).to(dtype), torch.randn(6, *shape, dtype=dtype), microbatch=2)
    side = step.captured.side(2)
    return step, side.hold_nothing(2, side.estimate)


def _runs(program: Program, schedule: Schedule) -> list[Task]:
    return [program.by_id[action.subject] for action in schedule.actions if action.do is Do.RUN]


@pytest.mark.parametrize("name", NETS)
def test_a_convolution_that_runs_again_makes_the_gradient_of_its_input_alone(name: str) -> None:
    step, candidate = _nothing_held(name)
    program = step.captured.program
    runs = _runs(program, candidate.schedule)
    gradients = [task for task in runs if task.kernel is not None and "convolution_backward" in task.kernel.name]
    first = [task for task in gradients if task.repeats is None]
    again = [task for task in gradients if task.repeats is not None]
    assert len(first) == 3 * 3  # of three layers in three microbatches
    assert len(again) >= 2 * 3  # the lowest layer's input needs no gradient
    for task in again:
        assert not any(out is not None and program.values[out].partial for out in task.outputs)
        assert task.flops * 2 == program.by_id[task.repeats or 0].flops


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", NETS)
def test_the_same_bits_as_where_everything_is_held(name: str, dtype: torch.dtype) -> None:
    step, candidate = _nothing_held(name, dtype)
    program = step.captured.program
    step(torch.randn(6, *NETS[name][1], dtype=dtype))
    inputs = {at: step.inputs[at].detach() for at in program.inputs}
    held = candidate.side.hold_all(2).schedule
    assert not any(task.repeats is not None for task in _runs(program, held))
    expected = Executor(program, held).run(inputs)
    for made in (Executor(program, candidate.schedule), Interpreter(program, candidate.schedule)):
        assert all(torch.equal(one, other) for one, other in zip(expected, made.run(inputs), strict=True))


@pytest.mark.parametrize("name", NETS)
def test_operations_are_those_that_the_plan_counts(name: str) -> None:
    """Also of what runs in place of a first run: torch's own counter sees what was predicted."""
    step, candidate = _nothing_held(name)
    program = step.captured.program
    step(torch.randn(6, *NETS[name][1], dtype=torch.float64))
    inputs = {at: step.inputs[at].detach() for at in program.inputs}
    executor = Executor(program, candidate.schedule)
    with FlopCounterMode(display=False) as counter:
        executor.run(inputs)
    predicted = sum(
        task.flops * (2 if task.kind is Kind.LOCAL else 6) // 6 for task in _runs(program, candidate.schedule)
    )
    counted = counter.get_total_flops()
    assert counted == predicted if name != "grouped" else counted > predicted  # torch counts one group there


def test_bytes_of_what_runs_again_are_measured_too() -> None:
    """At both sizes of microbatches of which the last is smaller."""
    model, shape = NETS["plain"]
    step = Watched(_loss, model, torch.randn(5, *shape, dtype=torch.float64), microbatch=2)
    cost = step.captured.side(2).exact(2)
    assert cost is not None
    program = step.captured.program
    for task in program.repeats:
        for samples in (2, 1):
            less, full = cost(task, samples), cost(program.by_id[task.repeats or 0], samples)
            assert less.peak < full.peak
            assert less.outs == full.outs[:1]


def test_a_plan_counts_them_as_runs_again() -> None:
    step, candidate = _nothing_held("plain")
    program = step.captured.program
    runs = [task for task in _runs(program, candidate.schedule) if task.kind is Kind.LOCAL and not task.view]
    distinct = {task.id if task.repeats is None else task.repeats for task in runs}
    assert candidate.schedule.recomputes(program) == len(runs) - 3 * len(distinct)


def test_a_plan_that_runs_them_is_saved_and_loaded() -> None:
    step, candidate = _nothing_held("plain")
    plan = replace(step.plan, order=order_of(candidate.schedule))
    read = fullbatch.Plan.from_json(plan.to_json())
    assert read == plan
    nets = [deepcopy(NETS["plain"][0]) for _ in range(2)]
    batch = torch.randn(6, *NETS["plain"][1], dtype=torch.float64)
    loaded = fullbatch.Step(_loss, nets[0], batch, plan=read)
    assert loaded.plan.loaded
    assert loaded.plan.recomputed == candidate.schedule.recomputes(step.captured.program)
    loss, expected = loaded(batch), _loss(nets[1], batch)
    expected.backward()
    assert (loss - expected).abs() <= 1e-12 * expected.abs()
    largest = max(float(weight.grad.abs().max()) for weight in nets[1].parameters() if weight.grad is not None)
    for mine, theirs in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert float((mine.grad - theirs.grad).abs().max()) <= 1e-9 * largest


def test_plans_are_compared_by_what_ran_again() -> None:
    step, candidate = _nothing_held("plain")
    other = replace(step.plan, order=order_of(candidate.schedule))
    program = step.captured.program
    again = [task for task in _runs(program, candidate.schedule) if task.repeats is not None]
    found = [item for item in step.plan.diff(other).recomputed if "convolution_backward" in item.operator]
    assert sum(item.other for item in found) == len(again) // 3  # of one microbatch
    assert all(item.this == 0 for item in found)
