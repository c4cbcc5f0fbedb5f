"""Trains a BatchNorm UNet on photographs at a batch that plain PyTorch cannot hold under a memory cap.

    python demo/segmentation.py [--quick]

Three runs of the same training, each in its own process so that its memory is its own: plain PyTorch without a cap,
plain PyTorch under a cap of 57 % of what that took, and fullbatch under the very same cap. The first is there to be
compared with: the loss curves must agree, and so must the gradients of the first step. How far float32 itself is off,
a single plain step in float64 says: fullbatch's gradient must be about as near to that one as plain PyTorch's is.

This file holds the training itself, the part that a user would write; ``report.py`` starts the runs and compares them.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

from data import CLASSES, UNKNOWN, Batch, Scene, load_scene, tiles
from fullbatch._memory._cap import CountingAllocator, available
from unet import UNet

TrainingStep = Callable[[Batch], torch.Tensor]


@dataclass(frozen=True)
class Job:
    """The training: ``count`` tiles of ``size`` pixels a step, ``steps`` optimizer steps, UNet of that ``width``."""

    count: int
    size: int
    steps: int
    width: int


FULL, QUICK = Job(count=24, size=256, steps=6, width=16), Job(count=8, size=96, steps=3, width=8)


def depth_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    # The mean is over the pixels with a measured depth, whose number differs from tile to tile: a second reason, after
    # BatchNorm, why averaging the gradients of parts of the batch gives something else.
    return F.cross_entropy(model(batch["images"]), batch["depth"], ignore_index=UNKNOWN)


def prepare_plain(model: nn.Module, first: Batch, optimizer: Optimizer, cap: int | None) -> TrainingStep:
    def step(batch: Batch) -> torch.Tensor:
        loss = depth_loss(model, batch)
        torch.autograd.backward(loss)
        return loss.detach()

    return step


def prepare_fullbatch(model: nn.Module, first: Batch, optimizer: Optimizer, cap: int | None) -> TrainingStep:
    import fullbatch  # only here: the plain runs are plain PyTorch

    step = fullbatch.Step(depth_loss, model, first, memory=cap or "2GiB", optimizer=optimizer)
    say(plan=str(step.plan), microbatches=step.plan.microbatches, predicted_peak=step.plan.predicted_peak)
    return step


PREPARE = {"plain": prepare_plain, "fullbatch": prepare_fullbatch, "float64": prepare_plain}


def say(**facts: object) -> None:
    """One line of JSON for the parent, at once."""
    print(json.dumps(facts), flush=True)


def train(kind: str, job: Job, cap: int | None, out: Path) -> None:
    """One child: trains and writes what was measured to ``out``, the first gradients beside it.

    Under a cap that is too low, it ends as any training script does, with the uncaught torch.OutOfMemoryError.
    """
    scene = load_scene()
    counter = start_counting(cap, scene)
    resident = process_bytes("VmHWM") if counter is None else 0
    torch.manual_seed(0)
    dtype = torch.float64 if kind == "float64" else torch.float32
    model = UNet(6, CLASSES, width=job.width).to(dtype)
    # foreach=False and plain SGD: Adam's first steps divide a gradient by its own size, which would blow up rounding.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    batch = tiles(scene, job.count, job.size, seed=0, dtype=dtype)
    began = time.perf_counter()
    step = PREPARE[kind](model, batch, optimizer, cap)
    say(prepared=time.perf_counter() - began)

    losses: list[float] = []
    seconds: list[float] = []
    timeline: list[tuple[float, int]] = []
    for index in range(1 if kind == "float64" else job.steps):
        if index:
            del batch
            batch = tiles(scene, job.count, job.size, seed=index, dtype=dtype)
        if index == 1 and counter is not None:  # the first step warms up: the second one is drawn
            counter.record()
        began = time.perf_counter()
        losses.append(float(step(batch)))  # kept as a float: a tensor of 4 bytes would count in the next step
        seconds.append(time.perf_counter() - began)
        if index == 1 and counter is not None:
            timeline = counter.timeline()
        if index == 0:
            torch.save({name: p.grad for name, p in model.named_parameters()}, out.with_suffix(".pt"))
        optimizer.step()
        optimizer.zero_grad()
        say(step=index + 1, loss=losses[-1], seconds=seconds[-1])
    peak = counter.peak if counter is not None else process_bytes("VmHWM") - resident
    result = {"losses": losses, "seconds": seconds, "peak": peak, "timeline": list(thinned(timeline))}
    out.write_text(json.dumps(result), encoding="utf-8")


def start_counting(cap: int | None, scene: Scene) -> CountingAllocator | None:
    """The counting allocator with its cap; without a compiler, a limit of the operating system of about that size."""
    if available() is None:
        counter = CountingAllocator().install()
        counter.cap = cap
        return counter
    # What Linux counts includes the interpreter, the libraries and their threads' buffers. A tiny step brings them all
    # in beforehand, so that they come on top of the cap.
    torch.autograd.backward(depth_loss(UNet(6, CLASSES, width=4), tiles(scene, 2, 32, seed=0)))
    if cap is not None:
        limit = process_bytes("VmData") + cap
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return None


def process_bytes(entry: str) -> int:
    """An entry of Linux's account of this process in bytes: VmData, or VmHWM, the largest resident set so far."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{entry}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(entry)


def thinned(points: list[tuple[float, int]], slots: int = 2000) -> Iterator[tuple[float, int]]:
    """The highest point of each of ``slots`` equal spans of time: the peak stays in the drawing."""
    width = (points[-1][0] or 1.0) / slots if points else 1.0
    best: dict[int, tuple[float, int]] = {}
    for at, live in points:
        slot = int(at / width)
        if slot not in best or live > best[slot][1]:
            best[slot] = (at, live)
    yield from best.values()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a small job that takes seconds, to see that all works")
    parser.add_argument("--child", choices=sorted(PREPARE), help="train in this process (what the demo itself calls)")
    parser.add_argument("--cap", type=int, help="with --child: the most bytes of tensors that may be alive")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("out"), help="where results are written")
    arguments = parser.parse_args()
    job = QUICK if arguments.quick else FULL
    if arguments.child:
        train(arguments.child, job, arguments.cap, arguments.out)
        return 0
    from report import compare

    return compare(Path(__file__), arguments.out, job.steps, ["--quick"] if arguments.quick else [])


if __name__ == "__main__":
    sys.exit(main())
