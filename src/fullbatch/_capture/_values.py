"""Numbers that are known before a step runs, though the step takes them out of tensors.

A padding kept as an integer buffer, `attention_mask.all()`, `torch.ones(...).sum()`: plain PyTorch reads a number, and
branches on it or makes a shape of it. Where it follows from integers alone that the step was called with, it is
computed when Dynamo comes to it, and again before each run, from the inputs as they then are. Where it is another the
step is captured anew, as for a number of Python's.

* A number of a buffer, or of another tensor that is kept outside of the batch, may be any number: it seldom changes.
* Of the batch only a truth is taken (`if mask.any():`): it has two values, so that at most two captures come of it. A
  number of the batch would be another one at each step.
* Floating point inputs are left out: what follows from activations or weights would have to be computed twice.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fullbatch import _torch
from fullbatch._capture._asked import Answers
from fullbatch._capture._assumed import Assumptions
from fullbatch._capture._constants import PURE, changes_argument, name_of
from fullbatch._errors import CaptureError

LARGEST = 1 << 20  # elements of a tensor that is computed before a step

_MORE = """
    isnan isinf isfinite logical_not logical_and logical_or logical_xor bitwise_not bitwise_and bitwise_or invert
    where masked_fill count_nonzero isin diff ones_like zeros_like full_like clamp unbind chunk split interpolate
    argmax argmin is_nonzero cpu rsub pos pad
"""
_PURE = PURE | frozenset(_MORE.split())

# Of NumPy by itself: methods with a name of torch's may change their array (`sort`), and these do not.
_NUMPY = """
    array asarray pow power square sqrt mod remainder floor_divide floordiv true_divide truediv add sub subtract mul
    multiply gt lt ge le eq ne greater less greater_equal less_equal equal not_equal any all sum prod max min maximum
    minimum ceil floor abs absolute logical_and logical_or logical_not
"""
_OF_NUMPY = frozenset(_NUMPY.split())

_COMPARISONS = {
    operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "__lt__": "<", "__le__": "<=", "__gt__": ">", "__ge__": ">=",
}  # fmt: skip


@dataclass(frozen=True)
class _Read:
    """A number that was read: the tensor's node, whether only as a truth, and its value."""

    node: fx.Node
    truth: bool
    value: Any


class Known(Answers):
    """What one capture knows; `_torch.Known`."""

    def __init__(self) -> None:
        super().__init__()
        self._reads: list[_Read] = []
        self.assumptions = Assumptions()

    def begin(self) -> None:
        """Before a call that may capture."""
        super().begin()
        self._reads = []

    def truth(self, node: fx.Node) -> bool | None:
        drawn = _of_a_draw(node)
        if drawn is not None:
            return drawn
        value = _value(node, of_batch=True)
        return None if value is None else self._keep(node, True, bool(value))

    def number(self, node: fx.Node) -> int | float | bool | None:
        value = _value(node, of_batch=getattr(node.meta.get("example_value"), "dtype", None) is torch.bool)
        return None if value is None else self._keep(node, False, value)

    def way(self, node: fx.Node, line: str) -> tuple[bool, str] | None:
        return self.assumptions.way(node, line)

    def note(self, graph: fx.GraphModule) -> None:
        super().note(graph)
        self.assumptions.note(graph)

    def _keep(self, node: fx.Node, truth: bool, value: Any) -> Any:
        if not any(read.node is node and read.truth is truth for read in self._reads):
            self._reads.append(_Read(node, truth, value))
            _torch.keep_input(node)
        return value

    def guard(self, graph: fx.GraphModule) -> Guard | None:
        """What to look at before each run of `graph`; None where no number was read. Raises CaptureError."""
        reads = [read for read in self._reads if read.node.graph is graph.graph and _inputs(read.node)]
        for read in reads:
            if not read.truth and _changed(_inputs(read.node)):
                raise _changes_what_it_reads(read.node)
        return Guard(graph, reads) if reads else None


def _changes_what_it_reads(node: fx.Node) -> CaptureError:
    trace = str(node.meta.get("stack_trace", "")).strip().splitlines()
    return CaptureError.of(
        "A number in the step depends on the data: it comes from a tensor that the step itself changes.",
        got=" ".join(line.strip() for line in trace[-2:]),
        expected="numbers that are the same for all batches of one form",
        next="keep the value a tensor, or count in a Python number outside of loss_fn",
    )


class Guard:
    """The numbers that a captured step read, computed again from the inputs of a call."""

    def __init__(self, graph: fx.GraphModule, reads: Sequence[_Read]) -> None:
        needed = {node for read in reads for node in _ancestors(read.node)}
        copied = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in graph.graph.nodes:
            if node.op == "placeholder" or node in needed:
                copies[node] = copied.node_copy(node, copies.__getitem__)
        copied.output(tuple(copies[read.node] for read in reads))
        self._graph = fx.GraphModule(torch.nn.Module(), copied)
        self._truths = [read.truth for read in reads]
        self.expected = tuple(repr(read.value) for read in reads)

    def values(self, inputs: Sequence[Any]) -> tuple[str, ...]:
        """What the numbers are for these inputs, written out: one that is not a number is then equal to itself.

        Where one cannot be computed, none are known: the code that reads it may lie behind a branch that another number
        does not take any more.
        """
        try:
            with torch.no_grad():
                found = self._graph(*inputs)
        except Exception:  # whatever an operator says of its operands
            return ()
        return tuple(
            repr(bool(tensor) if truth else tensor.item()) for tensor, truth in zip(found, self._truths, strict=True)
        )


def _ancestors(node: fx.Node) -> list[fx.Node]:
    """The node and all that it follows from."""
    found: dict[fx.Node, None] = {}
    waiting = [node]
    while waiting:
        at = waiting.pop()
        if at not in found:
            found[at] = None
            waiting.extend(at.all_input_nodes)
    return list(found)


def _inputs(node: fx.Node) -> list[fx.Node]:
    return [source for source in _ancestors(node) if source.op == "placeholder"]


def _value(node: fx.Node, of_batch: bool) -> Any:
    """The number in the tensor of `node`, where it follows from known integers alone; else None."""
    nodes = _ancestors(node)
    example = node.meta.get("example_value")
    if not isinstance(example, torch.Tensor) or example.numel() != 1:
        return None
    if not all(_knowable(at, of_batch) for at in nodes) or _changed(nodes):
        return None
    values: dict[fx.Node, Any] = {}
    with _torch.without_modes(), torch.no_grad():
        found = _computed(node, values)
    return found.item() if isinstance(found, torch.Tensor) and found.numel() == 1 else None


def _knowable(node: fx.Node, of_batch: bool) -> bool:
    if node.op == "placeholder":
        tensor = _torch.input_example(node)
        if tensor is None or not _integers(tensor) or tensor.numel() > LARGEST:
            return False
        return of_batch or not _torch.input_source(node).startswith("L['batch']")
    example = node.meta.get("example_value")
    if isinstance(example, torch.Tensor) and not (_numbers(example.shape) and example.numel() <= LARGEST):
        return False
    numpy = _torch.numpy_name(node.target)
    if numpy is not None:
        return numpy in _OF_NUMPY and "out" not in node.kwargs
    return node.op in ("call_function", "call_method") and name_of(node) in _PURE and not changes_argument(node)


def _integers(tensor: torch.Tensor) -> bool:
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type != "meta"
    return plain and not (tensor.is_floating_point() or tensor.is_complex())


def _numbers(shape: Sequence[Any]) -> bool:
    return all(isinstance(size, int) for size in shape)


def _changed(nodes: Sequence[fx.Node]) -> bool:
    """Whether a node of the graph, as far as there is one, changes the memory of one of these, or may."""
    changed = {key for node in nodes[0].graph.nodes for written in _may_change(node) for key in _memory(written)}
    return any(key in changed for node in nodes for key in _memory(node))


def _memory(node: fx.Node) -> list[int]:
    made = node.meta.get("example_value")
    parts = made if isinstance(made, (tuple, list)) else [made]
    return [_torch.storage_key(part) for part in parts if isinstance(part, torch.Tensor)]


def _may_change(node: fx.Node) -> list[fx.Node]:
    """The arguments whose memory a node changes; all where that is not known."""
    if node.op == "call_module" or _torch.may_write(node.target):
        return node.all_input_nodes
    if not changes_argument(node):
        return []
    first, out = node.args[0] if node.args else None, node.kwargs.get("out")
    written = [part for part in (first, out) if isinstance(part, fx.Node)]
    return written if isinstance(first, fx.Node) else node.all_input_nodes


def _computed(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    if node not in values:
        if node.op == "placeholder":
            values[node] = _torch.input_example(node)
        else:
            args = fx.node.map_arg(node.args, lambda source: _computed(source, values))
            kwargs = fx.node.map_arg(node.kwargs, lambda source: _computed(source, values))
            if node.op == "call_method":
                values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                assert callable(node.target)
                values[node] = node.target(*args, **kwargs)
    return values[node]


def _of_a_draw(node: fx.Node) -> bool | None:
    """The truth of a comparison of `torch.rand` with a number that no draw can be below: a dropout of layers at 0."""
    sign = _COMPARISONS.get(node.target)
    if sign is None or len(node.args) != 2 or node.kwargs:
        return None
    drawn, bound = node.args
    if not isinstance(drawn, fx.Node) or drawn.target is not torch.rand or not isinstance(bound, (int, float)):
        return None
    if set(drawn.users) != {node}:  # something else has it, and may have changed it
        return None
    if bound > 0 or (bound == 0 and sign in ("<=", ">")):
        return None
    return sign in (">", ">=")
