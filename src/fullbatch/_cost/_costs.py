"""Bytes and time of one task for a microbatch of a given size.

Two sources: estimated from shapes, for comparing many plans without running anything, and measured by running each
distinct operator once on dummy tensors (`_probe`), for a peak that is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fullbatch._axis._kernels import IN_STRIDES
from fullbatch._ir import Kind, Program, Task


@dataclass(frozen=True, slots=True)
class Out:
    """An output's memory: its own `nbytes`, or those of the value that it is an alias of."""

    value: int
    nbytes: int
    alias: int | None = None


@dataclass(frozen=True, slots=True)
class TaskCost:
    """`peak`: most bytes allocated above the start while the task runs. `outs`: what is left of them."""

    peak: int
    outs: tuple[Out, ...]
    time: float = 0.0


Coster = Callable[[Task, int], TaskCost]  # (task, samples)

# The unit of time where nothing was measured is a byte moved. Floating-point operations that take as long as one:
OPERATIONS_PER_BYTE = 8.0

# Starting an operator costs about as much as moving this many bytes; it is what makes many tiny microbatches slow.
LAUNCH = 40_000


def own_cost(task: Task, program: Program) -> float:
    """Time of one run over the whole batch, in bytes moved."""
    return moved_bytes(task, program, program.batch) + task.flops / OPERATIONS_PER_BYTE


def estimated(program: Program) -> Coster:
    """Costs from shapes alone: outputs are dense, workspaces are none. Time is in bytes moved."""
    times = {task.id: own_cost(task, program) for task in program.runnable}
    cache: dict[tuple[int, int], TaskCost] = {}

    def cost(task: Task, samples: int) -> TaskCost:
        key = (task.id, samples)
        found = cache.get(key)
        if found is None:
            found = cache[key] = _estimate(program, task, samples, times[task.id] * samples / max(program.batch, 1))
        return found

    return cost


def moved_bytes(task: Task, program: Program, samples: int) -> int:
    """Bytes that one run for `samples` reads and writes, by shapes; none for a view.

    Nor for what joins or cuts the batch where there is one microbatch.
    """
    once = task.kind in (Kind.SLICE, Kind.GATHER, Kind.REDUCE)
    if task.view or (once and samples == program.batch):
        return 0
    read, written = (
        [program.values[value].nbytes(samples, program.batch) for value in values if value is not None]
        for values in (task.inputs + _read_twice(task), task.outputs)
    )
    if once:  # of what is whole, the microbatch's share is touched
        return 2 * sum(written) if task.kind is Kind.SLICE else (3 if task.kind is Kind.REDUCE else 2) * sum(read)
    return sum(read) + sum(written)


# Batch normalisation by statistics of the batch goes over what it reads once for these and once with them: how many of
# its operands, and the argument that says so.
_TWO_PASSES = {
    "aten._native_batch_norm_legit": (1, 5), "aten._native_batch_norm_legit_functional": (1, 5),
    "aten.native_batch_norm": (1, 5), "aten.native_batch_norm_backward": (2, 7),
}  # fmt: skip


def _read_twice(task: Task) -> tuple[int, ...]:
    """Operands that one run reads a second time."""
    kernel = task.kernel
    if kernel is None or not kernel.name.startswith("aten."):
        return ()
    operator = kernel.name.removesuffix(IN_STRIDES)
    count, training = _TWO_PASSES.get(operator.rsplit(".", 1)[0], (0, 0))
    return task.inputs[:count] if count and kernel.args[training] is True else ()


def _estimate(program: Program, task: Task, samples: int, time: float) -> TaskCost:
    outs = []
    for value in task.outputs:
        if value is None:
            continue
        alias = task.inputs[0] if (task.view or task.kind is Kind.REDUCE) and task.inputs else None
        nbytes = 0 if alias is not None else program.values[value].nbytes(samples, program.batch)
        if task.view and not task.inputs:  # a constant that the graph holds
            nbytes = 0
        if task.kind is Kind.REDUCE:
            nbytes = program.values[value].nbytes(None, program.batch)
        if task.fills:
            nbytes = program.values[value].itemsize
        outs.append(Out(value, nbytes, alias))
    return TaskCost(sum(out.nbytes for out in outs), tuple(outs), time)
