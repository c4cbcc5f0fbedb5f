"""The steps that are measured: ordinary networks, random weights, float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Built = tuple[Callable[[Any, Any], torch.Tensor], nn.Module, Any]


class Bottleneck(nn.Module):
    """The block of ResNet-50 (He et al. 2015, with the stride in the 3 x 3 convolution)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.skip = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.skip(x))


def resnet50(batch: int = 16, side: int = 224) -> Built:
    """ResNet-50 with BatchNorm, 1000 classes."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    ]  # fmt: skip
    inputs = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, stride if block == 0 else 1))
            inputs = 4 * width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))
    return _classify, model, (torch.randn(batch, 3, side, side), torch.randint(0, 1000, (batch,)))


def gpt2(batch: int = 8, layers: int = 12, width: int = 256, length: int = 256) -> Built:
    """GPT-2 of the `transformers` package, twelve narrow layers, a vocabulary of 8000, no dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    size = {"n_layer": layers, "n_embd": width, "n_head": width // 64, "vocab_size": 8000, "n_positions": length}
    model = GPT2LMHeadModel(GPT2Config(**size, **off))
    return _next_token, model, torch.randint(0, 8000, (batch, length))


def gpt2_one_sample() -> Built:
    """The same with a single sequence: nothing to split, so that only recomputation saves memory."""
    return gpt2(batch=1, length=1024)


def _classify(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _next_token(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


MODELS: dict[str, Callable[[], Built]] = {"resnet50": resnet50, "gpt2": gpt2, "gpt2-one-sample": gpt2_one_sample}
