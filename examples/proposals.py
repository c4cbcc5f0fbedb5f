"""A language model that does not fit its memory, what would make it fit, and a step after one of the proposals.

    python examples/proposals.py [--memory 3.5MB]

Random words: what is asked is how much memory a step takes, not what it learns. Of what is proposed the example takes a
change that is the same mathematics, the loss without the logits of all words, and trains within the memory.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullbatch

BATCH, LENGTH, WORDS, FEATURES = 8, 64, 2000, 32


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


if __name__ == "__main__":
    main()
