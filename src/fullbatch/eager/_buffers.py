"""Buffers of a step that runs `loss_fn` once a microbatch and must move them once.

Limit that forced it: each microbatch updates running statistics, counters and power iterations, where the plain step
updates them once. Shape of the answer: every microbatch begins with the buffers as they were before the step, and at
the end each buffer gets one value. Where all microbatches left the same, it is that (`num_batches_tracked`, spectral
norm). Where they did not, it is the mean over the samples or the sum of the changes, whichever the probe found to be
what the undivided batch leaves. An update with momentum is linear in the batch's statistic, so that the mean over
microbatches is one momentum update with the mean of the microbatches' statistics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import nn

from fullbatch._errors import Fault, ModelError
from fullbatch._tree import modules


class Rule(StrEnum):
    """How a buffer's value after the step follows from those that its microbatches leave."""

    SAME = "the same in all microbatches"
    MEAN = "the mean over the samples"
    SUM = "the sum of the changes"
    NONE = "none"


@dataclass(frozen=True)
class Held:
    """Where a buffer is, and what it was: the tensor itself, and a copy of its values."""

    module: nn.Module
    key: str
    tensor: torch.Tensor
    start: torch.Tensor

    def now(self) -> torch.Tensor | None:
        """The buffer, which the user's code may have bound anew."""
        return getattr(self.module, self.key, None)


def holders(model: Any) -> dict[str, tuple[nn.Module, str, torch.Tensor]]:
    """Each buffer once, by qualified name: its module, its name there, and the tensor."""
    found: dict[str, tuple[nn.Module, str, torch.Tensor]] = {}
    seen: set[int] = set()
    for prefix, root in modules(model).items():
        for where, module in root.named_modules():
            for key, tensor in module.named_buffers(recurse=False):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    found[".".join(part for part in (prefix, where, key) if part)] = (module, key, tensor)
    return found


class _Moved:
    """What the microbatches left in one buffer."""

    def __init__(self, held: Held, samples: int, microbatches: int) -> None:
        self._held, self._samples, self._microbatches = held, samples, microbatches
        # Microbatches that were before this one left it alone.
        self._first = held.start if microbatches else None
        self._mean: torch.Tensor | None = None
        self._sum: torch.Tensor | None = None
        self._formed = True  # whether all have the shape and dtype that the buffer had
        self.same = True

    def add(self, value: torch.Tensor, samples: int) -> None:
        start = self._held.start
        self._formed = self._formed and value.shape == start.shape and value.dtype == start.dtype
        if self._first is None:
            self._first = value.detach().clone()
        elif self.same and not (value.shape == self._first.shape and torch.equal(value, self._first)):
            self.same = False
            if self._formed:
                self._sum, self._mean = self._repeated(self._microbatches), self._wide(self._first) * self._samples
        if self._sum is not None and self._mean is not None and self._formed:
            self._sum += self._wide(value) - self._wide(start)
            self._mean += self._wide(value) * samples
        self._samples += samples
        self._microbatches += 1

    def value(self, rule: Rule) -> torch.Tensor | None:
        """The value after the step by `rule`; None where the rule does not apply."""
        if self._microbatches == 1 or (self.same and rule in (Rule.SAME, Rule.MEAN)):
            return self._first
        if rule not in (Rule.MEAN, Rule.SUM) or not self._formed:
            return None
        start = self._held.start
        if rule is Rule.SUM:
            change = self._repeated(self._microbatches) if self._sum is None else self._sum
            return (self._wide(start) + change).to(start.dtype)
        if self._mean is None or not (start.is_floating_point() or start.is_complex()):
            return None
        return (self._mean / self._samples).to(start.dtype)

    def _repeated(self, times: int) -> torch.Tensor:
        """The change of the first microbatch, so many times."""
        assert self._first is not None
        return (self._wide(self._first) - self._wide(self._held.start)) * times

    @staticmethod
    def _wide(value: torch.Tensor) -> torch.Tensor:
        return value.detach().to(_wide(value.dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.promote_types(dtype, torch.float32)
    return torch.int64


class Buffers:
    """The buffers of a model while a step runs."""

    def __init__(self, model: Any) -> None:
        self.held = {
            name: Held(module, key, tensor, tensor.detach().clone())
            for name, (module, key, tensor) in holders(model).items()
        }
        self._moved: dict[str, _Moved] = {}
        self._samples = self._microbatches = 0

    def note(self, samples: int) -> None:
        """One microbatch of so many samples is done."""
        for name, held in self.held.items():
            now = held.now()
            if now is None or (name not in self._moved and torch.equal(now, held.start)):
                continue
            if name not in self._moved:
                self._moved[name] = _Moved(held, self._samples, self._microbatches)
            self._moved[name].add(now, samples)
        self._samples += samples
        self._microbatches += 1

    def bind(self) -> None:
        """The modules hold the tensors again that they held before the step."""
        for held in self.held.values():
            if held.now() is not held.tensor:
                setattr(held.module, held.key, held.tensor)

    def rewind(self) -> None:
        """Those tensors hold the values again that they held before the step."""
        with torch.no_grad():
            for held in self.held.values():
                if not torch.equal(held.tensor, held.start):
                    held.tensor.copy_(held.start)

    @property
    def moving(self) -> dict[str, bool]:
        """Buffers that were changed, and whether all microbatches left the same in them."""
        return {name: moved.same for name, moved in self._moved.items()}

    def value(self, name: str, rule: Rule) -> torch.Tensor | None:
        """What `name` holds after the step by `rule`."""
        return self._moved[name].value(rule)

    def final(self, rules: Mapping[str, Rule], allow_inexact: bool) -> list[tuple[Held, torch.Tensor]]:
        """Each changed buffer with its value after the step.

        Raises ModelError naming each that no rule covers, unless `allow_inexact`.
        """
        found, faults = [], []
        for name, moved in self._moved.items():
            tried = [rules.get(name, Rule.NONE), *((Rule.SAME, Rule.MEAN, Rule.SUM) if allow_inexact else ())]
            values = [value for value in map(moved.value, tried) if value is not None]
            if values:
                found.append((self.held[name], values[0]))
            else:
                faults.append(_fault(name))
        if faults:
            raise ModelError(*faults)
        return found


def _fault(name: str) -> Fault:
    return Fault(
        f"The buffer {name} depends on how the batch is cut.",
        got="neither what microbatches leave, nor its mean, nor the sum of the changes is known to be what the whole "
        "batch leaves",
        expected="a buffer whose value after the step follows from those of the microbatches",
        next="update it outside of loss_fn, or fullbatch.eager.Step(..., allow_inexact=True)",
    )
