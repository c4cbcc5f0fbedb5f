"""Small nets of the sorts whose memory is hard, sized so that a proof takes seconds and one tensor takes megabytes.

All are one sample, or a batch that is run at once. No BatchNorm: nothing is to couple. Each ends in one number a place,
so that the loss's own gradient is small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Net = Callable[[], tuple[Any, nn.Module, Any]]


def _mean_square(model: Any, batch: Any) -> Tensor:
    return model(batch).square().mean()


def mlp() -> tuple[Any, nn.Module, Any]:
    """A chain of ten equal layers."""
    layers = [layer for _ in range(10) for layer in (nn.Linear(32, 32), nn.Tanh())]
    return _mean_square, nn.Sequential(*layers, nn.Linear(32, 1)), torch.randn(1, 32768, 32)


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))


def residual_mlp() -> tuple[Any, nn.Module, Any]:
    """Four residual blocks."""
    return (
        _mean_square, nn.Sequential(*(_Residual(32) for _ in range(4)), nn.Linear(32, 1)), torch.randn(1, 16384, 32)
    )  # fmt: skip


class _Attention(nn.Module):
    """A transformer block with attention written out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.before(x)).chunk(3, -1)
        query, key, value = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in parts)
        weights = (query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5).softmax(-1)
        x = x + self.out((weights @ value).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.between(x))))


def transformer_block() -> tuple[Any, nn.Module, Any]:
    """One block."""
    return _mean_square, nn.Sequential(_Attention(32, 2), nn.Linear(32, 1)), torch.randn(512, 16, 32)


class _Fused(nn.Module):
    """A transformer block with torch's own attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x).unsqueeze(1)
        x = x + F.scaled_dot_product_attention(self.query(y), self.key(y), self.value(y)).squeeze(1)
        return x + self.down(F.gelu(self.up(self.between(x))))


def transformer_pair() -> tuple[Any, nn.Module, Any]:
    """Two blocks."""
    return _mean_square, nn.Sequential(_Fused(32), _Fused(32), nn.Linear(32, 1)), torch.randn(512, 32, 32)


class _Conv(nn.Module):
    def __init__(self, of: int, to: int, stride: int = 1) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(of, to, 3, stride, padding=1), nn.GroupNorm(2, to)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.deep, self.back, self.up = _Conv(1, 4), _Conv(4, 8), _Conv(8, 4), _Conv(8, 4)
        self.last = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.first(x)
        deep = self.back(self.deep(F.avg_pool2d(skip, 2)))
        return self.last(self.up(torch.cat([F.interpolate(deep, scale_factor=2.0), skip], 1)))


def unet() -> tuple[Any, nn.Module, Any]:
    """A skip over a level of half the resolution, GroupNorm."""
    return _mean_square, _UNet(), torch.randn(1, 1, 512, 512)


def conv_chain() -> tuple[Any, nn.Module, Any]:
    """Early layers that are huge, later ones small."""
    widths = ((3, 4, 1), *[(4, 4, 1)] * 4, (4, 8, 2), (8, 16, 2), (16, 32, 2))
    layers = [layer for of, to, stride in widths for layer in (nn.Conv2d(of, to, 3, stride, padding=1), nn.ReLU())]
    return _mean_square, nn.Sequential(*layers, nn.Conv2d(32, 1, 1)), torch.randn(1, 3, 256, 256)


def group_norm_chain() -> tuple[Any, nn.Module, Any]:
    """Convolution, GroupNorm and ReLU, six times."""
    layers = [_Conv(of, to) for of, to in ((2, 8), *[(8, 8)] * 5)]
    return _mean_square, nn.Sequential(*layers, nn.Conv2d(8, 1, 1)), torch.randn(1, 2, 256, 256)


class _Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4 + 4 * at, 4, 3, padding=1) for at in range(5))
        self.last = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(F.relu(layer(torch.cat(features, 1))))
        return self.last(features[-1])


def dense_block() -> tuple[Any, nn.Module, Any]:
    """Each layer reads all before it."""
    return _mean_square, _Dense(), torch.randn(1, 4, 256, 256)


def siamese() -> tuple[Any, nn.Module, Any]:
    """One encoder, two inputs, a loss on the difference."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())]

    def loss(model: Any, batch: Any) -> Tensor:
        return (model(batch[0]) - model(batch[1])).square().mean()

    model = nn.Sequential(*layers, nn.Linear(32, 4))
    return loss, model, (torch.randn(1, 32768, 32), torch.randn(1, 32768, 32))


class _Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def gated_mlp() -> tuple[Any, nn.Module, Any]:
    """Three gated blocks with LayerNorm."""
    return _mean_square, nn.Sequential(*(_Gated(32) for _ in range(3)), nn.Linear(32, 1)), torch.randn(1, 32768, 32)


# Each net with budgets, as shares of the bytes of the step that runs nothing twice. At those left out nothing fits, or
# a proof takes more than a minute.
NETS: dict[Net, tuple[float, ...]] = {
    mlp: (0.75, 0.6, 0.5, 0.4, 0.3),
    residual_mlp: (0.75, 0.6, 0.5),
    transformer_block: (0.75, 0.6, 0.5),
    transformer_pair: (0.75, 0.6, 0.5, 0.4),
    unet: (0.75, 0.6),
    conv_chain: (0.75, 0.6),
    group_norm_chain: (0.75, 0.6, 0.5, 0.4, 0.3),
    dense_block: (0.75, 0.65),
    siamese: (0.75, 0.6, 0.5, 0.4, 0.3),
    gated_mlp: (0.75, 0.6, 0.5, 0.4),
}
