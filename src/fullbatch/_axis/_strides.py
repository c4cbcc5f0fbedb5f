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
