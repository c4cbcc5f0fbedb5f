"""A model that cannot be captured as one graph, trained with the gradient of the whole batch.

Each sample is a sentence of its own length. The model pools its words with weights that NumPy computes, and reads short
sentences with another head than long ones. Values decide both, so that `fullbatch.Step` refuses the model.
`fullbatch.eager.Step` runs it in plain microbatches, each weighted by the count of what it holds.

With BatchNorm in it the samples meet, which no microbatch sees: that is refused, and with `allow_inexact=True` computed
within microbatches and named.

    python examples/data_dependent.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullbatch

WORDS, CLASSES, LONGEST = 50, 3, 40


class Reader(nn.Module):
    """Sentences as rows of word numbers, 0 behind their ends, to scores of each class."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))
            for _ in range(4)
        )
        self.short, self.long = nn.Linear(width, CLASSES), nn.Linear(width, CLASSES)

    def forward(self, sentences: Tensor) -> Tensor:
        x = self.words(sentences)
        for block in self.blocks:
            x = x + block(x)
        return torch.stack([self.read(row, states) for row, states in zip(sentences, x, strict=True)])

    def read(self, row: Tensor, states: Tensor) -> Tensor:
        """One sentence: its length decides the head, NumPy the weight of each word."""
        length = int((row != 0).sum())
        weights = np.hanning(length + 2)[1:-1]
        pooled = (states[:length] * torch.from_numpy(weights / weights.sum()).to(states)[:, None]).sum(0)
        return self.short(pooled) if length < 10 else self.long(pooled)


def loss_fn(model: Any, batch: Any) -> tuple[Tensor, int]:
    """The sum of the losses, and what it is to be divided by."""
    sentences, classes = batch
    return F.cross_entropy(model(sentences), classes, reduction="sum"), len(classes)


def make_batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sentences in which every other word, on average, tells the class."""
    sentences = torch.randint(1, WORDS, (size, LONGEST), generator=generator)
    lengths = torch.randint(2, LONGEST + 1, (size, 1), generator=generator)
    classes = torch.randint(0, CLASSES, (size,), generator=generator)
    told = torch.rand(size, LONGEST, generator=generator) < 0.5
    sentences = torch.where(told, classes[:, None] + 1, sentences)
    return sentences.masked_fill(torch.arange(LONGEST) >= lengths, 0), classes


def train(steps: int = 30, size: int = 32) -> list[float]:
    """Trains within half of the memory that the whole batch takes; returns the loss of each step."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batch = make_batch(size, generator)
    whole = fullbatch.eager.Step(loss_fn, model, batch, microbatch=size, optimizer=optimizer).plan
    step = fullbatch.eager.Step(loss_fn, model, batch, memory=whole.predicted_peak // 2, optimizer=optimizer)
    print(step.plan)
    losses = []
    for _ in range(steps):
        losses.append(float(step(make_batch(size, generator))))
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss: {losses[0]:.3f} at first, {losses[-1]:.3f} after {steps} steps")
    return losses


def coupled(size: int = 32) -> fullbatch.eager.Step:
    """The same with BatchNorm: refused first, then a step whose plan says what differs from the whole batch."""
    torch.manual_seed(0)
    model = Reader()
    model.blocks.insert(2, nn.Sequential(nn.Flatten(1), nn.BatchNorm1d(LONGEST * 32), nn.Unflatten(1, (LONGEST, 32))))
    batch = make_batch(size, torch.Generator().manual_seed(0))
    try:
        fullbatch.eager.Step(loss_fn, model, batch, microbatch=8)
    except fullbatch.FullbatchError as error:
        print(f"refused: {error}")
    step = fullbatch.eager.Step(loss_fn, model, batch, microbatch=8, allow_inexact=True)
    print(f"allowed: exact {step.plan.exact}, {step.plan.inexact}")
    return step


if __name__ == "__main__":
    train()
    coupled()
