"""Two models that do not fit their memory, what would make them fit, and a step after one of the proposals.

    python examples/proposals.py [--memory 3.5MB]

Random words: what is asked is how much memory a step takes, not what it learns. Of what is proposed the example takes a
change that is the same mathematics, the loss without the logits of all words, and trains within the memory.

Of images the sides can shrink, which is other mathematics: it is proposed last, with the line that makes them smaller.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullbatch

BATCH, LENGTH, WORDS, FEATURES = 8, 64, 2000, 32
SIDE, IMAGE_MEMORY = 64, 400_000


class Model(nn.Module):
    """Words, one block of attention, and as many words again."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, FEATURES)
        self.block = nn.TransformerEncoderLayer(FEATURES, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(FEATURES, WORDS, bias=False)

    def hidden(self, text: Tensor) -> Tensor:
        return self.block(self.words(text))

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.hidden(text))


def with_logits(model: Model, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def without_logits(model: Model, batch: Tensor) -> Tensor:
    return fullbatch.linear_cross_entropy(model.hidden(batch)[:, :-1], model.head.weight, batch[:, 1:])


def classified(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def images() -> None:
    """A step with images that does not fit, and the largest smaller ones with which it does."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    )
    pictures, classes = torch.randn(4, 3, SIDE, SIDE), torch.randint(10, (4,))
    found = fullbatch.propose(classified, model, (pictures, classes), memory=IMAGE_MEMORY)
    row = next(row for row in found.rows if row.what.startswith("images of") and row.fits)
    print(f"{row.what} fit: {row.line}")
    side = int(row.what.split()[-1])
    batch = F.interpolate(pictures, size=(side, side)), classes
    step = fullbatch.Step(classified, model, batch, memory=IMAGE_MEMORY)
    print(
        f"loss {step(batch):.4f}, {step.plan.predicted_peak:,} of {found.budget:,} bytes, least before {found.least:,}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Proposes what would make a training step fit a memory.")
    parser.add_argument("--memory", default="3.5MB")
    memory = parser.parse_args().memory
    torch.manual_seed(0)
    model = Model()
    batch = torch.randint(WORDS, (BATCH, LENGTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    try:
        fullbatch.Step(with_logits, model, batch, memory=memory, optimizer=optimizer)
    except fullbatch.BudgetError as error:
        print(error)
    found = fullbatch.propose(with_logits, model, batch, memory=memory, optimizer=optimizer)
    print(found)

    fits = [row.what for row in found.rows if row.same and row.fits]
    print(f"the same mathematics, and fits: {', '.join(fits)}")
    step = fullbatch.Step(without_logits, model, batch, memory=memory, optimizer=optimizer)
    with torch.no_grad():
        before = with_logits(model, batch)
    loss = step(batch)
    optimizer.step()
    print(f"loss {loss:.4f} (with logits {before:.4f}), {step.plan.predicted_peak:,} of {found.budget:,} bytes")
    images()


if __name__ == "__main__":
    main()
