"""The whole batch as one microbatch: the program for a step that nothing splits.

A step with room enough, or with a single sample, needs no operator split and no statistic merged. Its program is the
captured graph as it is: each operator runs once, in the form that plain PyTorch runs, and may be run again where its
value is dropped.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fullbatch._axis._build import build
from fullbatch._ir import Kind, Origin, Program, Reduction, Task, Value


def build_whole(joint: Any, batch: int) -> Program:
    """The program of a captured step in which the whole batch is the only microbatch."""
    program = build(joint, {}, batch)
    made = {out for task in program.tasks if not task.eager for out in task.outputs if out is not None}
    # Summands are local and do not grow with the microbatch: what the only microbatch makes.
    values = [replace(value, partial=True) if value.id in made else value for value in program.values]
    tasks: list[Task] = []
    results: dict[int, int] = {}
    next_task = 1 + max((task.id for task in program.tasks), default=0)
    for task in program.tasks:
        if not task.eager:
            tasks.append(replace(task, kind=Kind.LOCAL))
            continue
        # Run once and never again: what it reads is complete first, as for several microbatches.
        read: dict[int, int] = {}
        for value in dict.fromkeys(task.inputs):
            if value in made:
                out = Value(len(values), values[value].name, values[value].shape, values[value].itemsize)
                values.append(out)
                tasks.append(Task(next_task, Kind.REDUCE, (value,), (out.id,), program.producers[value].origin))
                next_task += 1
                read[value] = out.id
        tasks.append(replace(task, inputs=tuple(read.get(value, value) for value in task.inputs)))
    for value in dict.fromkeys(program.outputs):
        if value not in made:  # an input that is returned as it is
            results[value] = value
            continue
        out = Value(len(values), values[value].name, values[value].shape, values[value].itemsize)
        values.append(out)
        origin = Origin("output", backward=program.producers[value].origin.backward)
        tasks.append(Task(next_task, Kind.REDUCE, (value,), (out.id,), origin, reduction=Reduction.SUM))
        results[value] = out.id
        next_task += 1
    outputs = [results[value] for value in program.outputs]
    gradients = tuple(results[value] for value in program.gradients)
    return Program(batch, values, tasks, program.inputs, outputs, gradients=gradients)
