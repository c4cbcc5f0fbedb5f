"""Sums over microbatches in half precision are added up in float32 and rounded once, at the end of the step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullbatch
from fullbatch._axis._wide import sum_in_float32
from fullbatch._ir import Kind
from precision.support import SAMPLES, Watched, convolutions, cross_entropy, error, images, in_float64, under_autocast

HALF = [torch.bfloat16, torch.float16]


class Weight(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1, dtype=dtype))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("how", ["product", "sum"])
def test_1024_additions_of_one_1024th_are_one(dtype: torch.dtype, how: str) -> None:
    def loss_fn(model: Any, x: Tensor) -> Tensor:
        return F.linear(x, model.weight).mean() if how == "product" else (model.weight * x).mean()

    by_hand = Weight(dtype)
    batch = torch.ones(1024, 1, dtype=dtype)
    for sample in batch.split(1):
        (loss_fn(by_hand, sample) / 1024).backward()
    model = Weight(dtype)
    fullbatch.Step(loss_fn, model, batch, microbatch=1)(batch)
    assert by_hand.weight.grad.item() == (0.25 if dtype == torch.bfloat16 else 1.0)
    assert model.weight.grad.item() == 1.0
    assert model.weight.grad.dtype == dtype


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("microbatch", [1, 7])
def test_sums_and_means_over_the_batch_are_rounded_once(dtype: torch.dtype, microbatch: int) -> None:
    def loss_fn(model: Any, x: Tensor) -> Any:
        seen = {
            "sum": x.sum(0), "total": x.sum(), "mean": x.mean((0, 1)), "overall": x.mean(), "var": x.var(0),
            "norm": torch.linalg.vector_norm(x, dim=0),
        }  # fmt: skip
        return (model.weight * x).float().square().mean(), seen

    x = (torch.randn(301, 6) + 3).to(dtype)
    model = Weight(dtype)
    _, seen = fullbatch.Step(loss_fn, model, x, microbatch=microbatch)(x)
    exact = loss_fn(Weight(torch.float64), x.double())[1]
    for name, value in seen.items():
        assert value.dtype == dtype
        assert torch.equal(value, exact[name].to(dtype)) or torch.allclose(
            value.double(), exact[name], rtol=0.51 * torch.finfo(dtype).eps, atol=0
        ), name


def test_a_loss_whose_sum_is_out_of_range_has_a_mean_in_range() -> None:
    """In float16 the sum of 4096 losses of 20 is infinite; torch's own kernel gives the mean of the whole batch."""
    scores = torch.zeros(4096, 2, dtype=torch.float16)
    scores[:, 0] = -20

    def loss_fn(model: Any, batch: Any) -> Tensor:
        return F.nll_loss(batch[0] * model.weight[0], batch[1])

    batch = scores, torch.zeros(4096, dtype=torch.long)
    loss = fullbatch.Step(loss_fn, Weight(torch.float16), batch, microbatch=4000)(batch)
    assert loss.item() == 20.0


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(("dim", "keepdim"), [(None, False), ([0], True), ([0, 2], False), ([-1], False), ([], False)])
def test_the_sum_of_parts_is_the_sum(dtype: torch.dtype, dim: Any, keepdim: bool) -> None:
    x = torch.randn(700, 30, 40).to(dtype)
    expected = torch.sum(x.double(), dim or None, keepdim=keepdim)
    found = sum_in_float32(x, dim, keepdim)
    assert found.dtype == torch.float32 and found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    scalar = torch.tensor(3.0, dtype=dtype)
    assert sum_in_float32(scalar).item() == 3.0 and sum_in_float32(scalar).dtype == torch.float32


def test_a_large_sum_makes_no_copy_in_float32() -> None:
    x = torch.ones(4096, 1024, dtype=torch.bfloat16)
    assert fullbatch.measure(lambda: sum_in_float32(x, [0])).peak < x.nbytes / 4


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_weights_are_cast_once_a_step_however_often_they_are_used(dtype: torch.dtype) -> None:
    class Looped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = torch.tanh(self.inner(x))
            return x

    loss_fn = under_autocast(dtype, lambda model, x: model(x).float().square().mean())
    step = Watched(loss_fn, Looped(), torch.randn(6, 8), microbatch=2)
    program = step.captured.program
    weights = {program.inputs[at] for at, tensor in enumerate(step.captured.joint.sources) if "inner" in tensor}
    casts = [task for task in program.tasks if weights & set(task.inputs) and "_to_copy" in task.kernel.name]
    assert len(weights) == len(casts) == 2
    assert all(task.kind is Kind.ONCE for task in casts)


def test_gradients_under_autocast_are_never_rounded_to_bfloat16_and_back() -> None:
    step = Watched(under_autocast(torch.bfloat16), convolutions(), images(), microbatch=5)
    program = step.captured.program
    for value in program.gradients:
        chain = program.producers[value]
        while chain.kind is Kind.ONCE:
            assert chain.view, chain.origin
            chain = program.producers[chain.inputs[0]]
        assert chain.kind is Kind.REDUCE
        assert program.values[chain.outputs[0]].itemsize == 4


def test_float16_is_rounded_so_that_what_is_out_of_its_range_is_infinite() -> None:
    """Each summand is in range, and the sum is not: plain PyTorch gives infinity, which a GradScaler acts on."""
    model, batch = nn.Linear(1, 1, bias=False), torch.full((4, 1), 100.0)
    loss_fn = under_autocast(torch.float16, lambda m, x: (m(x).float() * 300).sum())
    plain = copy.deepcopy(model)
    loss_fn(plain, batch).backward()
    step = fullbatch.Step(loss_fn, model, batch, microbatch=1)
    step(batch)
    assert plain.weight.grad.isinf().all() and model.weight.grad.isinf().all()


@pytest.mark.parametrize("microbatch", [1, 3, SAMPLES // 2])
def test_batch_normalisation_with_weights_in_bfloat16(microbatch: int) -> None:
    model, (x, y) = convolutions(), images()
    model.bfloat16()
    batch = x.bfloat16(), y
    plain, exact = copy.deepcopy(model), in_float64(cross_entropy, model, batch)
    cross_entropy(plain, batch).backward()
    loss = fullbatch.Step(cross_entropy, model, batch, microbatch=microbatch)(batch)
    assert loss.dtype == torch.bfloat16
    assert error(model, exact) <= 1.5 * error(plain, exact)
    for (name, ours), (_, other) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert ours.dtype == other.dtype, name
        assert torch.allclose(ours.float(), other.float(), rtol=2**-7, atol=2**-9), name


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_the_gradient_of_a_bias_is_rounded_once(dtype: torch.dtype) -> None:
    """It is a plain sum over the batch, that of a convolution too: compared with the sum of the same summands."""
    model = nn.Conv2d(3, 4, 3).to(dtype)
    x, weight = torch.randn(96, 3, 6, 6).to(dtype), torch.randn(96, 4, 4, 4).to(dtype)
    step = fullbatch.Step(lambda m, b: (m(b[0]) * b[1]).float().sum(), model, (x, weight), microbatch=32)
    step((x, weight))
    exact = weight.double().sum((0, 2, 3)).to(dtype)
    assert torch.equal(model.bias.grad, exact)


def test_a_whole_batch_runs_as_torch_runs_it() -> None:
    """Unsplit there is nothing to add up, so nothing is converted: the bits are plain PyTorch's."""
    loss_fn, model, batch = under_autocast(torch.bfloat16), convolutions(), images()
    plain = copy.deepcopy(model)
    loss_fn(plain, batch).backward()
    fullbatch.Step(loss_fn, model, batch, microbatch=SAMPLES)(batch)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
