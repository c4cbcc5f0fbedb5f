"""Sums over the batch in float32, where the operators that make the summands are of half precision.

A kernel that sums the whole batch in bfloat16 or float16 adds up in float32 and rounds once. Split into microbatches it
rounds once each, and a sum kept in that dtype once more at every addition: 1024 additions of 1/1024 in bfloat16 give
0.25. So summands are converted where they are made, added up in float32, and the sum is rounded once, at the end. Where
the sum's only reader converts it to float32 anyway (a gradient under autocast), it is not rounded at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fullbatch import _torch
from fullbatch._axis._kernels import named

aten = torch.ops.aten

HALF = (torch.float16, torch.bfloat16)

_SUMS = {aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim}

# Elements that are converted at a time: the CPU's sum makes a copy in float32 of all that it is given.
_PART = 1 << 18


def is_half(meta: Any) -> bool:
    """Whether sums of such tensors are kept in float32."""
    return isinstance(meta, torch.Tensor) and meta.dtype in HALF


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums and statistics of tensors of `dtype` are kept."""
    return torch.float32 if dtype in HALF else dtype


def widened(meta: torch.Tensor) -> torch.Tensor:
    """The form of a sum of tensors like `meta`."""
    return meta.new_empty(meta.shape, dtype=statistics_dtype(meta.dtype))


def may_stay_wide(dtype: torch.dtype) -> bool:
    """Whether a sum may skip its rounding to `dtype` before it is converted to float32.

    Not float16: its rounding makes an infinity of what is too large, which is what a GradScaler looks for.
    """
    return dtype == torch.bfloat16


def widens(node: fx.Node) -> bool:
    """Whether `node` does nothing but convert to float32."""
    return (
        node.target is aten._to_copy.default
        and node.kwargs.get("dtype") is torch.float32
        and node.kwargs.get("memory_format") in (None, torch.preserve_format)
        and node.kwargs.get("device") in (None, node.args[0].meta["val"].device)  # type: ignore[union-attr]
    )


def only_moves(node: fx.Node, view: bool) -> bool:
    """Whether `node` gives the elements of its one operand, no matter of which dtype."""
    return (view or node.target is aten.clone.default) and not isinstance(node.meta["val"], (list, tuple))


def wide_sum(node: fx.Node) -> tuple[Callable[..., Any], int] | None:
    """A kernel that makes a sum or a mean over the batch in float32 from the start, where there is one.

    And which of its outputs that is.
    """
    source = node.args[0]
    if node.target is aten.convolution_backward.default:
        return (_convolution_backward, 2) if node.args[10][2] else None  # type: ignore[index]
    if node.target not in _SUMS or not isinstance(source, fx.Node):
        return None
    if node.meta["val"].dtype != source.meta["val"].dtype:
        return None
    if node.target in (aten.sum.default, aten.sum.dim_IntList):
        return sum_in_float32, 0
    return _mean_in_float32(source.meta["val"].numel() // max(node.meta["val"].numel(), 1)), 0


@named("aten.sum.dim_IntList")
def sum_in_float32(x: torch.Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> torch.Tensor:
    """The sum of x along `dim` (all, where None or empty), added up and returned in float32."""
    dims = [at % x.dim() for at in ([dim] if isinstance(dim, int) else dim)] if dim else list(range(x.dim()))
    if x.device.type != "cpu" or x.numel() <= _PART or _torch.is_fake(x) or not dims:
        return _sum(x, dims, keepdim)
    along = max(dims, key=lambda at: x.shape[at])
    count = max(1, _PART // (x.numel() // x.shape[along]))
    first, *rest = x.split(count, along)
    total: torch.Tensor = _sum(first, dims, keepdim)
    for part in rest:
        total += _sum(part, dims, keepdim)
    return total


def _sum(x: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    total: torch.Tensor = torch.sum(x, dims, keepdim=keepdim, dtype=torch.float32) if dims else x.float()
    return total


def _mean_in_float32(count: int) -> Callable[..., Any]:
    """A slice's part of a mean over `count` elements."""

    @named("aten.mean.dim")
    def mean_in_float32(x: torch.Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> torch.Tensor:
        return sum_in_float32(x, dim, keepdim).div_(count)

    return mean_in_float32


@named("aten.convolution_backward.default")
def _convolution_backward(
    grad: Any, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: Any, output: Any,
    groups: Any, mask: Any,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Torch's own, with the gradient of the bias, a plain sum, in float32."""
    gx, gw, _ = aten.convolution_backward.default(
        grad, x, weight, bias, stride, padding, dilation, transposed, output, groups, [mask[0], mask[1], False]
    )
    return gx, gw, sum_in_float32(grad, [0, *range(2, grad.dim())])
