"""Reductions and what runs along a dimension: over the batch a sum is `Partial`, over others nothing couples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fullbatch._axis._node import NodeView, Operand, Partial, Placed, Strategy, rule
from fullbatch._ir import Layout


def _dims(view: NodeView, source: Operand) -> tuple[int, ...]:
    return view.dims("dim", source) if "dim" in view.args else tuple(range(source.ndim))


def _kept(layout: Layout, dims: tuple[int, ...], keepdim: bool) -> Layout:
    return layout if keepdim else layout.at(layout.dim - sum(1 for dim in dims if dim < layout.dim))


def _keepdim(view: NodeView) -> bool:
    return bool(view.args.get("keepdim", False))


def _along(view: NodeView) -> tuple[Operand, Layout, tuple[int, ...]] | None:
    source = view.operands[0]
    return None if source.layout is None else (source, source.layout, _dims(view, source))


@rule("aten.sum", "aten.sum.dim_IntList", "aten.nansum")
def _sum(view: NodeView) -> Strategy | None:
    found = _along(view)
    if found is None:
        return None
    _, layout, dims = found
    out: Placed = Partial() if layout.dim in dims else _kept(layout, dims, _keepdim(view))
    return Strategy({0: layout}, (out,))


@rule("aten.mean", "aten.mean.dim")
def _mean(view: NodeView) -> Strategy | None:
    """A mean over the batch is the sum of the microbatches' own means, each weighed by its share of the count."""
    found = _along(view)
    if found is None:
        return None
    source, layout, dims = found
    if layout.dim not in dims:
        return Strategy({0: layout}, (_kept(layout, dims, _keepdim(view)),))
    count = torch.Size([source.shape[dim] for dim in dims]).numel()
    return Strategy({0: layout}, (Partial(),), {}, _share_of_mean(count))


def _share_of_mean(count: int) -> Callable[..., Any]:
    """The mean of a slice, times its share: in half precision the sum of a slice may be out of range."""

    def share_of_mean(x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
        out = torch.mean(x, dim=dim, keepdim=keepdim, dtype=dtype) if dim is not None else torch.mean(x, dtype=dtype)
        return out.mul_(x.numel() / max(out.numel(), 1) / count)

    return share_of_mean


@rule(
    "aten.amax", "aten.amin", "aten.max.dim", "aten.min.dim", "aten.argmax", "aten.argmin", "aten.any.dim",
    "aten.all.dim", "aten.any.dims", "aten.all.dims", "aten.prod.dim_int", "aten.logsumexp", "aten.var.correction",
    "aten.var_mean.correction", "aten.std.correction", "aten.std_mean.correction", "aten.var.dim", "aten.std.dim",
    "aten.linalg_vector_norm", "aten.norm.ScalarOpt_dim", "aten.norm.ScalarOpt_dim_dtype", "aten.median.dim",
    "aten.nanmedian.dim", "aten.kthvalue", "aten.mode", "aten.count_nonzero.dim_IntList", "aten.aminmax",
)  # fmt: skip
def _reduce_features(view: NodeView) -> Strategy | None:
    found = _along(view)
    if found is None:
        return None
    _, layout, dims = found
    if layout.dim in dims:
        return None
    return Strategy({0: layout}, tuple(_kept(layout, dims, _keepdim(view)) for _ in view.outputs))


@rule("aten.count_nonzero")
def _count_nonzero(view: NodeView) -> Strategy | None:
    source = view.operands[0]
    if source.layout is None or view.args.get("dim") is not None:
        return None
    return Strategy({0: source.layout}, (Partial(),))


@rule(
    "aten._softmax", "aten._log_softmax", "aten.cumsum", "aten.cumprod", "aten.logcumsumexp", "aten.cummax",
    "aten.cummin", "aten.sort", "aten.sort.stable", "aten.topk", "aten.argsort", "aten._safe_softmax",
)  # fmt: skip
def _scan(view: NodeView) -> Strategy | None:
    """Runs along one dimension and keeps all: independent along every other."""
    source = view.operands[0]
    if source.layout is None:
        return None
    dim = view.dim("dim", source, -1)
    if dim == source.layout.dim:
        return None
    return Strategy({0: source.layout}, tuple(source.layout for _ in view.outputs))


@rule("aten.renorm")
def _renorm(view: NodeView) -> Strategy | None:
    """Each sub-tensor along `dim` is scaled by its norm over every other dimension."""
    source = view.operands[0]
    if source.layout is None or view.dim("dim", source) != source.layout.dim:
        return None
    return Strategy({0: source.layout}, (source.layout,))


@rule("aten._softmax_backward_data", "aten._log_softmax_backward_data")
def _softmax_backward(view: NodeView) -> Strategy | None:
    source = view.sharded()[0]
    if source.layout is None or view.dim("dim", source) == source.layout.dim:
        return None
    return Strategy({operand.index: source.layout for operand in view.operands}, (source.layout,))


@rule("aten.value_selecting_reduction_backward")
def _value_selecting(view: NodeView) -> Strategy | None:
    from fullbatch._axis._node import scaled_shape

    grad = view.sharded()[0]
    if grad.layout is None:
        return None
    dim, keepdim = int(view.args["dim"]) % len(view.shape), _keepdim(view)
    layout = grad.layout
    whole = layout if keepdim else layout.at(layout.dim + (layout.dim >= dim))
    if whole.dim == dim:
        return None
    need = {operand.index: layout for operand in view.operands}
    return Strategy(need, (whole,), {"sizes": scaled_shape(view.shape, whole)})
