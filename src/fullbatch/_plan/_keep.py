"""What an operator takes, in bytes moved: the unit of time of plans that nothing was measured for."""

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
