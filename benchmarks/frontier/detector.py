"""A detector in the manner of YOLOv8: C2f backbone, FPN and PAN neck, three heads; BatchNorm and SiLU throughout."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from built import Built, images

STRIDES = (8, 16, 32)


class Unit(nn.Sequential):
    """Convolution, BatchNorm, SiLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> None:
        conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        super().__init__(conv, nn.BatchNorm2d(outputs), nn.SiLU())


class Residual(nn.Module):
    def __init__(self, width: int, shortcut: bool) -> None:
        super().__init__()
        self.body, self.shortcut = nn.Sequential(Unit(width, width, 3), Unit(width, width, 3)), shortcut

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.shortcut else self.body(x)


class C2f(nn.Module):
    """Cross-stage partial block: half of the channels goes through the residuals, and all their outputs are joined."""

    def __init__(self, inputs: int, outputs: int, depth: int, shortcut: bool) -> None:
        super().__init__()
        half = outputs // 2
        self.enter, self.leave = Unit(inputs, outputs), Unit((2 + depth) * half, outputs)
        self.steps = nn.ModuleList(Residual(half, shortcut) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.enter(x).chunk(2, 1))
        for step in self.steps:
            parts.append(step(parts[-1]))
        return self.leave(torch.cat(parts, 1))


class Pyramid(nn.Module):
    """SPPF: the same pooling once, twice and three times."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter, self.leave = Unit(width, width // 2), Unit(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.enter(x)]
        for _ in range(3):
            parts.append(F.max_pool2d(parts[-1], 5, 1, 2))
        return self.leave(torch.cat(parts, 1))


class Head(nn.Module):
    """Objectness and the four distances to a box's sides, each by a branch of its own: (N, 1 + 4, H, W)."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.objectness, self.box = (
            nn.Sequential(Unit(inputs, width, 3), Unit(width, width, 3), nn.Conv2d(width, outputs, 1))
            for outputs in (1, 4)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.objectness(x), self.box(x)], 1)


class Yolo(nn.Module):
    """Maps (N, 3, H, W) to three maps (N, 5, H / stride, W / stride)."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        w = [width * 2**level for level in range(5)]
        self.stem = Unit(3, w[0], 3, 2)
        self.down = nn.ModuleList(Unit(a, b, 3, 2) for a, b in zip(w, w[1:], strict=False))
        self.stages = nn.ModuleList(C2f(b, b, depth * n, True) for b, n in zip(w[1:], (1, 2, 2, 1), strict=True))
        self.pyramid = Pyramid(w[4])
        self.up16, self.up8 = C2f(w[4] + w[3], w[3], depth, False), C2f(w[3] + w[2], w[2], depth, False)
        self.down8, self.down16 = Unit(w[2], w[2], 3, 2), Unit(w[3], w[3], 3, 2)
        self.out16, self.out32 = C2f(w[2] + w[3], w[3], depth, False), C2f(w[3] + w[4], w[4], depth, False)
        self.heads = nn.ModuleList(Head(inputs, w[2]) for inputs in w[2:])

    def forward(self, x: Tensor) -> list[Tensor]:
        features = []
        x = self.stem(x)
        for down, stage in zip(self.down, self.stages, strict=True):
            x = stage(down(x))
            features.append(x)
        at8, at16, at32 = features[1], features[2], self.pyramid(features[3])
        at16 = self.up16(torch.cat([F.interpolate(at32, scale_factor=2.0), at16], 1))
        at8 = self.up8(torch.cat([F.interpolate(at16, scale_factor=2.0), at8], 1))
        at16 = self.out16(torch.cat([self.down8(at8), at16], 1))
        at32 = self.out32(torch.cat([self.down16(at16), at32], 1))
        return [head(x) for head, x in zip(self.heads, (at8, at16, at32), strict=True)]


def detect(model: Any, batch: Any) -> Tensor:
    """Objectness BCE and, where there is an object, 1 - IoU; both over the number of objects in the whole batch."""
    pictures, targets = batch
    objectness, boxes, count = 0.0, 0.0, 0.0
    for found, target in zip(model(pictures), targets, strict=True):
        here, wanted = target[:, :1], target[:, 1:]
        objectness = objectness + F.binary_cross_entropy_with_logits(found[:, :1], here, reduction="sum")
        boxes = boxes + (here * (1 - iou(F.softplus(found[:, 1:]), wanted))).sum()
        count = count + here.sum()
    return (objectness + 5 * boxes) / count.clamp(min=1)


def iou(found: Tensor, wanted: Tensor) -> Tensor:
    """Of two boxes about one point, given by the distances to their four sides: (N, 4, H, W) to (N, 1, H, W)."""
    least, most = torch.minimum(found, wanted), torch.maximum(found, wanted)
    shared = (least[:, :1] + least[:, 2:3]) * (least[:, 1:2] + least[:, 3:])
    hull = (most[:, :1] + most[:, 2:3]) * (most[:, 1:2] + most[:, 3:])
    return shared / hull


def yolo(batch: int, side: int, width: int = 16, depth: int = 1) -> Built:
    """As wide and deep as YOLOv8n by default. Targets are dense maps: an object or not, and its box."""
    maps = [(batch, side // stride, side // stride) for stride in STRIDES]
    targets = [
        torch.cat([(torch.rand(n, 1, h, w) < 0.05).float(), torch.rand(n, 4, h, w) * 4 + 0.5], 1) for n, h, w in maps
    ]
    return detect, Yolo(width, depth), (images(batch, side), targets)
