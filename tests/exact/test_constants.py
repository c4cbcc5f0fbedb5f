"""Tensors that hold Python's own numbers decide shapes; checks of values; `requires_grad` set on a step's value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fullbatch

from .data_checks import asserted, asserted_and_used


def _grid(m: Any, x: torch.Tensor) -> torch.Tensor:
    """As detectors write it: a shape as a tensor, and what follows from it."""
    shape = torch.tensor([x.shape[1], 2])
    wave = torch.arange(0, shape.max()) / shape.max()
    return (m(x).repeat(1, shape[1])[:, : x.shape[1]] * wave).square().mean()


def _number(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m(x).square().mean() * int(torch.tensor([x.shape[1], 3]).prod())


def _changed(m: Any, x: torch.Tensor) -> torch.Tensor:
    """A tensor of constants that the data change is none."""
    sizes = torch.tensor([2, 3])
    sizes[0] = (x.sum() > 0).long() + 1
    return m(x).square().mean() * torch.arange(0, sizes[0]).sum()


def _changed_view(m: Any, x: torch.Tensor) -> torch.Tensor:
    sizes = torch.tensor([2, 3])
    sizes.view(2)[1:].add_((x.sum() > 0).long())
    return m(x).square().mean() * int(sizes[1])


def _chosen(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m(x[x[:, 0] > 0]).square().mean() * torch.tensor([x.shape[1]]).max()


def _checked(m: Any, x: torch.Tensor) -> torch.Tensor:
    torch._check_tensor_all(x < 100)
    return m(x).square().mean()


def _required(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = x * 2
    x.requires_grad = True
    return m(x).square().mean()


def _read_after(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = x * 2
    x.requires_grad = True
    y = x + 1
    return m(y).square().mean() * (3 if y.requires_grad else 1)


def _model() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Linear(6, 6).double(), torch.randn(4, 6, dtype=torch.float64)


@pytest.mark.parametrize("loss_fn", [_grid, _number, _checked, asserted, _required])
@pytest.mark.parametrize("microbatch", [1, 3, 4])
def test_the_gradient_is_the_plain_one(loss_fn: Any, microbatch: int) -> None:
    model, x = _model()
    loss = loss_fn(model, x)
    loss.backward()
    wanted = [p.grad for p in model.parameters()]
    model.zero_grad()
    found = fullbatch.Step(loss_fn, model, x, microbatch=microbatch)(x)
    torch.testing.assert_close(found, loss.detach(), rtol=1e-12, atol=1e-12)
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-12)


def test_another_shape_is_another_constant() -> None:
    model, x = nn.Identity(), torch.randn(4, 6)
    weight = nn.Parameter(torch.ones(()))
    model.register_parameter("weight", weight)

    def loss_fn(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.weight * x.mean() * int(torch.tensor([x.shape[1], 3]).prod())

    step = fullbatch.Step(loss_fn, model, x, microbatch=1)
    for width in (6, 5):
        batch = torch.ones(4, width)
        assert float(step(batch)) == pytest.approx(3 * width)


@pytest.mark.parametrize("loss_fn", [_changed, _changed_view, _chosen, _read_after, asserted_and_used])
def test_what_does_depend_is_refused(loss_fn: Any) -> None:
    model, x = _model()
    with pytest.raises(fullbatch.CaptureError):
        fullbatch.Step((loss_fn, lambda outputs, batch: outputs), model, x, microbatch=1)


@pytest.mark.parametrize("loss_fn", [_checked, asserted])
def test_a_check_that_fails_raises(loss_fn: Any) -> None:
    model, x = _model()
    step = fullbatch.Step(loss_fn, model, x, microbatch=1)
    with pytest.raises(RuntimeError, match=r"check|assert"):
        step(x + 1000)
    assert all(p.grad is None for p in model.parameters())
