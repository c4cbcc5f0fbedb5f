"""Layers: convolution, pooling, resampling, normalisation over features, embedding, attention."""

from __future__ import annotations

from typing import Any

from fullbatch._axis._node import NodeView, Operand, Partial, Placed, Strategy, Unread, rule, scaled_shape
from fullbatch._ir import Layout, Scaled


def _leading(view: NodeView, operand: Operand | None) -> Layout | None:
    """The layout of `operand` where the batch is its first dimension, else None."""
    if operand is None or operand.layout is None or operand.layout.dim != 0:
        return None
    return operand.layout


@rule("aten.convolution", "aten.mkldnn_convolution", "aten.cudnn_convolution")
def _convolution(view: NodeView) -> Strategy | None:
    source, weight = view.operands[0], view.operands[1]
    layout = _leading(view, source)
    if layout is None or source.ndim != weight.ndim:
        return None
    return Strategy({source.index: layout}, (layout,))


@rule("aten.convolution_backward")
def _convolution_backward(view: NodeView) -> Strategy | None:
    """The input's gradient is a slice; the gradients of weight and bias are summands."""
    grad, source, weight = view.operands[:3]
    layout = _leading(view, grad) or _leading(view, source)
    if layout is None or source.ndim != weight.ndim or weight.layout is not None:
        return None
    return Strategy({grad.index: layout, source.index: layout}, (layout, Partial(), Partial()))


@rule(
    "aten.max_pool2d_with_indices", "aten.max_pool3d_with_indices", "aten.avg_pool2d", "aten.avg_pool3d",
    "aten._adaptive_avg_pool2d", "aten._adaptive_avg_pool3d", "aten.adaptive_max_pool2d", "aten.adaptive_max_pool3d",
    "aten.avg_pool1d", "aten.adaptive_avg_pool1d", "aten.adaptive_max_pool1d", "aten.fractional_max_pool2d",
    "aten.max_pool2d_with_indices_backward", "aten.max_pool3d_with_indices_backward", "aten.avg_pool2d_backward",
    "aten.avg_pool3d_backward", "aten._adaptive_avg_pool2d_backward", "aten._adaptive_avg_pool3d_backward",
    "aten.adaptive_max_pool2d_backward", "aten.adaptive_max_pool3d_backward", "aten.max_unpool2d",
    "aten.reflection_pad1d", "aten.reflection_pad2d", "aten.reflection_pad3d", "aten.replication_pad1d",
    "aten.replication_pad2d", "aten.replication_pad3d", "aten.reflection_pad1d_backward",
    "aten.reflection_pad2d_backward", "aten.reflection_pad3d_backward", "aten.replication_pad1d_backward",
    "aten.replication_pad2d_backward", "aten.replication_pad3d_backward", "aten.pixel_shuffle",
    "aten.pixel_unshuffle", "aten.channel_shuffle", "aten.im2col", "aten.col2im",
    "aten.upsample_nearest1d", "aten.upsample_nearest2d", "aten.upsample_nearest3d", "aten._upsample_nearest_exact1d",
    "aten._upsample_nearest_exact2d", "aten._upsample_nearest_exact3d", "aten.upsample_linear1d",
    "aten.upsample_bilinear2d", "aten.upsample_bicubic2d", "aten.upsample_trilinear3d",
    "aten._upsample_bilinear2d_aa", "aten._upsample_bicubic2d_aa", "aten._upsample_lanczos2d_aa",
    "aten.grid_sampler_2d", "aten.grid_sampler_3d",
)  # fmt: skip
def _per_image(view: NodeView) -> Strategy | None:
    """Images are independent: every operand with the batch in front is cut there."""
    return _batch_first(view, view.operands)


def _batch_first(view: NodeView, operands: tuple[Operand, ...], patch: dict[str, Any] | None = None) -> Strategy | None:
    layout = next((found for operand in operands if (found := _leading(view, operand))), None)
    if layout is None or any(operand.layout is not None and operand.layout.dim != 0 for operand in operands):
        return None
    extent = layout.per_sample * view.batch
    if any(not operand.shape or operand.shape[0] != extent for operand in operands):
        return None
    outputs: list[Placed] = [layout if shape and shape[0] == extent else None for shape in view.outputs]
    return Strategy({operand.index: layout for operand in operands}, tuple(outputs), patch or {})


@rule(
    "aten.upsample_nearest1d_backward", "aten.upsample_nearest2d_backward", "aten.upsample_nearest3d_backward",
    "aten._upsample_nearest_exact1d_backward", "aten._upsample_nearest_exact2d_backward",
    "aten._upsample_nearest_exact3d_backward", "aten.upsample_linear1d_backward", "aten.upsample_bilinear2d_backward",
    "aten.upsample_bicubic2d_backward", "aten.upsample_trilinear3d_backward", "aten._upsample_bilinear2d_aa_backward",
    "aten._upsample_bicubic2d_aa_backward",
)  # fmt: skip
def _resample_backward(view: NodeView) -> Strategy | None:
    layout = _leading(view, view.operands[0])
    if layout is None:
        return None
    return _batch_first(view, view.operands, {"input_size": scaled_shape(view.shape, layout)})


@rule("aten.affine_grid_generator")
def _affine_grid(view: NodeView) -> Strategy | None:
    layout = _leading(view, view.operands[0])
    if layout is None:
        return None
    return _batch_first(view, view.operands, {"size": scaled_shape(tuple(view.args["size"]), layout)})


@rule("aten.grid_sampler_2d_backward", "aten.grid_sampler_3d_backward")
def _grid_backward(view: NodeView) -> Strategy | None:
    return _batch_first(view, view.operands)


@rule("aten.native_layer_norm", "aten._fused_rms_norm")
def _layer_norm(view: NodeView) -> Strategy | None:
    source = view.operands[0]
    lead = source.ndim - len(view.args["normalized_shape"])
    if source.layout is None or source.layout.dim >= lead:
        return None
    return Strategy({0: source.layout}, tuple(source.layout for _ in view.outputs))


@rule("aten.native_layer_norm_backward", "aten._fused_rms_norm_backward")
def _layer_norm_backward(view: NodeView) -> Strategy | None:
    source = view.tensor("input")
    affine = {operand.index for name in ("weight", "bias") if (operand := view.tensor(name))}
    layout = next((op.layout for op in view.sharded() if op.index not in affine), None)
    if source is None or layout is None or layout.dim >= source.ndim - len(view.args["normalized_shape"]):
        return None
    need = {operand.index: layout for operand in view.operands if operand.index not in affine}
    return Strategy(need, (layout, *(Partial() for _ in view.outputs[1:])))


@rule("aten.native_group_norm")
def _group_norm(view: NodeView) -> Strategy | None:
    layout = _leading(view, view.operands[0])
    if layout is None or layout.outer * layout.inner * view.batch != view.args["N"]:
        return None
    return Strategy({0: layout}, (layout, layout, layout), {"N": Scaled(layout.per_sample)})


@rule("aten.native_group_norm_backward")
def _group_norm_backward(view: NodeView) -> Strategy | None:
    weight = view.tensor("weight")
    data = [operand for operand in view.operands if weight is None or operand.index != weight.index]
    layout = next((found for operand in data if (found := _leading(view, operand))), None)
    if layout is None or layout.per_sample * view.batch != view.args["N"]:
        return None
    need = {operand.index: layout for operand in data}
    return Strategy(need, (layout, Partial(), Partial()), {"N": Scaled(layout.per_sample)})


@rule("aten._native_batch_norm_legit_no_training", "aten.native_batch_norm", "aten._native_batch_norm_legit",
      "aten._native_batch_norm_legit_functional", "aten.cudnn_batch_norm", "aten.batch_norm_elemt")  # fmt: skip
def _batch_norm(view: NodeView) -> Strategy | None:
    """Without a batch to normalise over: frozen statistics, or instances folded into the channels."""
    source = view.operands[0]
    layout = source.layout
    if layout is None:
        return None
    frozen = not view.args.get("training", False)
    if layout.dim == 1:
        if "cudnn" in view.name:
            return None  # its reserve is no vector of the channels
        channels = layout.at(0)
        need = {operand.index: channels for operand in view.operands[1:]}
        outputs = [layout, *(channels for _ in view.outputs[1:])]
        placed = tuple(out if shape != (0,) else None for out, shape in zip(outputs, view.outputs, strict=True))
        return Strategy({0: layout, **need}, placed)
    if frozen:
        return Strategy({0: layout}, (layout, *(None for _ in view.outputs[1:])))
    return None


@rule("aten.native_batch_norm_backward")
def _batch_norm_backward(view: NodeView) -> Strategy | None:
    grad, source = view.operands[:2]
    layout = source.layout or grad.layout
    if layout is None:
        return None
    if layout.dim == 1:
        channels = layout.at(0)
        vectors = {operand.index: channels for operand in view.operands[2:] if operand.shape != (0,)}
        return Strategy({0: layout, 1: layout, **vectors}, (layout, channels, channels))
    if not view.args["train"]:
        return Strategy({0: layout, 1: layout}, (layout, Partial(), Partial()))
    return None


@rule("aten.embedding")
def _embedding(view: NodeView) -> Strategy | None:
    index = view.operands[1]
    if index.layout is None:
        return None
    return Strategy({index.index: index.layout}, (index.layout,))


@rule("aten.embedding_dense_backward")
def _embedding_backward(view: NodeView) -> Strategy | None:
    grad, index = view.operands
    layout = index.layout or grad.layout
    if layout is None or layout.dim >= index.ndim or view.args.get("scale_grad_by_freq"):
        return None
    return Strategy({0: layout, 1: layout}, (Partial(),))


_ATTENTION = (
    "aten._scaled_dot_product_flash_attention_for_cpu", "aten._scaled_dot_product_flash_attention_for_cpu_backward",
    "aten._scaled_dot_product_efficient_attention", "aten._scaled_dot_product_efficient_attention_backward",
    "aten._scaled_dot_product_flash_attention", "aten._scaled_dot_product_flash_attention_backward",
    "aten._scaled_dot_product_cudnn_attention", "aten._scaled_dot_product_cudnn_attention_backward",
    "aten._scaled_dot_product_attention_math_for_mps", "aten._scaled_dot_product_fused_attention_overrideable",
)  # fmt: skip


@rule(*_ATTENTION)
def _attention(view: NodeView) -> Strategy | None:
    """Samples attend within themselves. A mask of [queries, keys], or of one sample, is shared by all.

    A kernel that draws its own dropout numbers its draws from the first sample of the call, and its backward has to
    find them by the same seed: not by microbatches. Without dropout its seed is a number that nobody reads.
    """
    data = [operand for operand in view.operands if operand.ndim >= 3]  # not sequence offsets and seeds
    masks = [mask for name in ("attn_mask", "attn_bias") if (mask := view.tensor(name))]
    layout = next((found for operand in data if (found := _leading(view, operand))), None)
    if layout is None or view.args.get("dropout_p"):
        return None
    if any(operand.layout is not None and operand not in data and operand not in masks for operand in view.operands):
        return None
    extent = layout.per_sample * view.batch
    shared = [mask for mask in masks if mask.ndim == 2 or (mask.ndim == 4 and mask.shape[0] == 1)]
    need = {operand.index: layout for operand in data if operand not in shared}
    if any(operand.shape[0] != extent for operand in data if operand.index in need):
        return None
    outputs: list[Placed] = []
    for shape in view.outputs:
        if shape is not None and len(shape) >= 3:
            if shape[0] != extent:
                return None  # a mask shared by the samples with a gradient of its own
            outputs.append(layout)
        else:
            outputs.append(Unread())
    return Strategy(need, tuple(outputs))


@rule("aten._fft_r2c", "aten._fft_c2c", "aten._fft_c2r")
def _fft(view: NodeView) -> Strategy | None:
    source = view.operands[0]
    if source.layout is None or source.layout.dim in view.dims("dim", source):
        return None
    return Strategy({0: source.layout}, (source.layout,))


@rule(
    "aten.linalg_inv_ex", "aten.linalg_solve_triangular", "aten._linalg_solve_ex", "aten.linalg_cholesky_ex",
    "aten._linalg_svd", "aten._linalg_eigh", "aten.linalg_qr", "aten.linalg_lu_factor_ex", "aten.linalg_lu",
    "aten._linalg_det", "aten._linalg_slogdet", "aten.linalg_lu_solve", "aten.cholesky_solve",
    "aten.cholesky_inverse", "aten.linalg_pinv", "aten.linalg_matrix_exp", "aten.triangular_solve",
)  # fmt: skip
def _linalg(view: NodeView) -> Strategy | None:
    """Batches of matrices: independent along every dimension before the last two, where all operands have the same.

    Nothing is broadcast then. Pivots, and vectors that `solve` takes for a right-hand side, have one dimension less.
    """
    main = view.operands[0]
    lead = main.ndim - 2
    layout = next((op.layout for op in view.sharded() if op.layout and op.layout.dim < lead), None)
    if layout is None or any(op.layout is not None and op.layout != layout for op in view.operands):
        return None
    batch, rows = main.shape[:lead], main.shape[:-1]
    vectors = [view.tensor("pivots"), view.tensor("B") if "_linalg_solve_ex" in view.name else None]
    for operand in view.operands:
        if operand.shape[: operand.ndim - 2] != batch and not (operand in vectors and operand.shape == rows):
            return None
    outputs = tuple(layout if shape is not None and shape[:lead] == batch else None for shape in view.outputs)
    return Strategy({op.index: layout for op in view.operands}, outputs)
