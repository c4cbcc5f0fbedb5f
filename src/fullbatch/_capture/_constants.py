"""Numbers that follow from no input of the step are constants, also where the step writes them as tensors.

`torch.tensor([height, width])` of Python's own numbers, a maximum over it, an `arange` up to that: Dynamo sees a tensor
whose values decide a shape. They are the same at every call, since Python's numbers are guarded. Such numbers are
computed once, at capture, and written into the graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fullbatch import _torch

# Functions without side effects or random numbers, by name. What is not here is no constant, which only refuses more.
_NAMES = """
    tensor as_tensor scalar_tensor arange zeros ones full linspace stack cat getitem item tolist add sub mul div neg
    truediv floordiv floor_divide mod remainder pow sqrt ceil floor round abs max min maximum minimum amax amin sum
    prod cumsum numel size reshape view flatten squeeze unsqueeze expand repeat clone contiguous detach to type long
    int float double bool eq ne lt le gt ge and or not any all tile new_tensor new_zeros new_ones new_full index_select
"""
PURE = frozenset(_NAMES.split())
_LARGEST = 1 << 20  # elements of a value that is computed at capture


def settle(graph: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> None:
    """Writes such numbers into `graph`, where a shape or a number is taken from a tensor; else changes nothing."""
    symbolic = [node for node in graph.graph.nodes if _symbols(node)]
    if not symbolic:
        return
    values = _Values(_constants(graph.graph))
    changed = False
    for node in symbolic:
        if isinstance(node.meta["example_value"], torch.Tensor):
            changed |= _number_arguments(node, values)
        elif node in values.constants:
            for user in list(node.users):
                _put(user, node, values.of(node))
            changed = True
    _without_unused(graph.graph)
    changed |= _checks_of_tensors(graph.graph)
    if changed:
        _without_unused(graph.graph)
        graph.recompile()
        _infer_again(graph, inputs)


def _symbols(node: fx.Node) -> set[Any]:
    """Symbols in the number, or in the shape, that a node makes: what the data decide."""
    example = node.meta.get("example_value")
    if node.op == "placeholder" or getattr(example, "is_nested", False):
        return set()
    parts = list(example.shape) if isinstance(example, torch.Tensor) else [example]
    return {symbol for part in parts for symbol in _torch.free_symbols(part)}


def name_of(node: fx.Node) -> str:
    """The name of what the node calls; `and` for `operator.and_` and for `__and__`."""
    name = _called(node)
    python = getattr(node.target, "__module__", "") == "_operator"
    return name.strip("_") if python or name.startswith("__") or not name.endswith("_") else name


def _called(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def changes_argument(node: fx.Node) -> bool:
    """Whether the node changes a tensor in place, by its name."""
    name = name_of(node)
    in_place = name.endswith("_") or name in ("setitem", *_IN_PLACE) or "out" in node.kwargs
    return node.op in ("call_function", "call_method") and in_place


_IN_PLACE = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor")


def _constants(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that follow from no input, and that nothing changes in place."""
    candidates = _following(graph, set())
    changed = {
        origin
        for node in graph.nodes
        if changes_argument(node)
        for argument in node.all_input_nodes
        for origin in _origins(argument, candidates)
    }
    return _following(graph, changed) if changed else candidates


def _following(graph: fx.Graph, without: set[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in graph.nodes:
        pure = node.op in ("call_function", "call_method") and name_of(node) in PURE and not changes_argument(node)
        if pure and node not in without and all(source in found for source in node.all_input_nodes) and _small(node):
            found.add(node)
    return found


def _small(node: fx.Node) -> bool:
    example = node.meta.get("example_value")
    return not isinstance(example, torch.Tensor) or bool(_symbols(node)) or example.numel() <= _LARGEST


def _origins(node: fx.Node, within: set[fx.Node]) -> set[fx.Node]:
    """The node and all that it was made from: what it may share memory with."""
    found, waiting = set(), [node]
    while waiting:
        at = waiting.pop()
        if at in within and at not in found:
            found.add(at)
            waiting.extend(at.all_input_nodes)
    return found


class _Values:
    """What constant nodes give, computed when asked for."""

    def __init__(self, constants: set[fx.Node]) -> None:
        self.constants = constants
        self._known: dict[fx.Node, Any] = {}

    def of(self, node: fx.Node) -> Any:
        if node not in self._known:
            args = fx.node.map_arg(node.args, self.of)
            kwargs = fx.node.map_arg(node.kwargs, self.of)
            with torch.no_grad():
                if node.op == "call_method":
                    self._known[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
                else:
                    assert callable(node.target)
                    self._known[node] = node.target(*args, **kwargs)
        return self._known[node]


def _number_arguments(node: fx.Node, values: _Values) -> bool:
    """Where an operator reads a number out of a constant tensor, gives it the number. Whether there was one."""
    inherited = {symbol for source in node.all_input_nodes for symbol in _symbols(source)}
    if _symbols(node) <= inherited:
        return False
    changed = False
    for source in node.all_input_nodes:
        example = source.meta.get("example_value")
        if source in values.constants and isinstance(example, torch.Tensor) and example.dim() == 0:
            _put(node, source, values.of(source).item())
            changed = True
    return changed


def _put(user: fx.Node, node: fx.Node, value: Any) -> None:
    """In the arguments of `user`, `value` stands for `node`."""
    user.args = fx.node.map_arg(user.args, lambda argument: value if argument is node else argument)
    user.kwargs = fx.node.map_arg(user.kwargs, lambda argument: value if argument is node else argument)


def _without_unused(graph: fx.Graph) -> None:
    """Numbers that nothing reads any more are gone."""
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "call_method") and _is_number(node) and not node.users:
            graph.erase_node(node)


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def _checks_of_tensors(graph: fx.Graph) -> bool:
    """Numbers that are only asserted about stay tensors, and so do the assertions. Whether there were any.

    `assert lengths.max().item() <= size` decides nothing but whether the step raises.
    """
    asserts = {node for node in graph.nodes if node.target is torch.ops.aten._assert_scalar.default}
    good = asserts | {node for node in graph.nodes if _is_number(node) and _as_well_of_tensors(node)}
    while wrong := [node for node in good if not _among(node, good)]:
        good.difference_update(wrong)
    numbers = [node for node in graph.nodes if node in good and node not in asserts]
    for node in asserts & good:
        if node.args[0] in numbers:
            node.target = _torch.asserts_on_device
    for node in numbers:
        if node.target == "item":
            node.replace_all_uses_with(node.args[0])
        elif node.target is torch.sym_sum:
            node.target = sum
    return bool(numbers)


def _as_well_of_tensors(node: fx.Node) -> bool:
    """Whether the node takes a number out of a tensor, or computes with numbers what it would with tensors."""
    if node.op == "call_method":
        return node.target == "item"
    arithmetic = getattr(node.target, "__module__", "") == "_operator" or node.target is torch.sym_sum
    return node.op == "call_function" and arithmetic


def _among(node: fx.Node, good: set[fx.Node]) -> bool:
    inputs = (source for source in node.all_input_nodes if _is_number(source))
    return all(source in good for source in inputs) and all(user in good for user in node.users)


class _Inferred(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if "example_value" in n.meta and n.op != "placeholder":
            n.meta["example_value"] = result
        return result


def _infer_again(graph: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> None:
    """Shapes without symbols, up to the first operator whose shape does depend on the data."""
    mode = _torch.fake_mode()
    fakes = [_torch.to_fake(mode, tensor) for tensor in inputs]
    with contextlib.suppress(Exception), mode, torch.enable_grad():
        _Inferred(graph).run(*fakes)
