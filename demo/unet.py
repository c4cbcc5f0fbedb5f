"""A plain segmentation UNet: two convolution-BatchNorm-ReLU blocks a level, skips, bilinear upsampling.

BatchNorm is why the demo needs fullbatch: its statistics are over the whole batch, so running the batch in parts and
adding up gradients trains another network. Nothing in this file knows of fullbatch.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn


def block(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        # No bias: BatchNorm takes the mean away again.
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Maps (N, inputs, H, W) to (N, classes, H, W); H and W are multiples of 2 ** (levels - 1)."""

    def __init__(self, inputs: int, classes: int, width: int = 16, levels: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        self.down = nn.ModuleList(map(block, [inputs, *widths[:-1]], widths))
        self.up = nn.ModuleList(block(above + below, above) for above, below in pairwise(widths))
        self.pool = nn.MaxPool2d(2)
        self.grow = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        skips: list[torch.Tensor] = []
        features = images
        for level, down in enumerate(self.down):
            features = down(self.pool(features) if level else features)
            skips.append(features)
        for skip, up in zip(reversed(skips[:-1]), reversed(self.up), strict=True):
            features = up(torch.cat([skip, self.grow(features)], dim=1))
        result: torch.Tensor = self.head(features)
        return result
