"""The steps that the executor is timed on: a language model, a convolutional net, and one of many tiny operators."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Built = tuple[Callable[[Any, Any], Tensor], nn.Module, Any, int]


class _Block(nn.Module):
    """A block of GPT-2, its activation written out as its authors did."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.attend, self.project = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.second, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.attend(self.norm(x)).chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).flatten(2))
        h = self.up(self.second(x))
        h = 0.5 * h * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (h + 0.044715 * torch.pow(h, 3.0))))
        return x + self.down(h)


class _Language(nn.Module):
    def __init__(self, words: int, length: int, width: int, layers: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(words, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*[_Block(width, 4) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(ids) + self.place)))


def gpt2() -> Built:
    """Four blocks of width 256 on 16 texts of 128 tokens, in microbatches of 4."""
    model, ids = _Language(2000, 128, 256, 4), torch.randint(0, 2000, (16, 129))
    return _next_token, model, ids, 4


def _next_token(model: Any, ids: Any) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def batchnorm() -> Built:
    """Six convolutions with BatchNorm and SiLU on 16 images of 64 x 64, in microbatches of 4."""
    layers: list[nn.Module] = []
    for into, out in zip((3, 32, 32, 32, 32, 32), (32, 32, 32, 32, 32, 32), strict=True):
        layers += [nn.Conv2d(into, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.SiLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return _classify, model, (torch.randn(16, 3, 64, 64), torch.randint(0, 10, (16,))), 4


def _classify(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def tiny() -> Built:
    """Forty layers of eight features on 8 samples, in one microbatch: nothing but the starting of operators."""
    layers = [layer for _ in range(40) for layer in (nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh())]
    return _square, nn.Sequential(*layers), torch.randn(8, 8), 8


def _square(model: Any, x: Any) -> Tensor:
    return model(x).square().mean()


STEPS: dict[str, Callable[[], Built]] = {"gpt2": gpt2, "batchnorm": batchnorm, "tiny": tiny}
