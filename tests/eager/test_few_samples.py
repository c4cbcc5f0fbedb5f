"""BatchNorm that cannot take one sample: named where it is found, and no cut leaves one where another need not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullbatch
from eager.support import agrees


class Normed(nn.Module):
    """`F.batch_norm` with the statistics of what it is given, which no module of torch's shows."""

    def __init__(self, buffers: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.register_buffer("mean", torch.zeros(4) if buffers else None)
        self.register_buffer("var", torch.ones(4) if buffers else None)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return F.batch_norm(y * 2 if float(y.detach().sum()) > 1e9 else y, self.mean, self.var, training=True)


class Standardised(nn.Linear):
    """Its weight is normalised, as in timm's StdConv2d, by the function that normalises batches elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        weight = F.batch_norm(self.weight[None], None, None, training=True)[0] if len(x) else self.weight
        return F.linear(x, weight, self.bias)


def cubes(model: Any, x: Tensor) -> tuple[Tensor, int]:
    return model(x).pow(3).sum(), len(x)


def _by_module() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, None])
def test_the_function_is_refused_by_name(size: int | None, buffers: bool) -> None:
    model = nn.Sequential(Normed(buffers), nn.Linear(4, 4))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(fullbatch.ModelError, match=r"F\.batch_norm in 0 \(Normed\) uses statistics") as caught:
        fullbatch.eager.Step(cubes, model, torch.randn(6, 3), microbatch=size)
    assert "allow_inexact=True" in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("size", [2, 3, None])
def test_the_function_is_named_where_it_is_allowed(size: int | None) -> None:
    model, x = nn.Sequential(Normed(), nn.Linear(4, 4)), torch.randn(6, 3)
    step = fullbatch.eager.Step(cubes, model, x, microbatch=size, allow_inexact=True)
    step(x)
    if size is not None:
        assert not step.plan.exact
        assert "F.batch_norm in 0 (Normed)" in step.plan.inexact[0]


def test_weights_may_be_normalised_so() -> None:
    torch.set_default_dtype(torch.float64)
    model = nn.Sequential(Standardised(3, 4))
    for size in (1, 2):
        step = fullbatch.eager.Step(cubes, model, torch.randn(6, 3), microbatch=size)
        agrees(step, cubes, model, torch.randn(5, 3))


def _in_parts(model: nn.Module, x: Tensor, sizes: list[int]) -> list[Tensor]:
    """Gradients of plain PyTorch in microbatches of these sizes."""
    for part in x.split(sizes):
        (cubes(model, part)[0] / len(x)).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def _by_function() -> nn.Module:
    return nn.Sequential(Normed())


@pytest.mark.parametrize(
    ("make", "options"),
    [(_by_module, {"microbatch": 8}), (_by_module, {"memory": 3700}), (_by_function, {"microbatch": 8}),
     (_by_function, {"memory": 3600})],
)  # fmt: skip
def test_a_rest_of_one_sample_is_cut_evenly(make: Any, options: Any) -> None:
    model = make()
    plain = copy.deepcopy(model)
    step = fullbatch.eager.Step(cubes, model, torch.randn(64, 3), allow_inexact=True, **options)
    assert step.plan.microbatch == 8
    for count, sizes in ((33, [7, 7, 7, 6, 6]), (17, [6, 6, 5]), (9, [5, 4]), (64, [8] * 8), (8, [8])):
        x = torch.randn(count, 3)
        model.zero_grad()
        plain.zero_grad()
        step(x)
        expected = _in_parts(plain, x, sizes)
        found = [p.grad for p in model.parameters() if p.grad is not None]
        for one, right in zip(found, expected, strict=True):
            torch.testing.assert_close(one, right, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make", [_by_module, _by_function])
@pytest.mark.parametrize(("size", "count", "least"), [(1, 6, 2), (2, 5, 3), (2, 3, 3)])
def test_where_every_cut_leaves_one_it_is_said(make: Any, size: int, count: int, least: int) -> None:
    model = make()
    with pytest.raises(fullbatch.ModelError, match=r"(BatchNorm1d|Normed)\) cannot take one sample") as caught:
        fullbatch.eager.Step(cubes, model, torch.randn(count, 3), microbatch=size, allow_inexact=True)
    assert f"{count} samples in microbatches of at most {size}" in str(caught.value)
    assert f"microbatch={least}" in str(caught.value)
    fullbatch.eager.Step(cubes, model, torch.randn(count, 3), microbatch=least, allow_inexact=True)


@pytest.mark.parametrize("make", [_by_module, _by_function])
def test_a_later_batch_that_leaves_one_changes_nothing(make: Any) -> None:
    model = make()
    step = fullbatch.eager.Step(cubes, model, torch.randn(6, 3), microbatch=2, allow_inexact=True)
    step(torch.randn(4, 3))
    before, gradients = copy.deepcopy(model.state_dict()), [p.grad.clone() for p in model.parameters()]
    with pytest.raises(fullbatch.ModelError, match="cannot take one sample"):
        step(torch.randn(5, 3))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, kept) for p, kept in zip(model.parameters(), gradients, strict=True))


def test_one_sample_at_once_is_what_torch_says_of_it() -> None:
    """The batch is one sample, and the model takes none of one: plain PyTorch's own error."""
    model = _by_module()
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        fullbatch.eager.Step(cubes, model, torch.randn(1, 3), allow_inexact=True)
    pooled = nn.Sequential(nn.Linear(3, 4), nn.Unflatten(1, (4, 1)), Once())
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        fullbatch.eager.Step(cubes, pooled, torch.randn(6, 3), microbatch=2, allow_inexact=True)


class Once(nn.Module):
    """Each sample's channels by themselves, of one value each: no batch of any size has enough."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x.reshape(1, -1, 1), None, None, training=True).reshape(x.shape)


def test_two_dimensions_of_an_image_are_enough_for_one_sample() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    step = fullbatch.eager.Step(cubes, model, torch.randn(5, 3, 4, 4), microbatch=2, allow_inexact=True)
    step(torch.randn(5, 3, 4, 4))
    assert "at most 2 samples x 3" in str(step.plan)
