"""Costs of microbatches of any size, in proportion to those of one that was measured.

To measure an operator is to run it, and to run all of them takes as long as a good part of a step. To compare sizes of
microbatch it is enough to measure the smallest; what is chosen is measured at its own size before anything is promised.
"""

from __future__ import annotations

from fullbatch._cost._costs import Coster, Out, TaskCost
from fullbatch._ir import Kind, Program, Task


def in_proportion(program: Program, measured: Coster, size: int) -> Coster:
    """Costs by what `measured` says of `size` samples: bytes grow with them, but for sums and for what is whole."""
    found: dict[tuple[int, int], TaskCost] = {}

    def cost(task: Task, samples: int) -> TaskCost:
        if task.kind is Kind.ONCE or samples == size:
            return measured(task, size)
        key = task.id, samples
        if key not in found:
            found[key] = _grown(program, measured(task, size), samples / size)
        return found[key]

    return cost


def _grown(program: Program, cost: TaskCost, share: float) -> TaskCost:
    values = [program.values[out.value] for out in cost.outs]
    grow = [value.local and value.layout is not None for value in values]
    outs = tuple(
        Out(out.value, int(out.nbytes * share), out.alias) if grows else out
        for out, grows in zip(cost.outs, grow, strict=True)
    )
    whole = sum(out.nbytes for out, grows in zip(cost.outs, grow, strict=True) if not grows)
    return TaskCost(whole + int((cost.peak - whole) * share), outs, cost.time * share)
