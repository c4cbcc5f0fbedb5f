"""Batches of another size than the example: by repeating or cutting its samples, or by a function of the user's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from fullbatch._errors import BatchError, FullbatchError
from fullbatch._tree import find_batch, leaves, map_tensors

Axis = Literal["batch"] | Callable[[int], Any]


def check_axis(axis: Any) -> None:
    """Raises BatchError where `axis` is neither "batch" nor a function."""
    if axis != "batch" and not callable(axis):
        raise BatchError.of(
            "There is no such axis.", got=f"axis={axis!r:.80}",
            expected='"batch", or a function of a size that returns a batch',
            next="axis=lambda side: (images.new_empty(8, 3, side, side), labels)",
        )  # fmt: skip


class Sizes:
    """Batches of any size along one axis. `start` is a size to begin with: the example's own, or 1 for a function."""

    def __init__(self, example: Any, axis: Axis, batch_dims: Any) -> None:
        self._example, self._axis, self._dims = example, axis, batch_dims
        shape = find_batch(example, batch_dims)
        self.start = shape.size if axis == "batch" else 1
        self._along = shape.dims
        self.name = "batch" if axis == "batch" else "size"
        self._forms: dict[tuple[Any, ...], int] = {}

    def make(self, size: int, values: bool) -> Any:
        """The batch of `size`; without `values` its tensors hold nothing, and on the CPU take no memory."""
        if self._axis == "batch":
            dims = iter(self._along)
            return map_tensors(lambda tensor: _resized(tensor, next(dims), size, values), self._example)
        try:
            batch = self._axis(size)  # type: ignore[operator]
        except Exception as error:
            raise BatchError.of(
                f"axis({size}) raises {type(error).__name__}: {error}"[:600], expected="a batch",
                next="multiple_of= and most= bound the sizes that are asked for",
            ) from error  # fmt: skip
        self._check(size, batch)
        return batch

    def _check(self, size: int, batch: Any) -> None:
        """Sizes that give the same batch are no sizes: a search would never end well."""
        try:
            find_batch(batch, self._dims)
        except FullbatchError as error:
            raise BatchError.of(
                f"axis({size}) is no batch.", got=error.faults[0].got or f"{type(batch).__name__}: {batch!r:.80}",
                expected="a nest of tensors like the example", next="return (images, labels) from axis",
            ) from error  # fmt: skip
        form = tuple((path, tuple(tensor.shape)) for path, tensor in leaves(batch))
        same = self._forms.setdefault(form, size)
        if same != size:
            raise BatchError.of(
                f"axis({same}) and axis({size}) are of one shape.", got=str(form)[:300],
                expected="larger tensors for a larger size",
                next="multiple_of= where only some sizes differ (a side in steps of 32)",
            )  # fmt: skip


def _resized(tensor: torch.Tensor, dim: int | None, size: int, values: bool) -> torch.Tensor:
    """`tensor` with `size` samples along `dim`, dense, its dimensions in memory in the order that they have."""
    if dim is None:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = size
    strides, step = [0] * len(shape), 1
    for at in sorted(range(len(shape)), key=lambda at: (tensor.stride(at), -at)):
        strides[at], step = step, step * shape[at]
    made = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
    if values:
        samples = tensor.shape[dim]
        for begin in range(0, size, samples):
            count = min(samples, size - begin)
            made.narrow(dim, begin, count).copy_(tensor.detach().narrow(dim, 0, count))
    return made.requires_grad_(tensor.requires_grad)
