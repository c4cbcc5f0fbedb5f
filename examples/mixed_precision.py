"""A language model of characters in mixed precision, with the gradient of the whole batch.

    python examples/mixed_precision.py [--steps 40]

The text is the reference of the Python language, which every Python carries. It is trained three times, within a budget
that plain PyTorch exceeds: in bfloat16 with `torch.autocast` inside of `loss_fn`, in float16 with a GradScaler as well,
and with weights that are bfloat16 themselves. A plain loop beside each shows that the losses are the same to the
rounding of the dtype.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullbatch

BATCH, LENGTH, WIDTH = 48, 32, 64
TEXT = "\n".join(pydoc_data.topics.topics.values())
LETTERS = sorted(set(TEXT))
NUMBERS = torch.tensor([LETTERS.index(letter) for letter in TEXT])


class Model(nn.Module):
    """Two blocks of a transformer on characters."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, len(LETTERS))
        self.register_buffer("hidden", torch.full((LENGTH, LENGTH), float("-inf")).triu(1))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.letters(ids) + self.places.weight
        for block in self.blocks:
            x = block(x, src_mask=self.hidden)
        return self.head(x)


def batches(steps: int) -> Iterator[Tensor]:
    """Batches [BATCH, LENGTH + 1] of places in the text, the same in every run."""
    draws = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(NUMBERS) - LENGTH - 1, (BATCH, 1), generator=draws)
        yield NUMBERS[starts + torch.arange(LENGTH + 1)]


def loss_in(dtype: torch.dtype, autocast: bool) -> Callable[[nn.Module, Tensor], Tensor]:
    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype, enabled=autocast):
            scores = model(batch[:, :-1])
        return F.cross_entropy(scores.float().flatten(0, 1), batch[:, 1:].flatten())

    return loss_fn


def planned(
    loss_fn: Callable[[nn.Module, Tensor], Tensor], model: nn.Module, optimizer: torch.optim.Optimizer
) -> fullbatch.Step:
    """A step in six tenths of the memory that plain PyTorch would take."""
    (example,) = batches(1)
    plain = fullbatch.Step(loss_fn, model, example, optimizer=optimizer).plan.plain_peak
    return fullbatch.Step(loss_fn, model, example, memory=int(0.6 * plain), optimizer=optimizer)


def train(dtype: torch.dtype, autocast: bool, steps: int, plain: bool) -> tuple[list[float], fullbatch.Step | None]:
    """The losses of a run, and the step that it was planned as, where it was. `autocast=False`: weights in `dtype`."""
    torch.manual_seed(0)
    model, loss_fn = Model().to(torch.float32 if autocast else dtype), loss_in(dtype, autocast)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    step = None if plain else planned(loss_fn, model, optimizer)
    losses = []
    for batch in batches(steps):
        if step is None:
            loss = loss_fn(model, batch)
            scaler.scale(loss).backward()
        else:
            loss = step(batch, scaler=scaler)  # a scaler that is disabled is none
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, step


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small language model in mixed precision, plain and planned.")
    parser.add_argument("--steps", type=int, default=40)
    steps = parser.parse_args().steps
    for dtype, autocast in ((torch.bfloat16, True), (torch.float16, True), (torch.bfloat16, False)):
        plain, _ = train(dtype, autocast, steps, plain=True)
        ours, step = train(dtype, autocast, steps, plain=False)
        assert step is not None
        apart = max(abs(a - b) for a, b in zip(ours, plain, strict=True))
        plan = step.plan
        name = f"{dtype}" if autocast else f"weights in {dtype}"
        print(f"{name}: {plan.microbatches} microbatches, {plan.predicted_peak:,} bytes, plain {plan.plain_peak:,}")
        print(f"  loss {ours[0]:.4f} -> {ours[-1]:.4f}, plain {plain[0]:.4f} -> {plain[-1]:.4f}", end=", ")
        print(f"at most {apart:.0e} apart")
        print(step.verify(next(batches(1)), dtype=None))


if __name__ == "__main__":
    main()
