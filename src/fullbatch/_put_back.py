"""What code of the user's changes in a model and a batch, put back afterwards.

Limit that forced it: to plan a split that was found, `loss_fn` runs on the example up to its call of the model and is
left there. What it has changed by then (noise on weights, `eval()`, a counter, a batch normalised in place) would stay,
and the first step would begin elsewhere than the plain one.

Shape of the answer: the Python side of each module, and what each tensor is, are remembered as references. Numbers of
the batch and of buffers are copied, since some kernels and NumPy write them unseen; those of parameters and gradients
only when an operator is about to write them (`watched`), for a second copy of all weights is what nobody has room for.
Copies lie in the host's memory, outside of what is measured. What is not put back is what is outside of the model:
closures, iterators, objects that a module holds besides tensors, lists, dictionaries and sets.
"""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fullbatch import _torch
from fullbatch._tree import leaves, modules, named_tensors

_DICTS = (dict, OrderedDict, defaultdict, Counter)


class Contents:
    """Bytes of tensors: those of `watch` are copied when `save` is told that they are about to be written."""

    def __init__(self) -> None:
        self._watched: dict[int, dict[tuple[int, int], torch.UntypedStorage]] = {}
        self._saved: dict[int, dict[tuple[int, int], tuple[torch.UntypedStorage, torch.Tensor]]] = {}

    def watch(self, tensor: torch.Tensor) -> None:
        """The part of its storage that it spans is to be put back."""
        for part in _parts(tensor):
            key, span = _torch.storage_key(part), _span(part)
            if span not in self._saved.get(key, ()):
                self._watched.setdefault(key, {})[span] = part.untyped_storage()

    def save(self, tensor: torch.Tensor) -> None:
        """Copies what is watched of its storage, if that was not done yet."""
        for part in _parts(tensor):
            key = _torch.storage_key(part)
            for span, storage in self._watched.pop(key, {}).items():
                kept = _host_bytes(span[1] - span[0])
                kept.copy_(_bytes(storage, span))
                self._saved.setdefault(key, {})[span] = storage, kept

    def restore(self) -> None:
        """Writes what was copied, where it differs: memory that nobody changed may be read-only."""
        for spans in self._saved.values():
            for span, (storage, kept) in spans.items():
                if storage.nbytes() < span[1]:
                    storage.resize_(span[1])
                now = _bytes(storage, span)
                if not torch.equal(now.cpu(), kept):
                    now.copy_(kept)


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What of a tensor has numbers in a storage."""
    return [
        part
        for part in _torch.plain_parts(tensor)
        if part.layout is torch.strided and part.device.type != "meta" and part.numel() and not _torch.is_fake(part)
    ]


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte of a storage that a tensor may touch, and the one behind the last."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.storage_offset()
    return int(first * tensor.itemsize), int((first + last + 1) * tensor.itemsize)


def _host_bytes(count: int) -> torch.Tensor:
    """Memory that torch did not allocate, and does not count."""
    return torch.from_numpy(np.empty(count, np.uint8))


def _bytes(storage: torch.UntypedStorage, span: tuple[int, int]) -> torch.Tensor:
    view = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return view.set_(storage, span[0], (span[1] - span[0],), (1,))  # type: ignore[arg-type]


@dataclass
class _Tensor:
    """What a tensor is, its numbers aside."""

    tensor: torch.Tensor
    alias: torch.Tensor | None  # the same memory; None where torch does not let another take its place
    requires_grad: bool
    grad: torch.Tensor | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Tensor:
        plain = tensor.layout is torch.strided and not _torch.is_wrapper(type(tensor)) and not _torch.is_fake(tensor)
        grad = tensor.grad if tensor.is_leaf else None
        return cls(tensor, tensor.detach() if plain else None, tensor.requires_grad, grad)

    def restore(self) -> None:
        tensor = self.tensor
        if self.alias is not None:
            replace(tensor, self.alias)
        if tensor.is_leaf:
            if tensor.requires_grad != self.requires_grad:
                tensor.requires_grad_(self.requires_grad)
            if tensor.grad is not self.grad:
                tensor.grad = self.grad


def replace(tensor: torch.Tensor, alias: torch.Tensor) -> None:
    """`tensor` is in the memory of `alias` again, if code of the user's gave it another."""
    if _place(tensor) != _place(alias):
        tensor.data = alias


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    where = _torch.storage_key(tensor), tensor.storage_offset()
    return (*where, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


class _Python:
    """Modules and their attributes, and what lists, dictionaries and sets among these hold; and tensors in them."""

    def __init__(self, model: Any) -> None:
        self._undo: list[Callable[[], None]] = []
        self._seen: dict[int, Any] = {}
        self.tensors: list[torch.Tensor] = []
        waiting: list[Any] = [model, *modules(model).values()]
        while waiting:
            value = waiting.pop()
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                waiting.extend(self._look(value))

    def _look(self, value: Any) -> Sequence[Any]:
        """Remembers one value; those in it."""
        if isinstance(value, torch.Tensor):
            if not is_lazy(value):  # a parameter without a shape yet
                self.tensors.append(value)
        elif isinstance(value, nn.Module):
            self._undo.append(_of_class(value, type(value)))
            return (value.__dict__,)
        elif type(value) in _DICTS:
            self._undo.append(_of_dict(value, dict(value)))
            return list(value.values())
        elif type(value) in (list, deque):
            self._undo.append(_of_sequence(value, list(value)))
            return list(value)
        elif type(value) is set:
            self._undo.append(_of_set(value, set(value)))
        elif isinstance(value, tuple):
            return value
        return ()

    def restore(self) -> None:
        """As they were."""
        for undo in self._undo:
            undo()


def _of_class(module: nn.Module, was: type) -> Callable[[], None]:
    def undo() -> None:
        if type(module) is not was:  # a parametrisation is one
            module.__class__ = was

    return undo


def _of_dict(now: dict[Any, Any], was: dict[Any, Any]) -> Callable[[], None]:
    def undo() -> None:
        if not (_same(now, was) and _same(now.values(), was.values())):
            now.clear()
            now.update(was)

    return undo


def _of_sequence(now: Any, was: list[Any]) -> Callable[[], None]:
    def undo() -> None:
        if not _same(now, was):
            now.clear()
            now.extend(was)

    return undo


def _of_set(now: set[Any], was: set[Any]) -> Callable[[], None]:
    def undo() -> None:
        if {id(item) for item in now} != {id(item) for item in was}:
            now.clear()
            now.update(was)

    return undo


def _same(now: Any, was: Any) -> bool:
    return len(now) == len(was) and all(a is b for a, b in zip(now, was, strict=True))


_WATCHING: ContextVar[Contents | None] = ContextVar("watching", default=None)


@contextlib.contextmanager
def put_back(model: Any, batch: Any) -> Iterator[None]:
    """What the body changes in the model and in the batch's tensors is put back at its end.

    Of parameters, gradients and tensors in attributes: what was written under `watched`.
    """
    python, contents = _Python(model), Contents()
    given = [tensor for _, tensor in leaves(batch)]
    found = {id(tensor): tensor for tensor in (*python.tensors, *given)}
    found |= {id(one.grad): one.grad for one in list(found.values()) if one.is_leaf and one.grad is not None}
    kept = [_Tensor.of(tensor) for tensor in found.values()]
    for tensor in found.values():
        contents.watch(tensor)
    with _plainly():
        for tensor in (*named_tensors(model, "buffers").values(), *given):
            if id(tensor) in found:
                contents.save(tensor)
    token = _WATCHING.set(contents)
    try:
        yield
    finally:
        _WATCHING.reset(token)
        with _plainly(), _torch.without_modes():
            python.restore()
            for one in kept:
                one.restore()
            contents.restore()


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


class _Watch(_torch.DispatchMode):
    """Saves what an operator is about to write."""

    supports_higher_order_operators = True

    def __init__(self, contents: Contents) -> None:
        super().__init__()
        self._contents = contents

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _torch.written_by(func, args, kwargs or {}):
            with _plainly():
                self._contents.save(tensor)
        return func(*args, **(kwargs or {}))


class _WatchAround(_Watch):
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


@contextlib.contextmanager
def watched(compiled: bool = False) -> Iterator[None]:
    """While entered, what operators write is copied first, where the innermost `put_back` is to put it back.

    `compiled`: functions that the user compiled run so, and what they write is not seen, for a run that is measured.
    Else they run operator by operator; one that must not (`fullgraph=True`) raises.
    """
    contents = _WATCHING.get()
    watch = _WatchAround if compiled else _Watch
    with contextlib.nullcontext() if contents is None else watch(contents):
        yield


def about_to_write(tensor: torch.Tensor) -> None:
    """As an operator under `watched` does, for what writes and is none."""
    contents = _WATCHING.get()
    if contents is not None:
        contents.save(tensor)


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Inside of `watched`: nothing is captured under a dispatch mode."""
    with contextlib.nullcontext() if _WATCHING.get() is None else _torch.without_modes():
        yield
