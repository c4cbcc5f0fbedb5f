"""Seconds of each operator of a program, measured for as long as the caller allows.

Estimates from shapes cannot know that one convolution's backward runs at a tenth of the speed of another's. Timing
every operator takes longer than a step; so those that take most of it are timed first, and for what the limit leaves
out the rates of the machine stand in.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fullbatch._cost._cache import CostFile, cost_file
from fullbatch._cost._costs import moved_bytes
from fullbatch._cost._forms import Meta
from fullbatch._cost._keys import HERE
from fullbatch._cost._operator import repeated
from fullbatch._cost._rates import Rates, rates, seconds_of
from fullbatch._ir import Kind, Program, Task

_SECONDS: dict[str, float] = {}  # by the keys of costs; for the life of the process
_RUNS = 5
_SHARE = 0.25
"""Of the limit that is left, at most so much for one operator's runs after the first."""


@dataclass(frozen=True)
class Job:
    """One operator to time: a task for a microbatch of `samples` (0: once a step). `key` None: it cannot run alone."""

    slot: tuple[int, int]
    task: Task
    samples: int
    metas: Sequence[Meta]
    key: str | None


def time_jobs(
    program: Program, jobs: Sequence[Job], device: torch.device, limit: float
) -> dict[tuple[int, int], float]:
    """Seconds of one run of each job, by slot; each distinct operator is timed once."""
    until = time.monotonic() + limit
    speed = rates(device)
    guessed = {job.slot: _guess(job, program, speed) for job in jobs}
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        if job.key is not None:
            groups.setdefault(job.key, []).append(job)
    file = cost_file()
    missing = {key: group for key, group in groups.items() if _known(key, file) is None}
    totals = {key: sum(guessed[job.slot] * _runs(job, program) for job in group) for key, group in missing.items()}
    with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for key in sorted(missing, key=lambda key: -totals[key]):
            job = missing[key][0]
            left = until - time.monotonic()
            if left <= 0:
                break
            if guessed[job.slot] <= left:
                _time(job, program, device, left, file)
    if file is not None:
        file.flush()
    slower = _ratios(groups, guessed)
    return {job.slot: _SECONDS.get(job.key or "", guessed[job.slot] * slower.get(_operator(job), 1.0)) for job in jobs}


def _ratios(groups: dict[str, list[Job]], guessed: dict[tuple[int, int], float]) -> dict[Any, float]:
    """How many times the guess each operator took at the forms that were timed: it stands for its other forms."""
    sums: dict[Any, tuple[float, float]] = {}
    for key, (job, *_) in groups.items():
        if _SECONDS.get(key):
            took, guess = sums.get(_operator(job), (0.0, 0.0))
            sums[_operator(job)] = took + _SECONDS[key], guess + guessed[job.slot]
    return {operator: took / guess for operator, (took, guess) in sums.items() if guess}


def _operator(job: Job) -> Any:
    return job.task.kind if job.task.kernel is None else job.task.kernel.fn


def _known(key: str, file: CostFile | None) -> float | None:
    if key not in _SECONDS and file is not None and not key.startswith(HERE):
        kept = file.get(_name(key))
        if isinstance(kept, (int, float)) and kept >= 0:
            _SECONDS[key] = float(kept)
    return _SECONDS.get(key)


def _name(key: str) -> str:
    return f"{key} seconds"


def _time(job: Job, program: Program, device: torch.device, left: float, file: CostFile | None) -> None:
    assert job.key is not None
    try:
        call = repeated(job.task, program, job.samples, [meta.filled() for meta in job.metas])
        seconds = 0.0 if call is None else seconds_of(call, device, left * _SHARE, _RUNS)
    except Exception:  # memory that was there for the bytes may be gone
        return
    _SECONDS[job.key] = seconds
    if file is not None and not job.key.startswith(HERE):
        file.put(_name(job.key), seconds)


def _guess(job: Job, program: Program, speed: Rates) -> float:
    samples = job.samples or program.batch
    task = job.task
    if task.kind in (Kind.GATHER, Kind.REDUCE) and samples == program.batch:
        return 0.0
    flops = task.flops * samples / max(program.batch, 1)
    return speed.seconds(moved_bytes(task, program, samples), flops)


def _runs(job: Job, program: Program) -> float:
    """How often a step runs the task."""
    return 1.0 if job.samples == 0 else program.batch / job.samples
