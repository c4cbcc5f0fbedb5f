"""Every exception that fullbatch raises, in one tree.

A training script that fails after an hour must say what to type next. Each error therefore carries one or
more faults, all that were found at once, and each fault says what was wrong, what was got, what was expected
and the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong: `what`, the value `got`, what was `expected`, and the `next` thing to type."""

    what: str
    got: str = ""
    expected: str = ""
    next: str = ""

    def __str__(self) -> str:
        lines = [self.what]
        if self.got:
            lines.append(f"  got:      {self.got}")
        if self.expected:
            lines.append(f"  expected: {self.expected}")
        if self.next:
            lines.append(f"  next:     {self.next}")
        return "\n".join(lines)


class FullbatchError(Exception):
    """Base of every error raised by fullbatch. `.faults` lists what was found, all of it at once."""

    def __init__(self, *faults: Fault) -> None:
        self.faults = faults
        super().__init__("\n".join(str(fault) for fault in faults))

    @classmethod
    def of(cls, what: str, got: str = "", expected: str = "", next: str = "") -> Self:
        """An error with a single fault."""
        return cls(Fault(what, got, expected, next))


class MemorySizeError(FullbatchError, ValueError):
    """A memory budget that is no size (neither bytes nor a string such as "6GiB"), or that the device does not have."""


class BatchError(FullbatchError, ValueError):
    """The batch: no tensor that carries it, sizes that differ, an empty one, a microbatch larger than it."""


class ModelError(FullbatchError, ValueError):
    """The model: not a module, parameters on two devices, hooks that cannot run once a step."""


class LossError(FullbatchError, ValueError):
    """The loss: not a scalar, not a tensor, or nothing in it needs a gradient."""


class CaptureError(FullbatchError):
    """The step cannot be captured as one graph: data-dependent control flow, an unsupported call."""


class BudgetError(FullbatchError):
    """No plan fits the memory budget. `.smallest` is the least budget that works, in bytes."""

    def __init__(self, *faults: Fault, smallest: int = 0) -> None:
        super().__init__(*faults)
        self.smallest = smallest


class PlanError(FullbatchError):
    """A plan that is no plan (cut off, damaged, of another format) or that is for another step, machine or budget."""


class MeasureError(FullbatchError, RuntimeError):
    """Memory cannot be measured here and now, for example because a profiler is already running."""


class CompileError(FullbatchError, RuntimeError):
    """A part of the step cannot be compiled: no C++ compiler, or TorchInductor fails."""


class OptimizerError(FullbatchError, ValueError):
    """An option of an optimizer or a learning rate that is out of range; a gradient that an optimizer cannot take."""


class VerifyError(FullbatchError):
    """The planned step and the plain one could not be compared."""


def check_all(*checks: Callable[[], object]) -> None:
    """Runs every check, and raises what they found as one error: the class is that of the first, the faults are all."""
    found: list[FullbatchError] = []
    for check in checks:
        try:
            check()
        except FullbatchError as error:
            found.append(error)
    if len(found) == 1:
        raise found[0]
    if found:
        raise type(found[0])(*(fault for error in found for fault in error.faults))
