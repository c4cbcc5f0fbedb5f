"""A schedule's actions as straight-line Python text.

Walked action by action, every operator of every microbatch costs a dispatch and several dictionary look-ups, which is
much beside an operator on a small tensor. Here each part of a stage becomes functions that are written once and called
for each microbatch: one line an operator, its constants bound by name, its operands local variables.

A value that lives and dies within one function is a local variable, `del`eted where the schedule frees it. The others
are in `w` (whole values, by id) or in `h` (what this microbatch holds, by id). Only integers and names made here enter
the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fullbatch._ir import Kind, Program, Reduction, Ref, Scaled, Task
from fullbatch._plan._schedule import ALL, Action, Do
from fullbatch._run._random import seed_task
from fullbatch._run._slices import add_summand, cut, first_summand, paste
from fullbatch._run._stored import fetch, offload

# Python's compiler and interpreter are linear in a function's lines up to far more than this.
LONGEST = 2000
"""Actions of one generated function."""

ARGUMENTS = "w, h, b, begin, end, m, seed, drawn"
"""Whole values, held values, samples, range in the batch, microbatch, seed of the step, receiver of random draws."""


@dataclass(frozen=True, eq=False)
class Fused:
    """Consecutive runs of one microbatch in one call: `call(*inputs)` gives the outputs. See `_fuse`."""

    tasks: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    call: Callable[..., Any]


Item = Action | Fused


class Names:
    """The objects that generated text speaks of, each under a name made here."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self._known: dict[int, str] = {}

    def of(self, value: Any) -> str:
        """The name of an object; the same object has one name."""
        name = self._known.get(id(value))
        if name is None:
            name = self._known[id(value)] = f"c{len(self.objects)}"
            self.objects[name] = value  # held here, so that its id stays its own
        return name

    def constant(self, value: Any, at: Sequence[str], samples: str) -> str:
        """The text of an argument in a kernel's template: `at` are the operands, `samples` the microbatch's."""
        if isinstance(value, Ref):
            return at[value.index]
        if isinstance(value, Scaled):
            return f"{samples} * {value.per_sample}"
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self.constant(item, at, samples) for item in value)}]"
        if value is None or type(value) in (bool, int):
            return repr(value)
        return self.of(value)

    def call(self, task: Task, at: Sequence[str], samples: str) -> str:
        """The call of a task's kernel on operands that are found `at`."""
        kernel = task.kernel
        assert kernel is not None
        given = [self.constant(arg, at, samples) for arg in kernel.args]
        given += [f"{key}={self.constant(value, at, samples)}" for key, value in kernel.kwargs.items()]
        # What is not captured runs in turns (`EagerLoss.turns`): it may wait for code that is not called from here.
        eager: Any = kernel.fn
        fn = f"yield from {self.of(eager.turns)}" if task.eager else self.of(kernel.fn)
        return f"{fn}({', '.join(given)})"


@dataclass
class Text:
    """Generated lines, and for each the items that it stands for (none for a line that only opens a function)."""

    lines: list[str]
    items: list[tuple[Item, ...]]

    def add(self, line: str, *items: Item) -> None:
        """Appends one line."""
        self.lines.append(line)
        self.items.append(items)


class Writer:
    """Writes parts of stages into one text."""

    def __init__(self, program: Program, microbatches: int) -> None:
        self._program, self._many = program, microbatches > 1
        self._local = [value.local for value in program.values]
        self.names, self.text = Names(), Text([], [])
        self._inner: set[int] = set()
        self._count = 0

    def part(self, items: Sequence[Item]) -> list[str]:
        """Writes one part of a stage; returns the names of its functions, to be called in order."""
        return [self._function(items[at : at + LONGEST]) for at in range(0, len(items), LONGEST)]

    def _function(self, items: Sequence[Item]) -> str:
        name = f"part{self._count}"
        self._count += 1
        self._inner = inner_values(items, self._program)
        self.text.add(f"def {name}({ARGUMENTS}):")
        frees: list[Action] = []
        for item in items:
            if isinstance(item, Action) and item.do is Do.FREE:
                frees.append(item)
                continue
            self._drop(frees)
            for line in self._lines(item):
                self.text.add(f"    {line}", item)
        self._drop(frees)
        return name

    def _drop(self, frees: list[Action]) -> None:
        if frees:
            self.text.add(f"    del {', '.join(self._at(action.subject) for action in frees)}", *frees)
            frees.clear()

    def _at(self, value: int) -> str:
        if value in self._inner:
            return f"v{value}"
        return f"h[{value}]" if self._local[value] else f"w[{value}]"

    def _lines(self, item: Item) -> Iterator[str]:
        if isinstance(item, Fused):
            outs = ", ".join(self._at(value) for value in item.outputs)
            yield f"{outs}, = {self.names.of(item.call)}({', '.join(self._at(value) for value in item.inputs)})"
        elif item.do in (Do.OFFLOAD, Do.FETCH):
            move, at = offload if item.do is Do.OFFLOAD else fetch, self._at(item.subject)
            yield f"{at} = {self.names.of(move)}({at})"
        else:
            yield from self._task(self._program.by_id[item.subject], item.do)

    def _task(self, task: Task, do: Do) -> Iterator[str]:
        at = [self._at(value) for value in task.inputs]
        if do is Do.GATHER:
            yield from self._gather(task, at[0])
        elif do is Do.REDUCE:
            yield from self._reduce(task, at[0])
        elif task.kind is Kind.SLICE:
            rest = f"{self.names.of(task.layout)}, begin, end, {int(self._program.batch)}"
            yield f"{self._out(task)} = {self.names.of(cut)}({at[0]}, {rest})"
        elif task.random:
            yield f"{self.names.of(seed_task)}(seed, {int(task.id)}, m)"
            yield f"r = {self.names.call(task, at, 'b')}"
            yield f"drawn is None or drawn({int(task.id)}, m, r)"
            yield f"{self._unpacked(task)}del r"
        elif task.single:
            yield f"{self._out(task)} = {self.names.call(task, at, 'b')}"
        else:
            # One line: a result that nobody reads dies as soon as the others have their names.
            yield f"r = {self.names.call(task, at, 'b')}; {self._unpacked(task)}del r"

    def _out(self, task: Task) -> str:
        (value,) = task.outputs
        assert value is not None
        return self._at(value)

    def _unpacked(self, task: Task) -> str:
        if task.single:
            return f"{self._out(task)} = r; "
        outs = [(at, value) for at, value in enumerate(task.outputs) if value is not None]
        return "".join(f"{self._at(value)} = r[{at}]; " for at, value in outs)

    def _gather(self, task: Task, part: str) -> Iterator[str]:
        out = self._out(task)
        if not self._many:
            yield f"{out} = {part}"
            return
        (value,) = task.outputs
        assert value is not None
        shape = ", ".join(str(int(size)) for size in self._program.values[value].shape)
        yield f"if m == 0: {out} = {part}.new_empty([{shape}])"
        rest = f"{self.names.of(task.layout)}, begin, end, {int(self._program.batch)}"
        yield f"{self.names.of(paste)}({out}, {part}, {rest})"

    def _reduce(self, task: Task, part: str) -> Iterator[str]:
        out = self._out(task)
        if not self._many:
            yield f"{out} = {part}"
            return
        yield f"if m == 0: {out} = {self.names.of(first_summand)}({part})"
        if task.reduction is Reduction.SUM:
            yield f"else: {out}.add_({part})"
        else:
            rest = f"{self.names.of(task.reduction)}, {int(task.count)}, begin, b"
            yield f"else: {self.names.of(add_summand)}({out}, {part}, {rest})"


def inner_values(items: Sequence[Item], program: Program) -> set[int]:
    """The values whose every life begins and ends within `items`."""
    alive: set[int] = set()
    crossing: set[int] = set()
    seen: set[int] = set()
    for item in items:
        reads, makes, frees = touched(item, program)
        seen.update(reads, makes, frees)
        crossing.update(value for value in (*reads, *frees) if value not in alive)
        alive.update(makes)
        alive.difference_update(frees)
    return seen - crossing - alive


def touched(item: Item, program: Program) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """The values that one item reads, makes and frees.

    A gathered or reduced value is read too: it is there from the first microbatch on.
    """
    if isinstance(item, Fused):
        return item.inputs, item.outputs, ()
    if item.do is Do.FREE:
        return (), (), (item.subject,)
    if item.do in (Do.OFFLOAD, Do.FETCH):
        return (item.subject,), (), ()
    task = program.by_id[item.subject]
    outs = tuple(out for out in task.outputs if out is not None)
    if item.do is Do.RUN:
        return task.inputs, outs, ()
    return (*task.inputs, *outs), (), ()


def origin_of(item: Item, program: Program) -> str:
    """Where an item comes from in the user's code, in words."""
    if isinstance(item, Fused):
        origins = dict.fromkeys(str(program.by_id[task].origin) for task in item.tasks)
        return f"the compiled group of {'; '.join(origins)}"
    if item.do in (Do.RUN, Do.GATHER, Do.REDUCE):
        return f"{program.by_id[item.subject].origin}{'' if item.do is Do.RUN else f' ({item.do.value})'}"
    return f"{item.do.value} of {program.values[item.subject].name}"


def note(error: BaseException, item: Item, program: Program, stage: int, microbatch: int, count: int) -> None:
    """Adds to `error` which item raised it, where in the user's code that comes from, and in which microbatch."""
    which = "once a step" if microbatch == ALL else f"microbatch {microbatch + 1} of {count}"
    error.add_note(f"fullbatch: raised by {origin_of(item, program)} (stage {stage}, {which})")
