"""Texts of any length: `step.prepare` plans for every shape before the first step runs.

    python examples/varying_sizes.py

The texts are lines of the reference of the Python language, which every Python carries. A batch is as wide as its
longest line, and the mean is over all letters of the batch, so a microbatch does not know what to divide by. The memory
of a step grows with the length: without `prepare` a run may meet the largest batch, and end, hours after its start.
"""

from __future__ import annotations

import pydoc_data.topics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullbatch

BATCH, WIDTH, ROUND = 32, 48, 16  # widths are multiples of ROUND: fewer shapes
LINES = [line.strip() for text in pydoc_data.topics.topics.values() for line in text.splitlines() if line.strip()]
LETTERS = sorted(set("".join(LINES)))


def loss_fn(model: Any, batch: Tensor) -> Tensor:
    """The mean over all letters; 0 stands behind the ends of lines."""
    scores = model(batch[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=0)


class Model(nn.Module):
    """Next letters from the five up to here: convolutions, [lines, letters] -> [lines, letters, kinds]."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS) + 1, WIDTH)
        self.first, self.second = nn.Conv1d(WIDTH, WIDTH, 3), nn.Conv1d(WIDTH, WIDTH, 3)
        self.head = nn.Linear(WIDTH, len(LETTERS) + 1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.letters(ids).movedim(1, 2)
        for layer in (self.first, self.second):
            x = x + F.gelu(layer(F.pad(x, (2, 0))))
        return self.head(x.movedim(1, 2))


def padded(lines: list[str]) -> Tensor:
    """Numbers of letters [lines, width], the width that of the longest, rounded up."""
    width = -(-(max(map(len, lines)) + 1) // ROUND) * ROUND
    rows = [[LETTERS.index(letter) + 1 for letter in line] for line in lines]
    return torch.tensor([row + [0] * (width - len(row)) for row in rows])


def make_batches(count: int) -> list[Tensor]:
    """Each of lines of about the same length."""
    draws = torch.Generator().manual_seed(0)
    chosen = [LINES[at] for at in torch.randint(len(LINES), (count * BATCH,), generator=draws).tolist()]
    chosen.sort(key=len)
    batches = [padded(chosen[at : at + BATCH]) for at in range(0, len(chosen), BATCH)]
    return [batches[at] for at in torch.randperm(count, generator=draws).tolist()]


def plain_loss(model: nn.Module, batch: Tensor) -> tuple[float, Tensor]:
    """Loss and gradient of plain PyTorch."""
    loss = loss_fn(model, batch)
    return float(loss.detach()), torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def main() -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)  # to see how exact it is
    model, batches = Model(), make_batches(16)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    narrow = min(batches, key=lambda batch: batch.shape[1])
    widest = max(batches, key=lambda batch: batch.shape[1])
    plain = fullbatch.explain(loss_fn, model, widest, optimizer).peak
    step = fullbatch.Step(loss_fn, model, narrow, memory=plain // 2, optimizer=optimizer)
    prepared = step.prepare(batches)
    print(prepared)
    print(f"the worst takes {prepared.worst.predicted_peak:,} bytes, plain {plain:,}")

    losses, apart = [], 0.0
    beyond = padded([LINES[0] * 40, *LINES[1:BATCH]])[:, : widest.shape[1] + 2 * ROUND]
    for batch in [*batches, beyond]:
        expected, gradient = plain_loss(model, batch)
        optimizer.zero_grad()
        losses.append(float(step(batch)))
        ours = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        apart = max(apart, abs(losses[-1] - expected), float((ours - gradient).abs().max() / gradient.abs().max()))
        optimizer.step()
    plan = step.plan
    print(f"width {beyond.shape[1]} was planned anew: microbatch {plan.microbatch}, {plan.predicted_peak:,} bytes")
    print(f"loss {losses[0]:.2f} -> {losses[-2]:.2f}; losses and gradients at most {apart:.0e} from plain PyTorch")


if __name__ == "__main__":
    main()
