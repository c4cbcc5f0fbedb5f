"""Views, permutations, joins and cuts: where the batch goes when dimensions are rearranged."""

from __future__ import annotations

from math import prod
from typing import Any

from fullbatch._axis._node import NodeView, Operand, Strategy, rule, scaled_shape
from fullbatch._ir import Layout, Scaled


def through_view(shape: tuple[int, ...], layout: Layout, out: tuple[int, ...], batch: int) -> Layout | None:
    """Where `layout` of `shape` lies in the same elements seen as `out`; None where the batch is cut up.

    Both shapes are read from the left until their products agree; the group that holds the batch is
    [outer, batch, inner] flattened, and must have a dimension of `out` with the whole batch in it.
    """
    if prod(shape) == 0:
        return None
    i = j = 0
    while i < len(shape):
        begin_i, begin_j = i, j
        left, right = shape[i], out[j] if j < len(out) else 1
        i, j = i + 1, min(j + 1, len(out))
        while left != right:
            if left < right:
                left, i = left * shape[i], i + 1
            else:
                right, j = right * out[j], j + 1
        if begin_i <= layout.dim < i:
            if j < len(out) and i == len(shape):
                j = len(out)  # trailing ones
            outer = prod(shape[begin_i : layout.dim]) * layout.outer
            return _place(outer, layout.inner * prod(shape[layout.dim + 1 : i]), out, begin_j, j, batch)
    return None


def _place(outer: int, inner: int, out: tuple[int, ...], begin: int, end: int, batch: int) -> Layout | None:
    """The dimension of out[begin:end] that is [outer', batch, inner'] with whole factors."""
    before = 1
    for dim in range(begin, end):
        after = prod(out[dim + 1 : end])
        if outer % before == 0 and inner % after == 0:
            candidate = Layout(dim, outer // before, inner // after)
            if candidate.per_sample * batch == out[dim]:
                return candidate
        before *= out[dim]
    return None


@rule("aten.view", "aten._unsafe_view")
def _view(view: NodeView) -> Strategy | None:
    source = view.operands[0]
    if source.layout is None:
        return None
    layout = through_view(source.shape, source.layout, view.shape, view.batch)
    if layout is None:
        return None
    return Strategy({0: source.layout}, (layout,), {"size": scaled_shape(view.shape, layout)}, fn=_reshape)


def _reshape(x: Any, size: list[int]) -> Any:
    return x.reshape(size)


def _moved(view: NodeView, source: Operand, dim: int | None, patch: dict[str, Any] | None = None) -> Strategy | None:
    if dim is None or source.layout is None:
        return None
    return Strategy({source.index: source.layout}, (source.layout.at(dim),), patch or {})


@rule("aten.permute")
def _permute(view: NodeView) -> Strategy | None:
    source = view.operands[0]
    order = view.dims("dims", source)
    return _moved(view, source, order.index(source.layout.dim) if source.layout else None)


@rule("aten.transpose.int", "aten.t", "aten.numpy_T")
def _transpose(view: NodeView) -> Strategy | None:
    source = view.operands[0]
    if source.layout is None:
        return None
    if "dim0" in view.args:
        first, second = view.dim("dim0", source), view.dim("dim1", source)
    else:
        first, second = (0, 1) if source.ndim == 2 else (0, 0)
    swap = {first: second, second: first}
    return _moved(view, source, swap.get(source.layout.dim, source.layout.dim))


@rule("aten.unsqueeze")
def _unsqueeze(view: NodeView) -> Strategy | None:
    source = view.operands[0]
    if source.layout is None:
        return None
    at = int(view.args["dim"]) % (source.ndim + 1)
    return _moved(view, source, source.layout.dim + (source.layout.dim >= at))


@rule("aten.squeeze.dim", "aten.squeeze.dims", "aten.squeeze.default")
def _squeeze(view: NodeView) -> Strategy | None:
    """Named or not: a microbatch of one sample must not lose its own dimension."""
    source = view.operands[0]
    if source.layout is None:
        return None
    named = view.dims("dim", source) if "dim" in view.args else tuple(range(source.ndim))
    gone = {dim for dim in named if source.shape[dim] == 1}
    if source.layout.dim in gone:
        return None
    dim = source.layout.dim - sum(1 for other in gone if other < source.layout.dim)
    return Strategy({0: source.layout}, (source.layout.at(dim),), {}, _squeezed(tuple(sorted(gone))))


def _squeezed(dims: tuple[int, ...]) -> Any:
    def squeezed(x: Any, *_: Any) -> Any:
        return x.squeeze(dims)

    return squeezed


@rule("aten.expand")
def _expand(view: NodeView) -> Strategy | None:
    source = view.operands[0]
    if source.layout is None:
        return None
    dim = source.layout.dim + len(view.shape) - source.ndim
    layout = source.layout.at(dim)
    if view.shape[dim] != source.shape[source.layout.dim]:
        return None
    return Strategy({0: source.layout}, (layout,), {"size": scaled_shape(view.shape, layout)})


@rule("aten.repeat")
def _repeat(view: NodeView) -> Strategy | None:
    source = view.operands[0]
    if source.layout is None:
        return None
    dim = source.layout.dim + len(view.shape) - source.ndim
    times = int(view.args["repeats"][dim])
    if times == 0:
        return None
    layout = Layout(dim, source.layout.outer * times, source.layout.inner)
    return Strategy({0: source.layout}, (layout,))


@rule("aten.repeat_interleave.self_int")
def _repeat_interleave(view: NodeView) -> Strategy | None:
    source = view.operands[0]
    if source.layout is None or view.args.get("dim") is None:
        return None
    dim, times = view.dim("dim", source), int(view.args["repeats"])
    inner = source.layout.inner * (times if dim == source.layout.dim else 1)
    patch = {"output_size": None} if "output_size" in view.args else {}
    return Strategy({0: source.layout}, (Layout(source.layout.dim, source.layout.outer, inner),), patch)


@rule("aten.cat")
def _cat(view: NodeView) -> Strategy | None:
    """Along another dimension each slice is joined; along the batch the segments become `outer`."""
    parts = list(view.tensors("tensors"))
    sharded = [part for part in parts if part.layout is not None]
    if not sharded or sharded[0].layout is None:
        return None
    layout = sharded[0].layout
    dim = view.dim("dim", sharded[0])
    parts = [part for part in parts if part.shape != (0,)]
    if dim != layout.dim:
        if any(part.shape[layout.dim] != sharded[0].shape[layout.dim] for part in parts):
            return None
        return Strategy({part.index: layout for part in parts}, (layout,))
    if any(part.shape[dim] % (view.batch * layout.inner) or part.shape[dim] == 0 for part in parts):
        return None
    # A whole operand is only cut into segments where it was computed from the batch: its own layout says so.
    if any(part.layout is None or part.layout.inner != layout.inner for part in parts):
        return None
    outers = [part.shape[dim] // (view.batch * layout.inner) for part in parts]
    need = {part.index: Layout(dim, outer, layout.inner) for part, outer in zip(parts, outers, strict=True)}
    return Strategy(need, (Layout(dim, sum(outers), layout.inner),))


@rule("aten.stack")
def _stack(view: NodeView) -> Strategy | None:
    parts = list(view.tensors("tensors"))
    sharded = [part for part in parts if part.layout is not None]
    if not sharded or sharded[0].layout is None:
        return None
    layout = sharded[0].layout
    at = int(view.args.get("dim") or 0) % (sharded[0].ndim + 1)
    return Strategy({part.index: layout for part in parts}, (layout.at(layout.dim + (layout.dim >= at)),))


@rule("aten.split.Tensor", "aten.split_with_sizes", "aten.unbind", "aten.chunk", "aten.split_with_sizes_copy")
def _split(view: NodeView) -> Strategy | None:
    source = view.operands[0]
    if source.layout is None:
        return None
    dim, layout = view.dim("dim", source), source.layout
    if "unbind" in view.name:
        if dim == layout.dim:
            return None
        moved = layout.at(layout.dim - (dim < layout.dim))
        return Strategy({0: layout}, tuple(moved for _ in view.outputs))
    if dim != layout.dim:
        return Strategy({0: layout}, tuple(layout for _ in view.outputs))
    unit = view.batch * layout.inner
    sizes = [shape[dim] if shape else 0 for shape in view.outputs]
    if any(size % unit or not size for size in sizes):
        return None
    outers = [size // unit for size in sizes]
    if "split_size" in view.args:
        patch: dict[str, Any] = {"split_size": Scaled(outers[0] * layout.inner)}
    elif "split_sizes" in view.args:
        patch = {"split_sizes": [Scaled(outer * layout.inner) for outer in outers]}
    else:
        return None
    return Strategy({0: layout}, tuple(Layout(dim, outer, layout.inner) for outer in outers), patch)


def _segment(layout: Layout, start: int, end: int, batch: int) -> tuple[int, int] | None:
    """Which outer segments [start, end) covers, where it covers whole ones."""
    unit = batch * layout.inner
    return None if start % unit or end % unit else (start // unit, end // unit)


def _bounds(view: NodeView, size: int) -> tuple[int, int, int]:
    start, end, step = (view.args.get(name) for name in ("start", "end", "step"))
    return slice(start, end, step if step is not None else 1).indices(size)


@rule("aten.slice.Tensor")
def _slice(view: NodeView) -> Strategy | None:
    source = view.operands[0]
    if source.layout is None:
        return None
    dim, layout = view.dim("dim", source), source.layout
    if dim != layout.dim:
        return _moved(view, source, layout.dim)
    start, end, step = _bounds(view, source.shape[dim])
    segment = _segment(layout, start, end, view.batch)
    if step != 1 or segment is None or segment[0] >= segment[1]:
        return None
    patch = {"start": Scaled(segment[0] * layout.inner), "end": Scaled(segment[1] * layout.inner)}
    return Strategy({0: layout}, (Layout(dim, segment[1] - segment[0], layout.inner),), patch)


@rule("aten.slice_backward")
def _slice_backward(view: NodeView) -> Strategy | None:
    grad = view.operands[0]
    if grad.layout is None:
        return None
    dim, layout, out = view.dim("dim", grad), grad.layout, view.shape
    if dim != layout.dim:
        return Strategy({0: layout}, (layout,), {"input_sizes": scaled_shape(out, layout)})
    start, end, step = _bounds(view, out[dim])
    segment = _segment(layout, start, end, view.batch)
    unit = view.batch * layout.inner
    if step != 1 or segment is None or out[dim] % unit:
        return None
    whole = Layout(dim, out[dim] // unit, layout.inner)
    patch = {
        "input_sizes": scaled_shape(out, whole),
        "start": Scaled(segment[0] * layout.inner),
        "end": Scaled(segment[1] * layout.inner),
    }
    return Strategy({0: layout}, (whole,), patch)


@rule("aten.slice_scatter")
def _slice_scatter(view: NodeView) -> Strategy | None:
    first = view.sharded()[0]
    layout = first.layout
    if layout is None or view.dim("dim", first) == layout.dim:
        return None
    return Strategy({operand.index: layout for operand in view.operands}, (layout,))


@rule("aten.select.int")
def _select(view: NodeView) -> Strategy | None:
    source = view.operands[0]
    if source.layout is None:
        return None
    dim, layout = view.dim("dim", source), source.layout
    if dim == layout.dim:
        return None
    return _moved(view, source, layout.dim - (dim < layout.dim))


@rule("aten.select_backward")
def _select_backward(view: NodeView) -> Strategy | None:
    grad = view.operands[0]
    if grad.layout is None:
        return None
    dim = int(view.args["dim"]) % len(view.shape)
    layout = grad.layout.at(grad.layout.dim + (grad.layout.dim >= dim))
    return Strategy({0: grad.layout}, (layout,), {"input_sizes": scaled_shape(view.shape, layout)})


@rule("aten.select_scatter")
def _select_scatter(view: NodeView) -> Strategy | None:
    whole, part = view.operands[0], view.operands[1]
    dim = view.dim("dim", whole)
    layout = whole.layout
    if layout is None and part.layout is not None:
        layout = part.layout.at(part.layout.dim + (part.layout.dim >= dim))
    if layout is None or layout.dim == dim:
        return None
    return Strategy({0: layout, 1: layout.at(layout.dim - (dim < layout.dim))}, (layout,))


@rule("aten.unfold")
def _unfold(view: NodeView) -> Strategy | None:
    source = view.operands[0]
    if source.layout is None or view.dim("dimension", source) == source.layout.dim:
        return None
    return _moved(view, source, source.layout.dim)


@rule("aten.unfold_backward")
def _unfold_backward(view: NodeView) -> Strategy | None:
    """The last dimension of the gradient is the window's, which the input does not have."""
    grad = view.operands[0]
    if grad.layout is None or grad.layout.dim in (int(view.args["dim"]) % len(view.shape), len(view.shape)):
        return None
    patch = {"input_sizes": scaled_shape(view.shape, grad.layout)}
    return Strategy({0: grad.layout}, (grad.layout,), patch)


@rule("aten.diagonal", "aten.diagonal_backward", "aten.diag_embed", "aten.diagonal_copy")
def _diagonal(view: NodeView) -> Strategy | None:
    """The two matrix dimensions last, the batch before them."""
    source = view.operands[0]
    dims = {int(view.args.get(name, default)) for name, default in (("dim1", 0), ("dim2", 1))}
    wide = max(source.ndim, len(view.shape))
    if source.layout is None or {dim % wide for dim in dims} != {wide - 2, wide - 1}:
        return None
    if source.layout.dim >= min(source.ndim, len(view.shape)) - 1 or source.layout.dim >= wide - 2:
        return None
    patch = {"input_sizes": scaled_shape(view.shape, source.layout)} if "backward" in view.name else {}
    return Strategy({0: source.layout}, (source.layout,), patch)


@rule("aten.view_as_real", "aten.view_as_complex", "aten.view.dtype")
def _reinterpret(view: NodeView) -> Strategy | None:
    """Only the last dimension changes its extent, or comes or goes."""
    source = view.operands[0]
    if source.layout is None or source.layout.dim >= min(source.ndim, len(view.shape)):
        return None
    if view.shape[source.layout.dim] != source.shape[source.layout.dim]:
        return None
    return _moved(view, source, source.layout.dim)


@rule("aten.flip", "aten.roll", "aten.rot90")
def _flip(view: NodeView) -> Strategy | None:
    source = view.operands[0]
    if source.layout is None or not view.args.get("dims"):
        return None
    return None if source.layout.dim in view.dims("dims", source) else _moved(view, source, source.layout.dim)


@rule("aten.constant_pad_nd")
def _pad(view: NodeView) -> Strategy | None:
    source, pad = view.operands[0], view.args["pad"]
    if source.layout is None:
        return None
    at = 2 * (source.ndim - 1 - source.layout.dim)
    if any(pad[at : at + 2]):
        return None
    return _moved(view, source, source.layout.dim)


@rule("aten.tril", "aten.triu")
def _triangle(view: NodeView) -> Strategy | None:
    source = view.operands[0]
    if source.layout is None or source.layout.dim >= source.ndim - 2:
        return None
    return _moved(view, source, source.layout.dim)
