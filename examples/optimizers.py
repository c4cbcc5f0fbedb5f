"""LARS, and an AdamW whose state has eight bits, within budgets that count the optimizer too.

    python examples/optimizers.py [--steps 8]

A net with BatchNorm tells ten patterns apart under noise. For each optimizer it is trained twice: by a plain loop, and
by a step in half of the memory that the plain one takes. The losses are the same to the rounding of float32, and of
the codes of eight bits.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullbatch

BATCH, PIXELS, WIDTH = 512, 64, 96
Make = Callable[[nn.Module], torch.optim.Optimizer]


def network() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inside in (PIXELS, WIDTH, WIDTH, WIDTH):
        layers += [nn.Linear(inside, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def loss_fn(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Patterns with noise, [BATCH, PIXELS], and which they are; the same in every run."""
    draws = torch.Generator().manual_seed(1)
    patterns = torch.randn(10, PIXELS, generator=draws)
    for _ in range(count):
        which = torch.randint(10, (BATCH,), generator=draws)
        yield patterns[which] + 2 * torch.randn(BATCH, PIXELS, generator=draws), which


def lars(model: nn.Module) -> torch.optim.Optimizer:
    """Biases and the weights of BatchNorm neither decay nor adapt, as in the papers."""
    return fullbatch.optim.LARS(fullbatch.optim.param_groups(model, weight_decay=1e-4), lr=0.05)


def adamw_8bit(model: nn.Module) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit  # in fullbatch[lowbit]

    optimizer: torch.optim.Optimizer = AdamW8bit(model.parameters(), lr=5e-3)
    return optimizer


def train(make: Make, steps: int, plain: bool) -> tuple[list[float], fullbatch.Step | None]:
    """The losses of a run, and its planned step, where it has one."""
    model = network()
    optimizer = make(model)
    (example,) = batches(1)
    step = None
    if not plain:
        peak = fullbatch.explain(loss_fn, model, example, optimizer).peak
        step = fullbatch.Step(loss_fn, model, example, memory=peak // 2, optimizer=optimizer)
    losses = []
    for batch in batches(steps):
        optimizer.zero_grad()
        if step is None:
            loss = loss_fn(model, batch)
            loss.backward()
        else:
            loss = step(batch)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, step


def compare(name: str, make: Make, steps: int) -> None:
    """Trains plain and planned, and says how far apart they are."""
    (expected, _), (losses, step) = train(make, steps, plain=True), train(make, steps, plain=False)
    assert step is not None
    plan, apart = step.plan, max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    print(f"{name}: {plan.microbatches} microbatches, {plan.predicted_peak:,} bytes, plain {plan.plain_peak:,}")
    print(f"  loss {losses[0]:.3f} -> {losses[-1]:.3f}, at most {apart:.0e} from that of the plain loop")


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains with LARS and with an AdamW of eight bits, plain and planned.")
    parser.add_argument("--steps", type=int, default=8)
    steps = parser.parse_args().steps
    compare("LARS", lars, steps)
    if importlib.util.find_spec("torchao") is None:
        print("AdamW8bit needs torchao: pip install 'fullbatch[lowbit]'")
    else:
        compare("AdamW8bit", adamw_8bit, steps)


if __name__ == "__main__":
    main()
