"""Gradients arrive as `backward()` leaves them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullbatch
from behaviour.support import BATCH, agrees, captures, clear, gradients, make, mlp, mse, pair


def assert_like_plain(loss_fn: Any, model: nn.Module, batch: Any, start: Any = lambda model: None) -> None:
    """Values, strides and None of `.grad`, from the state that `start` brings a model to."""
    plain = copy.deepcopy(model)
    start(plain)
    out = loss_fn(plain, batch)
    (out[0] if isinstance(out, tuple) else out).backward()
    step = make(loss_fn, model, batch)
    start(model)
    step(batch)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-12, msg=name)
            assert p.grad.stride() == q.grad.stride(), name
            assert p.grad.dtype == q.grad.dtype


def test_gradients_are_added() -> None:
    model, batch = mlp(), pair()
    step = make(mse, model, batch)
    step(batch)
    once = gradients(model)
    step(batch)
    step(batch)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, 3 * once[name], rtol=1e-10, atol=1e-12)


def test_an_existing_gradient_is_added_to_in_place() -> None:
    model, batch = mlp(), pair()
    step = make(mse, model, batch)
    step(batch)
    kept = model[0].weight.grad
    before = kept.clone()
    step(batch)
    assert model[0].weight.grad is kept
    torch.testing.assert_close(kept, 2 * before)


def test_gradients_in_one_flat_buffer() -> None:
    model, batch = mlp(), pair()
    step = make(mse, model, batch)
    step(batch)
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    flat, at = torch.ones_like(expected), 0
    for p in model.parameters():
        p.grad = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    step(batch)
    torch.testing.assert_close(flat, expected + 1)


def test_zero_grad_to_zeros() -> None:
    model, batch = mlp(), pair()
    step = make(mse, model, batch)
    step(batch)
    expected = gradients(model)
    model.zero_grad(set_to_none=False)
    step(batch)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-12, atol=1e-14)


class Branched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.detached = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) + self.detached(x).detach()


def test_what_the_loss_does_not_reach_keeps_none() -> None:
    model, batch = Branched(), pair()
    assert_like_plain(mse, model, batch)
    assert model.unused.weight.grad is None
    assert model.detached.weight.grad is None


def test_what_the_loss_does_not_reach_keeps_what_it_had() -> None:
    def start(model: Any) -> None:
        model.unused.weight.grad = torch.full_like(model.unused.weight, 7.0)

    assert_like_plain(mse, Branched(), pair(), start)


def test_a_parameter_multiplied_by_zero_gets_zeros_and_not_none() -> None:
    def loss_fn(model: Any, batch: Any) -> Tensor:
        return mse(model, batch) + 0 * model.unused.weight.sum()

    assert_like_plain(loss_fn, Branched(), pair())


def test_frozen_parameters() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    assert_like_plain(mse, model, pair())


def test_tied_parameters() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 2))
    model[2].weight = model[0].weight
    assert_like_plain(mse, model, pair())


def test_a_parameter_in_a_closure_gets_its_gradient() -> None:
    scale = nn.Parameter(torch.tensor(0.5))

    def loss_fn(model: Any, batch: Any) -> Tensor:
        return mse(model, batch) * scale.exp()

    model, batch = mlp(), pair()
    loss_fn(model, batch).backward()
    expected, scale.grad = scale.grad, None
    make(loss_fn, model, batch)(batch)
    torch.testing.assert_close(scale.grad, expected)


def test_a_module_in_a_closure_gets_its_gradients() -> None:
    head = nn.Linear(2, 2)

    def loss_fn(model: Any, batch: Any) -> Tensor:
        return F.mse_loss(head(model(batch[0])), batch[1])

    model, batch = mlp(), pair()
    loss_fn(model, batch).backward()
    expected = gradients(head)
    head.zero_grad()
    make(loss_fn, model, batch)(batch)
    torch.testing.assert_close(head.weight.grad, expected["weight"])


@pytest.mark.parametrize("form", [tuple, lambda pair: {"generator": pair[0], "critic": pair[1]}], ids=["tuple", "dict"])
def test_two_steps_alternate_on_one_pair_of_models(form: Any) -> None:
    models = form((mlp(), nn.Linear(2, 1)))

    def parts(models: Any) -> Any:
        return models.values() if isinstance(models, dict) else models

    def generator_loss(models: Any, z: Tensor) -> Tensor:
        generator, critic = parts(models)
        return -critic(generator(z)).mean()

    def critic_loss(models: Any, z: Tensor) -> Tensor:
        generator, critic = parts(models)
        return critic(generator(z).detach()).pow(2).mean()

    z = torch.randn(BATCH, 3)
    steps = [(make(loss_fn, models, z), loss_fn) for loss_fn in (generator_loss, critic_loss)]
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in parts(models)]
    for _ in range(3):
        for (step, loss_fn), optimizer in zip(steps, optimizers, strict=True):
            agrees(step, loss_fn, models, z)
            optimizer.step()
    assert [captures(step) for step, _ in steps] == [1, 1]


def test_each_gradient_has_memory_of_its_own() -> None:
    def loss_fn(model: Any, batch: Any) -> Tensor:
        x, y = batch
        return model(x).mean() + sum(p.sum() for p in model.parameters()) + (model[2].weight[:, :2] * y[:2]).sum()

    model, batch = mlp(), pair()
    before = [t.clone() for t in batch]
    make(loss_fn, model, batch)(batch)
    kept = gradients(model)
    for name, p in model.named_parameters():
        p.grad.fill_(1e6)
        for other, q in model.named_parameters():
            if other != name:
                torch.testing.assert_close(q.grad, kept[other])
        p.grad.copy_(kept[name])
    assert all(torch.equal(a, b) for a, b in zip(batch, before, strict=True))


def test_channels_last_model() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last)
    x = torch.randn(BATCH, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    assert_like_plain(lambda model, x: model(x).pow(2).mean(), model, x)


def test_transposed_parameter() -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 3).t())

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    assert_like_plain(mse, Transposed(), pair())


@pytest.mark.parametrize(
    "create",
    [
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        lambda params: torch.optim.AdamW(params, lr=0.01),
    ],
    ids=["SGD", "AdamW"],
)
def test_five_optimizer_steps_end_at_plain_weights(create: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    plain = copy.deepcopy(model)
    optimizer, plain_optimizer = create(model.parameters()), create(plain.parameters())
    step = fullbatch.Step(mse, model, pair(), microbatch=4, optimizer=optimizer)
    for call in range(5):
        batch = pair(6 - call % 2)
        loss = step(batch)
        optimizer.step()
        optimizer.zero_grad()
        plain_loss = mse(plain, batch)
        plain_loss.backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        torch.testing.assert_close(loss, plain_loss.detach(), rtol=1e-10, atol=0)
    for (name, value), expected in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10, msg=name)


def test_nan_in_the_batch_gives_the_nan_that_plain_gives() -> None:
    model, (x, y) = mlp(), pair()
    x = x.clone()
    x[0, 0] = float("nan")
    loss = make(mse, model, (x, y))((x, y))
    assert loss.isnan()
    ours = gradients(model)
    clear(model)
    mse(model, (x, y)).backward()
    for name, p in model.named_parameters():
        assert torch.equal(ours[name].isnan(), p.grad.isnan()), name


def test_the_loss_is_detached_and_the_step_may_be_the_last_use_of_the_batch() -> None:
    model, batch = mlp(), pair()
    step = make(mse, model, batch)
    loss = step(batch)
    assert loss.grad_fn is None
    assert not loss.requires_grad
    value = loss.item()
    step(batch)
    assert loss.item() == value, "a later call does not write into an earlier loss"


def _penalty(slopes: Tensor) -> Tensor:
    return (slopes.norm(dim=1) - 1).square().mean()


def _by_autograd(model: Any, batch: Any) -> Tensor:
    x = batch[0].clone().requires_grad_()
    (slopes,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return mse(model, batch) + _penalty(slopes)


def _by_func(model: Any, batch: Any) -> Tensor:
    return mse(model, batch) + _penalty(torch.func.grad(lambda x: model(x).sum())(batch[0]))


def test_a_gradient_penalty_is_captured_from_torch_func_as_the_refusal_says() -> None:
    model, batch = mlp(), pair()
    with pytest.raises(fullbatch.CaptureError, match=r"torch\.func\.grad\(lambda x: model\(x\)\.sum\(\)\)\(x\)"):
        make(_by_autograd, model, batch)
    assert_like_plain(_by_func, copy.deepcopy(model), batch)
    plain, penalised = copy.deepcopy(model), copy.deepcopy(model)
    _by_autograd(plain, batch).backward()
    make(_by_func, penalised, batch)(batch)
    for p, q in zip(penalised.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-12)
