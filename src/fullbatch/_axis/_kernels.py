"""Operators that torch implements in a way that is not right for a microbatch, written so that it is.

`slice_scatter` and its kin clone `self` with its strides and everything between them. For a microbatch, a view of
the whole batch, that would be a copy of the whole batch. Normalisations read the memory of a batch of one in an order
that its strides do not say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fullbatch._axis._strides import memory_order, restride, with_batch_stride

aten = torch.ops.aten

Fn = TypeVar("Fn", bound=Callable[..., Any])


def named(operator: str) -> Callable[[Fn], Fn]:
    """Decorator: a kernel that stands for `operator`, by whose name it is known (`Kernel.name`)."""

    def add(fn: Fn) -> Fn:
        fn._qualified = operator  # type: ignore[attr-defined]
        return fn

    return add


def _copy(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _slice_scatter(x: Any, src: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    out = _copy(x)
    aten.slice.Tensor(out, dim, start, end, step).copy_(src)
    return out


def _select_scatter(x: Any, src: Any, dim: int, index: int) -> Any:
    out = _copy(x)
    out.select(dim, index).copy_(src)
    return out


def _diagonal_scatter(x: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    out = _copy(x)
    out.diagonal(offset, dim1, dim2).copy_(src)
    return out


def _group_norm(x: torch.Tensor, *rest: Any) -> Any:
    x = with_batch_stride(x)
    return aten.native_group_norm.default(x.contiguous(memory_format=memory_order(x)), *rest)


def _group_norm_backward(grad: torch.Tensor, x: torch.Tensor, *rest: Any) -> Any:
    x = with_batch_stride(x)
    order = memory_order(x)
    grad, x = (tensor.contiguous(memory_format=order) for tensor in (with_batch_stride(grad), x))
    return aten.native_group_norm_backward.default(grad, x, *rest)


def _batch_norm_backward(grad: torch.Tensor, x: torch.Tensor, *rest: Any) -> Any:
    return aten.native_batch_norm_backward.default(with_batch_stride(grad), with_batch_stride(x), *rest)


def _view(x: torch.Tensor, size: list[int]) -> Any:
    """A view of the whole batch need not be one of a microbatch, whose memory may lie in another order."""
    try:
        return aten.view.default(x, size)
    except RuntimeError:
        return x.reshape(size)


# Of all operators on images these alone read memory by an order that they do not make themselves: at a batch of one,
# whose stride may be any, or at gradients in another order than their inputs, they are wrong without a word.
KERNELS: dict[Any, Any] = {
    aten.view.default: _view,
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _select_scatter,
    aten.diagonal_scatter.default: _diagonal_scatter,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
}
"""What runs in place of an operator, everywhere."""

for _target, _fn in KERNELS.items():
    _fn._qualified = str(_target)


def filled(size: list[int], value: Any, **kwargs: Any) -> torch.Tensor:
    """A constant as one element seen many times: reading it costs no memory."""
    kwargs.pop("pin_memory", None)
    if 0 in size:
        return torch.full(size, value, **kwargs)
    return torch.full([1] * len(size), value, **kwargs).expand(size)


IN_STRIDES = " in strides"
"""What follows the operator's name in that of a kernel by `in_strides`."""


def in_strides(operator: Any, strides: tuple[tuple[int, ...] | None, ...]) -> Callable[..., Any]:
    """`operator` with its outputs in these strides, in which the graph that reads them was traced."""

    def traced(*args: Any, **kwargs: Any) -> Any:
        results = operator(*args, **kwargs)
        many = isinstance(results, (list, tuple))
        kept = [
            restride(out, list(out.shape), list(wanted))
            if isinstance(out, torch.Tensor) and wanted is not None and not _like(out, wanted)
            else out
            for out, wanted in zip(results if many else (results,), strides, strict=True)
        ]
        return tuple(kept) if many else kept[0]

    known = getattr(operator, "_qualified", operator)
    traced._qualified = f"{known}{IN_STRIDES}"  # type: ignore[attr-defined]
    return traced


def _like(tensor: torch.Tensor, strides: tuple[int, ...]) -> bool:
    pairs = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return all(size == 1 or now == wanted for size, now, wanted in pairs)


def then_nothing(check: Any) -> Callable[..., torch.Tensor]:
    def checked(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        check(tensor, *args, **kwargs)
        return nothing(tensor)

    def nothing(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros((), device=tensor.device)

    checked._qualified = str(check)  # type: ignore[attr-defined]
    checked.stand_in = nothing  # type: ignore[attr-defined]  # a check that fails on a device ends its use
    return checked
