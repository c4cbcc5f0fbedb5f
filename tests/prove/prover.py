"""Proves one operator's placement: run in microbatches by its rule, it must give what it gives on the whole batch.

A call of an ATen operator becomes a graph of one node. For a choice of which operands are slices, the real builder
makes a program of it, the program is run in lockstep for uneven microbatches, and every output is compared with the
operator's own. Cutting an operand is right whatever its contents mean, so every choice of layouts is a fair question,
and the rule's answer must be exact for all of them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from fullbatch._axis._build import Builder
from fullbatch._axis._operator import draws as _draws
from fullbatch._axis._rules import RULES
from fullbatch._axis._rules._pointwise import is_pointwise
from fullbatch._capture._clean import clean
from fullbatch._ir import Kind, Layout, Origin, Reduction, Task
from fullbatch._run._executor import add_moments, cut, paste

aten = torch.ops.aten
POINTWISE = "tagged pointwise"
EXPANDED = "an expansion"
_UNDEFINED = ("aten.empty", "aten.new_empty", "aten.resize", "aten._local_scalar")  # outputs without a value
_READS_FILLS = ("index_put", "_unsafe_index_put", "scatter_add", "index_add")


@dataclass
class Ledger:
    """What was proved: proofs by rule, those with a folded batch among them, and what failed."""

    proofs: Counter[str] = field(default_factory=Counter)
    folded: Counter[str] = field(default_factory=Counter)
    operators: set[str] = field(default_factory=set)
    choices: int = 0
    failures: list[str] = field(default_factory=list)


# ---- running a program in lockstep


def lockstep(tasks: Sequence[Task], builder: Builder, inputs: dict[int, Any], samples: Sequence[int]) -> dict[int, Any]:
    """Every value of the program: a tensor, or a list of one a microbatch."""
    env: dict[int, Any] = dict(inputs)
    batch = builder.batch
    bounds = [(sum(samples[:at]), sum(samples[: at + 1])) for at in range(len(samples))]
    for task in tasks:
        operands = [env[value] for value in task.inputs]
        if task.kind is Kind.SLICE:
            assert task.layout is not None
            results = [[cut(operands[0], task.layout, begin, end, batch) for begin, end in bounds]]
        elif task.kind is Kind.GATHER:
            assert task.layout is not None
            whole = operands[0][0].new_empty(builder.values[task.outputs[0] or 0].shape)
            for part, (begin, end) in zip(operands[0], bounds, strict=True):
                paste(whole, part, task.layout, begin, end, batch)
            results = [whole]
        elif task.kind is Kind.REDUCE:
            results = [_reduced(operands[0], task, bounds)]
        else:
            assert task.kernel is not None
            call = task.kernel.bind()
            if task.kind is Kind.ONCE:
                found = call(batch, *operands)
                results = [found] if task.single else list(found)
            else:
                found = [
                    call(count, *[each[at] if isinstance(each, list) else each for each in operands])
                    for at, count in enumerate(samples)
                ]
                results = [found] if task.single else [list(column) for column in zip(*found, strict=True)]
        env.update({out: result for out, result in zip(task.outputs, results, strict=False) if out is not None})
    return env


def _reduced(parts: Sequence[torch.Tensor], task: Task, bounds: Sequence[tuple[int, int]]) -> torch.Tensor:
    total = parts[0].clone()
    for part, (begin, end) in zip(parts[1:], bounds[1:], strict=True):
        if task.reduction is Reduction.MOMENTS:
            add_moments(total, part, begin * task.count, (end - begin) * task.count)
        else:
            total.add_(part)
    return total


def splits(batch: int) -> list[tuple[int, ...]]:
    """Uneven microbatches."""
    return [(1, batch - 1), (2, 1, batch - 3)] if batch > 3 else [(1, 2), (2, 1)] if batch == 3 else [(1, batch - 1)]


# ---- one call as a graph


class Call:
    """One call of an operator: a graph with a placeholder for each tensor, and what the whole batch gives."""

    def __init__(self, target: Any, args: Sequence[Any], kwargs: dict[str, Any], fills: bool = False) -> None:
        self.target, self.args, self.kwargs = target, args, kwargs
        leaves, _ = tree_flatten((tuple(args), kwargs))
        self.tensors: list[torch.Tensor] = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.graph = fx.Graph()
        self.nodes: list[fx.Node] = []
        at = iter(range(len(self.tensors)))

        def placed(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            position = next(at)
            if fills and _constant(leaf):
                value = leaf.reshape(-1)[0].item()
                named = {"dtype": leaf.dtype, "device": leaf.device}
                node = self.graph.call_function(aten.full.default, (list(leaf.shape), value), named)
            else:
                node = self.graph.placeholder(f"t{position}")
            node.meta["val"] = leaf
            self.nodes.append(node)
            return node

        self.expected = target(*args, **kwargs)
        args, kwargs = tree_map(placed, (tuple(args), kwargs))
        self.node = self.graph.call_function(target, args, kwargs)
        self.node.meta["val"] = self.expected
        self.floor = max([1e-12, *(1e-6 * _largest(tensor) for tensor in self.tensors)])
        self.single = not isinstance(self.expected, (list, tuple))
        self.items: list[fx.Node] = []
        if not self.single:
            for position, value in enumerate(self.expected):
                item = self.graph.call_function(_GETITEM, (self.node, position))
                item.meta["val"] = value
                self.items.append(item)
        self.graph.output(self.items or self.node)
        self.random = torch.Tag.nondeterministic_seeded in target.tags and _draws(self.node)
        self.random = self.random or str(target).startswith(_UNDEFINED)

    def prove(self, batch: int, layouts: Sequence[Layout | None], ledger: Ledger) -> bool:
        """Whether a rule answered for these layouts; what is wrong with its answer goes into the ledger."""
        builder = Builder(batch)
        inputs: dict[int, Any] = {}
        for node, layout, tensor in zip(self.nodes, layouts, self.tensors, strict=True):
            if node.op == "placeholder":
                inputs[builder.input(node, layout)] = tensor
            else:
                builder.node(node, Origin())
        before = len(builder.tasks)
        ledger.choices += 1
        try:
            builder.node(self.node, Origin(op=str(self.target)))
            if not any(task.kind is Kind.LOCAL and task.inputs for task in builder.tasks[before:]):
                return False
            for item in self.items:
                builder.node(item, Origin())
            errors = [error for samples in splits(batch) for error in self._errors(builder, inputs, samples)]
        except Exception as error:
            errors = [f"{type(error).__name__}: {str(error)[:300]}"]
        name = rule_name(self.target)
        ledger.operators.add(str(self.target))
        ledger.proofs[name] += 1
        if any(layout and layout.per_sample > 1 for layout in layouts):
            ledger.folded[name] += 1
        ledger.failures += [f"{self._text()} batch {batch} {[*map(_short, layouts)]}: {error}" for error in errors[:1]]
        return True

    def _errors(self, builder: Builder, inputs: dict[int, Any], samples: Sequence[int]) -> Iterator[str]:
        env = lockstep(builder.tasks, builder, inputs, samples)
        expected = [self.expected] if self.single else list(self.expected)
        values = [builder._of.get(self.node)] if self.single else builder._many[self.node]
        if "nll_loss" in str(self.target) and len(expected) == 2 and self.args[3] == 0:
            expected[1] = None  # not written where nothing is averaged
        for position, (value, whole) in enumerate(zip(values, expected, strict=True)):
            if value is None or not isinstance(whole, torch.Tensor):
                continue
            item = builder.values[value]
            if item.partial:
                yield f"output {position} is a summand"
                continue
            pairs = [(env[value], whole)]
            if item.layout is not None:
                if whole.shape[item.layout.dim] != item.layout.per_sample * builder.batch:
                    yield f"output {position} {tuple(whole.shape)} cannot be {_short(item.layout)}"
                    continue
                bounds = [(sum(samples[:at]), sum(samples[: at + 1])) for at in range(len(samples))]
                parts = [cut(whole, item.layout, begin, end, builder.batch) for begin, end in bounds]
                pairs = list(zip(env[value], parts, strict=True))
            for part, (mine, truth) in enumerate(pairs):
                error = difference(mine, truth, not self.random, self.floor)
                if error:
                    yield f"output {position}, microbatch {part} of {tuple(samples)}: {error}"

    def _text(self) -> str:
        def text(leaf: Any) -> str:
            return f"{str(leaf.dtype)[6:]}{list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else str(leaf)

        args = tree_map(text, (tuple(self.args), self.kwargs))
        return f"{self.target}{args}"


def _getitem() -> Any:
    import operator

    return operator.getitem


_GETITEM = _getitem()


def _short(layout: Layout | None) -> str:
    return "-" if layout is None else f"S({layout.dim};{layout.outer},{layout.inner})"


def _largest(tensor: torch.Tensor) -> float:
    """The largest size of a value that is no mask; what cancels is measured against it."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return 0.0
    size = tensor.abs().double()
    return float(torch.where(size < 1e4, size, 0.0).max())


def _constant(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and tensor.is_floating_point() and bool((tensor == tensor.reshape(-1)[0]).all())


def rule_name(target: Any) -> str:
    """The name under which the rule of `target` is registered."""
    full = str(target)
    names = set(RULES.names())
    for name in (full, full.rsplit(".", 1)[0]):
        if name in names:
            return name
    return POINTWISE if is_pointwise(target) else EXPANDED


def difference(value: torch.Tensor, expected: torch.Tensor, values: bool = True, floor: float = 1e-12) -> str:
    """What makes `value` another tensor than `expected`, or nothing. Sizes below `floor` are rounding noise."""
    if not isinstance(value, torch.Tensor):
        return f"no tensor but {type(value).__name__}"
    if value.shape != expected.shape or value.dtype != expected.dtype:
        return f"{value.dtype}{list(value.shape)} is not {expected.dtype}{list(expected.shape)}"
    if expected.dtype is torch.complex32:
        value, expected = value.to(torch.complex64), expected.to(torch.complex64)
    if not values or expected.numel() == 0 or torch.equal(value, expected):
        return ""
    if not (expected.is_floating_point() or expected.is_complex()):
        return f"{int((value != expected).sum())} of {expected.numel()} differ"
    exact = expected.dtype in (torch.float64, torch.complex128)
    if expected.is_complex():
        value, expected = torch.view_as_real(value.resolve_conj()), torch.view_as_real(expected.resolve_conj())
    odd = ~torch.isfinite(expected)
    if bool(odd.any()):
        if not torch.equal(value[odd].nan_to_num(0.5), expected[odd].nan_to_num(0.5)):
            return "infinities or nans differ"
        value, expected = value[~odd], expected[~odd]
        if not expected.numel():
            return ""
    error = float((value - expected).abs().max() / max(float(expected.abs().max()), floor))
    return "" if error <= (1e-9 if exact else 2e-2 if expected.dtype.itemsize == 2 else 1e-4) else f"error {error:.1e}"


def prove_function(fn: Any, tensors: Sequence[torch.Tensor], layouts: Sequence[Layout | None], batch: int) -> set[str]:
    """Proves what `fn` is made of, as one graph: every value against the whole batch's.

    Returns the operators that ran by microbatches, so that a test can say which have to.
    """
    module = make_fx(fn)(*tensors)
    clean(module.graph)
    builder = Builder(batch)
    truth: dict[fx.Node, Any] = {}
    inputs: dict[int, Any] = {}
    given = iter(zip(tensors, layouts, strict=True))

    def value(nest: Any) -> Any:
        return tree_map(lambda leaf: truth[leaf] if isinstance(leaf, fx.Node) else leaf, nest)

    for node in module.graph.nodes:
        if node.op == "placeholder":
            truth[node], layout = next(given)
            node.meta["val"] = truth[node]
            inputs[builder.input(node, layout)] = truth[node]
        elif node.op == "get_attr":
            truth[node] = node.meta["val"] = getattr(module, str(node.target))
            builder.constant(node, truth[node])
        elif node.op == "call_function":
            truth[node] = node.target(*value(node.args), **value(node.kwargs))
            node.meta["val"] = truth[node]
            builder.node(node, Origin(op=str(node.target)))
    for samples in splits(batch):
        env = lockstep(builder.tasks, builder, inputs, samples)
        bounds = [(sum(samples[:at]), sum(samples[: at + 1])) for at in range(len(samples))]
        for node, ident in builder._of.items():
            layout = builder.values[ident].layout
            if layout is None:
                assert not difference(env[ident], truth[node]), f"{node}: {difference(env[ident], truth[node])}"
                continue
            for part, (begin, end) in zip(env[ident], bounds, strict=True):
                error = difference(part, cut(truth[node], layout, begin, end, batch))
                assert not error, f"{node} of samples {begin}:{end}: {error}"
    local = {task.origin.op for task in builder.tasks if task.kind is Kind.LOCAL and task.inputs}
    return {name.removeprefix("aten.").rsplit(".", 1)[0] for name in local}


# ---- choices of layouts


def choices(tensors: Sequence[torch.Tensor], most: int, seed: int) -> list[tuple[int, tuple[Layout | None, ...]]]:
    """(batch, a layout or None for each tensor): single operands, all alike from either side, and random mixtures."""
    sizes = {size for tensor in tensors for size in tensor.shape if size > 1}
    batches = sorted(sizes | {size // k for size in sizes for k in (2, 3) if size % k == 0 and size // k > 1})
    rng = random.Random(seed)
    found: dict[tuple[int, tuple[Layout | None, ...]], None] = {}
    mixed: dict[tuple[int, tuple[Layout | None, ...]], None] = {}
    for batch in batches:
        options = [[None, *layouts_of(tensor, batch)] for tensor in tensors]
        every = {layout for each in options for layout in each if layout is not None}
        for at, each in enumerate(options):
            for layout in each[1:]:
                alone: list[Layout | None] = [None] * len(tensors)
                alone[at] = layout
                found[(batch, tuple(alone))] = None
        for layout in sorted(every, key=lambda x: (x.per_sample, x.dim, x.outer)):
            left = tuple(layout if layout in each else None for each in options)
            found[(batch, left)] = None
        widest = max(tensor.ndim for tensor in tensors)
        for layout in sorted(every, key=lambda x: (x.per_sample, x.dim, x.outer)):
            right = tuple(
                moved if (moved := layout.at(layout.dim - widest + tensor.ndim)) in each else None
                for tensor, each in zip(tensors, options, strict=True)
            )
            if any(right):
                found[(batch, right)] = None
        count = prod(len(each) for each in options)
        if count <= 3 * most:
            mixed.update(((batch, mixture), None) for mixture in product(*options) if any(mixture))
        else:
            for _ in range(2 * most):
                mixture = tuple(rng.choice(each) for each in options)
                if any(mixture):
                    mixed[(batch, mixture)] = None
    first = list(found)
    if len(first) > most:
        first = first[: most // 3] + rng.sample(first[most // 3 :], most - most // 3)
    rest = [key for key in mixed if key not in found]
    return first + rng.sample(rest, min(len(rest), most // 2))


def layouts_of(tensor: torch.Tensor, batch: int) -> list[Layout]:
    """Every layout with one or two factors on a dimension of `tensor`."""
    found = []
    for dim, size in enumerate(tensor.shape):
        if size and size % batch == 0:
            factor = size // batch
            pairs = {(1, factor), (factor, 1)} | ({(2, factor // 2)} if factor % 2 == 0 else set())
            found += [Layout(dim, outer, inner) for outer, inner in sorted(pairs)]
    return found


# ---- finding calls in whatever runs


class Prover(TorchDispatchMode):
    """Notes each ATen operator that runs beneath it and its operands; on leaving, proves the rules of them all."""

    def __init__(self, ledger: Ledger, most: int = 24, calls: int = 10) -> None:
        super().__init__()
        self._ledger, self._most, self._calls = ledger, most, calls
        self._seen: dict[Any, set[Any]] = {}
        self._noted: list[tuple[Any, Any, Any, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        noted, self._noted = self._noted, []
        with torch.no_grad():
            for target, args, kwargs, number in noted:
                self.prove(target, args, kwargs, number)

    def note(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Keeps a call that is new, with its operands as they are now."""
        target = _functional(func)
        if target is None or (str(target) == "aten.native_batch_norm.default" and args[5] and args[3] is not None):
            return  # the latter writes its running statistics, and its schema does not say so
        kwargs = {name: value for name, value in kwargs.items() if name != "out"}
        leaves = tree_leaves((tuple(args), kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not any(size > 1 for tensor in tensors for size in tensor.shape):
            return
        if max(tensor.numel() for tensor in tensors) > 20_000 or any(
            tensor.layout != torch.strided for tensor in tensors
        ):
            return
        key = str([(leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])
        seen = self._seen.setdefault(target, set())
        if key not in seen and len(seen) < self._calls:
            seen.add(key)
            self._noted.append((target, *_mapped(_copy, (tuple(args), kwargs)), len(seen) - 1))

    def prove(self, target: Any, args: Any, kwargs: Any, number: int = 0) -> None:
        """Proves `target` for these arguments, for constants in place of some, and for other strides."""
        self._prove(target, args, kwargs, number, self._most)
        if any(name in str(target) for name in _READS_FILLS):
            self._prove(target, args, kwargs, number, self._most, fills=True)
        if (
            number < 3
            and "attention" not in str(target)
            and any(tensor.ndim > 1 for tensor in _tensors((args, kwargs)))
        ):
            turned = _mapped(_turned, (args, kwargs))
            if turned is not None and _agree(target, (args, kwargs), turned):
                self._prove(target, *turned, number, self._most // 2)

    def _prove(self, target: Any, args: Any, kwargs: Any, number: int, most: int, fills: bool = False) -> None:
        try:
            call = Call(target, args, kwargs, fills)
        except Exception:
            return  # the operator refuses these arguments
        if _tensors(call.expected):
            for batch, layouts in choices(call.tensors, most, number):
                call.prove(batch, layouts, self._ledger)


def direct(func: Any, *args: Any, **kwargs: Any) -> None:
    """Notes a call of an operator that takes itself apart before a dispatch mode could see it."""
    mode = _get_current_dispatch_mode()
    assert isinstance(mode, Prover)
    mode.note(func, args, kwargs)


def _agree(target: Any, one: Any, other: Any) -> bool:
    """Whether an operator gives the same for other strides; if not, it reads memory in order and is given no such."""
    try:
        pairs = zip(_tensors(target(*one[0], **one[1])), _tensors(target(*other[0], **other[1])), strict=True)
        return torch.Tag.nondeterministic_seeded in target.tags or not any(difference(a, b) for a, b in pairs)
    except Exception:
        return False


def _mapped(fn: Any, nest: Any) -> Any:
    return tree_map(lambda leaf: fn(leaf) if isinstance(leaf, torch.Tensor) else leaf, nest)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage().clone()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        storage, tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def _functional(func: Any) -> Any:
    """`func`, or its form without side effects; None where there is no rule to prove."""
    if func.namespace not in ("aten", "fullbatch"):
        return None
    if func._schema.is_mutable:
        packet = getattr(aten, func._schema.name.removeprefix("aten::").rstrip("_"), None)
        func = getattr(packet, func._overloadname, None) if packet is not None else None
        if func is None or func._schema.is_mutable:
            return None
    known = RULES.find(str(func)) or is_pointwise(func) or rule_name(func) in _EXPANDED
    return func if known or str(func).startswith(_EXPANDED) else None


_EXPANDED = (
    "aten.nll_loss",
    "aten.var",
    "aten.linalg_vector_norm",
    "aten.native_batch_norm",
    "aten._native_batch_norm",
)


def _tensors(nest: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, torch.Tensor)]


def _turned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with the strides of a transposed tensor."""
    if tensor.ndim < 2:
        return tensor
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


__all__ = [
    "EXPANDED",
    "POINTWISE",
    "Call",
    "Ledger",
    "Prover",
    "choices",
    "direct",
    "lockstep",
    "prove_function",
    "rule_name",
]
