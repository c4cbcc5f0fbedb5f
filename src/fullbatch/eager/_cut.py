"""A batch cut into microbatches for code that is run and not traced.

Limit that forced it: a captured step sees the whole batch's values, so that a list of names beside the tensors is
right as it stands. Code that is run on a microbatch would see all of the names and a part of the tensors. Shape of the
answer: tensors are cut as everywhere else; a list or a NumPy array that has one entry a sample is cut too, and the
plan names it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from fullbatch._errors import BatchError
from fullbatch._tree import find_batch, leaves

Span = tuple[int, int]


@dataclass(frozen=True)
class Cut:
    """How a batch of `size` samples is cut: each tensor's dimension by path, and what else has an entry a sample."""

    size: int
    dims: dict[str, int | None]
    entries: tuple[str, ...] = ()

    def spans(self, microbatch: int) -> list[Span]:
        """(start, stop) of each microbatch: as few as hold at most so many, of sizes that differ by one at most.

        33 samples in eights are 7, 7, 7, 6, 6: the last of 8, 8, 8, 8, 1 is one that BatchNorm cannot take.
        """
        count = -(-self.size // microbatch)
        least, more = divmod(self.size, count)
        starts = [index * least + min(index, more) for index in range(count + 1)]
        return list(pairwise(starts))

    def weight(self, batch: Any) -> float:
        """Bytes a sample of the batch's tensors."""
        return sum(tensor.numel() * tensor.element_size() for _, tensor in leaves(batch)) / self.size

    def take(self, batch: Any, span: Span, device: torch.device) -> Any:
        """Samples `span` of `batch` with their tensors on `device`; views where they are there already."""
        return self._take(batch, "batch", span, device)

    def _take(self, nest: Any, path: str, span: Span, device: torch.device) -> Any:
        start, stop = span
        if path in self.entries:
            part = nest[start:stop]
            return [self._take(item, f"{path}[]", span, device) for item in part] if isinstance(part, list) else part
        if isinstance(nest, torch.Tensor):
            dim = self.dims.get(path)
            part = nest if dim is None or stop - start == self.size else nest.narrow(dim, start, stop - start)
            return part.to(device)
        parts = {key: (where, self._take(item, where, span, device)) for key, where, item in children(nest, path)}
        return _rebuilt(nest, {key: part for key, (_, part) in parts.items()})


def find_cut(batch: Any, batch_dims: Any = None) -> Cut:
    """How `batch` is cut. `batch_dims` is as in `fullbatch.Step`; "list" says that a list has an entry a sample.

    Raises BatchError.
    """
    listed = dict(_lists(batch, batch_dims, "batch")) if batch_dims is not None else {}
    if not listed:
        shape = find_batch(batch, batch_dims)
        return Cut(shape.size, dict(zip(shape.paths, shape.dims, strict=True)), _aligned(batch, "batch", shape.size))
    dims = dict(_dims(batch, batch_dims, "batch"))
    tensors = {path: tensor for path, tensor in leaves(batch) if dims.get(path) is not None}
    sizes = set(listed.values()) | {tensor.shape[dims[path] or 0] for path, tensor in tensors.items()}
    if len(sizes) != 1 or 0 in sizes:
        found = [f"{path}: {length}" for path, length in listed.items()]
        found += [f"{path}: {tuple(tensor.shape)}" for path, tensor in tensors.items()]
        raise BatchError.of(
            "The lists and tensors have different batch sizes." if 0 not in sizes else "The batch is empty.",
            got=", ".join(found), expected="one entry a sample in each", next="batch_dims=(0, 'list')",
        )  # fmt: skip
    (size,) = sizes
    return Cut(int(size), dims, tuple(listed) + _aligned(batch, "batch", int(size), tuple(listed)))


def children(nest: Any, path: str) -> Iterator[tuple[Any, str, Any]]:
    """(key, path, item) of what a nest holds, with the paths that `leaves` gives."""
    if isinstance(nest, Mapping):
        for key in nest:
            yield key, f"{path}[{key!r}]", nest[key]
    elif isinstance(nest, tuple) and hasattr(nest, "_fields"):
        for name in nest._fields:
            yield name, f"{path}.{name}", getattr(nest, name)
    elif isinstance(nest, (list, tuple)):
        for index, item in enumerate(nest):
            yield index, f"{path}[{index}]", item
    elif dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        for field in dataclasses.fields(nest):
            yield field.name, f"{path}.{field.name}", getattr(nest, field.name)


def _rebuilt(nest: Any, parts: dict[Any, Any]) -> Any:
    if not parts:
        return nest
    if type(nest) is dict:
        return parts
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(**parts)
    if isinstance(nest, (list, tuple)):
        return type(nest)(parts.values())
    twin = copy.copy(nest)
    if isinstance(nest, Mapping):
        if hasattr(twin, "data") and isinstance(twin.data, dict):  # a UserDict shares its data with its copy
            twin.data = dict(twin.data)
        for key, part in parts.items():
            twin[key] = part
    else:
        for name, part in parts.items():
            object.__setattr__(twin, name, part)
    return twin


def _aligned(nest: Any, path: str, size: int, known: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Lists without tensors, and arrays, of one entry a sample. A tuple is a record, not a sequence of samples."""
    if path in known:
        return ()
    if isinstance(nest, np.ndarray):
        return (path,) if nest.ndim > 0 and nest.shape[0] == size else ()
    if isinstance(nest, list) and len(nest) == size and next(leaves(nest), None) is None:
        return (path,)
    return tuple(name for _, where, item in children(nest, path) for name in _aligned(item, where, size, known))


def _lists(nest: Any, dims: Any, path: str) -> Iterator[tuple[str, int]]:
    """Path and length of what "list" stands for."""
    if dims == "list":
        yield from _every_list(nest, path)
    elif isinstance(dims, Mapping):
        for key, where, item in children(nest, path):
            yield from _lists(item, dims.get(key), where)
    elif isinstance(dims, (list, tuple)):
        for (_, where, item), given in zip(children(nest, path), dims, strict=False):
            yield from _lists(item, given, where)


def _every_list(nest: Any, path: str) -> Iterator[tuple[str, int]]:
    if isinstance(nest, list):
        yield path, len(nest)
    elif next(children(nest, path), None) is not None:
        for _, where, item in children(nest, path):
            yield from _every_list(item, where)
    else:
        raise BatchError.of(
            "batch_dims does not fit the batch.", got=f"'list' for {path}, a {type(nest).__name__}",
            expected="'list' for a list with one entry a sample", next="batch_dims=(0, 'list')",
        )  # fmt: skip


def _dims(nest: Any, dims: Any, path: str) -> Iterator[tuple[str, int | None]]:
    """The dimension of each tensor beside the lists."""
    if dims == "list":
        return
    if isinstance(dims, (Mapping, list, tuple)):
        for index, (key, where, item) in enumerate(children(nest, path)):
            entries = dims if isinstance(dims, Mapping) else dict(enumerate(dims))
            yield from _dims(item, entries.get(key if isinstance(dims, Mapping) else index), where)
        return
    names = [name for name, _ in leaves(nest, path)]
    if not names:
        return
    shape = find_batch(nest, dims) if dims is not None else None
    found = shape.dims if shape is not None else (None,) * len(names)
    yield from zip(names, found, strict=True)
