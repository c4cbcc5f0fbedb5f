"""The largest batch and the largest image that fit, for plain PyTorch and for fullbatch, and a step of that batch.

    python examples/largest_batch.py [--memory 8MB]

A network with BatchNorm on squares of noise: what is asked is how much memory it takes, not what it learns. Each size
that is printed has run within the memory. The plan that comes with the batch is then used for a step of it.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullbatch

BATCH, SIDE, CLASSES = 8, 32, 10
Batch = tuple[Tensor, Tensor]


def network() -> nn.Module:
    """Three convolutions with BatchNorm."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inward, outward, stride in ((3, 16, 1), (16, 32, 2), (32, 32, 1)):
        layers += [nn.Conv2d(inward, outward, 3, stride, 1, bias=False), nn.BatchNorm2d(outward), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES))


def images(count: int, side: int) -> Batch:
    return torch.randn(count, 3, side, side), torch.randint(CLASSES, (count,))


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def main() -> None:
    parser = argparse.ArgumentParser(description="Finds the largest batch and the largest image that fit a memory.")
    parser.add_argument("--memory", default="8MB")
    memory = parser.parse_args().memory
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    example = images(BATCH, SIDE)
    asked = {"memory": memory, "optimizer": optimizer}

    batch = fullbatch.largest(loss_fn, model, example, multiple_of=8, most=1024, **asked)
    print(batch)
    side = fullbatch.largest(
        loss_fn, model, example, axis=lambda size: images(BATCH, size), multiple_of=16, most=512, **asked
    )
    print(side)

    size = batch.fullbatch.size
    step = fullbatch.Step(loss_fn, model, images(size, SIDE), plan=batch.fullbatch.plan, **asked)
    loss = step(images(size, SIDE))
    optimizer.step()
    print(f"a step of {size} images: loss {loss:.3f}, plain PyTorch can have {batch.plain.size if batch.plain else 0}")


if __name__ == "__main__":
    main()
