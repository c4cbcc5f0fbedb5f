"""Operators that couple the batch through a few numbers only, written as summands, a reduction, and a local rest.

Batch normalisation needs each channel's mean and variance, not its samples. Run as one operator it would have to
see the whole batch at once; written as *moments of a slice*, *merge*, *normalise a slice* it needs the whole
batch for two numbers a channel. The same holds for a variance over the batch, and for the count of valid targets in
a loss.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fullbatch._axis._channels import channel_moments
from fullbatch._axis._kernels import named
from fullbatch._axis._node import NodeView, Operand, Partial
from fullbatch._axis._wide import HALF, statistics_dtype, sum_in_float32
from fullbatch._ir import Kind, Layout, Reduction, Ref

if TYPE_CHECKING:
    from fullbatch._axis._build import Builder

Expansion = Callable[["Builder", fx.Node, NodeView], bool]
_EXPANSIONS: dict[str, Expansion] = {}


def expansion(*names: str) -> Callable[[Expansion], Expansion]:
    """Decorator: the expansion of these operators."""

    def add(fn: Expansion) -> Expansion:
        _EXPANSIONS.update(dict.fromkeys(names, fn))
        return fn

    return add


def expand(builder: Builder, node: fx.Node, view: NodeView) -> bool:
    """Adds the tasks of `node` where it has an expansion that applies; False where it has none."""
    found = _EXPANSIONS.get(view.name) or _EXPANSIONS.get(view.name.rsplit(".", 1)[0])
    return found is not None and found(builder, node, view)


def _ids(builder: Builder, *operands: Operand | None) -> list[int]:
    return [builder.whole(builder.of(operand.node)) for operand in operands if operand is not None]


# ---- batch normalisation


@expansion(
    "aten._native_batch_norm_legit", "aten._native_batch_norm_legit_functional", "aten.native_batch_norm",
    "aten._batch_norm_with_update_functional", "aten.cudnn_batch_norm",
)  # fmt: skip
def _batch_norm(builder: Builder, node: fx.Node, view: NodeView) -> bool:
    source = view.operands[0]
    layout = source.layout
    if layout is None or layout.dim == 1 or not view.args.get("training"):
        return False
    x = builder.of(source.node)
    meta = source.node.meta["val"]
    channels = meta.shape[1]
    count = meta.numel() // channels
    dtype = statistics_dtype(meta.dtype)
    vector = meta.new_empty(channels, dtype=dtype)
    eps = float(view.args.get("eps", view.args.get("epsilon", 1e-5)))
    moments = _moments_of_channels(builder, x, vector, Partial(Reduction.MOMENTS, count // builder.batch))
    mean, var, invstd = builder.value(vector), builder.value(vector), builder.value(vector)
    builder.emit(
        Kind.ONCE, _finish_moments, (Ref(0), count, eps, dtype), [moments], [mean, var, invstd], single=False
    )  # fmt: skip
    weight, bias = view.tensor("weight"), view.tensor("bias")
    affine = _ids(builder, weight, bias)
    out = builder.value(meta, layout)
    refs = [Ref(1) if weight else None, Ref(1 + bool(weight)) if bias else None]
    position = 1 + len(affine)
    builder.emit(
        Kind.LOCAL, _normalise, (Ref(0), *refs, Ref(position), Ref(position + 1), eps),
        [x, *affine, mean, var], [out],
    )  # fmt: skip
    outputs: list[int | None] = [out, mean, invstd]
    outputs += _running_statistics(builder, view, mean, var, count)
    outputs += [None] * (len(view.outputs) - len(outputs))
    if view.name.startswith("aten._batch_norm_with_update"):
        raise AssertionError("this form of batch normalisation keeps a reserve that has no expansion")
    builder.memory[mean] = var
    builder.assign(node, outputs[: len(view.outputs)])
    return True


def _moments_of_channels(builder: Builder, x: int, vector: torch.Tensor, how: Partial) -> int:
    pair = vector.new_empty((2, *vector.shape), dtype=torch.float64)
    partial = builder.value(pair, partial=True)
    builder.emit(Kind.LOCAL, channel_moments, (Ref(0),), [x], [partial])
    return builder.reduce(partial, pair, how, "batch normalisation: mean and variance of the whole batch")


def _finish_moments(moments: torch.Tensor, count: int, eps: float, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    var = moments[1] / count
    return moments[0].to(dtype, copy=True), var.to(dtype, copy=True), torch.rsqrt(var + eps).to(dtype)


def _normalise(x: Any, weight: Any, bias: Any, mean: Any, var: Any, eps: float) -> Any:
    weight, bias = _slope(weight, x, mean), None if bias is None else bias.to(mean.dtype)
    return torch.ops.aten.native_batch_norm.default(x, weight, bias, mean, var, False, 0.0, eps)[0]


def _slope(weight: Any, x: Any, mean: Any) -> Any:
    """A weight for the kernels, which see by its dtype that the statistics are wider than x; ones where x has none."""
    if weight is None:
        return None if x.dtype == mean.dtype else torch.ones_like(mean)
    return weight.to(mean.dtype)


def _running_statistics(builder: Builder, view: NodeView, mean: int, var: int, count: int) -> list[int | None]:
    running = view.tensor("running_mean"), view.tensor("running_var")
    if running[0] is None or running[1] is None:
        return []
    momentum = float(view.args["momentum"] if "momentum" in view.args else view.args["exponential_average_factor"])
    old = _ids(builder, *running)
    new = [builder.value(operand.node.meta["val"]) for operand in running if operand is not None]
    builder.emit(
        Kind.ONCE, _update_running, (Ref(0), Ref(1), Ref(2), Ref(3), momentum, count / max(count - 1, 1)),
        [*old, mean, var], new, single=False,
    )  # fmt: skip
    return list(new)


def _update_running(
    mean: torch.Tensor,
    var: torch.Tensor,
    batch_mean: torch.Tensor,
    batch_var: torch.Tensor,
    momentum: float,
    bessel: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighed in the wider of both dtypes and rounded once, as torch's kernels do."""
    return (
        (mean * (1 - momentum) + batch_mean * momentum).to(mean.dtype),
        (var * (1 - momentum) + batch_var * bessel * momentum).to(var.dtype),
    )


@expansion("aten.native_batch_norm_backward")
def _batch_norm_backward(builder: Builder, node: fx.Node, view: NodeView) -> bool:
    grad, source = view.operands[:2]
    layout = source.layout or grad.layout
    save_mean, save_invstd = view.tensor("save_mean"), view.tensor("save_invstd")
    if layout is None or layout.dim == 1 or not view.args["train"] or save_mean is None or save_invstd is None:
        return False
    meta = source.node.meta["val"]
    channels = meta.shape[1]
    count, eps = meta.numel() // channels, float(view.args["eps"])
    mean, invstd = _ids(builder, save_mean, save_invstd)
    if mean in builder.memory:
        var = builder.memory[mean]
    else:
        var, eps = builder.value(save_invstd.node.meta["val"]), 0.0
        builder.emit(Kind.ONCE, torch.pow, (Ref(0), -2), [invstd], [var])
    weight = view.tensor("weight")
    affine = _ids(builder, weight)
    gy, x = builder.slice(builder.of(grad.node), layout), builder.slice(builder.of(source.node), layout)
    vector = meta.new_empty(channels, dtype=statistics_dtype(meta.dtype))
    sums = [builder.value(vector, partial=True) for _ in range(2)]
    builder.emit(
        Kind.LOCAL, _gradient_sums, (Ref(0), Ref(1), Ref(2), Ref(3), Ref(4), eps), [gy, x, mean, var, invstd], sums,
        single=False,
    )  # fmt: skip
    why = "batch normalisation, backward: sums of the gradient over the whole batch"
    whole = [builder.reduce(value, vector, Partial(), why) for value in sums]
    outputs: list[int | None] = [None]
    for total, form in zip(whole, node.meta["val"][1:], strict=True):
        outputs.append(total if form is None else builder.rounded(total, form))
    if view.args["output_mask"][0]:
        slopes = [builder.value(vector) for _ in range(3)]
        builder.emit(
            Kind.ONCE, _gradient_slopes, (Ref(0), Ref(1), Ref(2), Ref(3) if weight else None, count),
            [*whole, invstd, *affine], slopes, single=False,
        )  # fmt: skip
        gx = builder.value(meta, layout)
        builder.emit(
            Kind.LOCAL, _input_gradient, (Ref(0), Ref(1), Ref(2), Ref(3), Ref(4), Ref(5), Ref(6), eps),
            [gy, x, mean, var, *slopes], [gx],
        )  # fmt: skip
        outputs[0] = gx
    builder.assign(node, outputs)
    return True


def _gradient_sums(gy: Any, x: Any, mean: Any, var: Any, invstd: Any, eps: float) -> tuple[Any, Any]:
    """Of a slice, a channel: sum(gy * (x - mean) * invstd) and sum(gy), the gradients of weight and bias."""
    if gy.stride() != x.stride():  # for one sample whose gradient is in another memory order the kernel is wrong (2.13)
        gy, x = gy.contiguous(), x.contiguous()
    _, weight, bias = torch.ops.aten.native_batch_norm_backward.default(
        gy, x, _slope(None, x, mean), mean, var, mean, invstd, False, eps, [False, True, True]
    )
    return weight, bias


def _gradient_slopes(grad_weight: Any, grad_bias: Any, invstd: Any, weight: Any, count: int) -> tuple[Any, Any, Any]:
    """What makes gx = scale * gy + slope * (x - mean) * invstd + offset the gradient of the whole batch."""
    scale = invstd if weight is None else invstd * weight
    return scale.clone(), grad_weight * scale * (-1.0 / count), grad_bias * scale * (-1.0 / count)


def _input_gradient(gy: Any, x: Any, mean: Any, var: Any, scale: Any, slope: Any, offset: Any, eps: float) -> Any:
    gx = torch.ops.aten.native_batch_norm.default(x, slope, offset, mean, var, False, 0.0, eps)[0]
    shape = [1, -1] + [1] * (x.dim() - 2)
    return gx.addcmul_(gy, scale.reshape(shape).to(gy.dtype))


# ---- variance and norm over the batch


@expansion("aten.var.correction", "aten.var_mean.correction", "aten.var.dim", "aten.var.default")
def _variance(builder: Builder, node: fx.Node, view: NodeView) -> bool:
    source = view.operands[0]
    layout = source.layout
    dims = view.dims("dim", source)
    if layout is None or layout.dim not in dims or source.node.meta["val"].is_complex():
        return False
    count = prod(source.shape[dim] for dim in dims)
    keepdim = bool(view.args.get("keepdim", False))
    correction = view.args.get("correction", view.args.get("unbiased", 1))
    correction = 1.0 if correction is None else float(correction)
    metas = node.meta["val"]
    both = isinstance(metas, (list, tuple))
    meta = metas[0] if both else metas
    pair = meta.new_empty((2, *meta.shape), dtype=statistics_dtype(meta.dtype))
    partial = builder.value(pair, partial=True)
    x = builder.of(source.node)
    builder.emit(Kind.LOCAL, _moments, (Ref(0), list(dims), keepdim), [x], [partial])
    how = Partial(Reduction.MOMENTS, count // builder.batch)
    whole = builder.reduce(partial, pair, how, "a variance over the batch")
    outputs = [builder.value(meta), builder.value(meta)]
    divisor = max(count - correction, 0.0)
    builder.emit(Kind.ONCE, _variance_and_mean, (Ref(0), divisor, meta.dtype), [whole], outputs, single=False)
    builder.assign(node, outputs if both else outputs[:1])
    return True


def _moments(x: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    x = x.to(statistics_dtype(x.dtype))
    count = prod(x.shape[dim] for dim in dims)
    var, mean = torch.var_mean(x, dims, correction=0, keepdim=keepdim)
    return torch.stack([mean, var * count])


def _variance_and_mean(moments: torch.Tensor, divisor: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return (moments[1] / divisor).to(dtype), moments[0].to(dtype, copy=True)


@expansion("aten.linalg_vector_norm")
def _vector_norm(builder: Builder, node: fx.Node, view: NodeView) -> bool:
    source = view.operands[0]
    layout = source.layout
    dims = view.dims("dim", source)
    order = view.args.get("ord", 2)
    if layout is None or layout.dim not in dims or order != 2:
        return False
    meta = node.meta["val"]
    wide = meta.new_empty(meta.shape, dtype=statistics_dtype(meta.dtype))
    partial, out = builder.value(wide, partial=True), builder.value(meta)
    args = (Ref(0), list(dims), bool(view.args.get("keepdim", False)), wide.dtype)
    builder.emit(Kind.LOCAL, _sum_of_squares, args, [builder.of(source.node)], [partial])
    whole = builder.reduce(partial, wide, Partial(), "a norm over the batch")
    builder.emit(Kind.ONCE, _root, (Ref(0), meta.dtype), [whole], [out])
    builder.assign(node, [out])
    return True


def _sum_of_squares(x: torch.Tensor, dims: list[int], keepdim: bool, dtype: torch.dtype) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(x, 2, dims, keepdim, dtype=x.dtype if x.is_complex() else dtype)
    return norm.square()


def _root(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.sqrt().to(dtype)


# ---- negative log likelihood


_NONE, _MEAN, _SUM = 0, 1, 2


@expansion("aten.nll_loss_forward", "aten.nll_loss2d_forward")
def _nll(builder: Builder, node: fx.Node, view: NodeView) -> bool:
    scores, target = view.operands[:2]
    layout = target.layout or scores.layout
    if layout is None or layout.dim != 0 or target.ndim == 0:
        return False
    weight = view.tensor("weight")
    reduction, ignore = int(view.args["reduction"]), int(view.args["ignore_index"])
    meta = node.meta["val"][0]
    x = builder.slice(builder.of(scores.node), layout)
    y = builder.slice(builder.of(target.node), layout)
    affine = _ids(builder, weight)
    total = _target_weight(builder, y, affine, ignore, meta)
    ref = Ref(2) if weight else None
    if reduction not in (_MEAN, _SUM):
        out = builder.value(meta, layout)
        args = (Ref(0), Ref(1), ref, reduction, ignore)
        builder.emit(Kind.LOCAL, _first_of(node.target), args, [x, y, *affine], [out])
        builder.assign(node, [out, total])
        return True
    wide = meta.new_empty((), dtype=statistics_dtype(meta.dtype))
    partial = builder.value(wide, partial=True)
    half = meta.dtype in HALF
    args = (Ref(0), Ref(1), ref, _NONE if half else _SUM, ignore)
    fn = _summed(node.target) if half else _first_of(node.target)
    builder.emit(Kind.LOCAL, fn, args, [x, y, *affine], [partial])
    loss = builder.reduce(partial, wide, Partial(), "the sum of a loss over the batch")
    if reduction == _MEAN:
        summed, loss = loss, builder.value(meta)
        builder.emit(Kind.ONCE, _ratio, (Ref(0), Ref(1), meta.dtype), [summed, total], [loss])
    else:
        loss = builder.rounded(loss, meta)
    builder.assign(node, [loss, total])
    return True


def _first_of(operator: Any) -> Callable[..., Any]:
    @named(str(operator))
    def first(*args: Any) -> Any:
        return operator(*args)[0]

    return first


def _summed(operator: Any) -> Callable[..., Any]:
    """The losses of a slice, added up in float32: their sum may be out of range where their mean is not."""

    @named(str(operator))
    def summed(*args: Any) -> Any:
        return sum_in_float32(operator(*args)[0])

    return summed


def _target_weight(builder: Builder, target: int, weight: list[int], ignore: int, meta: torch.Tensor) -> int:
    """The denominator of a mean: it depends on the targets alone, so it is known before the forward begins."""
    wide = meta.new_empty((), dtype=statistics_dtype(meta.dtype))
    partial = builder.value(wide, partial=True)
    args = (Ref(0), Ref(1) if weight else None, ignore, wide.dtype)
    builder.emit(Kind.LOCAL, _sum_of_target_weights, args, [target, *weight], [partial])
    total = builder.reduce(partial, wide, Partial(), "the count of valid targets of the whole batch")
    return builder.rounded(total, meta.new_empty(()))


def _ratio(value: torch.Tensor, total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (value / total).to(dtype)


def _sum_of_target_weights(target: Any, weight: Any, ignore: int, dtype: torch.dtype) -> Any:
    valid = target != ignore
    if weight is None:
        return valid.sum(dtype=dtype)
    return torch.where(valid, weight[torch.where(valid, target, 0)], 0).sum(dtype=dtype)


@expansion("aten.nll_loss_backward", "aten.nll_loss2d_backward")
def _nll_backward(builder: Builder, node: fx.Node, view: NodeView) -> bool:
    scores, target = view.tensor("self"), view.tensor("target")
    grad, total, weight = view.tensor("grad_output"), view.tensor("total_weight"), view.tensor("weight")
    assert scores and target and grad and total
    layout = target.layout or scores.layout or grad.layout
    if layout is None or layout.dim != 0 or target.ndim == 0:
        return False
    reduction = int(view.args["reduction"])
    gy = builder.of(grad.node)
    gy = builder.whole(gy) if reduction in (_MEAN, _SUM) else builder.slice(gy, layout)
    out = builder.value(node.meta["val"], layout)
    affine = _ids(builder, weight)
    inputs = [gy, builder.slice(builder.of(scores.node), layout), builder.slice(builder.of(target.node), layout)]
    position = 3 + len(affine)
    args = (Ref(0), Ref(1), Ref(2), Ref(3) if weight else None, reduction, view.args["ignore_index"], Ref(position))
    builder.emit(Kind.LOCAL, node.target, args, [*inputs, *affine, *_ids(builder, total)], [out])  # type: ignore[arg-type]
    builder.assign(node, [out])
    return True


__all__ = ["Layout", "expand"]
