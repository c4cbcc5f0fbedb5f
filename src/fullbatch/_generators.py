"""The default generators that a step draws from, and their states as ints and tensors.

Limit that forced it: a step may draw from Python's `random` and from NumPy too (live in a captured step, in a loss that
runs as it is, in code that is not traced), so that torch's generators alone do not make a resumed run repeat a run; and
a checkpoint is read by `torch.load(weights_only=True)`, which takes no NumPy array. Shape of the answer: arrays become
tensors of the same dtype, Python's tuple of 625 ints one tensor.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fullbatch._errors import Fault, PlanError


@dataclass(frozen=True)
class Source:
    """A generator: how its state is read, as what a checkpoint can hold, and how it is set."""

    read: Callable[[], Any]
    write: Callable[[Any], None]


def default_generators(device: torch.device) -> dict[str, Source]:
    """Those that a step on `device` draws from, by the name that a state has them under."""
    found = {"cpu": Source(torch.get_rng_state, lambda state: torch.set_rng_state(state.cpu()))}
    if device.type == "cuda":
        found[str(device)] = Source(
            lambda: torch.cuda.get_rng_state(device), lambda state: torch.cuda.set_rng_state(state.cpu(), device)
        )
    return {**found, "python": Source(_read_python, _write_python), "numpy": Source(_read_numpy, _write_numpy)}


def set_generators(sources: Mapping[str, Source], states: Mapping[str, Any], faults: Iterable[Fault] = ()) -> None:
    """Sets each generator that `states` has a state for.

    Raises PlanError with `faults`, found before, and those of states that a generator does not take; all generators
    are then as before.
    """
    before = {name: source.read() for name, source in sources.items()}
    found = list(faults)
    for name, source in sources.items():
        try:
            if name in states:
                source.write(states[name])
        except Exception as error:  # each kind of generator has its own ways to refuse
            found.append(_not_taken(name, error))
    if found:
        for name, source in sources.items():
            source.write(before[name])
        raise PlanError(*found)


def _not_taken(name: str, error: Exception) -> Fault:
    return Fault(
        f"The state of the generator {name} cannot be set.",
        got=f"{type(error).__name__}: {error!s:.80}",
        expected="the state that step.state_dict() read from it",
        next="step.load_state_dict(checkpoint['step'])",
    )


def _read_python() -> Any:
    return packed(random.getstate())


def _write_python(state: Any) -> None:
    random.setstate(unpacked(state, python=True))


def _read_numpy() -> Any:
    return packed(np.random.get_state(legacy=False))  # a dict, whatever the bit generator


def _write_numpy(state: Any) -> None:
    np.random.set_state(unpacked(state))


def packed(state: Any) -> Any:
    """`state` in what a checkpoint can hold, sharing nothing with it."""
    if isinstance(state, np.ndarray):
        return torch.from_numpy(state.copy())
    if isinstance(state, np.generic):
        return state.item()
    if isinstance(state, dict):
        return {key: packed(item) for key, item in state.items()}
    if isinstance(state, tuple) and len(state) > 8:  # Python's words
        return torch.tensor(state, dtype=torch.int64)
    if isinstance(state, tuple):
        return [packed(item) for item in state]
    return state.clone() if isinstance(state, torch.Tensor) else state


def unpacked(state: Any, python: bool = False) -> Any:
    """What `packed` was given; `python`: the state of a generator of Python's."""
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
