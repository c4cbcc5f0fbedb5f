"""What a run of the user's code changes besides gradients: Python state, buffers, and the state of generators.

Limit that forced it: plain PyTorch runs `loss_fn` once a step. Here it runs once a microbatch, more often while a step
is planned, and parts of it again in a backward; each run appends to lists, counts, caches and draws. Shape of the
answer: Python state is remembered by reference (no tensor is copied) and put back where it was changed; generators by
their state. What is found: attributes of the modules, arguments of checkpointed ones, and lists, dicts, sets and plain
objects under these, three levels deep.
"""

from __future__ import annotations

import logging
import random
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

_DEPTH = 3  # below a pair of caches: a cache, its list of layers, a layer with its tensors
_MANY = 1000  # entries: a longer container is remembered itself, what its entries hold is not

_CONTAINERS = (dict, list, set, deque)
_ATOMS = (
    torch.Tensor, torch.jit.ScriptModule, np.ndarray, str, bytes, int, float, complex, type(None), type,
    types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, logging.Logger, torch.dtype,
    torch.device,
)  # fmt: skip
# Most of what modules hold, by exact type: asking the classes above takes longer than all the rest.
_COMMON = frozenset({str, int, float, bool, bytes, type(None), torch.Tensor, nn.Parameter, types.FunctionType, type})
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)


class Snapshot:
    """Python state reachable from `roots` (pairs of name and object), as it is now."""

    def __init__(self, roots: Iterable[tuple[str, Any]]) -> None:
        self._kept: list[tuple[str, Any, Any]] = []
        self._drawn: list[tuple[str, Any, Any]] = []
        self._seen: set[int] = set()
        for name, root in roots:
            self._keep(name, root, 0)
        self._seen.clear()

    def restore(self) -> None:
        """Puts back every container and attribute that was changed. Generators go on."""
        for _, container, kept in self._kept:
            if _differs(container, kept):
                _write(container, kept)

    def rewind(self) -> None:
        """Puts back the state of generators that modules hold."""
        for _, generator, state in self._drawn:
            set_generator(generator, state)

    def drawn(self) -> bool:
        """Whether a generator that a module holds has moved."""
        return any(not _same_state(get_generator(generator), state) for _, generator, state in self._drawn)

    def generators(self) -> dict[str, Any]:
        """Generators that modules hold, by name."""
        return {name: generator for name, generator, _ in self._drawn}

    def changed(self) -> dict[str, Any]:
        """What is not as it was, by name, with its value now."""
        found: dict[str, Any] = {}
        for name, container, kept in self._kept:
            if not _differs(container, kept):
                continue
            if not isinstance(container, dict):
                found[name] = list(container)
                continue
            for key in dict.fromkeys([*kept, *container]):
                if container.get(key, _MISSING) is not kept.get(key, _MISSING):
                    found[_join(name, key)] = container.get(key)
        return found

    def _keep(self, name: str, value: Any, depth: int) -> None:
        if type(value) in _COMMON or id(value) in self._seen or isinstance(value, _ATOMS):
            return
        self._seen.add(id(value))
        if isinstance(value, _GENERATORS) and not isinstance(value, random.SystemRandom):  # that one has no state
            self._drawn.append((name, value, get_generator(value)))
        elif isinstance(value, nn.Module):
            self._kept.append((name, vars(value), dict(vars(value))))
            children = vars(value).get("_modules")
            for key, item in list(vars(value).items()):
                if children is not None and item is children:
                    self._kept.append((name, item, item.copy()))
                    for child, module in list(item.items()):  # named by where they stand
                        self._keep(_join(name, child), module, 0)
                else:
                    self._keep(_join(name, key), item, 0)
        elif isinstance(value, _CONTAINERS):
            self._kept.append((name, value, value.copy()))
            inner = value.items() if isinstance(value, dict) else ((index, item) for index, item in enumerate(value))
            self._keep_items(name, inner, len(value), depth)
        elif isinstance(value, tuple):
            self._keep_items(name, enumerate(value), len(value), depth)
        elif isinstance(getattr(value, "__dict__", None), dict):
            self._kept.append((name, vars(value), dict(vars(value))))
            self._keep_items(name, vars(value).items(), len(vars(value)), depth)

    def _keep_items(self, name: str, items: Iterable[tuple[Any, Any]], count: int, depth: int) -> None:
        if count > _MANY:
            return
        for key, item in list(items):
            # A module is below another one however deep its container is.
            if depth < _DEPTH or isinstance(item, nn.Module):
                self._keep(_join(name, key), item, depth + 1)


_MISSING = object()


def _join(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def _differs(container: Any, kept: Any) -> bool:
    if len(container) != len(kept):
        return True
    if isinstance(container, dict):
        return any(container.get(key, _MISSING) is not item for key, item in kept.items())
    if isinstance(container, set):
        return bool(container != kept)
    return any(a is not b for a, b in zip(container, kept, strict=True))


def _write(container: Any, kept: Any) -> None:
    if isinstance(container, list):
        container[:] = kept
    elif isinstance(container, dict):
        for key in [key for key in container if key not in kept]:
            del container[key]
        for key, item in kept.items():
            if container.get(key, _MISSING) is not item:
                container[key] = item
    elif isinstance(container, set):
        container.clear()
        container.update(kept)
    else:
        container.clear()
        container.extend(kept)


def get_generator(generator: Any) -> Any:
    """The state of a generator that an object holds, as its class gives it."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state()


def _same_state(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else str(a) == str(b)


def set_generator(generator: Any, state: Any) -> None:
    """Sets it."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


class Generators:
    """The default generators of torch (the CPU's and that of `device`), Python and NumPy, as they are now."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Bytes and no tensor: the state is no part of the memory that a step is measured by.
        self._torch = torch.get_rng_state().numpy().tobytes()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._python, self._numpy = random.getstate(), np.random.get_state()

    def restore(self) -> None:
        """Brings all of them back."""
        torch.set_rng_state(torch.frombuffer(bytearray(self._torch), dtype=torch.uint8))
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
        random.setstate(self._python)
        np.random.set_state(self._numpy)

    def drawn_outside_torch(self) -> bool:
        """Whether Python's or NumPy's generator has moved since."""
        state: Any = np.random.get_state()
        before: Any = self._numpy
        moved = state[2] != before[2] or not np.array_equal(state[1], before[1])
        return moved or random.getstate() != self._python


def closed_over(fn: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Name and value of what a function closes over, or the object that is called."""
    names = getattr(getattr(fn, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(fn, "__closure__", None) or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # an empty cell
            continue
    if not isinstance(fn, types.FunctionType):
        yield type(fn).__name__, getattr(fn, "__self__", fn)
