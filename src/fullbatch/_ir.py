"""The step as plain values: what analysis hands to planning.

A captured graph speaks of tensors of the whole batch. What is planned and run speaks of tasks, each of which
either runs once a step or once a microbatch, and of the values between them, each `Shard` (a microbatch owns a
slice), `Partial` (a microbatch owns a summand) or `Replicate` (the same for all). Nothing here knows which
framework the graph came from; a kernel is an opaque callable with a template of its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any


@dataclass(frozen=True, slots=True)
class Layout:
    """`Shard`: dimension `dim` is [outer, batch, inner] flattened, and a microbatch owns a range of the batch.

    `outer` > 1 is two views concatenated along the batch; `inner` > 1 is time or channels folded into it.
    """

    dim: int
    outer: int = 1
    inner: int = 1

    @property
    def per_sample(self) -> int:
        """Elements of `dim` that one sample owns."""
        return self.outer * self.inner

    def at(self, dim: int) -> Layout:
        """The same factors on another dimension."""
        return Layout(dim, self.outer, self.inner)


class Reduction(Enum):
    """How the summands of a `Partial` become one value."""

    SUM = "sum"
    MOMENTS = "moments"  # a [2, ...] stack of mean and centred sum of squares, merged by counts


class Kind(Enum):
    """What a task does, and how often."""

    LOCAL = "local"  # once a microbatch
    ONCE = "once"  # once a step
    SLICE = "slice"  # Replicate -> Shard, for one microbatch; a view where the layout allows
    GATHER = "gather"  # Shard -> Replicate: each microbatch writes its slice, then a barrier
    REDUCE = "reduce"  # Partial -> Replicate: each microbatch adds its summand, then a barrier


@dataclass(frozen=True, slots=True)
class Ref:
    """In a kernel's template: the tensor operand with this index."""

    index: int


@dataclass(frozen=True, slots=True)
class Scaled:
    """In a kernel's template: an integer that grows with the microbatch, `per_sample` x its samples."""

    per_sample: int


@dataclass(frozen=True)
class Kernel:
    """A callable and a template of its arguments, in which `Ref` and `Scaled` stand for what varies."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The operator's name, for people."""
        name = str(getattr(self.fn, "_qualified", None) or getattr(self.fn, "__name__", self.fn))
        return str(self.fn) if "." in str(self.fn) and not str(self.fn).startswith("<") else name

    def bind(self) -> Callable[..., Any]:
        """A function of (samples, *tensors) that calls the kernel, with no interpretation left in it."""
        names: dict[str, Any] = {"fn": self.fn}
        refs: set[int] = set()

        def text(value: Any) -> str:
            if isinstance(value, Ref):
                refs.add(value.index)
                return f"t{value.index}"
            if isinstance(value, Scaled):
                return f"b * {value.per_sample}"
            if isinstance(value, (list, tuple)):
                inside = ", ".join(text(item) for item in value)
                return f"[{inside}]"
            if value is None or isinstance(value, (bool, int)):
                return repr(value)
            name = f"c{len(names)}"
            names[name] = value
            return name

        call = [text(arg) for arg in self.args] + [f"{key}={text(value)}" for key, value in self.kwargs.items()]
        tensors = "".join(f", t{index}" for index in range(max(refs, default=-1) + 1))
        # The only text that varies is integers and the names made above.
        return eval(f"lambda b{tensors}, *rest: fn({', '.join(call)})", names)  # type: ignore[no-any-return]  # noqa: S307


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a task came from in the user's code."""

    op: str = ""
    module: str = ""
    source: str = ""
    backward: bool = False

    def __str__(self) -> str:
        where = ", ".join(part for part in (self.module and f"in {self.module}", self.source) if part)
        return f"{self.op}{' (backward)' if self.backward else ''}" + (f", {where}" if where else "")


@dataclass(slots=True)
class Value:
    """A tensor between tasks. `shape` is that of the whole batch; `layout` says which slice a microbatch owns.

    `layout` is None for `Replicate`, and for the summand of a `Partial` (`partial` is then true).
    """

    id: int
    name: str
    shape: tuple[int, ...]
    itemsize: int
    layout: Layout | None = None
    partial: bool = False

    @property
    def local(self) -> bool:
        """Whether each microbatch has its own."""
        return self.layout is not None or self.partial

    def nbytes(self, samples: int | None, batch: int) -> int:
        """Bytes of the dense tensor for a microbatch of `samples` (the whole value where it is not sharded)."""
        count = 1
        for size in self.shape:
            count *= size
        if self.layout is not None and samples is not None and batch:
            count = count * samples // batch
        return count * self.itemsize


@dataclass(frozen=True, slots=True)
class Task:
    """One operation. `outputs` has None where an output of the kernel is not used by anyone."""

    id: int
    kind: Kind
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]
    origin: Origin
    kernel: Kernel | None = None
    single: bool = True  # the kernel returns one tensor and not a tuple
    random: bool = False
    view: bool = False  # by its name an alias of its first input
    fills: bool = False  # makes a constant, which is one element seen many times
    eager: bool = False  # the user's own Python: run once a step, and never alone for its costs
    flops: int = 0  # of the whole batch
    layout: Layout | None = None
    reduction: Reduction = Reduction.SUM
    count: int = 0  # MOMENTS: elements behind each mean, a sample
    repeats: int | None = None  # another task, of which it makes again what a microbatch owns a slice of

    @property
    def stores_nothing(self) -> bool:
        """Whether it makes no storage worth counting: a view, or a constant."""
        return self.view or self.fills


@dataclass(frozen=True)
class Barrier:
    """Something that couples the batch: all microbatches reach it before any goes on."""

    why: str
    origin: Origin
    stage: int = 0

    def __str__(self) -> str:
        return f"stage {self.stage}: {self.why}: {self.origin}"


@dataclass(frozen=True)
class FullBatchNode:
    """An operation that has to run on the whole batch, and why."""

    why: str
    origin: Origin
    nbytes: int = 0

    def __str__(self) -> str:
        return f"{self.origin}: {self.why}"


@dataclass
class Program:
    """The step as tasks in an order that respects data: `inputs` are given, `outputs` are wanted."""

    batch: int
    values: list[Value]
    tasks: list[Task]
    inputs: dict[int, int]  # position among the captured inputs -> value
    outputs: list[int]  # values, all Replicate
    full_batch: list[FullBatchNode] = field(default_factory=list)
    gradients: tuple[int, ...] = ()  # of `outputs`, those that are added to `.grad`: memory of their own at the end
    coupled: list[tuple[int, str]] = field(default_factory=list)  # task of the barrier, what couples
    repeats: list[Task] = field(default_factory=list)  # what may run in place of a task that has run before

    @cached_property
    def runnable(self) -> list[Task]:
        """All that a schedule may run."""
        return [*self.tasks, *self.repeats]

    @cached_property
    def by_id(self) -> dict[int, Task]:
        """Tasks by id; ids are sparse once unused tasks are gone."""
        return {task.id: task for task in self.runnable}

    @cached_property
    def again(self) -> dict[int, Task]:
        """For each task what makes its slices again: the task itself, or one that makes no summands."""
        return {task.id: task for task in self.tasks} | {
            task.repeats: task for task in self.repeats if task.repeats is not None
        }

    @cached_property
    def producers(self) -> dict[int, Task]:
        """Which task makes each value."""
        return {out: task for task in self.tasks for out in task.outputs if out is not None}


def prune(tasks: Sequence[Task], wanted: Sequence[int]) -> list[Task]:
    """The tasks that lead to `wanted`, with unused outputs set to None."""
    alive, kept = set(wanted), []
    for task in reversed(tasks):
        if any(out in alive for out in task.outputs if out is not None):
            outputs = tuple(out if out in alive else None for out in task.outputs)
            kept.append(_with_outputs(task, outputs))
            alive.update(task.inputs)
    return kept[::-1]


def _with_outputs(task: Task, outputs: tuple[int | None, ...]) -> Task:
    if outputs == task.outputs:
        return task
    return replace(task, outputs=outputs)
