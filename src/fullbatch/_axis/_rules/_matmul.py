"""Matrix products: rows or columns of the batch give a slice, a contraction over it gives a summand."""

from __future__ import annotations

from fullbatch._axis._node import NodeView, Operand, Partial, Placed, Strategy, rule
from fullbatch._ir import Layout


def _product(left: Operand, right: Operand, lead: int) -> tuple[dict[int, Layout], Placed] | None:
    """[.., M, K] @ [.., K, N] with `lead` shared leading dimensions. What to slice, and what comes out.

    Where both operands are slices that do not meet, the smaller one is needed whole.
    """
    row, inner_left, inner_right, column = lead, lead + 1, lead, lead + 1
    a, b = left.layout, right.layout
    if a is not None and a.dim < lead:
        return {left.index: a, right.index: a}, a
    if b is not None and b.dim < lead:
        return {left.index: b, right.index: b}, b
    if a is not None and b is not None and b.dim == inner_right and a == b.at(inner_left):
        return {left.index: a, right.index: b}, Partial()
    options: list[tuple[int, dict[int, Layout], Placed]] = []
    if a is not None and a.dim == row:
        options.append((_size(right) if b is not None else 0, {left.index: a}, a.at(row)))
    if b is not None and b.dim == column:
        options.append((_size(left) if a is not None else 0, {right.index: b}, b.at(column)))
    if a is not None and a.dim == inner_left and b is None:
        options.append((0, {left.index: a, right.index: a.at(inner_right)}, Partial()))
    if b is not None and b.dim == inner_right and a is None:
        options.append((0, {left.index: b.at(inner_left), right.index: b}, Partial()))
    if not options:
        return None
    _, need, out = min(options, key=lambda option: option[0])
    return need, out


def _size(operand: Operand) -> int:
    count = 1
    for size in operand.shape:
        count *= size
    return count


@rule("aten.mm")
def _mm(view: NodeView) -> Strategy | None:
    found = _product(view.operands[0], view.operands[1], 0)
    return None if found is None else Strategy(found[0], (found[1],))


@rule("aten.bmm")
def _bmm(view: NodeView) -> Strategy | None:
    found = _product(view.operands[0], view.operands[1], 1)
    return None if found is None else Strategy(found[0], (found[1],))


@rule("aten.addmm", "aten.baddbmm")
def _addmm(view: NodeView) -> Strategy | None:
    """As the product; the added term must not be counted once a microbatch."""
    added, left, right = view.operands
    found = _product(left, right, left.ndim - 2)
    if found is None:
        return None
    need, layout = found
    if not isinstance(layout, Layout):
        return None
    dim = layout.dim - (len(view.shape) - added.ndim)
    if dim >= 0 and added.shape[dim] == view.shape[layout.dim]:
        need = {**need, added.index: layout.at(dim)}
    return Strategy(need, (layout,))


@rule("aten.mv", "aten.dot", "aten.vdot")
def _mv(view: NodeView) -> Strategy | None:
    left, right = view.operands
    last = left.ndim - 1
    if left.layout is not None and left.layout.dim < last:
        return Strategy({0: left.layout}, (left.layout,))
    chosen = left.layout or (right.layout.at(last) if right.layout else None)
    if chosen is None:
        return None
    return Strategy({0: chosen.at(last), 1: chosen.at(0)}, (Partial(),))


@rule("aten._cdist_forward", "aten._euclidean_dist")
def _cdist(view: NodeView) -> Strategy | None:
    """Rows of either side, or dimensions before them that both sides have; broadcasting aligns from the right."""
    left, right = view.operands[:2]
    rows = len(view.shape) - 2
    a, b = left.layout, right.layout
    if a is not None and a.dim < left.ndim - 2:
        same = right.ndim == left.ndim and right.shape[a.dim] == left.shape[a.dim]
        return Strategy({0: a, 1: a}, (a,)) if same else None
    if a is not None and a.dim == left.ndim - 2:
        return Strategy({0: a}, (a.at(rows),))
    if a is None and b is not None and b.dim == right.ndim - 2:
        return Strategy({1: b}, (b.at(rows + 1),))
    return None


@rule("aten._cdist_backward")
def _cdist_backward(view: NodeView) -> Strategy | None:
    """grad, x1, x2, cdist -> the gradient of x1; independent along its rows."""
    grad, left, right, dist = view.operands
    layout = grad.layout or left.layout or dist.layout
    lead = left.ndim - 2
    if layout is None or layout.dim > lead:
        return None
    if not left.shape[:lead] == right.shape[: right.ndim - 2] == grad.shape[:-2] == view.shape[:lead]:
        return None  # one side is broadcast
    need = {grad.index: layout, left.index: layout, dist.index: layout}
    if layout.dim < lead:
        need[right.index] = layout
    return Strategy(need, (layout,))
