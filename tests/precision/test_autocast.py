"""A planned step under autocast is as near to the gradient in float64 as the plain one, and never without autocast."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fullbatch
from precision.support import MODELS, SAMPLES, Watched, cross_entropy, error, in_float64, under_autocast

HALF = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("microbatch", [1, 3, SAMPLES // 2])
@pytest.mark.parametrize("name", MODELS)
def test_the_error_is_that_of_the_plain_step(name: str, microbatch: int, dtype: torch.dtype) -> None:
    make, data = MODELS[name]
    model, batch = make(), data()
    loss_fn, exact = under_autocast(dtype), in_float64(cross_entropy, model, batch)
    plain = copy.deepcopy(model)
    expected = loss_fn(plain, batch)
    expected.backward()
    loss = fullbatch.Step(loss_fn, model, batch, microbatch=microbatch)(batch)
    assert error(model, exact) <= 1.5 * error(plain, exact)
    assert error(model, plain) <= 8 * torch.finfo(dtype).eps
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    assert loss.dtype == expected.dtype
    assert abs(loss - expected) <= torch.finfo(dtype).eps * abs(expected)
    for (buffer, ours), (_, other) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.allclose(ours, other, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps), buffer


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("weights", ["float32", "half"])
def test_frozen_batch_normalisation(weights: str, dtype: torch.dtype) -> None:
    """Its kernels look at the dtype of statistics that hold nothing, which tracing gets wrong."""
    make, data = MODELS["convolutions"]
    model, (x, y) = make(), data()
    model(x)
    model.eval()
    if weights == "half":
        model, x = model.to(dtype), x.to(dtype)
    loss_fn = cross_entropy if weights == "half" else under_autocast(dtype)
    plain, exact = copy.deepcopy(model), in_float64(cross_entropy, model, (x, y))
    loss_fn(plain, (x, y)).backward()
    fullbatch.Step(loss_fn, model, (x, y), microbatch=5)((x, y))
    assert error(model, exact) <= 1.5 * error(plain, exact)
    assert [p.grad.dtype for p in model.parameters()] == [p.grad.dtype for p in plain.parameters()]


def test_a_long_batch_loses_nothing() -> None:
    """2,048 samples one by one: kept in bfloat16 the sum would stand still long before its end."""
    model, batch = nn.Linear(16, 4), (torch.randn(2048, 16) + 1, torch.randint(0, 4, (2048,)))
    loss_fn, exact = under_autocast(torch.bfloat16), in_float64(cross_entropy, model, batch)
    plain, by_hand = copy.deepcopy(model), copy.deepcopy(model).bfloat16()
    loss_fn(plain, batch).backward()
    for x, y in zip(batch[0].split(1), batch[1].split(1), strict=True):
        (cross_entropy(by_hand, (x.bfloat16(), y)) / 2048).backward()
    fullbatch.Step(loss_fn, model, batch, microbatch=1)(batch)
    assert error(model, exact) <= 1.5 * error(plain, exact)
    assert error(by_hand, exact) > 10 * error(model, exact)


def _float_loss(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    out = model(batch[0])
    return nn.functional.cross_entropy(out.float(), batch[1]), out


def test_around_the_call_it_acts_as_for_the_plain_step() -> None:
    model, batch = MODELS["mlp"][0](), MODELS["mlp"][1]()
    step = Watched(_float_loss, model, batch, microbatch=5)
    assert step(batch)[1].dtype == torch.float32
    for captures, dtype in ((2, torch.bfloat16), (3, torch.float16), (3, torch.bfloat16)):
        model.zero_grad()
        plain = copy.deepcopy(model)
        with torch.autocast("cpu", dtype):
            out = step(batch)[1]
            loss = _float_loss(plain, batch)[0]
        loss.backward()
        assert out.dtype == dtype
        assert error(model, plain) <= 8 * torch.finfo(dtype).eps
        assert step.captures == captures
        assert step.captured.joint.autocast == (dtype,)
    assert step(batch)[1].dtype == torch.float32
    assert step.captures == 3


def test_the_backward_stands_outside_of_an_autocast_around_the_call() -> None:
    """The gradient of a float32 product is a float32 product, whatever stands around the call."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            with torch.autocast("cpu", enabled=False):
                return x @ weight

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            return grads[0] @ weight.T, x.T @ grads[0]

    model = nn.ParameterList([torch.randn(16, 5)])
    batch = MODELS["mlp"][1]()
    plain = copy.deepcopy(model)

    def loss_fn(model: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(Product.apply(batch[0], model[0]), batch[1])

    with torch.autocast("cpu", torch.bfloat16):
        fullbatch.Step(loss_fn, model, batch, microbatch=5)(batch)
        loss = loss_fn(plain, batch)
    loss.backward()
    assert error(model, plain) <= 1e-6


@pytest.mark.parametrize("microbatch", [3, SAMPLES // 2])
def test_a_recompute_runs_under_the_autocast_of_its_forward(microbatch: int) -> None:
    make, data = MODELS["block"]
    model, batch = make(), data()

    def loss_fn(model: Any, batch: Any) -> Tensor:
        def layer(x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return model.layer(x)

        out = checkpoint(layer, model.embedding(batch[0]), use_reentrant=False)
        return nn.functional.cross_entropy(model.head(out.float()).flatten(0, 1), batch[1].flatten())

    exact, plain = in_float64(cross_entropy, model, batch), copy.deepcopy(model)
    loss_fn(plain, batch).backward()
    step = Watched(loss_fn, model, batch, microbatch=microbatch)
    step(batch)
    assert step.captured.joint.autocast == (torch.bfloat16,)
    assert error(model, exact) <= 1.5 * error(plain, exact)


def test_a_recompute_changes_no_bit() -> None:
    make, data = MODELS["convolutions"]
    model, batch = make(), data()
    loss_fn = under_autocast(torch.bfloat16)
    free = fullbatch.Step(loss_fn, copy.deepcopy(model), batch, microbatch=4)
    budget = int(free.plan.owned + 0.7 * free.plan.activations)
    gradients = []
    for memory in (None, budget):
        twin = copy.deepcopy(model)
        step = fullbatch.Step(loss_fn, twin, batch, microbatch=4, memory=memory)
        step(batch)
        gradients.append([p.grad for p in twin.parameters()])
    assert step.plan.recomputed > 0
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_eight_bit_formats_are_refused_by_name(dtype: torch.dtype) -> None:
    model, (x, y) = MODELS["mlp"][0](), MODELS["mlp"][1]()

    def rounds(model: Any, batch: Any) -> Tensor:
        return cross_entropy(model, (batch[0].to(dtype).float(), batch[1]))

    with pytest.raises(fullbatch.CaptureError, match=f"{dtype}.*\n.*batch\\[0\\].to"):
        fullbatch.Step(rounds, model, (x, y))
    with pytest.raises(fullbatch.CaptureError, match=f"{dtype}.*\n.*L\\['batch'\\]\\[0\\]"):
        fullbatch.Step(lambda m, b: cross_entropy(m, (b[0].float(), b[1])), model, (x.to(dtype), y))
