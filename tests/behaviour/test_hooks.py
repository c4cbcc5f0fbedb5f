"""Hooks run once a step, on the gradient of the whole batch, or are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

import fullbatch
from behaviour.support import agrees, gradients, make, mlp, mse, pair


def test_register_hook_sees_the_whole_gradient_once() -> None:
    model, batch, seen = mlp(), pair(), []
    model[0].weight.register_hook(lambda g: seen.append(g.clone()))
    make(mse, model, batch, microbatch=2)(batch)
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], model[0].weight.grad)


def test_register_hook_may_return_a_new_gradient() -> None:
    model, batch = mlp(), pair()
    step = make(mse, model, batch)
    step(batch)
    plain = gradients(model)
    model.zero_grad()
    model[2].weight.register_hook(lambda g: g * 2)
    model[2].weight.register_hook(lambda g: g + 1)
    step(batch)
    torch.testing.assert_close(model[2].weight.grad, plain["2.weight"] * 2 + 1)
    torch.testing.assert_close(model[0].weight.grad, plain["0.weight"])


def test_register_hook_is_given_the_new_gradient_and_not_the_sum() -> None:
    model, batch, seen = mlp(), pair(), []
    step = make(mse, model, batch)
    step(batch)
    first = model[0].weight.grad.clone()
    model[0].weight.register_hook(lambda g: seen.append(g.clone()))
    step(batch)
    torch.testing.assert_close(seen[0], first)


def test_register_hook_may_change_its_gradient_without_changing_others() -> None:
    def loss_fn(model: Any, batch: Any) -> Tensor:
        return mse(model, batch) + sum(p.sum() for p in model.parameters())

    model, batch = mlp(), pair()
    step = make(loss_fn, model, batch)
    step(batch)
    plain = gradients(model)
    model.zero_grad()
    model[0].bias.register_hook(lambda g: g.zero_())
    step(batch)
    assert not model[0].bias.grad.any()
    for name in ("0.weight", "2.weight", "2.bias"):
        torch.testing.assert_close(gradients(model)[name], plain[name])


def test_register_hook_on_a_batch_tensor() -> None:
    model, (x, y), seen = mlp(), pair(), []
    x = x.clone().requires_grad_()
    x.register_hook(lambda g: seen.append(g.clone()))
    make(mse, model, (x, y))((x, y))
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], x.grad)


def test_post_accumulate_hook_runs_once_after_the_addition() -> None:
    model, batch, seen = mlp(), pair(), []
    step = make(mse, model, batch)
    step(batch)
    once = model[0].weight.grad.clone()
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    step(batch)
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], 2 * once)


def test_optimizer_in_a_post_accumulate_hook() -> None:
    model, batch = mlp(), pair()
    step = make(mse, model, batch)
    step(batch)
    expected = [p.detach() - 0.1 * p.grad for p in model.parameters()]
    model.zero_grad()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def update(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    step(batch)
    for p, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.detach(), value, rtol=1e-12, atol=1e-14)
        assert p.grad is None
    agrees_after = step(batch)
    assert agrees_after.isfinite()


def test_a_hook_that_removes_itself() -> None:
    model, batch, seen = mlp(), pair(), []
    handles: list[Any] = []

    def once(p: Tensor) -> None:
        seen.append(p)
        handles[0].remove()

    handles.append(model[0].weight.register_post_accumulate_grad_hook(once))
    step = make(mse, model, batch)
    step(batch)
    step(batch)
    assert len(seen) == 1


def test_module_forward_hooks_are_part_of_the_step() -> None:
    model, batch = mlp(), pair()
    model[0].register_forward_hook(lambda module, args, out: out * 2)
    model[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    agrees(make(mse, model, batch), mse, model, batch)


def test_a_forward_hook_that_stores_sees_the_whole_batch_once() -> None:
    model, batch, seen = mlp(), pair(), []
    model[0].register_forward_hook(lambda module, args, out: seen.append(out.detach()))
    step = make(mse, model, batch)
    assert not seen, "planning runs nothing"
    step(batch)
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], F.linear(batch[0], model[0].weight, model[0].bias).detach())


def test_a_hook_on_a_tensor_inside_loss_fn() -> None:
    def loss_fn(model: Any, batch: Any) -> Tensor:
        hidden = model[0](batch[0])
        hidden.register_hook(lambda g: g / g.norm())  # of the whole batch's gradient
        return F.mse_loss(model[2](model[1](hidden)), batch[1])

    model, batch = mlp(), pair()
    agrees(make(loss_fn, model, batch), loss_fn, model, batch)


REFUSED = {
    "full backward hook": lambda m: m[0].register_full_backward_hook(named_hook),
    "full backward pre-hook": lambda m: m[0].register_full_backward_pre_hook(named_hook),
    "global forward hook": lambda m: torch_module.register_module_forward_hook(named_hook),
    "global forward pre-hook": lambda m: torch_module.register_module_forward_pre_hook(named_hook),
    "global full backward hook": lambda m: torch_module.register_module_full_backward_hook(named_hook),
}


def named_hook(*args: Any) -> None:
    return None


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("when", ["before", "after"])
def test_other_hooks_are_refused_by_name(kind: str, when: str) -> None:
    model, batch = mlp(), pair()
    step = make(mse, model, batch) if when == "after" else None
    handle = REFUSED[kind](model)
    try:
        with pytest.raises(fullbatch.ModelError, match="named_hook") as refused:
            step(batch) if step is not None else make(mse, model, batch)
    finally:
        handle.remove()
    if "global" not in kind:
        assert "on 0 " in str(refused.value), "the module is named"
    assert all(p.grad is None for p in model.parameters())
    agrees(step or make(mse, model, batch), mse, model, batch)


def test_a_hook_that_returns_no_gradient_is_an_error_that_changes_nothing() -> None:
    model, batch = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), pair()
    handle = model[2].bias.register_hook(lambda g: torch.zeros(7))
    step = make(mse, model, batch)
    with pytest.raises(fullbatch.ModelError, match="hook"):
        step(batch)
    assert all(p.grad is None for p in model.parameters())
    assert model[1].num_batches_tracked == 0
    handle.remove()
    agrees(step, mse, model, batch)
