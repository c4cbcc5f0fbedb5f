"""LBFGS on all samples at once, within a memory budget: `optimizer.step(step.closure(batch))`.

A small net learns a photograph as a function of position, from all of its pixels in every evaluation: a line search
needs the loss of the same samples each time. Run it: `python examples/second_order.py` (needs scikit-image).
"""

from __future__ import annotations

import torch
from skimage import data
from torch import nn

import fullbatch

SIDE, STEPS, EVALUATIONS = 64, 6, 20


def pixels() -> tuple[torch.Tensor, torch.Tensor]:
    """Positions [4096, 2] in [-1, 1], and the grey value there [4096, 1]."""
    image = torch.from_numpy(data.camera()).float()[None, None] / 127.5 - 1
    small = nn.functional.interpolate(image, size=(SIDE, SIDE), mode="area")
    line = torch.linspace(-1, 1, SIDE)
    return torch.cartesian_prod(line, line), small.reshape(-1, 1)


class Waves(nn.Module):
    """Sines of positions, and two layers on them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("directions", 4 * torch.randn(2, 48))
        self.layers = nn.Sequential(nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, where: torch.Tensor) -> torch.Tensor:
        """The grey value at each position."""
        angle = where @ self.directions
        return self.layers(torch.cat([angle.sin(), angle.cos()], 1))


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean squared error over all pixels."""
    where, grey = batch
    return (model(where) - grey).square().mean()


def train() -> list[float]:
    """The loss before each LBFGS step, and after the last."""
    torch.manual_seed(0)
    model, batch = Waves(), pixels()
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=EVALUATIONS, history_size=10, line_search_fn="strong_wolfe"
    )
    plain = fullbatch.explain(loss_fn, model, batch, optimizer)
    print(plain)
    # What the optimizer holds while it evaluates is owned; half of the rest is enough for the evaluation.
    budget = plain.owned.total + (plain.peak - plain.owned.total) // 2
    step = fullbatch.Step(loss_fn, model, batch, memory=max(budget, plain.optimizer_peak), optimizer=optimizer)
    print(step.plan)

    losses = [optimizer.step(step.closure(batch)).item() for _ in range(STEPS)]
    losses.append(step.closure(batch)().item())
    for at, loss in enumerate(losses):
        print(f"after {at} steps of at most {EVALUATIONS} iterations: {loss:.5f}")
    return losses


if __name__ == "__main__":
    train()
