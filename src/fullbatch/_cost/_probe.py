"""Exact bytes of each operator, by running it once alone on dummy tensors.

What an operator allocates inside itself (a convolution's reordered weights, a copy of a gradient that is not
contiguous) is written nowhere. So each distinct operator of a program, at the shapes and strides it will see, is run
once under the memory counter. At any moment only one operator's operands exist, which the step itself needs too, so
that probing never takes more memory than the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fullbatch._cost._costs import Coster, Out, TaskCost, estimated
from fullbatch._errors import MeasureError
from fullbatch._ir import Kind, Program, Reduction, Task
from fullbatch._memory._measure import MemoryEvents, memory_events
from fullbatch._run._executor import cut, owns_dense_storage


@dataclass(frozen=True)
class Meta:
    """A tensor's form in memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Meta:
        """The form of `tensor`."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)

    def dummy(self, touched: bool) -> torch.Tensor:
        """A tensor of this form: zeros where values will be read, else memory that is never touched."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return tensor.zero_() if touched else tensor


@dataclass(frozen=True)
class _Found:
    """What one operator did: bytes, and the form of each output with the operand it is a view of."""

    peak: int
    outputs: tuple[tuple[Meta, int, int | None] | None, ...]  # form, bytes, operand


_KNOWN: dict[Any, _Found] = {}  # by operator, arguments, forms and threads; for the life of the process
_Slot = tuple[int, int]
ONCE = 0  # in place of the samples of a microbatch, for what runs or exists once a step


class Prober:
    """Exact costs of one program's tasks. `notes` says in words what could not be measured."""

    def __init__(self, program: Program, inputs: dict[int, torch.Tensor]) -> None:
        self._program = program
        self._metas: dict[_Slot, Meta] = {(program.inputs[at], ONCE): Meta.of(tensor) for at, tensor in inputs.items()}
        self._device = next((tensor.device for tensor in inputs.values()), torch.device("cpu"))
        self._found: dict[_Slot, TaskCost] = {}
        self._estimate = estimated(program)
        self._failed: set[str] = set()
        self._local = [value.local for value in program.values]
        self._done: set[int] = set()
        self._unavailable = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the prediction does not know."""
        if self._unavailable:
            return (self._unavailable,)
        failed = ", ".join(sorted(self._failed))
        return (f"workspace unknown (could not be run alone): {failed}",) if failed else ()

    def costs(self, samples: frozenset[int]) -> Coster | None:
        """Costs for microbatches of these sizes; None where nothing can be measured now."""
        missing = sorted(samples - self._done, reverse=True)
        if missing and not self._unavailable:
            self._marks: list[tuple[Any, int, int]] = []
            self._pending: dict[_Slot, Any] = {}
            try:
                on_cpu = self._device.type == "cpu"
                events = memory_events(lambda: self._walk(missing)) if on_cpu else self._walk(missing)
            except MeasureError:
                self._unavailable = "operators were not measured: a profiler is running"
                return None
            self._read(events)
            self._done.update(missing)
        if self._unavailable:
            return None
        return lambda task, count: self._found[task.id, ONCE if task.kind is Kind.ONCE else count]

    # ---- running

    def _walk(self, samples: Sequence[int]) -> MemoryEvents:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for count in samples:
                for task in self._program.tasks:
                    slot = (task.id, ONCE if task.kind is Kind.ONCE else count)
                    if slot not in self._found and slot not in self._pending:
                        self._task(task, slot)
        return []

    def _task(self, task: Task, slot: _Slot) -> None:
        samples = slot[1]
        metas = [self._metas[self._slot(value, samples)] for value in task.inputs]
        key = (_kernel_key(task, self._program), samples, tuple(metas), torch.get_num_threads())
        if key not in _KNOWN:
            self._run(key, task, samples, metas)
        found = _KNOWN.get(key)
        if found is None:
            self._give_up(task, samples)
            return
        self._pending[slot] = key
        for value, output in zip(task.outputs, found.outputs, strict=False):
            if value is not None and output is not None:
                self._metas[self._slot(value, samples)] = output[0]

    def _slot(self, value: int, samples: int) -> _Slot:
        return (value, samples if self._local[value] else ONCE)

    def _give_up(self, task: Task, samples: int) -> None:
        self._failed.add(task.origin.op)
        self._found[task.id, samples] = self._estimate(task, samples or self._program.batch)
        for value in task.outputs:
            if value is not None:
                self._metas.setdefault(self._slot(value, samples), self._guess(value, samples))

    def _guess(self, value: int, samples: int) -> Meta:
        item = self._program.values[value]
        shape = list(item.shape)
        if item.layout is not None:
            shape[item.layout.dim] = item.layout.per_sample * samples
        dense = torch.empty(shape, device="meta")
        dtype = {1: torch.bool, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}.get(item.itemsize, torch.float32)
        return Meta(tuple(shape), tuple(dense.stride()), dtype, self._device)

    def _run(self, key: Any, task: Task, samples: int, metas: Sequence[Meta]) -> None:
        inputs = [meta.dummy(touched=not task.view) for meta in metas]
        call = self._call(task, samples)
        on_cuda = self._device.type == "cuda"
        try:
            if on_cuda:
                torch.cuda.reset_peak_memory_stats(self._device)
                before = torch.cuda.memory_allocated(self._device)
            begin = time.time_ns()
            results = call(*inputs)
            end = time.time_ns()
        except Exception:  # an operator that refuses zeros, such as a Cholesky factor
            return
        outputs: list[tuple[Meta, int, int | None] | None] = []
        results = (results,) if task.single or task.kind in (Kind.SLICE, Kind.GATHER, Kind.REDUCE) else tuple(results)
        shown = {tensor.untyped_storage().data_ptr(): at for at, tensor in enumerate(inputs) if tensor.numel()}
        mine: dict[int, int] = {}
        for value, tensor in zip(task.outputs, results, strict=False):
            if value is None or not isinstance(tensor, torch.Tensor):
                outputs.append(None)
                continue
            address = tensor.untyped_storage().data_ptr()
            nbytes = tensor.untyped_storage().nbytes()
            if nbytes == 0 or (task.view and not inputs):  # nothing, or a constant that the graph holds
                outputs.append((Meta.of(tensor), 0, None))
            elif address in shown:
                outputs.append((Meta.of(tensor), 0, shown[address]))
            elif address in mine:
                outputs.append((Meta.of(tensor), 0, -1 - mine[address]))
            else:
                mine[address] = len(outputs)
                outputs.append((Meta.of(tensor), nbytes, None))
        peak = torch.cuda.max_memory_allocated(self._device) - before if on_cuda else 0
        _KNOWN[key] = _Found(peak, tuple(outputs))
        if not on_cuda:
            self._marks.append((key, begin, end))

    def _call(self, task: Task, samples: int) -> Callable[..., Any]:
        batch = self._program.batch
        if task.kind is Kind.SLICE:
            layout = task.layout
            assert layout is not None
            return lambda x: cut(x, layout, 0, samples, batch)
        if task.kind is Kind.GATHER:
            (value,) = task.outputs
            assert value is not None
            shape = self._program.values[value].shape
            return (lambda x: x) if samples == batch else (lambda x: x.new_empty(shape))
        if task.kind is Kind.REDUCE:
            many = samples != batch
            return lambda x: x if not many or owns_dense_storage(x) else x.clone(memory_format=torch.contiguous_format)
        assert task.kernel is not None
        bound = task.kernel.bind()
        return lambda *tensors: bound(samples or batch, *tensors)

    # ---- reading

    def _read(self, events: MemoryEvents) -> None:
        position = 0
        for key, begin, end in self._marks:
            level = peak = 0
            while position < len(events) and events[position][0] < begin:
                position += 1
            while position < len(events) and events[position][0] <= end:
                level += events[position][1]
                peak = max(peak, level)
                position += 1
            _KNOWN[key] = _Found(peak, _KNOWN[key].outputs)
        by_id = self._program.by_id
        for slot, key in self._pending.items():
            found, task = _KNOWN[key], by_id[slot[0]]
            outs = [
                Out(value, output[1], _alias(output[2], task))
                for value, output in zip(task.outputs, found.outputs, strict=False)
                if value is not None and output is not None
            ]
            time_of = self._estimate(task, slot[1] or self._program.batch).time
            self._found[slot] = TaskCost(found.peak, tuple(outs), time_of)


def _alias(operand: int | None, task: Task) -> int | None:
    if operand is None:
        return None
    return task.inputs[operand] if operand >= 0 else task.outputs[-1 - operand]


def _kernel_key(task: Task, program: Program) -> Any:
    if task.kernel is not None:
        used = tuple(out is not None for out in task.outputs)
        return (task.kernel.fn, repr(task.kernel.args), repr(sorted(task.kernel.kwargs.items(), key=str)), used)
    (value,) = task.outputs
    assert value is not None
    return (task.kind, task.layout, program.values[value].shape, program.batch, task.reduction is Reduction.MOMENTS)
