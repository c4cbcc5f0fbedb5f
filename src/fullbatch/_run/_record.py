"""What one run of a schedule holds, action by action: the ground on which compiling is decided.

Storages are counted, not tensors: a view shares its base. What was given to the step is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from fullbatch import _torch
from fullbatch._ir import Program
from fullbatch._plan._schedule import ALL, EACH, Action, Do, Schedule
from fullbatch._run._interpreter import Interpreter, Slot, Walk
from fullbatch._run._source import note, touched

Place = tuple[int, str, int]  # a stage, a part of it, and the position of an action there


@dataclass(frozen=True)
class Form:
    """A tensor's form in memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        """The form of `tensor`; a dimension of one element has no stride that matters, and gets 1."""
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        stride = tuple(1 if size == 1 else step for size, step in pairs)
        return cls(tuple(tensor.shape), stride, tensor.dtype, tensor.device)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize

    def dummy(self) -> torch.Tensor:
        """Zeros of this form."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).zero_()


class Record:
    """Bytes that were live before each action (the most over all microbatches), and the form of every value.

    `peak` is the most bytes that were live after any action. That is no more than the measured peak of the same run,
    which has the operators' own workspaces besides.
    """

    def __init__(self, program: Program, schedule: Schedule, inputs: dict[int, torch.Tensor], seed: int) -> None:
        self.before: dict[Place, int] = {}
        self.growth: dict[Place, int] = {}
        self.forms: dict[tuple[int, int], Form] = {}  # by value and samples of the microbatch (ALL: whole)
        self.peak = 0
        self._program, self._samples = program, schedule.samples
        self._local = [value.local for value in program.values]
        self._held = _Held(inputs.values())
        self._walk = Interpreter(program, schedule).begin(inputs, seed)
        for value, at in ((value, at) for at, value in program.inputs.items()):
            self._see(value, ALL, inputs[at])
        final = len(schedule.samples) - 1
        for stage, phase in enumerate(schedule.phases):
            self._part(phase.once, (stage, "once"), ALL)
            for microbatch in range(len(schedule.samples)):
                part = ("last", phase.last) if microbatch == final else ("body", phase.body)
                self._part(part[1], (stage, part[0]), microbatch)
        del self._walk, self._held  # and with them the results

    def form(self, value: int, samples: int) -> Form | None:
        """How a value lies in memory for a microbatch of so many samples; None for what is no tensor."""
        return self.forms.get((value, samples if self._local[value] else ALL))

    def _part(self, actions: Sequence[Action], where: tuple[int, str], microbatch: int) -> None:
        for position, action in enumerate(actions):
            place = (*where, position)
            before = self._held.live
            self.before[place] = max(self.before.get(place, 0), before)
            try:
                self._take(Action(action.do, action.subject, microbatch) if action.microbatch == EACH else action)
            except Exception as error:
                note(error, action, self._program, where[0], microbatch, len(self._samples))
                raise
            self.growth[place] = max(self.growth.get(place, 0), self._held.live - before)
            self.peak = max(self.peak, self._held.live)

    def _take(self, action: Action) -> None:
        self._walk.take(action)
        if action.do in (Do.FREE, Do.OFFLOAD):
            self._held.put((action.subject, action.microbatch), None)
            return
        reads, makes, _ = touched(action, self._program)
        for value in makes or reads:
            slot = self._walk.slot(value, action.microbatch)
            tensor = self._walk.live.get(slot)
            self._held.put(slot, tensor)
            samples = ALL if slot[1] == ALL else self._samples[slot[1]]
            self._see(value, samples, tensor)

    def _see(self, value: int, samples: int, tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor):
            self.forms[value, samples] = Form.of(tensor)


class _Held:
    """Live storages, counted by the slots that show them."""

    def __init__(self, ignored: Any) -> None:
        self.live = 0
        self._ignored = {_torch.storage_key(tensor) for tensor in ignored}
        self._shown: dict[Slot, int] = {}
        self._count: dict[int, int] = {}
        self._bytes: dict[int, int] = {}

    def put(self, slot: Slot, tensor: Any) -> None:
        """`slot` shows `tensor` from now on; what is no tensor shows nothing."""
        if isinstance(tensor, torch.Tensor) and _torch.storage_key(tensor) not in self._ignored:
            key = _torch.storage_key(tensor)
            if key not in self._count:
                self._count[key], self._bytes[key] = 0, tensor.untyped_storage().nbytes()
                self.live += self._bytes[key]
            self._count[key] += 1
            self._drop(slot)
            self._shown[slot] = key
        else:
            self._drop(slot)

    def _drop(self, slot: Slot) -> None:
        key = self._shown.pop(slot, None)
        if key is None:
            return
        self._count[key] -= 1
        if not self._count[key]:
            del self._count[key]
            self.live -= self._bytes.pop(key)


__all__ = ["Form", "Place", "Record", "Walk"]
