"""A gradient that arrives in another memory order than the input: one sample of it is ambiguous to torch's kernels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fullbatch


class _Tokens(nn.Module):
    """As LeViT: normalised images become tokens, and the gradient comes back transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x).flatten(2).transpose(1, 2).contiguous().tanh()


@pytest.mark.parametrize("microbatch", [1, 3])
def test_a_batch_normalisation_before_tokens(microbatch: int) -> None:
    torch.manual_seed(0)
    model, x, wave = _Tokens().double(), torch.randn(4, 8, 3, 5).double(), torch.randn(8).double()

    def loss_fn(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (m(x) - wave).square().mean()

    loss_fn(model, x).backward()
    wanted = [p.grad for p in model.parameters()]
    model.zero_grad()
    fullbatch.Step(loss_fn, model, x, microbatch=microbatch)(x)
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-12)
