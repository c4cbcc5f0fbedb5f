"""Gathers, scatters and advanced indexing: by position along features, or by `arange(batch)` along the batch."""

from __future__ import annotations

from typing import Any

import torch

from fullbatch._axis._node import NodeView, Operand, Partial, Strategy, rule
from fullbatch._ir import Layout


@rule("aten.gather")
def _gather(view: NodeView) -> Strategy | None:
    source, index = view.operands
    dim = view.dim("dim", source)
    layout = index.layout or source.layout
    if layout is None:
        return None
    if layout.dim == dim:
        return Strategy({1: layout}, (layout,)) if index.layout is not None and source.layout is None else None
    if source.shape[layout.dim] != index.shape[layout.dim]:
        return None
    return Strategy({0: layout, 1: layout}, (layout,))


@rule("aten.index_select")
def _index_select(view: NodeView) -> Strategy | None:
    source, index = view.operands
    dim = view.dim("dim", source)
    if source.layout is not None and source.layout.dim != dim:
        return Strategy({0: source.layout}, (source.layout,))
    if source.layout is None and index.layout is not None:
        return Strategy({1: index.layout}, (index.layout.at(dim),))
    return None


@rule(
    "aten.scatter.src", "aten.scatter.value", "aten.scatter_add", "aten.scatter_reduce.two", "aten.scatter.reduce",
    "aten.scatter.value_reduce",
)  # fmt: skip
def _scatter(view: NodeView) -> Strategy | None:
    """Into features each sample writes its own; a histogram over the batch starts from zeros and is summed."""
    source, index = view.operands[0], view.operands[1]
    dim = view.dim("dim", source)
    layout = source.layout or index.layout
    if layout is None or layout.dim >= index.ndim:
        return None
    extent = index.shape[layout.dim]
    if any(added.ndim <= layout.dim or added.shape[layout.dim] != extent for added in view.operands[2:]):
        return None  # a source may be larger than the index that reads it
    if layout.dim != dim and source.shape[layout.dim] == index.shape[layout.dim]:
        return Strategy({operand.index: layout for operand in view.operands}, (layout,))
    if "scatter_add" in view.name and source.fill == 0 and index.layout is not None and index.layout.dim == dim:
        return Strategy({op.index: index.layout for op in view.operands[1:]}, (Partial(),))
    return None


@rule("aten.index_add", "aten.index_copy", "aten.index_reduce")
def _index_add(view: NodeView) -> Strategy | None:
    source, index = view.operands[0], view.operands[1]
    added = view.operands[2]
    dim = view.dim("dim", source)
    layout = source.layout or added.layout
    if layout is not None and layout.dim != dim and index.layout is None:
        return Strategy({source.index: layout, added.index: layout}, (layout,))
    chosen = index.layout or (added.layout.at(0) if added.layout and added.layout.dim == dim else None)
    if not view.name.startswith("aten.index_add") or source.fill != 0 or source.layout is not None or chosen is None:
        return None
    if added.layout is not None and added.layout.dim != dim:
        return None
    return Strategy({index.index: chosen, added.index: chosen.at(dim)}, (Partial(),))


@rule("aten.index_fill.int_Scalar", "aten.index_fill")
def _index_fill(view: NodeView) -> Strategy | None:
    source = view.operands[0]
    if source.layout is None or source.layout.dim == view.dim("dim", source):
        return None
    return Strategy({0: source.layout}, (source.layout,))


def _entries(view: NodeView) -> list[Operand | None]:
    """One entry a dimension of the indexed tensor: an index, or None for a full slice."""
    return [item if isinstance(item, Operand) else None for item in view.args["indices"]]


class _Placement:
    """Where the dimensions of `x[indices]` come from: `front` broadcast index dimensions, at `at`."""

    def __init__(self, source: Operand, entries: list[Operand | None]) -> None:
        self.entries = entries + [None] * (source.ndim - len(entries))
        indexed = [dim for dim, entry in enumerate(self.entries) if entry is not None]
        shapes = [entry.shape for entry in entries if entry is not None]
        self.broadcast = tuple(torch.broadcast_shapes(*shapes)) if shapes else ()
        adjacent = indexed == list(range(indexed[0], indexed[-1] + 1)) if indexed else True
        self.at = indexed[0] if indexed and adjacent else 0
        self.indexed = indexed

    def free(self, dim: int) -> int:
        """The output dimension of the un-indexed dimension `dim` of the source."""
        before = sum(1 for other in range(dim) if self.entries[other] is None)
        return before + len(self.broadcast) if before >= self.at else before

    def index_layout(self) -> Layout | None:
        """The common layout of the index tensors, in broadcast dimensions."""
        for entry in self.entries:
            if entry is not None and entry.layout is not None:
                dim = entry.layout.dim + len(self.broadcast) - entry.ndim
                if self.broadcast[dim] == entry.shape[entry.layout.dim]:
                    return entry.layout.at(dim)
        return None

    def need(self, layout: Layout) -> dict[int, Layout]:
        """What to slice of each index tensor so that the broadcast dimension is `layout`."""
        need: dict[int, Layout] = {}
        for entry in self.entries:
            if entry is None:
                continue
            dim = layout.dim - (len(self.broadcast) - entry.ndim)
            if dim >= 0 and entry.shape[dim] == self.broadcast[layout.dim]:
                need[entry.index] = layout.at(dim)
        return need


def _counting(place: _Placement, source: Operand, layout: Layout) -> int | None:
    """The dimension of `source` that is indexed by `arange(batch)` along the same layout, if any."""
    for dim in place.indexed:
        entry = place.entries[dim]
        if entry is None or not entry.iota or source.layout != Layout(dim):
            continue
        at = layout.dim - (len(place.broadcast) - entry.ndim)
        if at >= 0 and entry.shape[at] == place.broadcast[layout.dim]:
            return dim
    return None


def _from_zero(dim: int, fn: Any) -> Any:
    """`fn` with the batch index counted from the microbatch's first sample, as its slice of the tensor is."""

    def indexed(x: Any, indices: list[Any], *rest: Any) -> Any:
        moved = list(indices)
        moved[dim] = moved[dim] - moved[dim].reshape(-1)[0]
        return fn(x, moved, *rest)

    indexed._qualified = f"{fn} from the microbatch's first sample"  # type: ignore[attr-defined]
    return indexed


@rule("aten.index.Tensor", "aten._unsafe_index.Tensor")
def _index(view: NodeView) -> Strategy | None:
    source = view.operands[0]
    place = _Placement(source, _entries(view))
    if any(entry is not None and entry.boolean for entry in place.entries):
        return None
    layout = place.index_layout() or _iota_layout(place, source)
    if source.layout is not None and source.layout.dim not in place.indexed:
        return _index_free(source, place, layout)
    if layout is None:
        return None
    need, out = place.need(layout), layout.at(layout.dim + place.at)
    if source.layout is None:
        return Strategy(need, (out,))
    dim = _counting(place, source, layout)
    if dim is None or len([d for d in place.indexed if d == dim]) != 1:
        return Strategy(need, (out,)) if place.index_layout() is not None else None
    return Strategy({0: source.layout, **need}, (out,), {}, _from_zero(dim, torch.ops.aten.index.Tensor))


def _index_free(source: Operand, place: _Placement, layout: Layout | None) -> Strategy | None:
    """The batch is a dimension that is not indexed: it stays, and the indices are the same for all."""
    assert source.layout is not None
    if place.index_layout() is not None:
        return None
    return Strategy({0: source.layout}, (source.layout.at(place.free(source.layout.dim)),))


def _iota_layout(place: _Placement, source: Operand) -> Layout | None:
    """The layout of `arange(batch)` used on the sharded dimension, where it is still a whole value."""
    for dim in place.indexed:
        entry = place.entries[dim]
        if entry is not None and entry.iota and source.layout == Layout(dim):
            axis = max(range(entry.ndim), key=lambda d: entry.shape[d])
            return Layout(axis + len(place.broadcast) - entry.ndim)
    return None


@rule("aten.index_put", "aten._unsafe_index_put")
def _index_put(view: NodeView) -> Strategy | None:
    source, values = view.operands[0], view.tensor("values")
    entries = _entries(view)
    if values is None:
        return None
    if any(entry is not None and entry.boolean for entry in entries):
        return _masked_put(view, source, entries, values)
    place = _Placement(source, entries)
    shape = _indexed_shape(source, place)
    layout = place.index_layout() or _put_layout(place, source, values, shape)
    if source.layout is not None and source.layout.dim not in place.indexed:
        if place.index_layout() is not None:
            return None
        out = place.free(source.layout.dim)
        return Strategy({0: source.layout, **_values(values, shape, source.layout.at(out))}, (source.layout,))
    if layout is None:
        return _put_free(view, source, place, values, shape)
    need = {**place.need(layout), **_values(values, shape, layout.at(layout.dim + place.at))}
    counting = Operand(0, source.node, source.shape, Layout(place.indexed[0]) if source.fill is not None else None)
    dim = _counting(place, source, layout) if source.layout is not None else _counting(place, counting, layout)
    if dim is not None:
        fn = _from_zero(dim, torch.ops.aten.index_put.default)
        return Strategy({0: Layout(dim), **need}, (Layout(dim),), {}, fn)
    if source.fill == 0 and source.layout is None and view.args.get("accumulate"):
        return Strategy(need, (Partial(),))
    return None


def _put_free(
    view: NodeView, source: Operand, place: _Placement, values: Operand, shape: tuple[int, ...]
) -> Strategy | None:
    """Zeros are filled at features that are the same for all, by values that are slices."""
    if values.layout is None or source.fill is None or source.layout is not None:
        return None
    out = values.layout.dim + len(shape) - values.ndim
    for dim, entry in enumerate(place.entries):
        if entry is None and place.free(dim) == out and source.shape[dim] == shape[out]:
            layout = values.layout.at(dim)
            return Strategy({0: layout, values.index: values.layout}, (layout,))
    return None


def _indexed_shape(source: Operand, place: _Placement) -> tuple[int, ...]:
    free = [size for dim, size in enumerate(source.shape) if place.entries[dim] is None]
    before = sum(1 for dim in range(source.ndim) if place.entries[dim] is None and place.free(dim) < place.at)
    return (*free[:before], *place.broadcast, *free[before:])


def _put_layout(place: _Placement, source: Operand, values: Operand, shape: tuple[int, ...]) -> Layout | None:
    """The layout in broadcast index dimensions that the values, or `arange(batch)`, imply."""
    if (found := _iota_layout(place, source)) is not None:
        return found
    if values.layout is None:
        return None
    dim = values.layout.dim + len(shape) - values.ndim - place.at
    if not (0 <= dim < len(place.broadcast)) or values.shape[values.layout.dim] != place.broadcast[dim]:
        return None
    return values.layout.at(dim)


def _values(values: Operand, shape: tuple[int, ...], layout: Layout) -> dict[int, Layout]:
    dim = layout.dim - (len(shape) - values.ndim)
    if dim >= 0 and values.shape[dim] == shape[layout.dim]:
        return {values.index: layout.at(dim)}
    return {}


def _masked_put(view: NodeView, source: Operand, entries: list[Operand | None], values: Operand) -> Strategy | None:
    """x[mask] = scalar: as where()."""
    mask = entries[0]
    if len(entries) != 1 or mask is None or torch.Size(values.shape).numel() != 1:
        return None
    layout = source.layout or mask.layout
    if layout is None:
        return None
    need = {0: layout}
    if layout.dim < mask.ndim:
        need[mask.index] = layout
    return Strategy(need, (layout,))
