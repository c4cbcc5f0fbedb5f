"""Two networks against each other: two losses, two optimizers, two planned steps, and an average of the weights.

    python examples/adversarial.py [--steps 60]

A generator turns noise into points, a judge tells them from points on a ring. Each has a step within six tenths of the
memory that its plain step takes with its optimizer. The judge's gradients are clipped by value, the generator's by
norm; weights of the generator decay, biases do not; `AveragedModel` keeps a moving average of it. All of that is as in
plain PyTorch, since `.grad` is the gradient of the whole batch. A plain loop shows that the numbers are the same.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fullbatch

BATCH, NOISE, WIDTH = 512, 8, 32


class Game(nn.Module):
    """A generator with BatchNorm, which needs the statistics of all its points, and a judge."""

    def __init__(self) -> None:
        super().__init__()
        normed = [nn.Linear(NOISE, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.ReLU()]
        self.generator = nn.Sequential(*normed, nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))
        hidden = [nn.Linear(2, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU()]
        self.judge = nn.Sequential(*hidden, nn.Linear(WIDTH, 1))


def judged(game: Any, batch: dict[str, Tensor]) -> Tensor:
    """The judge's loss: points of the ring are to get high scores, those of the generator low ones."""
    made = game.generator(batch["noise"]).detach()
    return F.softplus(-game.judge(batch["ring"])).mean() + F.softplus(game.judge(made)).mean()


def fooled(game: Any, batch: dict[str, Tensor]) -> Tensor:
    """The generator's loss: its points are to get high scores."""
    return F.softplus(-game.judge(game.generator(batch["noise"]))).mean()


def make_batch(draws: torch.Generator) -> dict[str, Tensor]:
    """Noise, and points on a ring of radius 1."""
    angle = torch.rand(BATCH, generator=draws) * (2 * math.pi)
    ring = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(BATCH, 2, generator=draws)
    return {"noise": torch.randn(BATCH, NOISE, generator=draws), "ring": ring}


def optimizers(game: Game) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """The judge's, and the generator's with two groups of parameters."""
    weights = [parameter for parameter in game.generator.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in game.generator.parameters() if parameter.ndim == 1]
    groups = [{"params": weights, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0, "lr": 4e-3}]
    return torch.optim.Adam(game.judge.parameters(), lr=4e-3, betas=(0.5, 0.9)), torch.optim.AdamW(groups, lr=2e-3)


def within(loss_fn: Any, game: Game, optimizer: torch.optim.Optimizer) -> fullbatch.Step:
    """A step in six tenths of the memory of the plain one."""
    batch = make_batch(torch.Generator().manual_seed(0))
    plain = fullbatch.explain(loss_fn, game, batch, optimizer).peak
    step = fullbatch.Step(loss_fn, game, batch, memory=int(0.6 * plain), optimizer=optimizer)
    plan = step.plan
    print(f"{loss_fn.__name__}: {plan.microbatches} microbatches, {plan.predicted_peak:,} bytes, plain {plain:,}")
    return step


def train(steps: int, plain: bool) -> tuple[Tensor, nn.Module]:
    """Both losses of each step, [steps, 2], and the averaged generator."""
    torch.manual_seed(0)
    game, draws = Game(), torch.Generator().manual_seed(1)
    averaged = AveragedModel(game.generator, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    judging, fooling = optimizers(game)
    judge_step = None if plain else within(judged, game, judging)
    fool_step = None if plain else within(fooled, game, fooling)

    def backward(step: fullbatch.Step | None, loss_fn: Any, batch: dict[str, Tensor]) -> float:
        game.zero_grad()  # the generator's loss leaves gradients in the judge too
        if step is not None:
            return float(step(batch))
        loss = loss_fn(game, batch)
        loss.backward()
        return float(loss.detach())

    losses = []
    for _ in range(steps):
        batch = make_batch(draws)
        first = backward(judge_step, judged, batch)
        nn.utils.clip_grad_value_(game.judge.parameters(), 0.05)
        judging.step()
        second = backward(fool_step, fooled, batch)
        nn.utils.clip_grad_norm_(game.generator.parameters(), 0.1)
        fooling.step()
        averaged.update_parameters(game.generator)
        losses.append([first, second])
    return torch.tensor(losses), averaged


def radius(generator: nn.Module) -> float:
    """How far from the middle the generator's points are, on average."""
    noise = torch.randn(2000, NOISE, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return float(generator.eval()(noise).norm(dim=1).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a generator against a judge, plain and planned.")
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    torch.set_default_dtype(torch.float64)  # in float32 the rounding of each step would grow in the game
    (expected, reference), (losses, averaged) = train(steps, plain=True), train(steps, plain=False)
    weights = zip(averaged.state_dict().values(), reference.state_dict().values(), strict=True)
    print(f"losses at most {float((losses - expected).abs().max()):.0e} apart", end=", ")
    print(f"averaged weights {max(float((a - b).abs().max()) for a, b in weights):.0e}")
    torch.manual_seed(0)
    print(
        f"radius of the points: {radius(Game().generator):.2f} at first, {radius(averaged):.2f} now, of the ring 1.00"
    )


if __name__ == "__main__":
    main()
