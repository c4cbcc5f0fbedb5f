"""The two gradients of a convolution, made apart.

Autograd has one operator for the gradient of a convolution's input and for those of its parameters, and keeps the
input for it. Torch's kernels make each alone as well, with the same bits and in the same time. Apart, the input can go
before its gradient comes, and where the gradient of the input is made again, to save memory, that of the weight is not.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

_MASK = 10  # the argument that says which gradients are wanted: of the input, the weight and the bias


def part_gradients(graph: fx.Graph) -> None:
    """Makes two of each convolution's backward in `graph` that gives both: for the parameters, then for the input."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.convolution_backward.default):
        of_input, *of_parameters = node.args[_MASK]
        if of_input and any(of_parameters):
            _part(graph, node, ([False, *of_parameters], [True, False, False]))
    graph.lint()


def _part(graph: fx.Graph, node: fx.Node, masks: tuple[list[bool], list[bool]]) -> None:
    parts = [_with_mask(graph, node, mask) for mask in masks]
    for user in list(node.users):
        assert user.target is operator.getitem
        user.update_arg(0, parts[1 if user.args[1] == 0 else 0])
    graph.erase_node(node)


def _with_mask(graph: fx.Graph, node: fx.Node, mask: list[bool]) -> fx.Node:
    with graph.inserting_before(node):
        part = graph.node_copy(node)
    part.args = (*node.args[:_MASK], mask, *node.args[_MASK + 1 :])
    part.meta["val"] = tuple(value if wanted else None for value, wanted in zip(node.meta["val"], mask, strict=True))
    return part
