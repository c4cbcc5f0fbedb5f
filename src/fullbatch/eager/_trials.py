"""Configurations run on the example: what each allocates, and whether it computes the same.

Limit that forced it: a peak that is read off a table of shapes is no peak of code that was never traced. Shape of the
answer: a trial runs the step's own loop under the memory counter, on all microbatches or on the first two, and puts
everything back. The first microbatch's loss and gradients without checkpoints are kept as two numbers each, and a trial
with checkpoints that gives others is an error.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fullbatch._memory._measure import measure
from fullbatch.eager._cut import Cut
from fullbatch.eager._gradients import Gradients
from fullbatch.eager._held import depth
from fullbatch.eager._loop import Job, Mode, Result, out_of_memory, preserved
from fullbatch.eager._loop import run as run_microbatches
from fullbatch.eager._plan import Trial
from fullbatch.eager._returned import Sums

_SOME = 2  # microbatches of a trial that is not complete: with the second one, the first one's gradients are there


class Other(Exception):
    """With checkpoints the first microbatch gave another loss or gradient."""


class Trials:
    """Trials of a job on an example batch, with `room` bytes, each made once. State is afterwards as before."""

    def __init__(self, job: Job, cut: Cut, batch: Any, room: int | None) -> None:
        self._job, self._cut, self._batch, self._room = job, cut, batch, room
        self.made: list[Trial] = []
        self.left: dict[tuple[int, tuple[str, ...]], tuple[str, ...]] = {}  # attributes that the last microbatch set
        self.gains: dict[str, int] = {}  # bytes that a checkpoint on a module frees
        self.reference: dict[str, tuple[float, float]] | None = None

    def fits(self, trial: Trial) -> bool:
        """Whether a trial kept to the room."""
        return trial.measured is not None and (self._room is None or trial.measured <= self._room)

    def attempt(self, size: int, names: tuple[str, ...], *, complete: bool = False) -> Trial:
        """The trial of a microbatch with checkpoints on `names`, made now or known. Raises what the run raises."""
        complete = complete or len(self._cut.spans(size)) <= _SOME
        if (known := self.tried(size, names, complete)) is not None:
            return known
        predicted = self._freed(size, names) if names else self.predicted(size)
        measured: int | None = None
        try:
            measured = self.run(size, names, some=None if complete else _SOME)
        except Exception as error:
            # Without checkpoints an error is the user's; with them it has been looked for before.
            if not out_of_memory(error):
                raise
        self.made.append(Trial(size, names, predicted, measured, complete))
        return self.made[-1]

    def tried(self, size: int, names: tuple[str, ...], complete: bool) -> Trial | None:
        """The trial, where it was made."""
        same = [t for t in self.made if (t.microbatch, t.checkpointed) == (size, names) and t.complete >= complete]
        return same[-1] if same else None

    def _freed(self, size: int, names: tuple[str, ...]) -> int | None:
        before = self.measured().get(size)
        outermost = [self.gains[name] for name in names if depth(name, names) == 0]
        return None if before is None else max(0, before - sum(outermost))

    def run(self, size: int, names: tuple[str, ...], some: int | None) -> int:
        """Bytes allocated at the peak of all microbatches, or of some. Raises what the run raises, or Other."""
        spans = self._cut.spans(size)[:some]
        found: dict[str, tuple[float, float]] = {}

        def seen(gradients: Gradients, sums: Sums, number: int) -> None:
            if number == 0:
                found.update(_summary(gradients, sums))

        mode = Mode(names, seen=seen, complete=some is None)
        with preserved(self._job, always=True):
            measured = measure(
                lambda: run_microbatches(self._job, self._cut, self._batch, spans, mode), self._job.device
            )
        result: Result = measured.result
        if some is None:
            self.left[size, names] = result.last
        if not names and self.reference is None:
            self.reference = found
        elif names and self.reference is not None and not _same(found, self.reference):
            raise Other
        return measured.peak

    def measured(self) -> dict[int, int]:
        """Bytes of each microbatch that was tried without checkpoints."""
        return {t.microbatch: t.measured for t in self.made if t.measured is not None and not t.checkpointed}

    def predicted(self, size: int) -> int | None:
        """Bytes at another size, by a line through the two largest that were measured."""
        known = sorted(self.measured().items())
        if not known:
            return None
        (b, most) = known[-1]
        a, less = known[-2] if len(known) > 1 else (0, 0)
        return round(most + (size - b) * max(0, most - less) / (b - a))

    def within(self, size: int, share: float) -> bool:
        """Whether a size is predicted to need at most this share of the room."""
        predicted = self.predicted(size)
        return self._room is None or predicted is None or predicted <= share * self._room

    def least(self) -> Trial | None:
        """The trial of all microbatches that took least; what looks less after two of them is tried on all."""
        while True:
            known = [trial for trial in self.made if trial.measured is not None]
            known = [t for t in known if t.complete or self.tried(t.microbatch, t.checkpointed, True) is None]
            least = min(known, key=lambda trial: trial.measured or 0, default=None)
            if least is None or least.complete:
                return least
            self.attempt(least.microbatch, least.checkpointed, complete=True)


def _summary(gradients: Gradients, sums: Sums) -> dict[str, tuple[float, float]]:
    """Two numbers of each gradient, and the loss: enough to see that a recompute was another function."""
    assert sums.loss is not None
    found = {"": (float(sums.loss), 0.0)}
    for name, gradient in gradients.peek():
        if gradient.numel():
            total = gradient.sum(dtype=torch.float64 if gradient.device.type != "mps" else torch.float32)
            largest = float(torch.linalg.vector_norm(gradient, math.inf))
            found[name] = (float(total) * sums.reference, largest * sums.reference)
    return found


def _same(found: dict[str, tuple[float, float]], reference: dict[str, tuple[float, float]]) -> bool:
    if found.keys() != reference.keys():
        return False
    largest = max((abs(b) for name, (_, b) in reference.items() if name), default=0.0)
    for name, values in found.items():
        scale = largest if name else abs(reference[""][0])
        pairs = zip(values, reference[name], strict=True)
        if any(not abs(a - b) <= 1e-3 * scale and not (a != a and b != b) for a, b in pairs):
            return False
    return True
