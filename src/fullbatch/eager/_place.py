"""The fastest configuration that fits, found by running: what is chosen was run on the example and measured.

Limit that forced it: without a graph there is nothing to predict a peak from. Shape of the answer: microbatches without
checkpoints first, the largest that fits, since nothing is computed twice then; trials grow from one sample, and what a
straight line through them says will not fit is not tried, or a trial would take the memory that is not there. Where one
sample does not fit, checkpoints are placed on the modules that hold most, as few as fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fullbatch._errors import BudgetError, Fault
from fullbatch._size import format_bytes
from fullbatch.eager._cut import Cut
from fullbatch.eager._held import depth, repeated, worth
from fullbatch.eager._loop import Job, out_of_memory, preserved
from fullbatch.eager._plan import Trial, listed
from fullbatch.eager._trials import Trials

_NEAR = 1.1  # a size that is predicted to need this much of the room is worth a trial


@dataclass(frozen=True)
class Choice:
    """A configuration that was run on all of the example: microbatch, checkpoints, and bytes allocated at its peak."""

    microbatch: int
    checkpointed: tuple[str, ...]
    activations: int
    trials: tuple[Trial, ...]
    notes: tuple[str, ...]


class Placer:
    """Tries configurations of a job on an example batch. State is afterwards as before."""

    def __init__(self, job: Job, cut: Cut, batch: Any, room: int | None, owned: int) -> None:
        self._job, self._cut, self._batch, self._room, self._owned = job, cut, batch, room, owned
        self._trials = Trials(job, cut, batch, room)
        self._notes: list[str] = []

    def choose(self, sizes: Sequence[int]) -> Choice:
        """The fastest of what fits, at one of the microbatches `sizes`, which rise.

        Raises BudgetError with the least that was found.
        """
        found = self._without(sizes) or self._at_once(sizes) or self._with_checkpoints(sizes[0])
        if found is None:
            raise self._too_small()
        assert found.measured is not None
        left = self._trials.left.get((found.microbatch, found.checkpointed), ())
        notes = tuple(self._notes + ([f"left as by the last microbatch: {listed(left)}"] if left else []))
        return Choice(found.microbatch, found.checkpointed, found.measured, tuple(self._trials.made), notes)

    # ---- microbatches alone

    def _without(self, sizes: Sequence[int]) -> Trial | None:
        """The largest microbatch at which all of the batch fits without a checkpoint."""
        fitting = list(self._rising(sizes))
        for size in reversed([size for size in sizes if fitting and size <= fitting[-1]]):
            trial = self._trials.attempt(size, (), complete=True)
            if self._trials.fits(trial):
                return trial
        return None

    def _rising(self, sizes: Sequence[int]) -> Iterator[int]:
        """Sizes that fit in a short trial, ever larger, until none larger is likely to."""
        at = 0
        while at < len(sizes):
            size = sizes[at]
            if not self._trials.fits(self._trials.attempt(size, (), complete=size >= self._cut.size)):
                return
            yield size
            likely = [i for i in range(at + 1, len(sizes)) if self._trials.within(sizes[i], _NEAR)]
            within = [i for i in likely if self._trials.within(sizes[i], 1.0)]
            if not likely:
                return
            # One step at first; when a line can be drawn, as far as it says.
            at = within[-1] if within and len(self._trials.measured()) > 1 else likely[0]

    def _at_once(self, sizes: Sequence[int]) -> Trial | None:
        """The whole batch, where its activations are less than the gradients that microbatches gather beside theirs."""
        if self._room is None or len(sizes) < 2 or sizes[-1] != self._cut.size or not self._trials.measured():
            return None
        if self._trials.tried(sizes[-1], (), True):
            return None
        small, next_one = (self._trials.run(size, (), some=1) for size in sizes[:2])
        predicted = small + (sizes[-1] - sizes[0]) * max(0, next_one - small) // (sizes[1] - sizes[0])
        if predicted > _NEAR * self._room:
            return None
        trial = self._trials.attempt(sizes[-1], (), complete=True)
        return trial if self._trials.fits(trial) else None

    # ---- checkpoints

    def _with_checkpoints(self, size: int) -> Trial | None:
        """The fewest checkpoints, on what holds most, with which microbatches of `size` fit."""
        self._trials.gains = self._worth(size)
        order = self._right(size, list(self._trials.gains))
        if not order:
            return None
        levels = [depth(name, order) for name in order]
        ends = [sum(1 for level in levels if level <= most) for most in sorted(set(levels), reverse=True)]
        for end in ends:
            if self._trials.fits(self._trials.attempt(size, tuple(order[:end]))):
                return self._fewest(size, order, end)
        return None

    def _worth(self, size: int) -> dict[str, int]:
        """Modules worth a checkpoint, with what each frees; all candidates where memory ran out in a plain forward."""
        try:
            with preserved(self._job, always=True):
                return worth(self._job, self._cut, self._batch, self._cut.spans(size)[0])
        except Exception as error:
            if not out_of_memory(error):
                raise
            return dict.fromkeys(repeated(self._job.model), 0)

    def _fewest(self, size: int, order: list[str], most: int) -> Trial | None:
        """Of `most` that fit in a short trial as few as fit in a complete one."""
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            if self._trials.fits(self._trials.attempt(size, tuple(order[:middle]))):
                high = middle
            else:
                low = middle + 1
        for count in sorted({*range(high, most, max(1, (most - high) // 4)), most}):
            trial = self._trials.attempt(size, tuple(order[:count]), complete=True)
            if self._trials.fits(trial):
                return trial
        return None

    def _right(self, size: int, order: list[str]) -> list[str]:
        """Those with which the first microbatch's loss and gradient are what they are without."""
        if self._trials.reference is None:
            self._notes.append("not compared: gradients with and without checkpoints, for want of memory")
        try:
            self._trials.run(size, tuple(order), some=1)
            return order
        except Exception as error:
            if out_of_memory(error):
                return order
        wrong = [name for name in order if not self._right_alone(size, name)]
        if wrong:
            self._notes.append(f"not checkpointed, since their recompute differs: {', '.join(wrong)}")
        return [name for name in order if name not in wrong]

    def _right_alone(self, size: int, name: str) -> bool:
        try:
            self._trials.run(size, (name,), some=1)
        except Exception as error:
            return out_of_memory(error)
        return True

    def _too_small(self) -> BudgetError:
        least = self._trials.least()
        budget = self._owned + (self._room or 0)
        got = f"{budget:,} bytes ({format_bytes(budget)})"
        if least is None or least.measured is None:
            return BudgetError(
                Fault(
                    "No configuration fits the memory that there is.",
                    got=got,
                    expected="memory for one microbatch",
                    next="a smaller model, or smaller samples",
                )
            )
        smallest = self._owned + least.measured
        return BudgetError(
            Fault(
                "No configuration that was tried fits the memory budget.",
                got=got,
                expected=(
                    f"at least {smallest:,} bytes ({format_bytes(smallest)}), of which {format_bytes(self._owned)} are "
                    f"parameters, buffers, gradients, optimizer state and the batch; tried: {least}"
                ),
                next=f"memory={smallest}",
            ),
            smallest=smallest,
        )
