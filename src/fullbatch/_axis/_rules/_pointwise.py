"""Element by element: the batch stays where it is, and broadcasting aligns dimensions from the right."""

from __future__ import annotations

import torch

from fullbatch import _torch
from fullbatch._axis._node import RULES, NodeView, Operand, Strategy, rule
from fullbatch._ir import Layout

# Pointwise by nature but not tagged so by torch.
_ALSO = (
    "aten._to_copy", "aten.clone", "aten.copy", "aten.native_dropout", "aten.native_dropout_backward",
    "aten.bernoulli", "aten.rand_like", "aten.randn_like", "aten.randint_like", "aten.normal",
    "aten.threshold_backward", "aten.rrelu_with_noise_functional", "aten.nan_to_num", "aten.masked_fill",
    "aten.where", "aten.polar", "aten.complex", "aten.real", "aten.imag", "aten._conj", "aten.conj_physical",
    "aten._conj_physical", "aten.resolve_conj", "aten.contiguous", "aten._fake_quantize_learnable_per_tensor_affine",
    "aten.logical_not", "aten.special_erfcx", "aten.uniform", "aten.exponential", "aten._neg_view",
    "aten.mish_backward", "aten.hardtanh_backward", "aten.hardswish_backward", "aten.hardsigmoid_backward",
    "aten.leaky_relu_backward", "aten.elu_backward", "aten.softplus_backward", "aten.logit_backward",
    "aten.gelu_backward", "aten.silu_backward", "aten.sigmoid_backward", "aten.tanh_backward",
    "aten.log_sigmoid_forward", "aten.log_sigmoid_backward", "aten.softshrink_backward", "aten.hardshrink_backward",
)  # fmt: skip


def pointwise(view: NodeView) -> Strategy | None:
    """Slices in, a slice out; an operand of extent 1 along the batch is needed whole."""
    out = view.shape
    chosen = _chosen(view)
    if chosen is None:
        return None
    need: dict[int, Layout] = {}
    for operand in view.operands:
        dim = chosen.dim - (len(out) - operand.ndim)
        if dim >= 0 and operand.shape[dim] == out[chosen.dim]:
            need[operand.index] = chosen.at(dim)
    return Strategy(need, tuple(chosen if shape == out else None for shape in view.outputs))


def _chosen(view: NodeView) -> Layout | None:
    """The layout, in the output's dimensions, of the largest operand that is a slice."""
    out = view.shape
    best: tuple[int, Layout] | None = None
    for operand in view.sharded():
        assert operand.layout is not None
        dim = operand.layout.dim + len(out) - operand.ndim
        if dim < 0 or operand.shape[operand.layout.dim] != out[dim]:
            continue
        size = _size(operand)
        if best is None or size > best[0]:
            best = (size, operand.layout.at(dim))
    return best[1] if best else None


def _size(operand: Operand) -> int:
    return int(torch.Size(operand.shape).numel())


for _name in _ALSO:
    rule(_name)(pointwise)


def is_pointwise(target: object) -> bool:
    """Whether torch tags the operator as pointwise."""
    return isinstance(target, _torch.OpOverload) and torch.Tag.pointwise in target.tags


@rule("aten._prelu_kernel")
def _prelu(view: NodeView) -> Strategy | None:
    return pointwise(view)


@rule("aten.isin")
def _isin(view: NodeView) -> Strategy | None:
    """Each element is looked up in all test elements, which are no operand of the same extent but a whole set."""
    elements = view.tensor("elements")
    if elements is None or elements.layout is None:
        return None
    return Strategy({elements.index: elements.layout}, (elements.layout,))


@rule("aten.glu", "aten.glu_backward")
def _glu(view: NodeView) -> Strategy | None:
    """Halves of one dimension: elementwise on all others."""
    source = next((operand for operand in view.sharded()), None)
    if source is None or source.layout is None:
        return None
    if view.dim("dim", source, -1) == source.layout.dim:
        return None
    need = {operand.index: source.layout for operand in view.operands}
    return Strategy(need, (source.layout,))


__all__ = ["RULES", "is_pointwise", "pointwise"]
