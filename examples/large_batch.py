"""A batch eight times as large: LAMB, the rate scaled with the batch, and a warm-up, within a memory budget.

Tiles of three photographs of surfaces (brick, grass and gravel, from scikit-image's wheel) are told apart by a small
convolutional net with BatchNorm. Run it: `python examples/large_batch.py` (needs scikit-image).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from skimage import data
from torch import nn
from torch.optim.swa_utils import update_bn

import fullbatch

TILE, BASE_BATCH, BATCH, STEPS, WARM_UP = 32, 32, 256, 30, 8
BASE_LR = 0.02  # what a batch of 32 takes


def photographs() -> torch.Tensor:
    """Three grey photographs, [3, 512, 512], from -1 to 1."""
    return torch.stack([torch.from_numpy(image()) for image in (data.brick, data.grass, data.gravel)]) / 127.5 - 1


def tiles(images: torch.Tensor, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` random tiles [count, 1, 32, 32] and which photograph each is of."""
    labels = torch.randint(len(images), (count,), generator=generator)
    rows = torch.randint(images.shape[1] - TILE, (count,), generator=generator)
    columns = torch.randint(images.shape[2] - TILE, (count,), generator=generator)
    cut = [
        images[k, r : r + TILE, c : c + TILE]
        for k, r, c in zip(labels.tolist(), rows.tolist(), columns.tolist(), strict=True)
    ]
    return torch.stack(cut)[:, None], labels


def network() -> nn.Module:
    """Three convolutions with BatchNorm: each step needs the statistics of all 256 tiles."""
    layers: list[nn.Module] = []
    for inside, outside in ((1, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(inside, outside, 3, stride=2, bias=False), nn.BatchNorm2d(outside), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 3))


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Written for the whole batch."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def train() -> float:
    """Trains, and returns the share of unseen tiles that are told right."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    images = photographs()
    seen, unseen = images[:, :, :384], images[:, :, 384:]
    model = network()

    lr = fullbatch.lr.scaled(BASE_LR, BASE_BATCH, BATCH, rule="sqrt")
    optimizer = fullbatch.optim.LAMB(fullbatch.optim.param_groups(model, weight_decay=0.01), lr=lr)
    schedule = fullbatch.lr.warmup(
        optimizer, WARM_UP, after=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS - WARM_UP)
    )

    example = tiles(seen, BATCH, generator)
    plain = fullbatch.explain(loss_fn, model, example, optimizer).peak
    step = fullbatch.Step(loss_fn, model, example, memory=plain // 2, optimizer=optimizer)
    print(step.plan)

    for at in range(STEPS):
        optimizer.zero_grad()
        loss = step(tiles(seen, BATCH, generator))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if at % 5 == 4:
            print(f"step {at + 1:3}  loss {loss.item():.3f}  rate {schedule.get_last_lr()[0]:.4f}")

    # In 30 steps the running statistics have not caught up with the weights: they are taken anew, without gradients.
    update_bn([tiles(seen, BATCH, generator)[0] for _ in range(4)], model)
    model.eval()
    images, labels = tiles(unseen, 512, generator)
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).float().mean().item()
    print(f"unseen tiles told right: {right:.1%}")
    return right


if __name__ == "__main__":
    train()
