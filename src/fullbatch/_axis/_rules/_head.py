"""The loss head in slices: tokens are independent, the gradients of weight and bias are summands."""

from __future__ import annotations

from fullbatch._axis._node import NodeView, Partial, Strategy, rule
from fullbatch._ir import Layout

_OF_WORDS = ("weight", "bias")


def _tokens(view: NodeView) -> tuple[dict[int, Layout], Layout] | None:
    """All that has tokens, cut along them; None where a batch of words is meant, or one of features."""
    shared = {operand.index for name in _OF_WORDS if (operand := view.tensor(name))}
    layouts = {operand.layout for operand in view.sharded() if operand.layout and operand.layout.dim == 0}
    if any(operand.index in shared for operand in view.sharded()) or len(layouts) != 1:
        return None
    (layout,) = layouts
    return {operand.index: layout for operand in view.operands if operand.index not in shared}, layout


@rule("fullbatch.token_losses")
def _token_losses(view: NodeView) -> Strategy | None:
    found = _tokens(view)
    return None if found is None else Strategy(found[0], (found[1], found[1]))


@rule("fullbatch.token_losses_backward")
def _token_losses_backward(view: NodeView) -> Strategy | None:
    found = _tokens(view)
    return None if found is None else Strategy(found[0], (found[1], Partial(), Partial()))
