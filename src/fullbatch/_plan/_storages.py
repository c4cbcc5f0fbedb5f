"""Which memory a value is in, by shapes: a view has that of its base."""

from __future__ import annotations

from collections.abc import Iterable

from fullbatch._ir import Kind, Program
from fullbatch._plan._stages import TARGETS


class Storages:
    """The storages that a program makes in microbatches of `size` samples."""

    def __init__(self, program: Program, size: int) -> None:
        self._program = program
        self._of: dict[int, tuple[int, int]] = {}  # value -> the storage behind it and its bytes
        for task in program.tasks:
            shares = task.stores_nothing or (task.kind in TARGETS and size == program.batch)
            for out in task.outputs:
                if out is None:
                    continue
                if shares and task.inputs and task.inputs[0] in self._of:
                    self._of[out] = self._of[task.inputs[0]]
                elif not shares and task.kind is not Kind.SLICE:
                    self._of[out] = out, program.values[out].nbytes(size, program.batch)

    def of(self, values: Iterable[int | None]) -> dict[int, int]:
        """The storages behind those of `values` that the step makes, with their bytes."""
        return dict(self._of[value] for value in values if value is not None and value in self._of)

    def largest(self) -> int:
        """Bytes of the largest operator's operands and results."""
        tasks = self._program.tasks
        return max((sum(self.of((*task.inputs, *task.outputs)).values()) for task in tasks), default=0)
