"""A microbatch of one sample whose channels come last, by way of a view.

`view` gives a dimension of one any stride. Normalisations of torch then take the memory for one in another order: their
gradients are wrong without a word.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullbatch
from cases.reference import collect, compare, plain
from exactly import exactly
from fullbatch._axis._kernels import KERNELS

__all__ = ["exactly"]

aten = torch.ops.aten


class FromTokens(nn.Module):
    """Tokens become an image, as in the neck of a vision transformer."""

    def __init__(self, norm: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.mix, self.norm, self.head = nn.Linear(16, 16), norm, head

    def forward(self, image: Tensor) -> Tensor:
        tokens = self.mix(image.flatten(2).transpose(1, 2))
        return self.head(self.norm(tokens.transpose(1, 2).reshape(image.shape)))


NORMS: dict[str, Callable[[], nn.Module]] = {
    "group": lambda: nn.GroupNorm(4, 16),
    "frozen batch": lambda: _frozen(nn.BatchNorm2d(16)),
    "batch": lambda: nn.BatchNorm2d(16),
    "instance": lambda: nn.InstanceNorm2d(16, affine=True),
}
HEADS: dict[str, Callable[[], nn.Module]] = {  # gradients with channels last, and with channels first
    "convolution": lambda: nn.Conv2d(16, 8, 3),
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(1024, 3)),
}


def _frozen(norm: Any) -> nn.Module:
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2.0)
    return norm.eval()  # type: ignore[no-any-return]


def _loss(model: nn.Module, image: Tensor) -> Tensor:
    return model(image).square().mean()


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_of_tokens_seen_as_an_image(norm: str, head: str) -> None:
    model = FromTokens(NORMS[norm](), HEADS[head]())
    image = torch.randn(5, 16, 8, 8)
    expected = plain(_loss, copy.deepcopy(model), image)
    for microbatch in (1, 3):
        twin = copy.deepcopy(model)
        step = fullbatch.Step(_loss, twin, image, microbatch=microbatch)
        errors = compare(collect(step(image), twin), expected)
        assert errors.within(1e-10), (microbatch, errors)


def _images(*, last: bool) -> Tensor:
    tokens = torch.randn(1, 64, 16)
    image = tokens.transpose(1, 2).reshape(1, 16, 8, 8)
    assert image.stride(0) < image.numel()  # as torch's view makes it
    return image if last else image.contiguous()


@pytest.mark.parametrize("image_last", [True, False])
@pytest.mark.parametrize("gradient_last", [True, False])
def test_their_kernels_read_what_the_strides_say(image_last: bool, gradient_last: bool) -> None:
    image, gradient = _images(last=image_last), _images(last=gradient_last)
    weight, mean, scale = torch.randn(16), torch.randn(1, 4), torch.rand(1, 4)
    group = (mean, scale, weight, 1, 16, 64, 4, [True, True, True])
    batch = (weight, weight, weight.abs(), None, None, False, 1e-5, [True, True, True])
    for operator, rest in (
        (aten.native_group_norm_backward.default, group),
        (aten.native_batch_norm_backward.default, batch),
    ):
        expected = operator(gradient.contiguous(), image.contiguous(), *rest)
        found = KERNELS[operator](gradient, image, *rest)
        for wanted, ours in zip(expected, found, strict=True):
            assert torch.allclose(wanted, ours, rtol=0, atol=1e-12 * float(wanted.abs().max()))
