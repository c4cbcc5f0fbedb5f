"""Placements flow through the captured graph, and a program of tasks comes out.

In one pass over the graph each operator asks its rule how it runs for one microbatch. Where the rule knows, slices
flow on; where it does not, its operands are gathered, it runs once on the whole batch, and its result is cut again
as soon as that pays. Cutting a whole value is always right, whatever the cut means, so a rule that says no costs
memory and never correctness.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fullbatch import _torch
from fullbatch._axis import _expand
from fullbatch._axis._kernels import filled, then_nothing
from fullbatch._axis._node import NodeView, Operand, Partial, Placed, Strategy, scaled_shape
from fullbatch._axis._operator import complete, fields, kernel, metas, template, used_outputs, whole_kernel
from fullbatch._axis._origin import Origins
from fullbatch._axis._repeats import MASK, repeats
from fullbatch._axis._rules import RULES
from fullbatch._axis._rules._pointwise import is_pointwise, pointwise
from fullbatch._axis._strides import restride, same_view, within
from fullbatch._axis._wide import is_half, may_stay_wide, only_moves, wide_sum, widened, widens
from fullbatch._capture._assumed import held, is_assumed
from fullbatch._capture._clean import EFFECTS
from fullbatch._capture._split import WHY as EAGER
from fullbatch._errors import CaptureError
from fullbatch._ir import (
    FullBatchNode,
    Kernel,
    Kind,
    Layout,
    Origin,
    Program,
    Ref,
    Task,
    Value,
    prune,
)

aten = torch.ops.aten

# Below this many bytes a value that was computed on the whole batch stays whole: cutting it again would buy
# nothing and may cost a barrier further on. A floating point number counts as four, so that a step has the same tasks
# in float64, where it is verified.
RESLICE_ABOVE = 256 * 1024


class Builder:
    """Holds the program while it is built. Rules and expansions add to it through the methods below."""

    def __init__(self, batch: int, reslice_above: int = RESLICE_ABOVE) -> None:
        self.batch = batch
        self.values: list[Value] = []
        self.tasks: list[Task] = []
        self.full_batch: list[FullBatchNode] = []
        self.coupled: list[tuple[int, str]] = []
        self.masked: dict[int, fx.Node] = {}  # tasks that can leave out some of their outputs
        self.effects: list[int] = []  # values that stand for checks
        self.memory: dict[Any, Any] = {}  # what an expansion of a forward leaves for its backward
        self._reslice_above = reslice_above
        self._of: dict[fx.Node, int] = {}
        self._many: dict[fx.Node, list[int | None]] = {}
        self._whole: dict[int, int] = {}
        self._sliced: dict[tuple[int, Layout], int] = {}
        self._soft: dict[int, Layout] = {}
        self._fills: dict[int, tuple[tuple[int, ...], Kernel]] = {}
        self._fill_value: dict[int, float] = {}
        self._iota: set[int] = set()
        self._wide: dict[int, int] = {}  # sums in half precision -> the same before they were rounded
        self._maker: dict[int, fx.Node] = {}  # whole values and the operator that makes them from whole values
        self._boolean: set[int] = set()
        self.origin = Origin()

    # ---- values and conversions

    def value(self, like: torch.Tensor, layout: Layout | None = None, partial: bool = False, name: str = "") -> int:
        """A new value with the metadata of `like` (whole batch)."""
        ident = len(self.values)
        item = Value(ident, name or f"v{ident}", tuple(like.shape), like.element_size(), layout, partial)
        self.values.append(item)
        if like.dtype == torch.bool:
            self._boolean.add(ident)
        return ident

    def emit(
        self,
        kind: Kind,
        fn: Callable[..., Any],
        args: Sequence[Any],
        inputs: Sequence[int],
        outputs: Sequence[int | None],
        kwargs: dict[str, Any] | None = None,
        **fields: Any,
    ) -> Task:
        """Adds a task with this kernel; `fields` are further fields of Task."""
        kernel = Kernel(fn, tuple(args), dict(kwargs or {}))
        return self._add(kind, tuple(inputs), tuple(outputs), kernel=kernel, **fields)

    def _add(self, kind: Kind, inputs: tuple[int, ...], outputs: tuple[int | None, ...], **fields: Any) -> Task:
        task = Task(len(self.tasks), kind, inputs, outputs, self.origin, **fields)
        self.tasks.append(task)
        return task

    def reduce(self, value: int, like: torch.Tensor, how: Partial, why: str = "") -> int:
        """The whole value, in the form of `like`, of a summand in that form. In half precision it is summed in float32.

        The summand may be in float32 already.
        """
        if is_half(like):
            wide = widened(like)
            if self.values[value].itemsize != wide.element_size():
                part, value = value, self.value(wide, partial=True)
                self.emit(Kind.LOCAL, aten._to_copy.default, (Ref(0),), [part], [value], {"dtype": wide.dtype})
            return self.rounded(self.reduce(value, wide, how, why), like)
        out = self.value(like)
        task = self._add(Kind.REDUCE, (value,), (out,), reduction=how.reduction, count=how.count)
        self.coupled.append((task.id, why or f"a sum over the batch in {self.origin.op}"))
        return out

    def rounded(self, value: int, like: torch.Tensor) -> int:
        """A whole value that was summed in float32, in the dtype of `like`: rounded once a step."""
        if not is_half(like):
            return value
        out = self.value(like)
        self.emit(Kind.ONCE, aten._to_copy.default, (Ref(0),), [value], [out], {"dtype": like.dtype})
        if may_stay_wide(like.dtype):
            self._wide[out] = value
        return out

    def whole(self, value: int, why: str = "") -> int:
        """`value` for the whole batch: itself, or gathered."""
        item = self.values[value]
        if item.layout is None:
            return value
        if value not in self._whole:
            out = self._copy_value(item, None)
            task = self._add(Kind.GATHER, (value,), (out,), layout=item.layout)
            self.coupled.append((task.id, why or f"{self.origin.op} reads the whole batch"))
            self._whole[value] = out
            self._soft[out] = item.layout
        return self._whole[value]

    def slice(self, value: int, layout: Layout) -> int:
        """`value` as each microbatch's slice by `layout`."""
        item = self.values[value]
        if item.layout == layout:
            return value
        if item.layout is not None:
            value = self.whole(value, f"{self.origin.op} cuts the batch another way")
        key = (value, layout)
        if key not in self._sliced:
            out = self._copy_value(item, layout)
            if value in self._fills:
                shape, kernel = self._fills[value]
                local = Kernel(kernel.fn, (scaled_shape(shape, layout), *kernel.args[1:]), kernel.kwargs)
                self._add(Kind.LOCAL, (), (out,), kernel=local, fills=True)
            elif (made := self._made_in_slices(value, layout)) is not None:
                out = made
            else:
                self._add(Kind.SLICE, (value,), (out,), layout=layout, view=_is_view(item.shape, layout))
            self._sliced[key] = out
            for flags in (self._iota, self._boolean):
                if value in flags:
                    flags.add(out)
            if value in self._fill_value:
                self._fill_value[out] = self._fill_value[value]
        return self._sliced[key]

    def _made_in_slices(self, value: int, layout: Layout) -> int | None:
        """A large whole value that only slices are read of (a mask expanded to the batch) is computed in slices."""
        node = self._maker.get(value)
        if node is None or max(map(_weight, metas(node))) <= self._reslice_above:
            return None
        whole = self._view(node, soft=False)
        if node.target is aten.expand.default and not whole.sharded():
            source = whole.operands[0]
            at = layout.dim - len(whole.shape) + source.ndim
            if at < 0 or source.shape[at] == 1:
                size = scaled_shape(whole.shape, layout)
                strategy = Strategy({}, (layout,), {"size": size})
                return self._emit_local(node, whole, strategy)[0]
        for operand in whole.operands:
            for dim, extent in enumerate(operand.shape):
                if extent != layout.per_sample * self.batch:
                    continue
                view = whole.with_layout(operand, layout.at(dim))
                found = self._strategy(node, view)
                if found is not None and found.out[0] == layout:
                    return self._emit_local(node, view, found)[0]
        return None

    def _copy_value(self, item: Value, layout: Layout | None) -> int:
        ident = len(self.values)
        self.values.append(Value(ident, item.name, item.shape, item.itemsize, layout))
        if item.id in self._boolean:
            self._boolean.add(ident)
        return ident

    # ---- nodes

    def input(self, node: fx.Node, layout: Layout | None) -> int:
        """A graph input, whole; with `layout`, operators see it cut that way."""
        whole = self.value(node.meta["val"], name=node.name)
        self._of[node] = whole if layout is None else self.slice(whole, layout)
        return whole

    def constant(self, node: fx.Node, tensor: Any) -> None:
        """A tensor that the graph carries."""
        if not isinstance(tensor, torch.Tensor):
            raise CaptureError.of(
                f"The step holds a nested program ({node.target}) that is not supported.",
                expected="tensor operations",
                next="replace torch.cond / while_loop by torch.where",
            )
        out = self.value(tensor, name=str(node.target))
        self.emit(Kind.ONCE, lambda: tensor, (), (), (out,), view=True)
        self._of[node] = out

    def of(self, node: fx.Node) -> int:
        """The value that stands for `node`."""
        return self._of[node]

    def assign(self, node: fx.Node, outputs: Sequence[int | None]) -> None:
        """The values that stand for the outputs of `node`, and take its name."""
        many = isinstance(node.meta["val"], (list, tuple))
        for position, out in enumerate(outputs):
            if out is not None:
                self.values[out].name = f"{node.name}[{position}]" if many else node.name
        if isinstance(node.meta["val"], (list, tuple)):
            self._many[node] = list(outputs)
        else:
            assert outputs[0] is not None
            self._of[node] = outputs[0]

    def node(self, node: fx.Node, origin: Origin) -> None:
        """Adds the tasks of one operator of the graph."""
        self.origin = origin
        if node.target is operator.getitem:
            chosen = self._many[node.args[0]][node.args[1]]  # type: ignore[index]
            if chosen is not None:
                self._of[node] = chosen
            return
        if not isinstance(node.target, _torch.OpOverload):
            raise CaptureError.of(
                f"The step contains {node.target}, which is no tensor operator.", got=str(origin),
                expected="ATen operators", next="move it out of loss_fn",
            )  # fmt: skip
        if any(isinstance(item, torch.Tensor) and item.layout != torch.strided for item in metas(node)):
            raise CaptureError.of(
                f"{node.target} makes a sparse tensor, which is not supported.", got=str(origin),
                expected="dense gradients", next="nn.Embedding(..., sparse=False)",
            )  # fmt: skip
        if node.target is _torch.EAGER_LOSS:
            self._eager(node)
            return
        if node.target is aten.full.default:
            self._fill(node)
            return
        if node.target in (aten.as_strided.default, aten.as_strided_scatter.default, aten.resize.default):
            self._strided(node)
            return
        if node.target in EFFECTS:
            self._effect(node)
            return
        view = self._view(node, soft=False)
        if view.sharded():
            if _expand.expand(self, node, view):
                return
            strategy = self._strategy(node, view)
            if strategy is not None:
                self._local(node, view, strategy)
                return
        elif self._resliced(node):
            return
        self._once(node, view)

    def _fill(self, node: fx.Node) -> None:
        shape, value = node.args[0], node.args[1]
        out = self.value(node.meta["val"], name=node.name)
        task = self.emit(Kind.ONCE, filled, (list(shape), value), (), (out,), node.kwargs, fills=True)  # type: ignore[arg-type]
        assert task.kernel is not None
        self._fills[out] = (tuple(shape), task.kernel)  # type: ignore[arg-type]
        self._fill_value[out] = float(value) if isinstance(value, (int, float)) else float("nan")
        self._of[node] = out

    def _strided(self, node: fx.Node) -> None:
        """Operators that read memory by strides: exact where the traced strides can be had again, else refused."""
        source = node.args[0]
        assert isinstance(source, fx.Node)
        meta = source.meta["val"]
        if node.target is aten.as_strided.default and same_view(meta, node):
            self._of[node] = self._of[source]
            return
        if node.target is aten.resize.default or not within(meta, node):
            raise CaptureError.of(
                f"{node.target} reads memory beyond the tensor it is given.", got=str(self.origin),
                expected="views by shape: view, transpose, slice, unfold",
                next="replace as_strided by unfold or by indexing",
            )  # fmt: skip
        placed = self._of[source]
        whole = self.whole(placed)
        out = self._copy_value(self.values[whole], None)
        self.emit(Kind.ONCE, restride, (Ref(0), list(meta.shape), list(meta.stride())), [whole], [out])
        self._of[source] = out  # for this operator only
        self._once(node, self._view(node, soft=False))
        self._of[source] = placed

    def _effect(self, node: fx.Node) -> None:
        """A check that raises or does nothing: it runs on what it is given, and something must wait for it."""
        view = self._view(node, soft=False)
        args, kwargs = template(node, view, {})
        inputs = [self._of[operand.node] for operand in view.operands]
        local = any(self.values[value].local for value in inputs)
        meta = torch.empty((), device="meta")
        out = self.value(meta, partial=local)
        fn = held if is_assumed(node) else then_nothing(node.target)
        self.emit(Kind.LOCAL if local else Kind.ONCE, fn, args, inputs, (out,), kwargs)
        self.effects.append(self.reduce(out, meta, Partial(), "a check of values") if local else out)

    def _eager(self, node: fx.Node) -> None:
        """A loss that is not captured: it reads all outputs whole, and its cotangents are cut as their outputs are."""
        self.origin = Origin("the loss")
        outs, changed = node.args
        assert isinstance(outs, list) and isinstance(changed, list)
        ids = [self.whole(self._of[item], EAGER) for item in (*outs, *changed)]
        kernel_of, forms = node.meta["kernel"], metas(node)
        used = used_outputs(node, len(forms))
        made = [self.value(form) if at in used else None for at, form in enumerate(forms)]
        refs = [Ref(at) for at in range(len(ids))]
        args = (refs[: len(outs)], refs[len(outs) :])
        read = [*ids, *self.effects]  # what a check of the forward stops does not reach the loss
        self.emit(Kind.ONCE, kernel_of, args, read, made, single=False, eager=True)
        self.full_batch.append(FullBatchNode(EAGER, self.origin, sum(self._nbytes(item) for item in ids[: len(outs)])))
        standing: list[int | None] = []
        for at, value in zip(kernel_of.wanted, made, strict=True):
            layout = self.values[self._of[outs[at]]].layout
            standing.append(value if value is None or layout is None else self.slice(value, layout))
        self.assign(node, standing)

    def _view(self, node: fx.Node, soft: bool) -> NodeView:
        operands: list[Operand] = []

        def convert(arg: Any) -> Any:
            if isinstance(arg, fx.Node):
                operands.append(self._operand(arg, len(operands), soft))
                return operands[-1]
            if isinstance(arg, (list, tuple)):
                return [convert(item) for item in arg]
            return arg

        schema = _torch.schema(node.target).arguments
        args = {argument.name: convert(value) for argument, value in zip(schema, node.args, strict=False)}
        args |= {name: convert(value) for name, value in node.kwargs.items()}
        out = node.meta.get("val")
        outputs = tuple(
            tuple(item.shape) if isinstance(item, torch.Tensor) else None
            for item in (out if isinstance(out, (list, tuple)) else [out])
        )
        return NodeView(str(node.target), args, tuple(operands), outputs, self.batch)

    def _operand(self, node: fx.Node, index: int, soft: bool) -> Operand:
        value = self._of[node]
        item = self.values[value]
        layout = item.layout if not soft else item.layout or self._soft.get(value)
        return Operand(
            index, node, item.shape, layout, self._fill_value.get(value), value in self._iota, value in self._boolean
        )

    def _strategy(self, node: fx.Node, view: NodeView) -> Strategy | None:
        found = RULES.find(view.name)
        if found is None and is_pointwise(node.target):
            found = pointwise
        strategy = None if found is None else found(view)
        return strategy if strategy is not None and complete(node, strategy) else None

    # ---- ways to run

    def _local(self, node: fx.Node, view: NodeView, strategy: Strategy) -> None:
        standing = self._emit_local(node, view, strategy)
        self._mark(node, view, standing)
        self.assign(node, standing)

    def _emit_local(self, node: fx.Node, view: NodeView, strategy: Strategy) -> list[int | None]:
        """Adds the task by which `node` runs for each microbatch; the values that stand for its outputs."""
        ids = []
        for operand in view.operands:
            value = self._of[operand.node]
            if operand.index in strategy.need:
                ids.append(self.slice(value, strategy.need[operand.index]))
            else:
                if self.values[value].layout is not None:
                    self.full_batch.append(FullBatchNode("one operand is read whole", self.origin, self._nbytes(value)))
                ids.append(self.whole(value))
        forms = metas(node)
        outputs: list[int | None] = []
        standing: list[int | None] = []
        pending: list[tuple[int, int, Partial]] = []
        used = used_outputs(node, len(forms))
        fn, wide = strategy.fn or kernel(node), -1
        if any(isinstance(placed, Partial) for placed in strategy.out) and is_half(forms[-1]):
            fn, wide = wide_sum(node) or (fn, wide)
        for position, (meta, placed) in enumerate(zip(forms, strategy.out, strict=True)):
            form = widened(meta) if position == wide else meta
            out, stands = self._output(form, placed, position in used, pending, position)
            outputs.append(out)
            standing.append(stands)
        args, kwargs = template(node, view, strategy.patch)
        task = self.emit(Kind.LOCAL, fn, args, ids, outputs, kwargs, **fields(node))  # type: ignore[arg-type]
        if MASK in view.args:
            self.masked[task.id] = node
        for position, value, how in pending:
            standing[position] = self.reduce(value, forms[position], how)
        return standing

    def _output(
        self, meta: Any, placed: Placed, used: bool, pending: list[tuple[int, int, Partial]], position: int
    ) -> tuple[int | None, int | None]:
        if not used or not isinstance(meta, torch.Tensor):
            return None, None
        if isinstance(placed, Layout):
            value = self.value(meta, placed)
            return value, value
        if isinstance(placed, Partial):
            value = self.value(meta, partial=True)
            pending.append((position, value, placed))
            return value, value
        # An output that holds nothing: empty (statistics that are not kept), or of no meaning with these arguments.
        empty = self.value(meta)
        form = {"dtype": meta.dtype, "device": meta.device}
        self.emit(Kind.ONCE, filled, (list(meta.shape), 0), (), (empty,), form, fills=True)
        return None, empty

    def _once(self, node: fx.Node, view: NodeView) -> None:
        coupled = view.sharded()
        ids = [self.whole(self._of[operand.node]) for operand in view.operands]
        if ids and ids[0] in self._wide and widens(node):
            self.assign(node, [self._wide[ids[0]]])
            return
        forms = metas(node)
        used = used_outputs(node, len(forms))
        outputs = [
            self.value(meta) if isinstance(meta, torch.Tensor) and position in used else None
            for position, meta in enumerate(forms)
        ]
        args, kwargs = template(node, view, {})
        self.emit(Kind.ONCE, whole_kernel(node), args, ids, outputs, kwargs, **fields(node))  # type: ignore[arg-type]
        if coupled:
            why = "couples the samples" if RULES.find(view.name) or is_pointwise(node.target) else "no rule knows it"
            size = sum(self._nbytes(out) for out in outputs if out is not None)
            self.full_batch.append(FullBatchNode(why, self.origin, size))
        elif not self.tasks[-1].random and len(outputs) == 1 and outputs[0] is not None:
            self._maker[outputs[0]] = node
        self._soften(node, view, outputs)
        self._mark(node, view, outputs)
        self.assign(node, outputs)
        if ids and ids[0] in self._wide and only_moves(node, self.tasks[-1].view):
            self._move_wide(node, args, kwargs, ids[0], outputs[0])

    def _move_wide(
        self, node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any], source: int, moved: int | None
    ) -> None:
        """What `node` does to a rounded sum is done to the sum itself too; what nobody reads of both is dropped."""
        if moved is not None:
            out = self.value(widened(node.meta["val"]), name=node.name)
            self.emit(Kind.ONCE, whole_kernel(node), args, [self._wide[source]], [out], kwargs, **fields(node))
            self._wide[moved] = out

    def _resliced(self, node: fx.Node) -> bool:
        """Runs `node` by microbatches although its operands are whole, where its values are worth it."""
        view = self._view(node, soft=True)
        if not view.sharded():
            return False
        forms = [*(operand.node.meta["val"] for operand in view.sharded()), *metas(node)]
        if max(map(_weight, forms)) <= self._reslice_above:
            return False
        strategy = self._strategy(node, view)
        if strategy is None:
            return False
        if any(op.index not in strategy.need for op in view.sharded()):
            return False
        self._local(node, view, strategy)
        return True

    def _soften(self, node: fx.Node, view: NodeView, outputs: Sequence[int | None]) -> None:
        """Remembers how whole outputs would be cut: as a rule says, else where an operand's extent returns."""
        soft = self._view(node, soft=True)
        strategy = self._strategy(node, soft) if soft.sharded() else None
        for position, value in enumerate(outputs):
            if value is None:
                continue
            placed = strategy.out[position] if strategy is not None else None
            if isinstance(placed, Layout):
                self._soft[value] = placed
            elif strategy is None:
                found = soft.by_extent(self.values[value].shape)
                if found is not None:
                    self._soft[value] = found

    def _mark(self, node: fx.Node, view: NodeView, outputs: Sequence[int | None]) -> None:
        """Keeps track of `arange(batch)` through what only moves it."""
        first = outputs[0]
        if first is None:
            return
        name = view.name.rsplit(".", 1)[0]
        if name == "aten.arange":
            start, end, step = view.args.get("start", 0), view.args.get("end"), view.args.get("step", 1)
            if start == 0 and step == 1 and end == self.batch:
                self._iota.add(first)
        elif name in ("aten.unsqueeze", "aten.view", "aten._to_copy", "aten.expand", "aten.reshape"):
            source = self._of[view.operands[0].node]
            dims = [size for size in self.values[first].shape if size != 1]
            if source in self._iota and dims == [self.batch]:
                self._iota.add(first)

    def _nbytes(self, value: int) -> int:
        return self.values[value].nbytes(None, self.batch)


def _weight(meta: Any) -> int:
    """Bytes, where a floating point number has four; 0 for what is no tensor."""
    if not isinstance(meta, torch.Tensor):
        return 0
    return meta.numel() * (4 if meta.is_floating_point() else meta.element_size())


def _is_view(shape: tuple[int, ...], layout: Layout) -> bool:
    """Whether a slice of a contiguous tensor is contiguous, so that it need not be copied."""
    return layout.outer == 1 and all(size == 1 for size in shape[: layout.dim])


def build(joint: Any, layouts: dict[int, Layout], batch: int, reslice_above: int = RESLICE_ABOVE) -> Program:
    """The program of a captured step. `layouts` says which inputs, by position, carry the batch and where."""
    builder = Builder(batch, reslice_above)
    origins = Origins(joint.graph)
    inputs: dict[int, int] = {}
    for node in joint.graph.nodes:
        if node.op == "placeholder" and node in joint.placeholders:
            position = joint.placeholders[node]
            inputs[position] = builder.input(node, layouts.get(position))
        elif node.op == "get_attr":
            builder.constant(node, getattr(joint.module, str(node.target)))
        elif node.op == "call_function":
            builder.node(node, origins.of(node))
    builder.origin = Origin("output")
    outputs = [builder.whole(builder.of(node), "returned for the whole batch") for node in joint.wanted]
    gradients = tuple(outputs[len(outputs) - sum(isinstance(node, fx.Node) for node in joint.gradients.values()) :])
    outputs += builder.effects
    tasks = prune(builder.tasks, outputs)
    alive = {task.id for task in tasks}
    coupled = [(task, why) for task, why in builder.coupled if task in alive]
    again = repeats(tasks, builder.masked, builder.values, len(builder.tasks))
    return Program(batch, builder.values, tasks, inputs, outputs, builder.full_batch, gradients, coupled, again)
