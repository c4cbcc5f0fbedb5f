"""Next-word prediction with a vocabulary of thousands of words, whose logits are never all in memory.

    python examples/long_vocabulary.py [--steps 10]

The text is the reference of the Python language, cut into words. `fullbatch.linear_cross_entropy` stands for the last
layer and the loss: in plain PyTorch, where the memory of both is measured, and in a planned step that trains. At the
end the same loss is taken in bfloat16, where logits that are rounded give another value than those of float32.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import re

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullbatch

BATCH, LENGTH, WIDTH = 32, 32, 48
TEXT = re.findall(r"\w+|[^\w\s]", "\n".join(pydoc_data.topics.topics.values()))
WORDS = sorted(set(TEXT))
PLACES = {word: at for at, word in enumerate(WORDS)}
NUMBERS = torch.tensor([PLACES[word] for word in TEXT])


class Model(nn.Module):
    """Words to features by a GRU; the head reads the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(len(WORDS), WIDTH)
        nn.init.normal_(self.words.weight, std=0.1)
        self.inner = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        features: Tensor = self.inner(self.words(ids))[0]
        return features


def sliced(model: Model, batch: Tensor) -> Tensor:
    return fullbatch.linear_cross_entropy(model(batch[:, :-1]), model.words.weight, batch[:, 1:])


def whole(model: Model, batch: Tensor) -> Tensor:
    logits = F.linear(model(batch[:, :-1]), model.words.weight)
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def batches(steps: int) -> list[Tensor]:
    draws = torch.Generator().manual_seed(0)
    starts = [torch.randint(len(NUMBERS) - LENGTH - 1, (BATCH, 1), generator=draws) for _ in range(steps)]
    return [NUMBERS[start + torch.arange(LENGTH + 1)] for start in starts]


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains on words without the logits of all of them.")
    parser.add_argument("--steps", type=int, default=10)
    data = batches(parser.parse_args().steps)
    print(f"{len(WORDS)} words, {BATCH * LENGTH} of them a step")

    for name, loss_fn in (("whole", whole), ("sliced", sliced)):
        model = Model()
        peak = fullbatch.measure(lambda fn=loss_fn, net=model: fn(net, data[0]).backward()).peak
        print(f"{name}: loss {loss_fn(model, data[0]):.6f}, {peak:,} bytes")

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = fullbatch.Step(sliced, model, data[0], microbatch=BATCH // 4, optimizer=optimizer)
    losses = []
    for batch in data:
        losses.append(step(batch).item())
        optimizer.step()
        optimizer.zero_grad()
    print(f"planned: loss {losses[0]:.6f} -> {losses[-1]:.6f}, {step.plan.activations:,} bytes")

    half = Model().bfloat16()
    with torch.no_grad():
        features = half(data[0][:, :-1]).double()
        truth = F.cross_entropy((features @ half.words.weight.double().t()).flatten(0, 1), data[0][:, 1:].flatten())
        print(f"bfloat16: {truth:.6f} in float64, sliced {sliced(half, data[0]):.6f}, whole {whole(half, data[0]):.6f}")


if __name__ == "__main__":
    main()
