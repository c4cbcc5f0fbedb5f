"""Parameters and buffers that the step changes in place: the gradient is that of the plain step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fullbatch
from cases.reference import collect, compare, plain


class _Centred(nn.Module):
    """A centre that follows the features, with or without a gradient of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.register_buffer("centre", torch.zeros(4))


def _halved(m: Any, b: Any) -> torch.Tensor:
    with torch.no_grad():
        m.weight.mul_(0.5)
    return m(b).sum()


def _clamped(m: Any, b: Any) -> torch.Tensor:
    with torch.no_grad():
        m.weight.clamp_(-0.2, 0.2)
    return m(b).square().mean()


def _normalised_data(m: Any, b: Any) -> torch.Tensor:
    m.weight.data.div_(m.weight.data.norm(dim=1, keepdim=True))
    return m(b).square().mean()


def _bias_after_use(m: Any, b: Any) -> torch.Tensor:
    first = m(b)
    with torch.no_grad():
        m.bias.mul_(0.5)
    return (first * m.bias).sum()


def _centre_copied(m: Any, b: Any) -> torch.Tensor:
    features = m.layer(b)
    loss = (features - m.centre).square().mean()
    m.centre.copy_(features.mean(0))
    return loss


def _centre_averaged(m: Any, b: Any) -> torch.Tensor:
    features = m.layer(b)
    m.centre.mul_(0.9).add_(features.mean(0) * 0.1)
    return (features - m.centre).square().mean()


def _embedded(m: Any, b: Any) -> torch.Tensor:
    return m((b[:, 0] * 3).abs().long() % 11).square().mean()


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Any], torch.Tensor]]] = {
    "halved": (lambda: nn.Linear(3, 1, bias=False), _halved),
    "clamped": (lambda: nn.Linear(3, 4), _clamped),
    "normalised through data": (lambda: nn.Linear(3, 4), _normalised_data),
    "bias after use": (lambda: nn.Linear(3, 4), _bias_after_use),
    "centre copied": (_Centred, _centre_copied),
    "centre averaged": (_Centred, _centre_averaged),
    "embedding with max_norm": (lambda: nn.Embedding(11, 6, max_norm=1.0), _embedded),
}


@pytest.mark.parametrize("name", CASES)
def test_gradient_is_the_plain_one(name: str) -> None:
    make, loss_fn = CASES[name]
    torch.manual_seed(0)
    model, batch = make().double(), torch.randn(7, 3, dtype=torch.float64)
    reference = plain(loss_fn, model, batch)
    for microbatch in (1, 3, 7):
        fresh = copy.deepcopy(model)
        step = fullbatch.Step(loss_fn, fresh, batch, microbatch=microbatch)
        errors = compare(collect(step(batch), fresh), reference)
        assert errors.within(1e-10), (microbatch, errors)


def test_a_sparse_gradient_is_refused_by_name() -> None:
    model = nn.Embedding(11, 6, sparse=True)
    with pytest.raises(fullbatch.CaptureError, match="sparse=False"):
        fullbatch.Step(lambda m, b: m(b).square().mean(), model, torch.randint(0, 11, (8, 5)), microbatch=2)


def test_an_operator_that_torch_traces_wrongly_is_refused_by_name() -> None:
    batch = torch.randn(5, 3), torch.tensor([[0, 2, -1], [1, -1, -1], [2, 1, 0], [0, -1, -1], [0, 1, -1]])
    with pytest.raises(fullbatch.CaptureError, match="multilabel_margin_loss"):
        fullbatch.Step(lambda m, b: F.multilabel_margin_loss(m(b[0]), b[1]), nn.Linear(3, 3), batch, microbatch=2)


def test_buffers_that_share_memory_are_refused_where_one_is_changed() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)
            self.register_buffer("whole", torch.zeros(4))
            self.register_buffer("part", self.whole[:2])

    def loss(m: Any, b: Any) -> torch.Tensor:
        out = m.layer(b)
        with torch.no_grad():
            m.whole.add_(out.mean(0))
            m.part.mul_(0.5)
        return (out - m.whole).square().mean()

    with pytest.raises(fullbatch.CaptureError, match="shares its memory"):
        fullbatch.Step(loss, Shared(), torch.randn(6, 3), microbatch=2)
