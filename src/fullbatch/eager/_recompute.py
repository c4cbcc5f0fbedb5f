"""Checkpoints on chosen modules, without the faults that `torch.utils.checkpoint` leaves to its users.

Limit that forced it: a recompute runs a module's forward again in the middle of the backward. torch keeps its own
random state there and nothing else: BatchNorm's statistics move twice (pytorch#96136), a list that forward appends to
grows twice (pytorch#155171), a key/value cache gets its keys twice, NumPy draws other numbers. Shape of the answer:
only non-reentrant checkpoints (a frozen input keeps its gradient, transformers#26221), entered with a context that
brings generators, Python state and buffers back to what the forward saw, and after the recompute to what they were
before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fullbatch._tree import modules
from fullbatch.eager._state import Generators, Snapshot

Wrap = Callable[[str, nn.Module, Callable[..., Any]], Callable[..., Any]]


@contextlib.contextmanager
def checkpointed(model: Any, names: Iterable[str], moving: Iterable[str], device: torch.device) -> Iterator[None]:
    """While entered, the modules `names` keep their inputs and make the rest again in the backward.

    `moving` are the buffers that a forward is known to change.
    """
    moved = {id(tensor) for tensor in _buffers_named(model, frozenset(moving))}

    def wrap(name: str, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            # preserve_rng_state=False: the contexts keep all generators, torch's among them.
            return checkpoint(
                forward, *args, use_reentrant=False, preserve_rng_state=False,
                context_fn=lambda: _contexts(module, (*args, *kwargs.values()), moved, device), **kwargs,
            )  # fmt: skip

        return run

    with wrapped(model, names, wrap):
        yield


@contextlib.contextmanager
def wrapped(model: Any, names: Iterable[str], wrap: Wrap) -> Iterator[None]:
    """While entered, the forwards of the modules `names` are what `wrap` makes of them. Hooks stay outside."""
    known = dict(named_modules(model))
    patched: list[tuple[nn.Module, Any]] = []
    try:
        for name in names:
            module = known[name]
            own = vars(module).get("forward")  # an instance's own forward stands before its class's
            patched.append((module, own))
            module.forward = wrap(name, module, module.forward)
        yield
    finally:
        for module, own in reversed(patched):
            if own is not None:
                module.forward = own
            else:
                vars(module).pop("forward", None)


def named_modules(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """All modules by qualified name, each once, the roots with the name that the model's nest gives them."""
    seen: set[int] = set()
    for prefix, root in modules(model).items():
        for name, module in root.named_modules():
            if id(module) not in seen:
                seen.add(id(module))
                yield ".".join(part for part in (prefix, name) if part), module


def _buffers_named(model: Any, names: frozenset[str]) -> Iterator[torch.Tensor]:
    for where, module in named_modules(model):
        for key, tensor in module.named_buffers(recurse=False):
            if (f"{where}.{key}" if where else key) in names:
                yield tensor


def _contexts(
    module: nn.Module, arguments: tuple[Any, ...], moved: set[int], device: torch.device
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """What torch enters for the forward, and for the recompute."""
    return contextlib.nullcontext(), _Again(module, arguments, moved, device)


class _Again:
    """While entered, all is as the forward found it; afterwards as it was. torch enters it once a recompute."""

    def __init__(self, module: nn.Module, arguments: tuple[Any, ...], moved: set[int], device: torch.device) -> None:
        self._module, self._device = module, device
        # Each argument is a root of its own, so that caches in caches are seen to their last level.
        self._roots = [("", module), *(("arguments", argument) for argument in arguments)]
        self._generators, self._state = Generators(device), Snapshot(self._roots)
        self._buffers = {id(tensor): tensor.detach().clone() for _, _, tensor in _of(module) if id(tensor) in moved}
        self._before: list[tuple[Generators, Snapshot]] = []

    def __enter__(self) -> None:
        self._before.append((Generators(self._device), Snapshot(self._roots)))
        self._generators.restore()
        self._state.restore()
        self._state.rewind()
        # Bound anew and not overwritten: the backward may still need the values that are there now.
        for owner, key, tensor in list(_of(self._module)):
            kept = self._buffers.get(id(tensor))
            setattr(owner, key, tensor.detach().clone() if kept is None else kept.clone())

    def __exit__(self, *_: object) -> None:
        generators, state = self._before.pop()
        state.restore()
        state.rewind()
        generators.restore()


def _of(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    for owner in module.modules():
        for key, tensor in owner.named_buffers(recurse=False):
            yield owner, key, tensor


@contextlib.contextmanager
def caches_off(model: Any) -> Iterator[tuple[str, ...]]:
    """While entered, transformers' models build no key/value cache; yields the models whose `use_cache` was on.

    A training step reads no cache, and holds it to the end of the microbatch.
    """
    found: dict[int, tuple[str, Any]] = {}
    for name, module in named_modules(model):
        for config in _configs(getattr(module, "config", None)):
            if getattr(config, "use_cache", None) is True and id(config) not in found:
                found[id(config)] = (name or type(module).__name__, config)
    try:
        for _, config in found.values():
            config.use_cache = False
        yield tuple(dict.fromkeys(name for name, _ in found.values()))
    finally:
        for _, config in found.values():
            config.use_cache = True


def _configs(config: Any) -> Iterator[Any]:
    """A configuration and those of the parts of a composite model."""
    if hasattr(config, "use_cache"):
        yield config
    parts = vars(config) if isinstance(getattr(config, "__dict__", None), dict) else {}
    for key, part in parts.items():
        if key.endswith("_config") and hasattr(part, "use_cache"):
            yield part
