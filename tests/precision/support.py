"""Small models under autocast, and how far a gradient is from the one in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullbatch
from fullbatch._captured import Captured

SAMPLES = 24


class Block(nn.Module):
    """One block of a transformer on tokens, with its embedding and its head."""

    def __init__(self, width: int = 32, tokens: int = 50) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, tokens)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(ids))).flatten(0, -2)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip


def rows() -> tuple[Tensor, Tensor]:
    return torch.randn(SAMPLES, 16), torch.randint(0, 5, (SAMPLES,))


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(SAMPLES, 3, 12, 12), torch.randint(0, 5, (SAMPLES,))


def tokens() -> tuple[Tensor, Tensor]:
    return torch.randint(0, 50, (SAMPLES, 10)), torch.randint(0, 50, (SAMPLES, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]] = {
    "mlp": (mlp, rows), "convolutions": (convolutions, images), "block": (Block, tokens),
}  # fmt: skip


def cross_entropy(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1].flatten())


def under_autocast(dtype: torch.dtype, loss_fn: Any = cross_entropy) -> Callable[[Any, Any], Tensor]:
    def loss(model: Any, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype):
            return loss_fn(model, batch)

    return loss


def in_float64(loss_fn: Any, model: nn.Module, batch: Any) -> nn.Module:
    """A copy of the model with the gradient of plain PyTorch in float64."""
    twin = copy.deepcopy(model).double()
    loss_fn(twin, tuple(item.double() if item.is_floating_point() else item for item in batch)).backward()
    return twin


def error(model: nn.Module, reference: nn.Module, scale: float = 1.0) -> float:
    """max|g - g_ref| / max|g_ref|, of `model`'s gradient divided by `scale`."""
    both = zip(model.parameters(), reference.parameters(), strict=True)
    pairs = [(p.grad.double() / scale, q.grad.double()) for p, q in both]
    return float(max((g - r).abs().max() for g, r in pairs) / max(r.abs().max() for _, r in pairs))


class Watched(fullbatch.Step):
    """A step that keeps what was captured for its last call."""

    captured: Captured

    @property
    def captures(self) -> int:
        return self._frontend.captures

    def _run(self, captured: Captured, inputs: Any) -> Any:
        self.captured = captured
        return super()._run(captured, inputs)


__all__ = ["MODELS", "SAMPLES", "Watched", "cross_entropy", "error", "in_float64", "under_autocast"]
