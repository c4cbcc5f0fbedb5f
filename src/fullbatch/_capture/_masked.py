"""`x[mask] = row` is written as a choice: torch's own backward of it selects by the mask, and has no known shape.

That is what a learned vector in the places of some tokens is (`embeddings[ids == special] = self.vector`). Where the
value is broadcast to the places it does not matter how many there are.
"""

from __future__ import annotations

import operator

import torch
from torch import fx


def choose(graph: fx.GraphModule) -> None:
    """Rewrites such assignments in `graph`; others are left alone."""
    found = [node for node in graph.graph.nodes if node.target is operator.setitem and _is_choice(node)]
    for node in found:
        into, mask, value = node.args
        with graph.graph.inserting_before(node):
            chosen = graph.graph.call_function(chosen_by, (into, mask, value))
            chosen.meta = dict(node.meta)
            written = graph.graph.call_method("copy_", (into, chosen))
            written.meta = dict(node.meta)
        graph.graph.erase_node(node)
    if found:
        graph.recompile()


def chosen_by(into: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`into` with `value` in the places of `mask`, a mask of its first dimensions."""
    wide = mask.reshape(*mask.shape, *(1,) * (into.dim() - mask.dim()))
    return torch.where(wide, value.to(into.dtype), into)


def _is_choice(node: fx.Node) -> bool:
    """Whether a tensor that requires a gradient is written, the same at each place of one mask."""
    parts = [part.meta.get("example_value") for part in node.args if isinstance(part, fx.Node)]
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    if len(tensors) != 3 or node.users:
        return False
    into, mask, value = tensors
    fits = mask.shape == into.shape[: mask.dim()] and value.dim() <= into.dim() - mask.dim()
    return mask.dtype is torch.bool and mask.dim() > 0 and fits and value.requires_grad
