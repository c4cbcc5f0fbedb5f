"""Random numbers that a recompute sees again.

Each random task of each microbatch draws from the default generator under a seed of its own, made from one number that
the step draws. So a recompute draws what its first run drew, and the user's generator moves by that one draw.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from fullbatch._ir import Program

# The state of the default generator (a Mersenne twister) is kept in a tensor while a step with random operators runs.
RANDOM_BYTES = 2 * 5056

# Receives every random task's outputs as (task, microbatch, tensors).
Drawn = Callable[[int, int, Any], None]


@contextlib.contextmanager
def step_seed(program: Program, inputs: Iterable[torch.Tensor]) -> Iterator[int]:
    """The seed of one step. While it is entered the default generators may be seeded at will."""
    if not any(task.random for task in program.tasks):
        yield 0
        return
    seed = int(torch.empty((), dtype=torch.int64).random_().item())
    devices = {tensor.device for tensor in inputs if tensor.device.type != "cpu"}
    with torch.random.fork_rng(devices=sorted(devices, key=str), enabled=True):
        yield seed


def seed_task(seed: int, task: int, microbatch: int) -> None:
    """Seeds the default generators for one run of a task."""
    torch.manual_seed(mixed(seed, task, microbatch))


def mixed(seed: int, task: int, microbatch: int) -> int:
    """A seed for each (step, task, microbatch): a multiplicative hash, so that neighbours share nothing."""
    return (seed ^ ((task + 1) * 0x9E3779B97F4A7C15 + (microbatch + 2) * 0xC2B2AE3D27D4EB4F)) & (2**63 - 1)
