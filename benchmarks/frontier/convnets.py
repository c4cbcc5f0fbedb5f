"""Image classifiers of convolutions: ResNet-50 with BatchNorm, ConvNeXt-T with LayerNorm. Both are chains."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from built import Built, classify, images


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

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.skip(x))


def resnet50(
    batch: int, side: int, width: int = 64, depths: Sequence[int] = (3, 4, 6, 3), classes: int = 1000
) -> Built:
    """ResNet-50 with BatchNorm."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    ]  # fmt: skip
    inputs = width
    for stage, blocks in enumerate(depths):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width * 2**stage, 2 if stage and not block else 1))
            inputs = 4 * width * 2**stage
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
    return classify, model, (images(batch, side), torch.randint(0, classes, (batch,)))


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of (N, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """The block of ConvNeXt (Liu et al. 2022), without stochastic depth."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.grow, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.shrink(F.gelu(self.grow(hidden)))).permute(0, 3, 1, 2)


def convnext(
    batch: int, side: int, width: int = 96, depths: Sequence[int] = (3, 3, 9, 3), classes: int = 1000
) -> Built:
    """ConvNeXt-T."""
    layers: list[nn.Module] = []
    inputs = 3
    for stage, blocks in enumerate(depths):
        outputs = width * 2**stage
        if stage == 0:
            layers += [nn.Conv2d(inputs, outputs, 4, 4), ChannelNorm(outputs, eps=1e-6)]
        else:
            layers += [ChannelNorm(inputs, eps=1e-6), nn.Conv2d(inputs, outputs, 2, 2)]
        layers += [ConvNeXtBlock(outputs) for _ in range(blocks)]
        inputs = outputs
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(inputs, eps=1e-6), nn.Linear(inputs, classes)]
    return classify, nn.Sequential(*layers, *head), (images(batch, side), torch.randint(0, classes, (batch,)))
