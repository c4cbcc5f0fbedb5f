"""Exact bytes of each operator, by running it once alone on dummy tensors.

What an operator allocates inside itself (a convolution's reordered weights, a copy of a gradient that is not
contiguous) is written nowhere. So each distinct operator of a program, at the shapes and strides it will see, is run
once under the memory counter. At any moment only one operator's operands exist, which the step itself needs too, so
that probing never takes more memory than the step. What was found is known for the life of the process, and on disk
(`_cache`) for those that come after it.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence

import torch

from fullbatch._cost._cache import CostFile, cost_file
from fullbatch._cost._costs import Coster, Out, TaskCost, estimated
from fullbatch._cost._forms import Found, Meta
from fullbatch._cost._keys import HERE, digest, machine, operator_text, settings
from fullbatch._cost._operator import alone, outcome, without_running
from fullbatch._cost._time import Job, time_jobs
from fullbatch._errors import MeasureError
from fullbatch._ir import Kind, Program, Task
from fullbatch._memory._free import free_bytes
from fullbatch._memory._measure import MemoryEvents, memory_events

_KNOWN: dict[str, Found] = {}  # by `_keys`; for the life of the process
_NUMBERS = itertools.count()
_Slot = tuple[int, int]
_Todo = deque[tuple[Task, int]]
NOT_RUN = "workspace unknown (could not be run alone): "
"""Begins the note of operators whose bytes are estimated, since they raised."""

# Below so many bytes of results nobody is asked how much memory is free.
_LARGE = 2**28

ONCE = 0  # in place of the samples of a microbatch, for what runs or exists once a step


class Prober:
    """Exact costs of one program's tasks. `notes` says in words what could not be measured."""

    def __init__(self, program: Program, inputs: dict[int, torch.Tensor]) -> None:
        self._program = program
        self._metas: dict[_Slot, Meta] = {(program.inputs[at], ONCE): Meta.of(tensor) for at, tensor in inputs.items()}
        self._device = next((tensor.device for tensor in inputs.values()), torch.device("cpu"))
        self._keys: dict[_Slot, str] = {}  # of what was measured
        self._found: dict[_Slot, TaskCost] = {}
        self._estimate = estimated(program)
        self._failed: set[str] = set()
        self._local = [value.local for value in program.values]
        self._done: set[int] = set()
        self._unavailable = ""
        self._number = next(_NUMBERS)
        self._here: dict[str, Found] = {}  # operators that another process could not recognise
        self._fresh: dict[str, Found] = {}  # run, and their bytes not read yet
        self._marks: list[tuple[str, int, int]] = []

    @property
    def notes(self) -> tuple[str, ...]:
        """What the prediction does not know."""
        if self._unavailable:
            return (self._unavailable,)
        failed = ", ".join(sorted(self._failed))
        return (f"{NOT_RUN}{failed}",) if failed else ()

    def costs(self, samples: frozenset[int]) -> Coster | None:
        """Costs for microbatches of these sizes; None where nothing can be measured now."""
        missing = sorted(samples - self._done, reverse=True)
        if missing and not self._unavailable:
            try:
                self._measure(missing)
            except MeasureError:
                self._unavailable = "operators were not measured: a profiler is running"
                return None
            self._done.update(missing)
        if self._unavailable:
            return None
        return lambda task, count: self._found[_slot(task, count)]

    def timed(self, samples: frozenset[int], seconds_limit: float = 2.0) -> Coster | None:
        """As `costs`, with `time` in seconds: measured, the operators that take most first, for `seconds_limit`.

        What the limit leaves out is estimated from the rates of the machine (`_rates`). One operator may overrun the
        limit by one run of itself. None where `costs` is None. Seconds are kept in the file of costs.
        """
        exact = self.costs(samples)
        if exact is None:
            return None
        slots = [_slot(task, count) for count in sorted(samples) for task in self._program.runnable]
        jobs = [self._job(slot) for slot in dict.fromkeys(slots)]
        seconds = time_jobs(self._program, jobs, self._device, seconds_limit)
        return lambda task, count: _with_time(exact(task, count), seconds[_slot(task, count)])

    def _job(self, slot: _Slot) -> Job:
        task = self._program.by_id[slot[0]]
        metas = [self._metas[self._slot(value, slot[1])] for value in task.inputs]
        return Job(slot, task, slot[1], metas, self._keys.get(slot))

    # ---- running

    def _measure(self, samples: Sequence[int]) -> None:
        self._base = digest(machine(self._device), settings(self._device, torch.get_num_threads()))
        self._file = cost_file()
        slots = dict.fromkeys(_slot(task, count) for count in samples for task in self._program.runnable)
        by_id = self._program.by_id
        todo: _Todo = deque((by_id[at], count) for at, count in slots if (at, count) not in self._found)
        walked = list(todo)
        self._fresh, self._marks = {}, []
        self._walk(todo, run=False)
        if todo:
            if self._device.type == "cpu":
                self._read(memory_events(lambda: self._run_all(todo)))
            else:
                self._run_all(todo)
        self._remember()
        for task, count in walked:
            if (task.id, count) in self._keys:
                self._found[task.id, count] = self._cost(task, count)

    def _run_all(self, todo: _Todo) -> MemoryEvents:
        with torch.no_grad(), torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            self._walk(todo, run=True)
        return []

    def _walk(self, todo: _Todo, run: bool) -> None:
        """Takes tasks off `todo` in order; without `run`, up to the first that no one has measured."""
        while todo:
            if not self._task(*todo[0], run):
                return
            todo.popleft()

    def _task(self, task: Task, samples: int, run: bool) -> bool:
        metas = [self._metas[self._slot(value, samples)] for value in task.inputs]
        key = self._key(task, samples, metas)
        found = self._known(key, task, metas)
        if found is None and (run or _is_constant(task)):
            found = self._run(key, task, samples, metas)
            if found is None:
                self._give_up(task, samples)
                return True
        if found is None:
            return False
        self._keys[task.id, samples] = key
        for value, output in zip(task.outputs, found.outputs, strict=False):
            if value is not None and output is not None:
                self._metas[self._slot(value, samples)] = output[0]
        return True

    def _key(self, task: Task, samples: int, metas: Sequence[Meta]) -> str:
        text = operator_text(task, self._program, samples or self._program.batch)
        if text is None:  # here the program keeps the task
            return f"{HERE}{self._number} {task.id} {samples}"
        return digest(self._base, text, *[meta.text for meta in metas])

    def _known(self, key: str, task: Task, metas: Sequence[Meta]) -> Found | None:
        found = self._fresh.get(key) or self._here.get(key) or _KNOWN.get(key)
        if found is None and not key.startswith(HERE):
            found = without_running(task, metas) or _from_file(self._file, key, task)
            if found is not None:
                _KNOWN[key] = found
        return found

    def _run(self, key: str, task: Task, samples: int, metas: Sequence[Meta]) -> Found | None:
        if self._beyond_memory(task, samples):
            return None
        call = alone(task, self._program, samples)
        on_cuda, before, peak = self._device.type == "cuda", 0, 0
        try:
            inputs = [meta.dummy() for meta in metas]
            if on_cuda:
                torch.cuda.reset_peak_memory_stats(self._device)
                before = torch.cuda.memory_allocated(self._device)
            begin = time.time_ns()
            results = call(*inputs)
            end = time.time_ns()
        except Exception:  # operands beyond all memory; an operator that refuses zeros, such as a Cholesky factor
            return None
        if on_cuda:
            peak = torch.cuda.max_memory_allocated(self._device) - before
        elif not _is_constant(task):
            self._marks.append((key, begin, end))
        found = Found(peak, outcome(task, inputs, results))
        self._fresh[key] = found
        return found

    def _beyond_memory(self, task: Task, samples: int) -> bool:
        """Whether its results are more than is free: asked for, such memory may end the process."""
        made = self._estimate(task, samples or self._program.batch).peak
        return made > _LARGE and made > free_bytes(self._device)

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

    def _slot(self, value: int, samples: int) -> _Slot:
        return (value, samples if self._local[value] else ONCE)

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
            self._fresh[key] = Found(peak, self._fresh[key].outputs)

    def _remember(self) -> None:
        for key, found in self._fresh.items():
            if key.startswith(HERE):
                self._here[key] = found
                continue
            _KNOWN[key] = found
            if self._file is not None:
                self._file.put(key, found.to_json())
        if self._file is not None:
            self._file.flush()
        self._fresh = {}

    def _cost(self, task: Task, samples: int) -> TaskCost:
        key = self._keys[task.id, samples]
        found = self._here[key] if key.startswith(HERE) else _KNOWN[key]
        outs = [
            Out(value, output[1], _alias(output[2], task))
            for value, output in zip(task.outputs, found.outputs, strict=False)
            if value is not None and output is not None
        ]
        return TaskCost(found.peak, tuple(outs), self._estimate(task, samples or self._program.batch).time)


def _slot(task: Task, samples: int) -> _Slot:
    return (task.id, ONCE if task.kind is Kind.ONCE else samples)


def _is_constant(task: Task) -> bool:
    """A tensor that the graph carries: it is there already, and allocates nothing."""
    return task.view and not task.inputs


def _from_file(file: CostFile | None, key: str, task: Task) -> Found | None:
    kept = None if file is None else file.get(key)
    if file is None or kept is None:
        return None
    try:
        found = Found.from_json(kept)
        if not found.fits(len(task.inputs), len(task.outputs)):
            raise ValueError("it is of another operator")
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        file.reject(key, f"an entry makes no sense: {error}")
        return None
    return found


def _alias(operand: int | None, task: Task) -> int | None:
    if operand is None:
        return None
    return task.inputs[operand] if operand >= 0 else task.outputs[-1 - operand]


def _with_time(cost: TaskCost, seconds: float) -> TaskCost:
    return TaskCost(cost.peak, cost.outs, seconds)
