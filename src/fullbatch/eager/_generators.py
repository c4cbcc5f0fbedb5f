"""Generators that an eager forward may draw from, and their states as ints and tensors.

Limit that forced it: code that is not traced draws from wherever it likes, so that torch's generators alone do not make
a resumed run repeat a run; and a checkpoint is read by `torch.load(weights_only=True)`, which takes no NumPy array.
Shape of the answer: the default generators of torch, Python and NumPy, and those that modules hold or that `loss_fn`
closes over, by name. Arrays become tensors of the same dtype, Python's tuple of 625 ints one tensor.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from fullbatch._resume import Source, default_generators
from fullbatch.eager._loop import Job
from fullbatch.eager._state import Snapshot, closed_over, get_generator, set_generator


def generators_of(job: Job) -> dict[str, Source]:
    """All that a step of this job is known to draw from, by the name that a checkpoint has them under."""
    python, numpy = Source(_read_python, _write_python), Source(_read_numpy, _write_numpy)
    held = Snapshot(
        [(f"model.{name}".rstrip("."), root) for name, root in job.roots()]
        + [(f"loss_fn.{name}", value) for name, value in closed_over(job.loss_fn)]
    ).generators()
    own = {name: _source(generator) for name, generator in held.items()}
    return {**default_generators(job.device), "python": python, "numpy": numpy, **own}


def _source(generator: Any) -> Source:
    def write(state: Any) -> None:
        set_generator(generator, _unpacked(state, python=isinstance(generator, random.Random)))

    return Source(lambda: _packed(get_generator(generator)), write)


def _read_python() -> Any:
    return _packed(random.getstate())


def _write_python(state: Any) -> None:
    random.setstate(_unpacked(state, python=True))


def _read_numpy() -> Any:
    return _packed(np.random.get_state(legacy=False))  # a dict, whatever the bit generator


def _write_numpy(state: Any) -> None:
    np.random.set_state(_unpacked(state))


def _packed(state: Any) -> Any:
    """`state` in what a checkpoint can hold, sharing nothing with it."""
    if isinstance(state, np.ndarray):
        return torch.from_numpy(state.copy())
    if isinstance(state, np.generic):
        return state.item()
    if isinstance(state, dict):
        return {key: _packed(item) for key, item in state.items()}
    if isinstance(state, tuple) and len(state) > 8:  # Python's words
        return torch.tensor(state, dtype=torch.int64)
    if isinstance(state, tuple):
        return [_packed(item) for item in state]
    return state.clone() if isinstance(state, torch.Tensor) else state


def _unpacked(state: Any, python: bool = False) -> Any:
    if python:
        version, words, gauss = state
        return version, tuple(words.tolist()), gauss
    return state.cpu() if isinstance(state, torch.Tensor) else _arrays(state)


def _arrays(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _arrays(item) for key, item in state.items()}
    if isinstance(state, list):
        return tuple(_arrays(item) for item in state)
    return state.cpu().numpy() if isinstance(state, torch.Tensor) else state
