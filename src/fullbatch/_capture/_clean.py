"""What a traced graph says in many ways is said in one: no aliases, no constants that look like data.

Tracing leaves `detach` and `alias` where autograd needed them, and makes constants from the *shape* of a tensor
(`ones_like(loss)`). Read as data flow, such a constant would wait for the whole loss; as a fill it waits for
nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fullbatch._errors import CaptureError

aten = torch.ops.aten

_SAME = {aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift_fresh_copy.default}
_FILLS: dict[Any, float | int | None] = {
    aten.ones_like.default: 1, aten.zeros_like.default: 0, aten.empty_like.default: 0, aten.new_zeros.default: 0,
    aten.new_ones.default: 1, aten.new_empty.default: 0, aten.zeros.default: 0, aten.ones.default: 1,
    aten.empty.memory_format: 0, aten.full_like.default: None, aten.new_full.default: None,
    aten.scalar_tensor.default: None, aten.new_empty_strided.default: 0, aten.empty_strided.default: 0,
    aten.full.default: None,
}  # fmt: skip
_NO_VALUE = {aten._assert_tensor_metadata.default, aten._assert_scalar.default}
# Checks of values that raise or do nothing. They have no output, and must not be dropped for it.
EFFECTS = {aten._linalg_check_errors.default, aten._assert_async.msg, aten._assert_async.default}


def clean(graph: fx.Graph) -> None:
    """Rewrites `graph` in place: aliases removed, shape-only constants as `aten.full`, dead code dropped."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in (aten.all.default, aten.any.default):
            _as_count(graph, node)
        elif node.target in _SAME:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target is aten.copy.default:
            _as_source(graph, node)
        elif node.target in _NO_VALUE:
            graph.erase_node(node)
        elif node.target in _FILLS:
            _as_full(graph, node)
        elif node.target is aten.as_strided.default and _contiguous(node, 0) and _in_order(node, 1):
            _as_view(graph, node, node.args[0])
        elif node.target is aten.as_strided_scatter.default and _contiguous(node, 0) and _in_order(node, 2):
            _as_view(graph, node, node.args[1])
        elif node.target in (aten.expand.default, aten.view.default, aten.clone.default) and _is_fill(node.args[0]):
            _as_full(graph, node, value=node.args[0].args[1])
    _share_casts(graph)
    graph.eliminate_dead_code(is_impure_node=_is_impure)


def _as_count(graph: fx.Graph, node: fx.Node) -> None:
    """Whether all, or any, of a batch are true is asked of a count, which is a sum over its microbatches."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if source.meta["val"].dtype is not torch.bool:
        return
    steps: list[tuple[Any, tuple[Any, ...]]] = [(aten.sum.default, ()), (aten.ne.Scalar, (0,))]
    if node.target is aten.all.default:
        steps = [(aten.logical_not.default, ()), (aten.sum.default, ()), (aten.eq.Scalar, (0,))]
    with graph.inserting_before(node):
        for target, args in steps:
            made = graph.call_function(target, (source, *args))
            with node.meta["val"].fake_mode:
                made.meta = {**node.meta, "val": target(source.meta["val"], *args)}
            source = made
    node.replace_all_uses_with(source)
    graph.erase_node(node)


def _share_casts(graph: fx.Graph) -> None:
    """A weight that autocast converts for each of its uses is converted once, as plain PyTorch's cache does."""
    first: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not aten._to_copy.default or node.args[0].op != "placeholder":
            continue
        if node.kwargs.get("dtype") in (torch.float16, torch.bfloat16):
            same = first.setdefault((node.args, *sorted(node.kwargs.items())), node)
            if same is not node:
                node.replace_all_uses_with(same)
                graph.erase_node(node)


def _is_impure(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output") or node.target in EFFECTS


def without_tokens(graph: fx.Graph) -> None:
    """Writes `with_effects(token, operator, ...)` as the operator: the graph's order is kept anyway."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is torch.ops.higher_order.with_effects:
            token, operator, *args = node.args
            with graph.inserting_before(node):
                plain = graph.call_function(operator, tuple(args), dict(node.kwargs))
            plain.meta = {**node.meta, "val": None}
            for user in list(node.users):
                if user.args[1] == 0:
                    user.replace_all_uses_with(token)
                    graph.erase_node(user)
            if node.users:
                raise CaptureError.of(f"The step calls {operator}, an operator with side effects and a result.")
            graph.erase_node(node)


def _as_source(graph: fx.Graph, node: fx.Node) -> None:
    """copy(into, source) is the source in the other's shape and dtype; what `into` held is not read."""
    source, out = node.args[1], node.meta["val"]
    assert isinstance(source, fx.Node)
    with graph.inserting_before(node):
        for target, args, kwargs, changes in (
            (aten._to_copy.default, (), {"dtype": out.dtype}, source.meta["val"].dtype != out.dtype),
            (aten.expand.default, (list(out.shape),), {}, source.meta["val"].shape != out.shape),
        ):
            if changes:
                converted = graph.call_function(target, (source, *args), kwargs)
                with source.meta["val"].fake_mode:
                    converted.meta = {**node.meta, "val": target(source.meta["val"], *args, **kwargs)}
                source = converted
    node.replace_all_uses_with(source)
    graph.erase_node(node)


def _contiguous(node: fx.Node, at: int) -> bool:
    source = node.args[at]
    meta = source.meta["val"] if isinstance(source, fx.Node) else None
    return meta is not None and meta.is_contiguous() and not meta.storage_offset()


def _in_order(node: fx.Node, at: int) -> bool:
    """Whether a strided view reads all of a contiguous base in order: then it is a view by shape."""
    args: tuple[Any, ...] = node.args
    size, stride = args[at], args[at + 1]
    offset = args[at + 2] if len(args) > at + 2 else 0
    expected = 1
    for n, step in zip(reversed(tuple(size)), reversed(tuple(stride)), strict=True):
        if n != 1 and step != expected:
            return False
        expected *= n
    return not offset and bool(expected == args[0].meta["val"].numel())


def _as_view(graph: fx.Graph, node: fx.Node, source: Any) -> None:
    with graph.inserting_before(node):
        view = graph.call_function(aten.view.default, (source, list(node.meta["val"].shape)))
    view.meta = dict(node.meta)
    node.replace_all_uses_with(view)
    graph.erase_node(node)


def _is_fill(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.full.default


def _as_full(graph: fx.Graph, node: fx.Node, value: Any = None) -> None:
    out = node.meta["val"]
    if value is None:
        value = _FILLS[node.target]
    if value is None:
        position = 0 if node.target is aten.scalar_tensor.default else 1
        if node.target is aten.new_full.default:
            position = 2
        value = node.args[position]
    if isinstance(value, fx.Node) or not isinstance(out, torch.Tensor):
        return
    with graph.inserting_before(node):
        full = graph.call_function(
            aten.full.default,
            (list(out.shape), value),
            {"dtype": out.dtype, "device": out.device, "pin_memory": False},
        )
    full.meta = dict(node.meta)
    node.replace_all_uses_with(full)
    graph.erase_node(node)
