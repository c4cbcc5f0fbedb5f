"""Batches and models as users nest them: tuples, dictionaries, dataclasses, and what behaves like a dictionary."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fullbatch._errors import BatchError, Fault, ModelError


def leaves(nest: Any, path: str = "batch") -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in `nest`, each with the expression that reaches it."""
    if isinstance(nest, torch.Tensor):
        yield path, nest
    elif isinstance(nest, Mapping):
        for key in nest:
            yield from leaves(nest[key], f"{path}[{key!r}]")
    elif isinstance(nest, tuple) and hasattr(nest, "_fields"):
        for name in nest._fields:
            yield from leaves(getattr(nest, name), f"{path}.{name}")
    elif isinstance(nest, (list, tuple)):
        for index, item in enumerate(nest):
            yield from leaves(item, f"{path}[{index}]")
    elif dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        for field in dataclasses.fields(nest):
            yield from leaves(getattr(nest, field.name), f"{path}.{field.name}")


def map_tensors(fn: Callable[[Any], Any], nest: Any, leaf: type = torch.Tensor) -> Any:
    """A copy of `nest` with `fn` applied to each tensor (or other `leaf`); what is no tensor is shared."""
    if isinstance(nest, leaf):
        return fn(nest)
    if isinstance(nest, Mapping):
        if isinstance(nest, dict) and type(nest) is dict:
            return {key: map_tensors(fn, item, leaf) for key, item in nest.items()}
        twin = copy.copy(nest)
        if hasattr(twin, "data") and isinstance(twin.data, dict):  # a UserDict shares its data with its copy
            twin.data = dict(twin.data)
        for key in nest:
            twin[key] = map_tensors(fn, nest[key], leaf)  # type: ignore[index]
        return twin
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(map_tensors(fn, item, leaf) for item in nest))
    if isinstance(nest, (list, tuple)):
        return type(nest)(map_tensors(fn, item, leaf) for item in nest)
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        record: Any = nest
        twin = copy.copy(record)
        for field in dataclasses.fields(nest):
            object.__setattr__(twin, field.name, map_tensors(fn, getattr(nest, field.name), leaf))
        return twin
    return nest


def returned(nest: Any) -> Any:
    """`nest` as a caller gets it: each tensor detached, each of its elements in memory of its own."""
    if any(tensor.requires_grad or _overlaps(tensor) for _, tensor in leaves(nest)):
        return map_tensors(lambda tensor: (tensor.clone() if _overlaps(tensor) else tensor).detach(), nest)
    return nest


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether the tensor is an expanded one, as constants are while a step runs."""
    return any(size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True))


@dataclass(frozen=True)
class BatchShape:
    """Samples in a batch, and for each of its tensors the dimension that carries them (None: the same for all)."""

    size: int
    paths: tuple[str, ...]
    dims: tuple[int | None, ...]

    @property
    def replicated(self) -> tuple[str, ...]:
        """Tensors that are the same for all microbatches."""
        return tuple(path for path, dim in zip(self.paths, self.dims, strict=True) if dim is None)


def find_batch(batch: Any, batch_dims: Any = None) -> BatchShape:
    """Which dimension of each tensor carries the batch: the leading one where its size is that of most tensors.

    `batch_dims` says it instead: a nest like the batch, or a prefix of one, of dimensions and None.
    Raises BatchError.
    """
    found = list(leaves(batch))
    paths = tuple(path for path, _ in found)
    if batch_dims is not None:
        dims: list[int | None] = list(_given(batch, batch_dims, "batch"))
    else:
        dims = _leading(found)
    sizes = {tensor.shape[dim] for (_, tensor), dim in zip(found, dims, strict=True) if dim is not None}
    if len(sizes) != 1:
        listed = ", ".join(f"{path}: {tuple(tensor.shape)}" for path, tensor in found) or f"no tensor in {batch!r:.80}"
        what = "The tensors have different batch sizes." if sizes else "No tensor carries the batch."
        raise BatchError.of(
            what, got=listed, expected="one size in the dimension that carries the batch",
            next="say it: fullbatch.Step(..., batch_dims=(0, None)) with None for a tensor that all samples share",
        )  # fmt: skip
    (size,) = sizes
    if size == 0:
        raise BatchError.of("The batch is empty.", got="0 samples", expected="at least one sample",
                            next="skip empty batches in the loader")  # fmt: skip
    return BatchShape(int(size), paths, tuple(dims))


def _leading(found: list[tuple[str, torch.Tensor]]) -> list[int | None]:
    sizes = [tensor.shape[0] for _, tensor in found if tensor.dim() > 0]
    if not sizes:
        return [None] * len(found)
    counts = {size: sizes.count(size) for size in dict.fromkeys(sizes)}
    best = max(counts.values())
    most = [size for size, count in counts.items() if count == best]
    if len(most) > 1:
        return [0 if tensor.dim() > 0 else None for _, tensor in found]  # ambiguous: reported by the caller
    return [0 if tensor.dim() > 0 and tensor.shape[0] == most[0] else None for _, tensor in found]


def _given(nest: Any, dims: Any, path: str) -> Iterator[int | None]:
    if dims is None or (isinstance(dims, int) and not isinstance(dims, bool)):
        for where, tensor in leaves(nest, path):
            if dims is not None and not -tensor.dim() <= dims < tensor.dim():
                raise _no_dims(f"dimension {dims} of {where}, which has shape {tuple(tensor.shape)}")
            yield None if dims is None else dims % tensor.dim()
    elif isinstance(nest, Mapping) and isinstance(dims, Mapping):
        for key in nest:
            yield from _given(nest[key], dims.get(key, None), f"{path}[{key!r}]")
    elif isinstance(nest, (list, tuple)) and isinstance(dims, (list, tuple)) and len(nest) == len(dims):
        for index, (item, given) in enumerate(zip(nest, dims, strict=True)):
            yield from _given(item, given, f"{path}[{index}]")
    elif dataclasses.is_dataclass(nest) and isinstance(dims, Mapping):
        for field in dataclasses.fields(nest):
            yield from _given(getattr(nest, field.name), dims.get(field.name), f"{path}.{field.name}")
    elif next(leaves(nest), None) is not None:
        raise _no_dims(f"batch_dims={dims!r} for {path}, a {type(nest).__name__}")


def _no_dims(got: str) -> BatchError:
    return BatchError.of(
        "batch_dims does not fit the batch.", got=got,
        expected="a nest like the batch with a dimension or None for each tensor", next="batch_dims=(0, 0)",
    )  # fmt: skip


def modules(model: Any) -> dict[str, nn.Module]:
    """The modules of a model by name. Raises ModelError where it is neither a Module nor a tuple or dict of them."""
    if isinstance(model, nn.Module):
        return {"": model}
    if isinstance(model, Mapping):
        items = {str(key): item for key, item in model.items()}
    elif isinstance(model, (list, tuple)):
        items = {str(index): item for index, item in enumerate(model)}
    else:
        items = {}
    wrong = {name: item for name, item in items.items() if not isinstance(item, nn.Module)}
    if not items or wrong:
        listed = ", ".join(f"{name}: {type(item).__name__}" for name, item in wrong.items())
        got = type(model).__name__ + (f" with {listed}" if wrong else "")
        raise ModelError.of(
            "The model is not a module.", got=got, expected="a torch.nn.Module, or a tuple or dict of them",
            next="fullbatch.Step(loss_fn, model, batch)",
        )  # fmt: skip
    return items


def named_tensors(model: Any, which: str) -> dict[str, torch.Tensor]:
    """Parameters or buffers of all modules by qualified name, each tensor once."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for prefix, module in modules(model).items():
        for name, tensor in getattr(module, f"named_{which}")():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                found[f"{prefix}.{name}" if prefix else name] = tensor
    return found


def check_devices(model: Any) -> torch.device:
    """The one device of the model. Raises ModelError where its parameters are on several, naming them."""
    by_device: dict[torch.device, list[str]] = {}
    for which in ("parameters", "buffers"):
        for name, tensor in named_tensors(model, which).items():
            if which == "parameters" or tensor.dim() > 0:
                by_device.setdefault(tensor.device, []).append(name)
    if len(by_device) > 1:
        raise ModelError(
            Fault(
                "The model is on several devices.",
                got="; ".join(f"{device}: {', '.join(names[:3])}" for device, names in by_device.items()),
                expected="all parameters and buffers on one device",
                next=f"model.to({str(next(iter(by_device)))!r})",
            )
        )
    return next(iter(by_device), torch.device("cpu"))
