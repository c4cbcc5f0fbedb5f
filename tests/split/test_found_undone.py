"""Planning a split that was found runs code of the user's on the example: what it changes there is put back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullbatch
from cases.reference import Result, collect, compare
from fullbatch import _put_back
from fullbatch._found_call import Found

Before = Callable[[Any, Any], Any]


class Net(nn.Module):
    """Most of its parameters are in `body`, whose call is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
        self.register_buffer("count", torch.zeros(()))
        self.body.register_buffer("seen", torch.zeros(()))
        self.calls, self.history, self.deep = 0, [], {"sizes": [1]}
        self.mean, self.variance = torch.zeros(5), torch.ones(5)


def example() -> list[Tensor]:
    torch.manual_seed(3)
    return [torch.randn(8, 5), torch.arange(8) % 3 > 0]


def weight(model: Any) -> nn.Parameter:
    return model.body[0].weight


def noise(model: Any, batch: Any) -> None:
    weight(model).data.add_(0.1)


def decay(model: Any, batch: Any) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.body.parameters()), 0.9)


def through_out(model: Any, batch: Any) -> None:
    torch.mul(weight(model).detach(), 0.9, out=weight(model).detach())


def other_memory(model: Any, batch: Any) -> None:
    weight(model).data = weight(model).data * 0.9


def other_parameter(model: Any, batch: Any) -> None:
    model.body[0].bias = nn.Parameter(model.body[0].bias.detach() + 1)


def evaluating(model: Any, batch: Any) -> None:
    model.body.eval()


def freezing(model: Any, batch: Any) -> None:
    model.body[2].weight.requires_grad_(False)


def seeing(model: Any, batch: Any) -> None:
    model.body.seen.add_(1)


def counting(model: Any, batch: Any) -> None:
    model.count = model.count + 1


def normalising(model: Any, batch: Any) -> None:
    with torch.no_grad():
        # It writes the running statistics, and no schema says so.
        batch[0].copy_(nn.functional.batch_norm(batch[0] + 1, model.mean, model.variance, training=True))


def attributes(model: Any, batch: Any) -> None:
    model.calls += 1
    model.history.append(model.calls)
    model.deep["sizes"].append(len(batch[0]))
    model.mean.add_(1)
    model.count.fill_(model.calls + sum(model.history) + len(model.deep["sizes"]) + model.mean.sum())


def of_the_batch(model: Any, batch: Any) -> None:
    batch[0].sub_(1.0).div_(2.0)
    batch[1].numpy()[:] ^= True


def clearing(model: Any, batch: Any) -> None:
    model.zero_grad()


def halving(model: Any, batch: Any) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def hooking(model: Any, batch: Any) -> None:
    model.body[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))


ROWS = [noise, decay, through_out, other_memory, other_parameter, evaluating, freezing, seeing, counting, normalising,
        attributes, of_the_batch, clearing, halving, hooking]  # fmt: skip


def loss_after(*before: Before) -> Callable[[Any, Any], Tensor]:
    def loss_fn(model: Any, batch: Any) -> Tensor:
        for change in before:
            change(model, batch)
        out = model.body(batch[0])
        return out[batch[1]].square().mean() * (1 + model.count + model.body.seen)

    return loss_fn


def state(model: Any, batch: Any) -> dict[str, Any]:
    """All of a model and a batch that code can change, by value."""
    found: dict[str, Any] = {f"batch {at}": each.clone() for at, each in enumerate(batch)}
    for name, each in [*model.named_parameters(), *model.named_buffers()]:
        found |= {name: each.detach().clone(), f"{name} place": each.data_ptr(), f"{name} is": id(each)}
        found |= {f"{name} wants": each.requires_grad, f"{name} grad is": id(each.grad)}
        found[f"{name} grad"] = None if each.grad is None else each.grad.clone()
    for name, module in model.named_modules():
        plain = (bool, int, list, dict, Tensor)
        for key, value in module.__dict__.items():
            if type(value) in plain and not key.startswith("_"):
                found[f"{name}: {key}"] = copy.deepcopy(value)
        found[f"{name} hooks"] = list(module._forward_pre_hooks)
    return found


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    def same(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b or a == b

    return [key for key in {**before, **after} if key not in before or not same(before[key], after.get(key))]


def made(with_gradients: bool = True) -> tuple[Net, list[Tensor]]:
    torch.manual_seed(0)
    model = Net()
    if with_gradients:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    return model, example()


def with_its_gradients(model: Net) -> Net:
    twin = copy.deepcopy(model)
    for mine, own in zip(twin.parameters(), model.parameters(), strict=True):
        mine.grad = None if own.grad is None else own.grad.clone()
    return twin


def referred(loss_fn: Callable[[Any, Any], Tensor], twin: Net, batch: Any) -> Result:
    """The plain step."""
    out = loss_fn(twin, batch)
    out.backward()
    return collect(out, twin)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.__name__)
def test_what_the_code_before_the_call_changes_is_put_back(row: Before) -> None:
    model, batch = made()
    twin, other = with_its_gradients(model), copy.deepcopy(batch)
    loss_fn, before = loss_after(row), state(model, batch)
    step = fullbatch.Step(loss_fn, model, batch, microbatch=3)
    assert isinstance(step._split, Found)
    assert changed(before, state(model, batch)) == []
    short = [each[:6].clone() for each in batch]
    kept = [each.clone() for each in short]
    step.prepare([batch, short])
    assert changed(before, state(model, batch)) == []
    assert all(map(torch.equal, short, kept))
    for _ in range(3):
        reference = referred(loss_fn, twin, other)
        errors = compare(collect(step(batch), model), reference)
        assert errors.within(1e-9), errors
        assert all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(batch, other, strict=True))
        assert (model.calls, model.history, model.deep) == (twin.calls, twin.history, twin.deep)


def test_propose_and_largest_put_back_too() -> None:
    """`largest` runs whole steps, planned and plain: what the loss changes behind the call is put back as well."""
    rows = [row for row in ROWS if row is not hooking]

    def loss_fn(model: Any, batch: Any) -> Tensor:
        loss = loss_after(*rows)(model, batch)
        weight(model).data.mul_(0.5)
        model.calls += 1
        return loss

    model, batch = made()
    before = state(model, batch)
    fullbatch.explain(loss_fn, model, batch)
    assert changed(before, state(model, batch)) == []
    fullbatch.propose(loss_fn, model, batch)
    assert changed(before, state(model, batch)) == []
    found = fullbatch.largest(loss_fn, model, batch, memory="200KB", most=8)
    assert found.plain is not None and found.fullbatch.tried
    assert changed(before, state(model, batch)) == []


def test_largest_puts_back_what_a_captured_step_writes() -> None:
    def loss_fn(model: Any, batch: Any) -> Tensor:
        weight(model).data.mul_(0.9)
        model.calls += 1
        return model.body(batch[0]).square().mean() * model.calls

    model, batch = made()
    before = state(model, batch)
    fullbatch.largest(loss_fn, model, batch, memory="200KB", most=8)
    assert changed(before, state(model, batch)) == []


def test_weights_are_not_copied_unless_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    empty = _put_back._host_bytes
    monkeypatch.setattr(_put_back, "_host_bytes", lambda size, *kind: (copied.append(size), empty(size, *kind))[1])
    model, batch = made(with_gradients=False)
    fullbatch.Step(loss_after(seeing), model, batch, microbatch=3)
    runs = copied.count(batch[0].nbytes)
    expected = sum(each.nbytes for each in (*model.buffers(), *batch))
    assert runs and sum(copied) == runs * expected
    copied.clear()
    fullbatch.Step(loss_after(noise), model, batch, microbatch=3)
    assert sum(copied) == runs * (expected + weight(model).nbytes)


def test_an_error_leaves_buffers_as_they_were_and_the_next_step_is_right() -> None:
    wrong = [False]

    def loss_fn(model: Any, batch: Any) -> Tensor:
        model.body.seen.add_(1)
        model.body[1].running_mean = model.body[1].running_mean + 1
        model.body.seen.data = model.body.seen + 1
        out = model.body(batch[0])
        model.count = model.count + 1
        if wrong[0]:
            raise ValueError("wrong")
        return out[batch[1]].square().mean() * (1 + model.count + model.body.seen)

    model, batch = made(with_gradients=False)
    twin = copy.deepcopy(model)
    step = fullbatch.Step(loss_fn, model, batch, microbatch=3)
    for at in range(5):
        wrong[0] = at in (1, 3)
        if wrong[0]:
            before = state(model, batch)
            with pytest.raises(ValueError, match="wrong"):
                step(batch)
            assert changed(before, state(model, batch)) == []
            continue
        reference = referred(loss_fn, twin, batch)
        errors = compare(collect(step(batch), model), reference)
        assert errors.within(1e-9), errors


def test_the_plan_says_that_this_code_runs_on_the_example() -> None:
    model, batch = made()
    step = fullbatch.Step(loss_after(), model, batch, microbatch=3)
    (note,) = [note for note in step.plan.notes if "cannot be captured whole" in note]
    assert "runs on the example when the step is made" in note and "closures, iterators" in note
