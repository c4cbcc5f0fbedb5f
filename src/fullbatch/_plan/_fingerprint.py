"""What a plan is for, in plain values: which tensors go in, which operators run on what, and where.

A plan names tasks by number. In another process the same numbers must mean the same operators, or the plan would run
something else. So a plan carries a description of its program without addresses or memory, short enough for a file and
long enough to say in words what is different.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from fullbatch import _torch
from fullbatch._ir import Kind, Layout, Program, Ref, Scaled, Task

AGAIN = "again"
"""The mark of what runs in place of a task that has run before."""


@dataclass(frozen=True)
class InputForm:
    """A tensor that the step reads: where it was found, its form, and what the step does to it.

    `batch_dim` is the dimension that carries the batch, None where none does. `gradient` and `changed` say whether the
    step makes its gradient, and whether it writes it (a buffer).
    """

    source: str
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]
    batch_dim: int | None = None
    gradient: bool = False
    changed: bool = False


class Operator(NamedTuple):
    """One task: `mark` is its kind (`local`, `view`, ..., `again`), `digest` a hash of arguments, flow and layouts.

    `nbytes` is what its outputs take for the whole batch.
    """

    task: int
    mark: str
    op: str
    module: str
    digest: str
    nbytes: int


@dataclass(frozen=True)
class Fingerprint:
    """The program that a plan is for. `results` is a hash of what the step returns and writes."""

    torch: str
    device: str
    threads: int
    batch: int
    inputs: tuple[InputForm, ...]
    operators: tuple[Operator, ...]
    results: str

    @cached_property
    def digest(self) -> str:
        """A hash of the program alone: without the torch version, the device and the threads."""
        program = [self.batch, [asdict(form) for form in self.inputs], self.operators, self.results]
        return _hash(json.dumps(program, sort_keys=True), 16)


def input_forms(
    inputs: Sequence[torch.Tensor], sources: Sequence[str], batch_dims: dict[int, int], gradients: Iterable[int],
    changed: Iterable[int],
) -> tuple[InputForm, ...]:  # fmt: skip
    """The forms of a captured step's inputs; `batch_dims`, `gradients` and `changed` count them by position."""
    with_gradient, written = set(gradients), set(changed)
    return tuple(
        InputForm(
            in_words(source), tuple(tensor.shape), _plain(tensor.dtype), tuple(tensor.stride()), batch_dims.get(at),
            at in with_gradient, at in written,
        )
        for at, (tensor, source) in enumerate(zip(inputs, sources, strict=True))
    )  # fmt: skip


def fingerprint(program: Program, inputs: tuple[InputForm, ...], device: torch.device) -> Fingerprint:
    """The description of `program` as it would run here and now."""
    operators = tuple(_operator(task, program) for task in program.runnable)
    results = _hash(json.dumps([sorted(program.inputs.items()), program.outputs]), 16)
    return Fingerprint(
        str(torch.__version__), device.type, torch.get_num_threads(), program.batch, inputs, operators, results
    )


def _operator(task: Task, program: Program) -> Operator:
    values = program.values
    outs = [values[out] for out in task.outputs if out is not None]
    flow = [(value, _value(program, value)) for value in task.inputs]
    made = [None if out is None else (out, _value(program, out)) for out in task.outputs]
    kernel = None if task.kernel is None else (
        _described(task.kernel.fn), _described(task.kernel.args), _described(task.kernel.kwargs)
    )  # fmt: skip
    form = (
        task.kind.value, task.single, task.random, task.view, _layout(task.layout), task.reduction.value, task.repeats
    )  # fmt: skip
    aliased = task.view or task.kind in (Kind.SLICE, Kind.REDUCE)
    nbytes = 0 if aliased else sum(value.nbytes(None, program.batch) for value in outs)
    mark = "view" if task.view and task.kind is Kind.LOCAL else task.kind.value
    mark = mark if task.repeats is None else AGAIN
    backward = " (backward)" if task.origin.backward else ""
    name = (task.origin.op or f"{task.kind.value} of an input") + backward
    digest = _hash(repr((flow, made, kernel, form, task.count)), 4)
    return Operator(task.id, mark, name, task.origin.module, digest, nbytes)


def _value(program: Program, ident: int) -> tuple[Any, ...]:
    value = program.values[ident]
    return (value.shape, value.itemsize, _layout(value.layout), value.partial)


def _layout(layout: Layout | None) -> tuple[int, ...] | None:
    return None if layout is None else (layout.dim, layout.outer, layout.inner)


def _described(value: Any) -> str:
    """`value`, an argument of a kernel, as text that is the same in every process."""
    if value is None or isinstance(value, (bool, int, float, complex, str, Ref, Scaled)):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return f"tensor({tuple(value.shape)}, {value.dtype}, {tuple(value.stride())})"
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format, _torch.OpOverload)):
        return str(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_described(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(sorted(f'{key}: {_described(item)}' for key, item in value.items()))}}}"
    if isinstance(value, functools.partial):
        return f"partial({_described(value.func)}, {_described(value.args)}, {_described(value.keywords)})"
    if callable(value) and hasattr(value, "__name__"):
        return _function(value)
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _function(function: Callable[..., Any]) -> str:
    """A function by name, with what it closes over: two closures of one name may hold different operators."""
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', function.__name__)}"
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return f"{name}{_described(cells)}" if cells else name


_PARTS = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]")
_COUNTED = re.compile(r"_\d{6,}_c\d+")  # Dynamo names some globals by an address and a counter


def in_words(source: str) -> str:
    """Dynamo's expression for a tensor as the user would write it: `model.0.weight`, `batch[0]`."""
    text = re.sub(r"G\['__import_\w+'\]\.", "", source)  # the name of a module is another where it is run as a script
    text = _COUNTED.sub("", _PARTS.sub(r".\1", text))
    text = re.sub(r"loss_fn'\]\.__closure__\[(\d+)\]\.cell_contents", r"loss_fn']'s variable \1", text)
    return re.sub(r"\b[LG]\['(\w+)'\]", r"\1", text)


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _hash(text: str, nbytes: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[: 2 * nbytes]
