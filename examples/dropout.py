"""Random layers under a tight budget: what is computed again sees the masks that were drawn first.

    python examples/dropout.py

A net with three kinds of chance in it: dropout, stochastic depth (a block is left out for some samples), and a hard
choice between two experts by Gumbel softmax. In half of the plain step's memory much of it is computed twice. The masks
come from the seed alone, so the same seed gives the same step to the bit, and the same as a step that computes nothing
twice: were a mask drawn again for the recomputation, they would differ. `step.verify()` gives the plain step the masks
that were drawn, in the same microbatches, and compares loss, gradients and buffers.

Numbers from NumPy, or from a torch.Generator of the user's, are not drawn where torch's own are: captured, every step
would see the same ones. Such a step is refused, and the refusal says what to type.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullbatch

BATCH, WIDTH, DEPTH = 256, 32, 4


class Block(nn.Module):
    """A residual block that is left out for a fifth of the samples while training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.choice = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        choice = F.gumbel_softmax(self.choice(y), hard=True)  # [samples, 2], one of them 1
        y = sum(choice[:, at, None] * F.gelu(expert(y)) for at, expert in enumerate(self.experts))
        kept = torch.empty(len(x), 1).bernoulli_(0.8) / 0.8
        return x + kept * self.drop(y)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, WIDTH), *(Block() for _ in range(DEPTH)), nn.Linear(WIDTH, 1))


def loss_fn(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0])[:, 0], batch[1])


def make_batch() -> tuple[Tensor, Tensor]:
    """Points, and the product of two of their coordinates."""
    x = torch.randn(BATCH, 8)
    return x, x[:, 0] * x[:, 1]


def gradient(step: fullbatch.Step, model: nn.Module, batch: tuple[Tensor, Tensor], seed: int) -> Tensor:
    """All gradients of one step from `seed`, as one vector; buffers stay as they were."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.zero_grad()
    torch.manual_seed(seed)
    step(batch)
    model.load_state_dict(before)
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


OWN = torch.Generator().manual_seed(0)


def noise_of_numpy(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return loss_fn(model, (x + 0.1 * torch.from_numpy(np.random.randn(*x.shape)).to(x), y))


def noise_of_a_generator(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return loss_fn(model, (x + 0.1 * torch.randn(x.shape, generator=OWN), y))


def refused(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    """Both are refused before anything runs."""
    for noisy in (noise_of_numpy, noise_of_a_generator):
        try:
            fullbatch.Step(noisy, model, batch, microbatch=32)
        except fullbatch.CaptureError as error:
            print(f"refused: {error}")


def main() -> None:
    torch.manual_seed(0)
    model, batch = network(), make_batch()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    roomy = fullbatch.Step(loss_fn, model, batch, microbatch=32, optimizer=optimizer)
    plain = roomy.plan.plain_peak
    tight = fullbatch.Step(loss_fn, model, batch, microbatch=32, memory=int(0.5 * plain), optimizer=optimizer)
    plan = tight.plan
    print(f"{plan.microbatches} microbatches, {plan.predicted_peak:,} bytes, plain {plain:,}")
    print(f"operators run again: {plan.recomputed}, with more memory: {roomy.plan.recomputed}")

    first = gradient(tight, model, batch, seed=3)
    print(f"same seed, same gradient: {torch.equal(first, gradient(tight, model, batch, seed=3))}")
    print(f"same seed, with more memory: {torch.equal(first, gradient(roomy, model, batch, seed=3))}")
    print(f"another seed, same gradient: {torch.equal(first, gradient(tight, model, batch, seed=4))}")
    print(tight.verify(batch))

    losses = []
    for _ in range(100):
        optimizer.zero_grad()
        losses.append(float(tight(batch)))
        optimizer.step()
    print(f"loss {losses[0]:.3f} -> {sum(losses[-10:]) / 10:.3f}")
    refused(model, batch)


if __name__ == "__main__":
    main()
