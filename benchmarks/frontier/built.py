"""What a benchmarked step is: a loss, a model and a batch, in three sizes, and what the peers need to know of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Loss = Callable[[Any, Any], Tensor]
Built = tuple[Loss, nn.Module, Any]

SIZES = ("full", "small", "tiny")


@dataclass(frozen=True)
class Model:
    """A step that can be built in three sizes: `full` is measured, `small` is for reach, `tiny` is for tests.

    `build(batch=..., **size)` makes it. `blocks` are the classes of modules that the peers put a checkpoint around.
    `additive`: the loss is the mean of what single samples give, so that accumulating gradients by hand is exact.
    """

    build: Callable[..., Built]
    blocks: tuple[str, ...]
    additive: bool
    batch: int = 16
    full: Mapping[str, Any] = field(default_factory=dict)
    small: Mapping[str, Any] = field(default_factory=dict)
    tiny: Mapping[str, Any] = field(default_factory=dict)

    def make(self, size: str = "full", batch: int | None = None) -> Built:
        """The step with random weights and data of a fixed seed; `batch` None is the model's own, at most 4 if tiny."""
        torch.manual_seed(0)
        if batch is None:
            batch = min(self.batch, 4) if size == "tiny" else self.batch
        loss_fn, model, data = self.build(
            batch=batch, **{"full": self.full, "small": self.small, "tiny": self.tiny}[size]
        )
        return loss_fn, model.train(), data

    def find_blocks(self, model: nn.Module) -> list[nn.Module]:
        """The outermost modules of the classes named in `blocks`."""
        if type(model).__name__ in self.blocks:
            return [model]
        return [block for child in model.children() for block in self.find_blocks(child)]


def images(batch: int, side: int, channels: int = 3) -> Tensor:
    return torch.randn(batch, channels, side, side)


def classify(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def next_token(model: Any, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
