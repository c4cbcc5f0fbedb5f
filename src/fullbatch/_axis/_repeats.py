"""What runs in place of an operator that has run before: its slices alone.

Sums over the batch are formed once, at the first run. An operator that takes a mask of the outputs that are wanted,
such as the backward of a convolution, need not make its summands again: that is half of its work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from torch import fx

from fullbatch import _torch
from fullbatch._axis._operator import flops, kernel
from fullbatch._ir import Kernel, Task, Value

MASK = "output_mask"
"""The argument of such an operator."""


def repeats(tasks: Sequence[Task], masked: Mapping[int, fx.Node], values: Sequence[Value], ident: int) -> list[Task]:
    """Tasks, numbered from `ident`, that make the slices of others in less work. `masked`: tasks that take a mask."""
    found: list[Task] = []
    for task in tasks:
        if task.id in masked:
            slices = {at for at, out in enumerate(task.outputs) if out is not None and values[out].layout}
            less = _repeated(masked[task.id], task, slices, ident + len(found))
            found += [less] if less is not None else []
    return found


def _repeated(node: fx.Node, task: Task, slices: AbstractSet[int], ident: int) -> Task | None:
    """What makes the outputs of `task` at the positions `slices`; None where that is no less work, or nothing."""
    assert task.kernel is not None
    at = [argument.name for argument in _torch.schema(node.target).arguments].index(MASK)
    mask = [wanted and position in slices for position, wanted in enumerate(task.kernel.args[at])]
    work = flops(node, {at: mask})
    if not slices or work >= task.flops:
        return None
    args = (*task.kernel.args[:at], mask, *task.kernel.args[at + 1 :])
    outputs = tuple(out if position in slices else None for position, out in enumerate(task.outputs))
    return replace(
        task, id=ident, outputs=outputs, kernel=Kernel(kernel(node), args, task.kernel.kwargs), flops=work,
        repeats=task.id,
    )  # fmt: skip
