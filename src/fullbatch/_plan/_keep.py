"""What to keep across barriers and what to recompute: a price on bytes decides.

A value that a later stage reads is either held for *all* microbatches or recomputed for *one* at a time. It is held
where recomputing it, from what is held, costs more than `price` for each of its bytes. A price of zero holds all;
a high one recomputes even convolutions.
"""

from __future__ import annotations

from fullbatch._ir import Kind, Program, Task

# Floating-point operations that take as long as moving one byte, on an ordinary machine.
OPERATIONS_PER_BYTE = 8.0


def own_cost(task: Task, program: Program) -> float:
    """Time of one run over the whole batch, in bytes moved."""
    if task.view or task.kind in (Kind.SLICE, Kind.GATHER, Kind.REDUCE):
        return 0.0
    moved = sum(program.values[value].nbytes(None, program.batch) for value in task.inputs)
    moved += sum(program.values[out].nbytes(None, program.batch) for out in task.outputs if out is not None)
    return moved + task.flops / OPERATIONS_PER_BYTE


def choose_keep(program: Program, price: float) -> frozenset[int]:
    """Values to hold where a later stage reads them."""
    again: dict[int, float] = {}  # cost of having a local value once more
    keep: set[int] = set()
    for task in program.tasks:
        if task.kind is Kind.SLICE:
            again.update((out, 0.0) for out in task.outputs if out is not None)
        if task.kind is not Kind.LOCAL:
            continue
        cost = own_cost(task, program) + sum(again.get(value, 0.0) for value in task.inputs if value not in keep)
        for out in task.outputs:
            if out is None:
                continue
            again[out] = cost
            if cost > price * program.values[out].nbytes(None, program.batch):
                keep.add(out)
    return frozenset(keep)
