"""Which consecutive operators of a microbatch may become one compiled call.

Pointwise operators, normalisations and reductions are bound by memory: each reads what the last one wrote. Fused they
read and write once, and what lives only between them is never written. Matrix products and convolutions gain nothing
and stay as they are; so do random operators, whose draws a compiler would change.

A group is a run of such operators between others, with the frees and the adding up of summands that stand among them:
these come after the call. What the group makes and frees again is not seen outside of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fullbatch import _torch
from fullbatch._ir import Kind, Program, Reduction, Task
from fullbatch._plan._schedule import Action, Do

_NAMES = {
    "aten._softmax", "aten._softmax_backward_data", "aten._log_softmax", "aten._log_softmax_backward_data",
    "aten.native_layer_norm", "aten.native_layer_norm_backward", "aten.native_group_norm",
    "aten.native_group_norm_backward", "aten.sum.dim_IntList", "aten.sum", "aten.mean.dim", "aten.mean", "aten.amax",
    "aten.amin", "aten.var.correction", "aten.var_mean.correction", "aten._to_copy", "aten.hardtanh_backward",
    "aten.leaky_relu_backward", "aten.hardswish", "aten.hardswish_backward", "aten.elu_backward",
    "aten.softplus_backward", "aten.glu", "aten.glu_backward",
    # Of fullbatch's own batch normalisation: what is left of it for a slice.
    "_normalise", "_input_gradient", "_gradient_sums",
}  # fmt: skip

# Inductor's time grows with the size of a group, and what it gains does not.
LARGEST = 64


def may_fuse(task: Task) -> bool:
    """Whether a task may be in a group."""
    kernel = task.kernel
    if task.kind is not Kind.LOCAL or task.random or kernel is None or not task.inputs:
        return False
    fn: Any = kernel.fn
    if task.view and kernel.name.startswith("aten."):
        return True
    if isinstance(fn, _torch.OpOverload) and torch.Tag.pointwise in fn.tags:
        return True
    return kernel.name.removesuffix(".default") in _NAMES


@dataclass(frozen=True)
class Group:
    """Actions [start, stop) of a part of a stage: `tasks` in one call, then the actions `after`."""

    start: int
    stop: int
    tasks: tuple[Task, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    after: tuple[Action, ...]


def find_groups(part: Sequence[Action], program: Program, start: int = 0, stop: int | None = None) -> Iterator[Group]:
    """The groups among actions [start, stop) of a part, in order; none overlap."""
    stop = len(part) if stop is None else stop
    at = start
    while at < stop:
        if part[at].do is not Do.RUN:
            at += 1
            continue
        end = _end(part, program, at, stop)
        group = _group(part, program, at, end)
        if group is not None:
            yield group
        at = max(end, at + 1)


def halves(group: Group, part: Sequence[Action], program: Program) -> Iterator[Group]:
    """The groups of its first and of its second half."""
    runs = [at for at in range(group.start, group.stop) if part[at].do is Do.RUN]
    middle = runs[len(runs) // 2]
    yield from find_groups(part, program, group.start, middle)
    yield from find_groups(part, program, middle, group.stop)


def _end(part: Sequence[Action], program: Program, start: int, stop: int) -> int:
    """Where the group ends that begins at `start`: behind its last run."""
    seen: set[int] = set()  # made, read or freed: a run that makes it again is for another group
    reduced: set[int] = set()
    end, count = start, 0
    for at in range(start, stop):
        action = part[at]
        if action.do is Do.FREE:
            seen.add(action.subject)
            continue
        task = program.by_id.get(action.subject)
        if task is not None and action.do is Do.REDUCE and task.reduction is Reduction.SUM:
            reduced.update(out for out in task.outputs if out is not None)
            continue
        if task is None or action.do is not Do.RUN or not may_fuse(task) or count == LARGEST:
            break
        outs = [out for out in task.outputs if out is not None]
        if not seen.isdisjoint(outs) or not reduced.isdisjoint(task.inputs):
            break
        seen.update(outs, task.inputs)
        end, count = at + 1, count + 1
    return end


def _group(part: Sequence[Action], program: Program, start: int, stop: int) -> Group | None:
    actions = part[start:stop]
    tasks = [program.by_id[action.subject] for action in actions if action.do is Do.RUN]
    if sum(1 for task in tasks if not task.view) < 2:
        return None
    made: dict[int, None] = {}
    inputs: dict[int, None] = {}
    for task in tasks:
        inputs.update(dict.fromkeys(value for value in task.inputs if value not in made))
        made.update(dict.fromkeys(out for out in task.outputs if out is not None))
    summed = {value for action in actions if action.do is Do.REDUCE for value in program.by_id[action.subject].inputs}
    inside = {action.subject for action in actions if action.do is Do.FREE} & (made.keys() - summed)
    outputs = tuple(value for value in made if value not in inside)
    after = [a for a in actions if a.do is Do.REDUCE or (a.do is Do.FREE and a.subject not in inside)]
    return Group(start, stop, tuple(tasks), tuple(inputs), outputs, tuple(after)) if outputs else None
