"""A run that is killed and goes on from its last checkpoint ends with the same bits as one that is not.

The checkpoint holds the model, the optimizer, the schedule and `step.state_dict()`: with dropout the masks of the
coming steps follow from that. Three processes run here: one whole, one that kills itself, one that goes on.
Run it: `python examples/resume.py` (needs scikit-image).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from skimage import data
from torch import nn

import fullbatch

STEPS, BATCH = 6, 48


def batch_of(at: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of step `at`: a function of its number, so that a resumed run sees what it would have seen."""
    generator = torch.Generator().manual_seed(at)
    images = [torch.from_numpy(image()).float() / 255 for image in (data.brick, data.grass, data.gravel)]
    labels = torch.randint(3, (BATCH,), generator=generator)
    corners = torch.randint(480, (BATCH, 2), generator=generator).tolist()
    cut = [images[k][r : r + 16, c : c + 16] for k, (r, c) in zip(labels.tolist(), corners, strict=True)]
    return torch.stack(cut).flatten(1), labels


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Written for the whole batch."""
    return F.cross_entropy(model(batch[0]), batch[1])


def train(path: Path, die_after: int) -> None:
    """Trains from the checkpoint at `path`, where there is one; writes it after every step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = fullbatch.lr.warmup(optimizer, 3)
    step = fullbatch.Step(loss_fn, model, batch_of(0), microbatch=20, optimizer=optimizer)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "step": step}
    if path.exists():
        checkpoint = torch.load(path, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])

    for at in range(step.state_dict()["steps"], STEPS):
        optimizer.zero_grad()
        loss = step(batch_of(at))
        optimizer.step()
        schedule.step()
        print(f"  step {at + 1}  loss {loss.item():.4f}", flush=True)
        unfinished = path.with_suffix(".tmp")
        torch.save({name: part.state_dict() for name, part in parts.items()}, unfinished)
        unfinished.replace(path)  # a kill while it is written leaves the one before
        if at + 1 == die_after:
            os.kill(os.getpid(), signal.SIGKILL)


def compare() -> bool:
    """Whether the killed and resumed run ended with the bits of the whole one."""
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder, "whole.pt"), Path(folder, "killed.pt")
        for title, path, die_after in (("whole", whole, 0), ("killed", killed, 3), ("resumed", killed, 0)):
            print(title, flush=True)
            done = subprocess.run([sys.executable, __file__, str(path), str(die_after)], check=False)
            assert done.returncode == (-signal.SIGKILL if die_after else 0), done.returncode
        one, other = (torch.load(path, weights_only=True)["model"] for path in (whole, killed))
    same = all(torch.equal(one[name], other[name]) for name in one)
    print("bitwise the same weights and statistics" if same else "NOT the same")
    return same


if __name__ == "__main__":
    if len(sys.argv) == 3:
        train(Path(sys.argv[1]), int(sys.argv[2]))
    elif not compare():
        sys.exit(1)
