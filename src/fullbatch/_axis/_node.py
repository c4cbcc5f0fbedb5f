"""What a placement rule sees of an operator, and what it answers.

A rule is a function of one `NodeView` that says how the operator runs for one microbatch: which operands it
needs as slices (`Strategy.need`), which arguments grow with the microbatch (`patch`), and whether each output is
then a slice or a summand. It answers None where the operator couples samples; that is always allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from fullbatch._ir import Layout, Reduction


@dataclass(frozen=True)
class Partial:
    """The output is a summand: the whole value is the reduction of all microbatches' outputs."""

    reduction: Reduction = Reduction.SUM
    count: int = 0


@dataclass(frozen=True)
class Unread:
    """The output means nothing with these arguments (a seed where nothing is drawn): zeros stand for it."""


# None: the rule cannot say what the output is. That is an answer only for outputs that are empty or not used.
Placed = Layout | Partial | Unread | None


@dataclass(frozen=True)
class Operand:
    """A tensor argument: its global shape, and the layout it has now (None: the whole value)."""

    index: int
    node: fx.Node
    shape: tuple[int, ...]
    layout: Layout | None
    fill: float | None = None  # every element has this value
    iota: bool = False  # the elements count along `layout`'s dimension from zero
    boolean: bool = False

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)


@dataclass(frozen=True)
class NodeView:
    """An operator: `args` by schema name, in which tensors are `Operand`s."""

    name: str
    args: dict[str, Any]
    operands: tuple[Operand, ...]
    outputs: tuple[tuple[int, ...] | None, ...]  # global shapes; None where the output is no tensor
    batch: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape of the first output."""
        return self.outputs[0] or ()

    def sharded(self) -> list[Operand]:
        """Operands that are slices now."""
        return [operand for operand in self.operands if operand.layout is not None]

    def tensor(self, name: str) -> Operand | None:
        """The operand given for argument `name`, if it is a tensor."""
        value = self.args.get(name)
        return value if isinstance(value, Operand) else None

    def tensors(self, name: str) -> Iterator[Operand]:
        """The operands in the list given for argument `name`."""
        return (value for value in self.args.get(name) or () if isinstance(value, Operand))

    def dim(self, name: str, operand: Operand, default: int = 0) -> int:
        """Argument `name` as a non-negative dimension of `operand`."""
        value = self.args.get(name)
        value = default if value is None else value
        return int(value) % max(operand.ndim, 1)

    def dims(self, name: str, operand: Operand) -> tuple[int, ...]:
        """Argument `name` as non-negative dimensions of `operand`; empty or None means all."""
        value = self.args.get(name)
        if value is None or value == []:
            return tuple(range(operand.ndim))
        values = value if isinstance(value, (list, tuple)) else [value]
        return tuple(int(item) % max(operand.ndim, 1) for item in values)

    def with_layout(self, operand: Operand, layout: Layout) -> NodeView:
        """The same operator with `operand` alone as a slice, by `layout`."""
        operands = tuple(replace(item, layout=layout if item is operand else None) for item in self.operands)

        def convert(arg: Any) -> Any:
            if isinstance(arg, Operand):
                return operands[arg.index]
            return [convert(item) for item in arg] if isinstance(arg, (list, tuple)) else arg

        return replace(self, operands=operands, args={name: convert(arg) for name, arg in self.args.items()})

    def by_extent(self, shape: tuple[int, ...]) -> Layout | None:
        """Where in `shape` the extent of a slice returns: in its own dimension, else in the first that has it."""
        for operand in self.sharded():
            assert operand.layout is not None
            extent = operand.shape[operand.layout.dim]
            if operand.layout.dim < len(shape) and shape[operand.layout.dim] == extent:
                return operand.layout
            if extent in shape:
                return operand.layout.at(shape.index(extent))
        return None


@dataclass(frozen=True)
class Strategy:
    """How an operator runs for one microbatch. Operands not in `need` are needed whole."""

    need: dict[int, Layout]
    out: tuple[Placed, ...]
    patch: dict[str, Any] = field(default_factory=dict)
    fn: Callable[..., Any] | None = None


Rule = Callable[[NodeView], Strategy | None]


class RuleTable:
    """Rules by operator name, such as "aten.mm" (every overload) or "aten.sum.dim_IntList" (one)."""

    def __init__(self) -> None:
        self._rules: dict[str, Rule] = {}

    def register(self, *names: str) -> Callable[[Rule], Rule]:
        """Decorator: the rule for these operators."""

        def add(rule: Rule) -> Rule:
            for name in names:
                assert name not in self._rules, f"two rules for {name}"
                self._rules[name] = rule
            return rule

        return add

    def find(self, name: str) -> Rule | None:
        """The rule for the operator `name` ("aten.sum.dim_IntList"): that of its overload, else of its packet."""
        return self._rules.get(name) or self._rules.get(name.rsplit(".", 1)[0])

    def names(self) -> list[str]:
        """All names with a rule."""
        return sorted(self._rules)


RULES = RuleTable()
rule = RULES.register


def same_on(operand: Operand, dim: int, layout: Layout) -> bool:
    """Whether dimension `dim` of `operand` has the extent that `layout` describes, from the batch's own."""
    return operand.layout == layout.at(dim)


def scaled_shape(shape: tuple[int, ...], layout: Layout) -> list[Any]:
    """`shape` as an argument, with the sharded dimension growing with the microbatch."""
    from fullbatch._ir import Scaled

    return [Scaled(layout.per_sample) if dim == layout.dim else size for dim, size in enumerate(shape)]
