"""Finding coins in a photograph: a loss that matches predictions to targets, which no graph can hold.

The photograph is `coins` of scikit-image: Greek coins from Pompeii on a dark ground. Each sample is a window of it; the
targets are the centres of the coins in it (those that a threshold finds), of which each window has another number. A
network with BatchNorm proposes one point for each cell of a grid, with a score. The Hungarian method (`scipy`) matches
proposals to centres: its result depends on the data, so the loss cannot be captured.

So the step is given as a pair. `forward(model, batch)` is captured and runs a microbatch at a time, within the budget;
`loss(outputs, batch)` runs as it is, once, on the outputs of the whole batch. The gradient is that of the whole batch,
and `step.verify()` shows it.

Written as one plain `loss_fn` it is split by itself, at its call of the model: `found` shows that.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from skimage import data, filters, measure, morphology
from torch import Tensor, nn

import fullbatch

WINDOW = 96  # pixels
CELL = 8  # pixels of the photograph for each proposal
MOST = 8  # coins in one window, at most


class Finder(nn.Module):
    """[N, 1, WINDOW, WINDOW] -> points [N, cells, 2] in windows (x, y in 0..1), and scores [N, cells]."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        sizes = [1, width, 2 * width, 2 * width]
        blocks = [
            nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in zip(sizes, sizes[1:], strict=False)
        ]
        around = nn.Conv2d(2 * width, 2 * width, 7, padding=6, dilation=2)  # a coin is about five cells wide
        self.body = nn.Sequential(*blocks, around, nn.BatchNorm2d(2 * width), nn.ReLU())
        self.head = nn.Conv2d(2 * width, 3, 1)
        side = torch.arange(WINDOW // CELL) + 0.5
        self.register_buffer("cells", torch.stack(torch.meshgrid(side, side, indexing="xy"), -1).view(-1, 2))

    def forward(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        found = self.head(self.body(windows)).flatten(2).movedim(1, 2)
        return (self.cells + found[..., :2]) * (CELL / WINDOW), found[..., 2]


def forward(model: Any, batch: Any) -> Any:
    """The captured part."""
    return model(batch["window"])


def loss(outputs: Any, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Matched proposals are drawn to their coins and scored 1, all others 0. `aux`: how far off they are, in pixels."""
    points, scores = outputs
    wanted, distances = torch.zeros_like(scores), []
    for at, count in enumerate(batch["count"].tolist()):
        centres = batch["centre"][at, :count]
        cost = torch.cdist(points[at].detach(), centres, p=1) * 5 - scores[at].detach().sigmoid()[:, None]
        rows, columns = linear_sum_assignment(cost.numpy())
        wanted[at, rows] = 1
        distances.append((points[at, rows] - centres[columns]).abs().sum(1))
    off = torch.cat(distances)
    scored = F.binary_cross_entropy_with_logits(scores, wanted, pos_weight=scores.new_tensor(10.0))
    return scored + 5 * off.mean(), {"pixels": off.detach().mean() * WINDOW}


def photograph() -> tuple[Tensor, Tensor]:
    """The photograph, and the centres of its coins (x, y in pixels)."""
    image = data.coins()
    bright = filters.gaussian(image, 2) > filters.threshold_otsu(filters.gaussian(image, 2))
    apart = measure.label(morphology.opening(bright, morphology.disk(9)))
    centres = [region.centroid[::-1] for region in measure.regionprops(apart) if region.area > 500]
    return torch.tensor(image / 255.0 - 0.4, dtype=torch.float32), torch.tensor(centres, dtype=torch.float32)


def make_batch(size: int, generator: torch.Generator, image: Tensor, coins: Tensor) -> dict[str, Tensor]:
    """`size` windows with at least one coin each: pixels, centres (padded to MOST) and how many of them count."""
    batch = {"window": torch.zeros(size, 1, WINDOW, WINDOW), "centre": torch.zeros(size, MOST, 2)}
    counts = []
    room = torch.tensor([image.shape[1] - WINDOW, image.shape[0] - WINDOW])
    while len(counts) < size:
        corner = (torch.rand(2, generator=generator) * room).long()
        inside = ((coins - corner) / WINDOW)[((coins >= corner) & (coins < corner + WINDOW)).all(1)][:MOST]
        if len(inside):
            at, (x, y) = len(counts), corner.tolist()
            batch["window"][at, 0] = image[y : y + WINDOW, x : x + WINDOW]
            batch["centre"][at, : len(inside)] = inside
            counts.append(len(inside))
    return {**batch, "count": torch.tensor(counts)}


def loss_fn(model: Any, batch: Any) -> Tensor:
    """The same as one function, which boolean masks and matching keep from being captured: the step finds the split."""
    outputs = model(batch["window"])
    value, _ = loss(outputs, batch)
    sure = outputs[1][outputs[1] > 0]  # of a size that depends on values
    return value + 0.01 * sure.square().sum() / len(batch["count"])


def found(model: nn.Module, batch: dict[str, Tensor], memory: int) -> None:
    """One step of `loss_fn` within `memory` bytes, beside a plain one."""
    step = fullbatch.Step(loss_fn, model, batch, memory=memory)
    plain = loss_fn(copy.deepcopy(model), batch).detach()
    model.zero_grad()
    value = step(batch)
    (note,) = [note for note in step.plan.notes if "cannot be captured whole" in note]
    print(f"found: {note}")
    print(f"found: {step.plan.microbatches} microbatches, loss {value:.6f}, plain {plain:.6f}")
    print(step.verify(batch))


def train(steps: int = 40, size: int = 32) -> list[float]:
    """Trains within 60 % of the memory that the whole batch takes; returns how far off, in pixels, after each step."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    image, coins = photograph()
    print(f"{len(coins)} coins in a photograph of {tuple(image.shape)} pixels")
    model = Finder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batch = make_batch(size, generator, image, coins)
    plain = fullbatch.Step((forward, loss), model, batch, optimizer=optimizer, microbatch=size).plan.predicted_peak
    step = fullbatch.Step((forward, loss), model, batch, optimizer=optimizer, memory=int(0.6 * plain))
    pixels = []
    for _ in range(steps):
        _, aux = step(make_batch(size, generator, image, coins))
        pixels.append(float(aux["pixels"]))
        optimizer.step()
        optimizer.zero_grad()
    print(step.plan)
    print(step.verify(make_batch(size, generator, image, coins)))
    found(model, make_batch(size, generator, image, coins), int(0.6 * plain))
    print(f"pixels off: {pixels[0]:.1f} at first, {sum(pixels[-5:]) / 5:.1f} in the last of {steps} steps")
    return pixels


if __name__ == "__main__":
    train()
