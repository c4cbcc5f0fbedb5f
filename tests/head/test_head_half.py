"""The loss head in half precision: the value in float32, against float64 on the same rounded numbers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fullbatch


@pytest.fixture(autouse=True)
def single() -> Iterator[None]:
    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(kept)


def numbers(dtype: torch.dtype, words: int = 3000) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = torch.randn(300, 64).to(dtype), (0.05 * torch.randn(words, 64)).to(dtype)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(words, (300,))


def truth(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    leaves = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
    loss = F.cross_entropy(F.linear(*leaves), target)
    return loss.detach(), torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_value_is_that_of_float64(dtype: torch.dtype) -> None:
    hidden, weight, target = numbers(dtype)
    expected, slopes = truth(hidden, weight, target)
    loss = fullbatch.linear_cross_entropy(hidden, weight, target)
    assert loss.dtype == torch.float32
    assert abs(loss.double() - expected) <= 1e-6 * expected
    plain = F.cross_entropy(F.linear(hidden, weight), target)
    assert abs(plain.double() - expected) > 1e-4 * expected  # rounded logits: what this is for
    for found, slope in zip(torch.autograd.grad(loss, (hidden, weight)), slopes, strict=True):
        assert found.dtype == dtype
        # Rounded once, to the dtype or, in float16, to its least number.
        least = 2.0**-25 if dtype == torch.float16 else 0
        assert ((found.double() - slope).abs() <= torch.finfo(dtype).eps * slope.abs() + least + 1e-9).all()


def test_sum_of_many_losses_keeps_its_digits() -> None:
    """torch 2.13's own linear_cross_entropy rounds to bfloat16, about 0.1 off 10.9; in chunks it adds losses up in
    bfloat16, and is more than 1 off."""
    words, tokens = 50_257, 2048
    hidden, weight = torch.randn(tokens, 4).bfloat16(), (0.2 * torch.randn(words, 4)).bfloat16()
    target = torch.randint(words, (tokens,))
    parts = [F.cross_entropy(h.double() @ weight.double().t(), t, reduction="sum")
             for h, t in zip(hidden.split(256), target.split(256), strict=True)]  # fmt: skip
    expected = torch.stack(parts).sum() / tokens
    assert abs(fullbatch.linear_cross_entropy(hidden, weight, target).double() - expected) <= 1e-6 * expected
    whole = F.linear_cross_entropy(hidden, weight, target)
    chunked = F.linear_cross_entropy(hidden, weight, target, options=torch.nn.LinearCrossEntropyOptions())
    assert abs(whole.double() - expected) > 1e-3 * expected
    assert abs(chunked.double() - expected) > 0.1 * expected


def test_autocast_converts_as_a_linear_layer() -> None:
    hidden, weight, target = numbers(torch.float32)
    expected, _ = truth(hidden.bfloat16(), weight.bfloat16(), target)
    with torch.autocast("cpu", torch.bfloat16):
        loss = fullbatch.linear_cross_entropy(hidden, weight, target)
        mixed = fullbatch.linear_cross_entropy(hidden.bfloat16(), weight, target)
    assert loss.dtype == torch.float32
    assert abs(loss.double() - expected) <= 1e-6 * expected
    assert torch.equal(loss, mixed)
    assert all(slope.dtype == torch.float32 for slope in torch.autograd.grad(loss, (hidden, weight)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_that_of_a_tile(dtype: torch.dtype) -> None:
    """Beside the gradient of the weight in float32 (and in its dtype), a few tiles of 8 MiB; plain, three of logits."""
    words, tokens = 50_257, 1024
    hidden, weight = (
        torch.randn(tokens, 16).to(dtype).requires_grad_(),
        torch.randn(words, 16).to(dtype).requires_grad_(),
    )
    target = torch.randint(words, (tokens,))

    def peak(fn: object) -> int:
        hidden.grad = weight.grad = None
        return fullbatch.measure(lambda: fn().backward()).peak  # type: ignore[operator]

    ours = peak(lambda: fullbatch.linear_cross_entropy(hidden, weight, target))
    plain = peak(lambda: F.cross_entropy(F.linear(hidden, weight), target))
    gradient = weight.numel() * 4 * (1 if dtype == torch.float32 else 1.5)
    assert plain >= 2 * tokens * words * dtype.itemsize
    assert ours <= gradient + 3 * (8 << 20)
    narrow = peak(lambda: fullbatch.linear_cross_entropy(hidden, weight, target, slice=1))
    assert narrow <= gradient + 3 * (8 << 20)
