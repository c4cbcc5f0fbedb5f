"""A tensor's form in memory, tensors of that form without content, and what one operator did to them."""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

# Below this many bytes a tensor of zeros is cheaper than a mapping of zero pages.
_MAPPED_ABOVE = 256 * 1024


@dataclass(frozen=True)
class Meta:
    """A tensor's form in memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Meta:
        """The form of `tensor`."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)

    @cached_property
    def text(self) -> str:
        """The form as text, the same in every process."""
        return f"{self.shape} {self.stride} {self.dtype} {self.device}"

    @property
    def elements(self) -> int:
        """Elements of the smallest storage that holds the tensor."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))

    def bare(self) -> torch.Tensor:
        """A tensor with this shape and these strides that has no memory at all."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")

    def dummy(self) -> torch.Tensor:
        """A tensor of zeros that takes no memory where it is large and on the CPU: nothing writes it.

        Its pages are those of a private mapping, which the system gives out zeroed, and all as the one zero page for as
        long as they are only read. Filling them would take as long as many an operator.
        """
        nbytes = self.elements * self.dtype.itemsize
        if self.device.type == "cpu" and nbytes > _MAPPED_ABOVE and hasattr(mmap, "MAP_PRIVATE"):
            try:
                pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except OSError:  # a limit on address space
                return self.filled()
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # a kernel without huge pages
                    pages.madvise(mmap.MADV_HUGEPAGE)
            storage = torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()
            return torch.empty(0, dtype=self.dtype).set_(storage, 0, self.shape, self.stride)
        return self.filled()

    def filled(self) -> torch.Tensor:
        """A tensor of zeros in memory of its own, as an operator of a running step finds it."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).zero_()

    def to_json(self) -> list[Any]:
        """Plain lists, numbers and strings."""
        return [list(self.shape), list(self.stride), str(self.dtype).removeprefix("torch."), str(self.device)]

    @classmethod
    def from_json(cls, found: Any) -> Meta:
        """Raises ValueError, TypeError, AttributeError or RuntimeError for anything that `to_json` did not write."""
        shape, stride, name, device = found
        dtype = getattr(torch, name)
        if not isinstance(dtype, torch.dtype) or len(shape) != len(stride):
            raise ValueError("no form of a tensor")
        return cls(tuple(map(int, shape)), tuple(map(int, stride)), dtype, torch.device(device))


Output = tuple[Meta, int, int | None]


@dataclass(frozen=True)
class Found:
    """What one operator did.

    `peak`: most bytes above the start. `outputs`: of each that is used its form, the bytes of its storage, and the
    operand that it is a view of; -1 - n for the output n.
    """

    peak: int
    outputs: tuple[Output | None, ...]

    def fits(self, inputs: int, outputs: int) -> bool:
        """Whether this can be of an operator with so many operands and outputs."""
        made = [out for out in self.outputs if out is not None]
        return len(self.outputs) <= outputs and all(
            operand is None or -len(self.outputs) <= operand < inputs for _, _, operand in made
        )

    def to_json(self) -> list[Any]:
        """Plain lists, numbers and strings."""
        return [self.peak, [None if out is None else [*out[0].to_json(), *out[1:]] for out in self.outputs]]

    @classmethod
    def from_json(cls, found: Any) -> Found:
        """Raises ValueError, TypeError, AttributeError or RuntimeError for anything that `to_json` did not write."""
        peak, outputs = found
        return cls(_bytes(peak), tuple(None if out is None else _output(out) for out in outputs))


def _output(found: Any) -> Output:
    *form, nbytes, operand = found
    return Meta.from_json(form), _bytes(nbytes), None if operand is None else int(operand)


def _bytes(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no number of bytes")
    return value
