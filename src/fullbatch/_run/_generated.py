"""Generated text made into functions, and their errors made findable.

A traceback through generated code says nothing unless the code can be seen. So the text is registered with `linecache`,
which tracebacks and debuggers read, for as long as its functions are in use; and an exception gets a note that names
the operator, module and source line that its generated line stands for.
"""

from __future__ import annotations

import itertools
import linecache
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from fullbatch._ir import Program
from fullbatch._plan._schedule import ALL, Schedule
from fullbatch._run._source import Writer, note

Part = Callable[..., None]

_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Stage:
    """A phase of the schedule as items, or as functions."""

    once: Sequence[Any]
    body: Sequence[Any]
    last: Sequence[Any]


class Generated:
    """The functions of a schedule. `stages` has them in order; each takes the arguments of `_source.ARGUMENTS`."""

    def __init__(self, program: Program, schedule: Schedule, stages: Sequence[Stage] | None = None) -> None:
        """`stages` holds the items to write, where they are not the schedule's own actions."""
        self._program, self._count = program, len(schedule.samples)
        writer = Writer(program, self._count)
        given = stages or [Stage(phase.once, phase.body, phase.last) for phase in schedule.phases]
        names = [[writer.part(items) for items in (stage.once, stage.body, stage.last)] for stage in given]
        self.text, self._items = writer.text.lines, writer.text.items
        self.filename = f"<fullbatch step {next(_NUMBERS)}>"
        space = dict(writer.names.objects)
        # The text is this package's own: integers, and names that it made.
        exec(compile("\n".join(self.text), self.filename, "exec"), space)
        self.stages = [Stage(*([space[name] for name in part] for part in parts)) for parts in names]
        self._stage_of = {name: at for at, parts in enumerate(names) for part in parts for name in part}
        linecache.cache[self.filename] = (
            sum(len(line) + 1 for line in self.text), None, [f"{line}\n" for line in self.text], self.filename,
        )  # fmt: skip
        weakref.finalize(self, linecache.cache.pop, self.filename, None)

    def explain(self, error: BaseException) -> None:
        """Adds to `error` a note with the origin of what raised it, where that is a line of these functions."""
        for step in _steps(error.__traceback__):
            code = step.tb_frame.f_code
            if code.co_filename == self.filename:
                stage, microbatch = self._stage_of[code.co_name], step.tb_frame.f_locals.get("m", ALL)
                for item in self._items[step.tb_lineno - 1]:
                    note(error, item, self._program, stage, microbatch, self._count)


def _steps(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next
