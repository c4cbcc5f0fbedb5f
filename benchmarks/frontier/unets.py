"""Segmentation networks with skips: a BatchNorm UNet on images, an InstanceNorm UNet on volumes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from built import Built, images

CLASSES = 4


class Twice(nn.Sequential):
    """Two times convolution, normalisation, activation."""

    def __init__(self, inputs: int, outputs: int, conv: Any, norm: Any, activation: Callable[[], nn.Module]) -> None:
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            layers += [conv(channels, outputs, 3, padding=1, bias=False), norm(outputs, affine=True), activation()]
        super().__init__(*layers)


class UNet(nn.Module):
    """Maps (N, inputs, ...) to (N, classes, ...), in two or three dimensions of a multiple of 2 ** (levels - 1)."""

    def __init__(self, dims: int, inputs: int, classes: int, width: int, levels: int) -> None:
        super().__init__()
        if dims == 2:
            conv, norm, shrink, grow, act = nn.Conv2d, nn.BatchNorm2d, nn.MaxPool2d, nn.ConvTranspose2d, nn.ReLU
        else:
            conv, norm, shrink, grow, act = (
                nn.Conv3d, nn.InstanceNorm3d, nn.MaxPool3d, nn.ConvTranspose3d, nn.LeakyReLU
            )  # fmt: skip
        widths = [width * 2**level for level in range(levels)]
        self.down = nn.ModuleList(Twice(a, b, conv, norm, act) for a, b in pairwise([inputs, *widths]))
        self.grow = nn.ModuleList(grow(below, above, 2, 2) for above, below in pairwise(widths))
        self.up = nn.ModuleList(Twice(2 * above, above, conv, norm, act) for above in widths[:-1])
        self.shrink, self.head = shrink(2), conv(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for level, down in enumerate(self.down):
            x = down(self.shrink(x) if level else x)
            skips.append(x)
        for level in reversed(range(len(self.up))):
            x = self.up[level](torch.cat([skips[level], self.grow[level](x)], 1))
        result: Tensor = self.head(x)
        return result


def dice_of_the_batch(model: Any, batch: Any) -> Tensor:
    """Cross entropy and a soft Dice whose sums run over the whole batch, so that it couples the samples."""
    return _segment(model, batch, over_batch=True)


def dice_of_each(model: Any, batch: Any) -> Tensor:
    """Cross entropy and the mean of each sample's soft Dice, as nnU-Net has it without `batch_dice`."""
    return _segment(model, batch, over_batch=False)


def _segment(model: Any, batch: Any, over_batch: bool) -> Tensor:
    pictures, labels = batch
    logits = model(pictures)
    found = logits.softmax(1)
    wanted = F.one_hot(labels, CLASSES).movedim(-1, 1).to(found.dtype)
    dims = [*([0] if over_batch else []), *range(2, found.dim())]
    dice = (2 * (found * wanted).sum(dims) + 1) / (found.sum(dims) + wanted.sum(dims) + 1)
    return F.cross_entropy(logits, labels) + 1 - dice.mean()


def unet(batch: int, side: int, width: int = 32, levels: int = 5) -> Built:
    """A BatchNorm UNet on images of 3 channels."""
    labels = torch.randint(0, CLASSES, (batch, side, side))
    return dice_of_the_batch, UNet(2, 3, CLASSES, width, levels), (images(batch, side), labels)


def unet3d(batch: int, side: int, width: int = 8, levels: int = 4) -> Built:
    """An InstanceNorm UNet on volumes of 1 channel."""
    shape = (side, side, side)
    data = torch.randn(batch, 1, *shape), torch.randint(0, CLASSES, (batch, *shape))
    return dice_of_each, UNet(3, 1, CLASSES, width, levels), data
