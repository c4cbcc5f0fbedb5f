"""A loss over a vocabulary, found in the captured graph and replaced: `linear_cross_entropy` without changing code.

Where `F.cross_entropy` reads what `F.linear` made, and nothing else does, the logits need not exist. Between the two a
model puts views that leave the words as the last dimension, a shift by one word, or a transposition that makes them
the second one; these are done to the hidden states instead.
"""

from __future__ import annotations

import inspect
import operator
import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fullbatch import _torch
from fullbatch._head._head import linear_cross_entropy
from fullbatch._plan._fingerprint import in_words

_LINEAR_ARGS, _LOSS_ARGS = ("input", "weight", "bias"), tuple(inspect.signature(F.cross_entropy).parameters)
_FLATTEN, _SAME, _SWAP = {"view", "reshape", "flatten"}, {"contiguous", "float"}, {"transpose", "permute"}


@dataclass(frozen=True)
class Head:
    """A loss head in a graph: its two nodes, and the views between them from the logits on."""

    linear: fx.Node
    loss: fx.Node
    between: tuple[fx.Node, ...]

    @property
    def line(self) -> str:
        """What the user would write."""
        given = _arguments(self.linear, _LINEAR_ARGS)
        bias = f", {_expression(given['bias'])}" if isinstance(given.get("bias"), fx.Node) else ""
        rest = "".join(f", {name}={value!r}" for name, value in _options(self.loss).items())
        return f"fullbatch.linear_cross_entropy(hidden, {_expression(given['weight'])}, target{bias}{rest})"


def _expression(node: fx.Node) -> str:
    name = in_words(_torch.dynamo_source(node)) if node.op == "placeholder" else node.name
    return re.sub(r"\.(\d+)", r"[\1]", name)


def find_head(graph: fx.GraphModule) -> Head | None:
    """The one head of a graph that can be replaced; None where there is none, or the logits are read elsewhere too."""
    losses = [node for node in graph.graph.nodes if node.target is F.cross_entropy]
    heads = [head for node in losses if (head := _head_of(node)) is not None]
    return heads[0] if len(heads) == 1 else None


def _head_of(loss: fx.Node) -> Head | None:
    given = _arguments(loss, _LOSS_ARGS)
    if any(given.get(name) is not None for name in ("weight", "size_average", "reduce")):
        return None
    target, node = given.get("target"), given.get("input")
    if not isinstance(target, fx.Node) or _example(target).dtype != torch.int64:
        return None
    between: list[fx.Node] = []
    while isinstance(node, fx.Node) and len(node.users) == 1 and node.target is not F.linear:
        between.insert(0, node)
        node = node.all_input_nodes[0] if _is_between(node) else None
    if not isinstance(node, fx.Node) or len(node.users) != 1:
        return None
    head = Head(node, loss, tuple(between))
    return head if _fits(head, _example(target)) else None


def _fits(head: Head, target: torch.Tensor) -> bool:
    """Whether the logits of a token end where its target stands."""
    logits, last = _example(head.linear), _example(head.loss.all_input_nodes[0])
    swapped = [node for node in head.between if _name(node) in _SWAP]
    if not swapped:
        return last.dim() == 2 and last.shape[-1] == logits.shape[-1] and target.dim() == 1
    plain = all(_name(node) in _SAME | _SWAP for node in head.between)
    moved = last.dim() == 3 and last.shape == (logits.shape[0], logits.shape[-1], logits.shape[1])
    return len(swapped) == 1 and plain and moved and logits.shape[1] != logits.shape[-1] and target.dim() == 2


def _is_between(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return _leaves_words(node)
    if _name(node) not in _FLATTEN | _SAME | _SWAP or len(node.all_input_nodes) != 1:
        return False
    words = _example(node.all_input_nodes[0]).shape[-1]
    return _name(node) in _SWAP or _example(node).shape[-1] == words


def _leaves_words(node: fx.Node) -> bool:
    """A slice of leading dimensions, with every index given as one."""
    before, at = node.args
    parts = at if isinstance(at, tuple) else (at,)
    dims = _example(before).dim()  # type: ignore[arg-type]
    slices = all(isinstance(part, slice) or part is Ellipsis for part in parts)
    of_words = parts[-1] is not Ellipsis and (Ellipsis in parts or len(parts) == dims)
    return slices and (not of_words or parts[-1] == slice(None, None, None))


def replace_head(graph: fx.GraphModule) -> None:
    """Puts `linear_cross_entropy` in the place of the head that `find_head` finds."""
    head = find_head(graph)
    assert head is not None
    linear, loss = _arguments(head.linear, _LINEAR_ARGS), _arguments(head.loss, _LOSS_ARGS)
    swapped = any(_name(node) in _SWAP for node in head.between)
    with graph.graph.inserting_before(head.loss):
        hidden = linear["input"]
        for node in head.between:
            if node.target is operator.getitem:
                hidden = graph.graph.call_function(operator.getitem, (hidden, node.args[1]))
        if not swapped:
            features = _example(linear["input"]).shape[-1]
            hidden = graph.graph.call_method("reshape", (hidden, -1, int(features)))
        made = graph.graph.call_function(
            linear_cross_entropy, (hidden, linear["weight"], loss["target"], linear.get("bias")), _options(head.loss)
        )
    made.meta = dict(head.loss.meta)
    head.loss.replace_all_uses_with(made)
    for node in (head.loss, *reversed(head.between), head.linear):
        graph.graph.erase_node(node)
    graph.recompile()


def _options(loss: fx.Node) -> dict[str, Any]:
    given, plain = _arguments(loss, _LOSS_ARGS), {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0}
    return {name: given[name] for name, usual in plain.items() if given.get(name, usual) != usual}


def _arguments(node: fx.Node, names: tuple[str, ...]) -> dict[str, Any]:
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _example(node: fx.Node) -> torch.Tensor:
    found: torch.Tensor = node.meta["example_value"]
    return found


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
