"""After any exception everything is as before, and the next call works."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullbatch
from behaviour.support import make, pair
from cases.reference import training_flags
from fullbatch._ir import Kernel
from fullbatch._plan._schedule import Do
from fullbatch._run._executor import Executor


class Model(nn.Module):
    """Statistics, dropout, a Python counter and a frozen part: all that a step could leave half done."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(3, 8), nn.BatchNorm1d(8)
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(8, 2)
        self.average = nn.BatchNorm1d(8, momentum=None)
        self.frozen = nn.BatchNorm1d(2).eval()
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.frozen(self.last(self.drop(self.average(self.norm(self.first(x)).relu()))))


def loss_fn(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def state(model: Model) -> dict[str, Any]:
    return {
        "parameters": copy.deepcopy(model.state_dict()),
        "gradients": {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        "identity": {name: id(p.grad) for name, p in model.named_parameters()},
        "generator": torch.get_rng_state(),
        "python generator": random.getstate(),
        "training": training_flags(model),
        "counter": model.steps,
        "own attributes": sorted(vars(model.average)),
        "grad mode": torch.is_grad_enabled(),
    }


def assert_same(a: Any, b: Any, where: str = "") -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where} {key}")
    elif isinstance(a, Tensor):
        assert torch.equal(a, b), where
    else:
        assert a == b, where


@pytest.fixture(params=["no gradients", "gradients there"])
def prepared(request: pytest.FixtureRequest) -> tuple[Model, fullbatch.Step]:
    torch.manual_seed(0)
    model = Model()
    step = make(loss_fn, model, microbatch=2)
    if request.param == "gradients there":
        step(pair())
    return model, step


class Broken(Exception):
    pass


def fail_at(step: fullbatch.Step, batch: Any, part: float, error: BaseException) -> None:
    """The step's executor raises `error`, once, in place of one of the operators that it runs: the first at 0."""
    call = step._start(batch, only_plan=True)
    with pytest.raises(Exception, match=r"^$"):  # leaves once it is planned
        step._invoke(batch, call)
    _, executor = step._plan_for(call.captured, call)
    program, schedule = executor.program, executor.schedule
    by_id = program.by_id
    runs = sum(1 for action in schedule.walk() if action.do is Do.RUN and by_id[action.subject].kernel is not None)
    left = [int(part * (runs - 1))]

    def breaking(kernel: Kernel) -> Kernel:
        def run(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                raise error
            return kernel.fn(*args, **kwargs)

        return replace(kernel, fn=run)

    tasks = [task if task.kernel is None else replace(task, kernel=breaking(task.kernel)) for task in program.tasks]
    vars(executor).update(vars(Executor(replace(program, tasks=tasks), schedule)))


@pytest.mark.parametrize("part", [0.0, 0.4, 0.8, 1.0], ids=lambda p: f"at {p:.0%}")
@pytest.mark.parametrize("error", [Broken("kernel"), torch.OutOfMemoryError("out"), KeyboardInterrupt()], ids=repr)
def test_in_the_middle_of_a_run(prepared: tuple[Model, fullbatch.Step], part: float, error: BaseException) -> None:
    model, step = prepared
    twin = copy.deepcopy(model)
    for p, q in zip(twin.parameters(), model.parameters(), strict=True):  # deepcopy leaves gradients behind
        p.grad = None if q.grad is None else q.grad.clone()
    before = state(model)
    fail_at(step, pair(), part, error)
    with pytest.raises(type(error)) as caught:
        step(pair())
    assert caught.value is error
    assert_same(before, state(model))
    step(pair())
    # The same seed and the same state: what a step that never failed would have done.
    torch.set_rng_state(before["generator"])
    make(loss_fn, twin, microbatch=2)(pair())
    after, expected = state(model), state(twin)
    for what in ("parameters", "gradients", "generator", "counter"):
        assert_same(after[what], expected[what], what)


BAD: dict[str, Any] = {
    "sizes": lambda: (pair()[0], pair(4)[1]),
    "empty": lambda: pair(0),
    "shape": lambda: (torch.randn(6, 5), pair()[1]),
    "no tensor": lambda: (),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_batch(prepared: tuple[Model, fullbatch.Step], bad: str) -> None:
    model, step = prepared
    batch = BAD[bad]()
    before = state(model)
    with pytest.raises(fullbatch.FullbatchError):
        step(batch)
    assert_same(before, state(model))
    assert step(pair()).isfinite()


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.register_full_backward_hook(lambda *args: None),
        lambda model: model.last.weight.register_hook(lambda g: _raise()),
        lambda model: model.first.register_forward_hook(lambda *args: _raise()),
    ],
    ids=["refused hook", "gradient hook raises", "forward hook raises"],
)
def test_a_hook(prepared: tuple[Model, fullbatch.Step], change: Callable[[Any], Any]) -> None:
    model, step = prepared
    handle = change(model)
    before = state(model)
    # The Python counter counts what ran: a gradient hook comes after the forward.
    with pytest.raises((fullbatch.FullbatchError, Broken)):
        step(pair())
    after = state(model)
    before.pop("counter"), after.pop("counter")
    assert_same(before, after)
    handle.remove()
    assert step(pair()).isfinite()


def _raise() -> None:
    raise Broken("hook")


@pytest.mark.parametrize(
    "bad",
    [
        (lambda model, batch: loss_fn(model, batch) * batch[0].sum().item(), lambda outputs, batch: outputs),
        lambda model, batch: model(batch[0]),
        lambda model, batch: loss_fn(model, batch) + batch[0].nope,
    ],
    ids=["data-dependent", "no scalar", "raises"],
)
def test_a_step_that_cannot_be_made(prepared: tuple[Model, fullbatch.Step], bad: Any) -> None:
    model, _ = prepared
    before = state(model)
    with pytest.raises(fullbatch.FullbatchError):
        make(bad, model)
    assert_same(before, state(model))


def test_making_a_step_changes_nothing(prepared: tuple[Model, fullbatch.Step]) -> None:
    model, _ = prepared
    before = state(model)
    make(loss_fn, model, memory="1GiB")
    make(loss_fn, model, microbatch=1)
    assert_same(before, state(model))


def test_a_budget_too_small(prepared: tuple[Model, fullbatch.Step]) -> None:
    model, _ = prepared
    before = state(model)
    with pytest.raises(fullbatch.BudgetError):
        make(loss_fn, model, memory=100)
    assert_same(before, state(model))
