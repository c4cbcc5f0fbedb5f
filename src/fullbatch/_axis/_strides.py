"""How a tensor lies in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def has_dense_strides(tensor: torch.Tensor) -> bool:
    """Whether the strides are those of some permutation of a contiguous tensor."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _offset(node: fx.Node, meta: torch.Tensor) -> int:
    position = 4 if node.target is aten.as_strided_scatter.default else 3
    args: tuple[Any, ...] = node.args
    given = args[position] if len(args) > position else None
    return int(given - meta.storage_offset()) if given is not None else 0


def same_view(meta: torch.Tensor, node: fx.Node) -> bool:
    return tuple(node.args[1]) == tuple(meta.shape) and tuple(node.args[2]) == meta.stride() and not _offset(node, meta)  # type: ignore[arg-type]


def within(meta: torch.Tensor, node: fx.Node) -> bool:
    """Whether every element read lies in the memory that the operand's own elements fill."""
    at = 2 if node.target is aten.as_strided_scatter.default else 1
    size, stride = node.args[at], node.args[at + 1]
    last = sum((n - 1) * s for n, s in zip(size, stride, strict=True))  # type: ignore[arg-type]
    offset = _offset(node, meta)
    return offset == 0 and last < meta.numel() and has_dense_strides(meta)


def restride(x: torch.Tensor, size: list[int], stride: list[int]) -> torch.Tensor:
    """`x` with the strides that it was traced with, in memory that begins with it."""
    return torch.empty_strided(size, stride, dtype=x.dtype, device=x.device).copy_(x)


def with_batch_stride(x: torch.Tensor) -> torch.Tensor:
    """`x`, where it is a batch of one, with the stride that its samples would have in a batch of more.

    The stride of a dimension of one is free, and `view` gives it a small one. Operators tell by it whether channels
    come last, and take the same memory for another order then. Nothing is copied.
    """
    if x.dim() < 3 or x.shape[0] != 1 or x.stride(0) == x.numel() or not has_dense_strides(x):
        return x
    order = sorted(range(1, x.dim()), key=x.stride, reverse=True)
    as_it_lies = x.permute(0, *order).squeeze(0).unsqueeze(0)  # `as_strided` would say the same, and fuse with nothing
    return as_it_lies.permute(0, *(1 + order.index(dim) for dim in range(1, x.dim())))


def memory_order(x: torch.Tensor) -> torch.memory_format:
    """The order in which torch's operators on images take `x` to lie, on a CPU."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if last is None or x.is_contiguous() or not x.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last
