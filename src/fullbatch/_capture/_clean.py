"""What a traced graph says in many ways is said in one: no aliases, no constants that look like data.

Tracing leaves `detach` and `alias` where autograd needed them, and makes constants from the *shape* of a tensor
(`ones_like(loss)`). Read as data flow, such a constant would wait for the whole loss; as a fill it waits for
nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

_SAME = {aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift_fresh_copy.default}
_FILLS: dict[Any, float | int | None] = {
    aten.ones_like.default: 1, aten.zeros_like.default: 0, aten.empty_like.default: 0, aten.new_zeros.default: 0,
    aten.new_ones.default: 1, aten.new_empty.default: 0, aten.zeros.default: 0, aten.ones.default: 1,
    aten.empty.memory_format: 0, aten.full_like.default: None, aten.new_full.default: None,
    aten.scalar_tensor.default: None, aten.new_empty_strided.default: 0, aten.empty_strided.default: 0,
    aten.full.default: None,
}  # fmt: skip
_NO_VALUE = {aten._assert_async.msg, aten._assert_async.default, aten._assert_tensor_metadata.default, aten._assert_scalar.default}


def clean(graph: fx.Graph) -> None:
    """Rewrites `graph` in place: aliases removed, shape-only constants as `aten.full`, dead code dropped."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _SAME:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target in _NO_VALUE:
            graph.erase_node(node)
        elif node.target in _FILLS:
            _as_full(graph, node)
        elif node.target in (aten.expand.default, aten.view.default, aten.clone.default) and _is_fill(node.args[0]):
            _as_full(graph, node, value=node.args[0].args[1])
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))


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
