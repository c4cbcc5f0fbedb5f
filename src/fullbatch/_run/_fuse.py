"""A schedule with groups of its cheap operators compiled, within the same budget.

A plan knows the memory of each operator to the byte. Inside of a compiled call that no longer holds: its operands live
to its end, and what it allocates is Inductor's choice. So a step is first run as it is, and the bytes that are live
before each group are noted (`_record`). Each compiled group is then measured alone (`_inductor`). It takes its place
only where

    live before it + the most it allocates <= the most that was ever live in the step without it,

and where it leaves behind what the operators left: as many bytes, in the same forms, with the same aliases. Else its
halves are tried. So the peak is at most that of the plan, whatever the compiler does. A group that is too small to
repay its call is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from fullbatch import _torch
from fullbatch._cost._costs import LAUNCH
from fullbatch._ir import Program
from fullbatch._plan._schedule import Action, Do, Schedule
from fullbatch._run._generated import Stage
from fullbatch._run._groups import Group, find_groups, halves
from fullbatch._run._inductor import Behaviour, Written
from fullbatch._run._record import Form, Record
from fullbatch._run._source import Fused, Item

NOTE = (
    "compiled: groups of cheap operators run as one kernel from the first step on, within the predicted peak; results "
    "are equal to rounding, not to the bit"
)

# Operators that start while a compiled call does.
_CALL = 4

# By `Written.key`, for the life of the process: blocks that repeat are compiled once, for every plan.
_PLAIN: dict[Any, Behaviour] = {}
_COMPILED: dict[Any, tuple[Callable[..., Any], Behaviour]] = {}


def fuse(program: Program, schedule: Schedule, inputs: dict[int, torch.Tensor], seed: int) -> list[Stage] | None:
    """The stages of `schedule` with groups in them; None while a profiler runs, under which nothing can be measured.

    Runs the step once, and drops what comes out. Takes seconds for each distinct group. Raises CompileError.
    """
    if _torch.profiler_running():
        return None
    fuser = _Fuser(program, Record(program, schedule, inputs, seed))
    *others, final = schedule.samples
    stages = []
    for at, phase in enumerate(schedule.phases):
        # Generated once for all microbatches, a body is compiled for one size.
        body = fuser.part(phase.body, (at, "body"), others[0]) if len(set(others)) == 1 else phase.body
        stages.append(Stage(phase.once, body, fuser.part(phase.last, (at, "last"), final)))
    return stages


class _Fuser:
    """Puts groups into parts of stages."""

    def __init__(self, program: Program, record: Record) -> None:
        self._program, self._record = program, record

    def part(self, actions: Sequence[Action], where: tuple[int, str], samples: int) -> list[Item]:
        """The items of one part for microbatches of so many samples."""
        items: list[Item] = []
        at = 0
        for group, call in self._chosen(find_groups(actions, self._program), actions, where, samples):
            tasks = tuple(task.id for task in group.tasks)
            items += actions[at : group.start]
            items += [Fused(tasks, group.inputs, group.outputs, call), *group.after]
            at = group.stop
        return [*items, *actions[at:]]

    def _chosen(
        self, groups: Iterable[Group], actions: Sequence[Action], where: tuple[int, str], samples: int
    ) -> Iterator[tuple[Group, Callable[..., Any]]]:
        for group in groups:
            call = self._call(group, actions, where, samples)
            if call is not None:
                yield group, call
            else:
                yield from self._chosen(halves(group, actions, self._program), actions, where, samples)

    def _call(
        self, group: Group, actions: Sequence[Action], where: tuple[int, str], samples: int
    ) -> Callable[..., Any] | None:
        """The compiled group, if it keeps the peak."""
        forms = [self._record.form(value, samples) for value in group.inputs]
        known = [form for form in forms if form is not None and not form.dtype.is_complex]
        written = Written.of(group, known, samples) if len(known) == len(forms) else None
        if written is None or not self._repays(group, samples):
            return None
        room = self._record.peak - self._record.before[(*where, group.start)]
        joined = sum(
            self._record.growth[(*where, at)] for at in range(group.start, group.stop) if actions[at].do is Do.REDUCE
        )
        plain = _plain(written)
        if plain.retained + joined > room:  # no compiler can do with less
            return None
        call, found = _compiled(written)
        fits = max(found.peak, found.retained + joined) <= room
        return call if fits and found.replaces(plain) else None

    def _repays(self, group: Group, samples: int) -> bool:
        """Whether what is no longer written and read, and what need not start, is more than a compiled call costs."""
        tasks = [task for task in group.tasks if not task.view]
        moved = sum(self._bytes(value, samples) for task in tasks for value in (*task.inputs, *task.outputs))
        kept = sum(self._bytes(value, samples) for value in (*group.inputs, *group.outputs))
        return moved - kept + LAUNCH * len(tasks) > LAUNCH * _CALL

    def _bytes(self, value: int | None, samples: int) -> int:
        form = None if value is None else self._record.form(value, samples)
        return 0 if form is None else form.nbytes


def _plain(written: Written) -> Behaviour:
    if written.key not in _PLAIN:
        _PLAIN[written.key] = written.behaviour(written.fn)
    return _PLAIN[written.key]


def _compiled(written: Written) -> tuple[Callable[..., Any], Behaviour]:
    if written.key not in _COMPILED:
        fn = written.compiled()
        _COMPILED[written.key] = fn, written.behaviour(fn)
    return _COMPILED[written.key]


__all__ = ["NOTE", "Form", "fuse"]
