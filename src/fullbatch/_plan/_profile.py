"""The peak of each segment of a schedule, by a walk over one microbatch of each stage.

All microbatches of a stage do the same, so that what one of them does to memory says what all do: before the first of
them each holds what came in, behind the last each holds what goes on, and the bytes between lie between.
The walk over the whole schedule (`_simulate`) is exact and is made once, for what was chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fullbatch._cost._costs import Coster
from fullbatch._ir import Program, Reduction
from fullbatch._plan._schedule import ALL, Action, Do, Phase
from fullbatch._plan._simulate import Ledger


@dataclass(frozen=True)
class Profile:
    """`peaks[t]`: most bytes in segment t.

    Bytes of what no microbatch owns: `whole[t]` at the start of segment t, for the first microbatch; `during[t]` in it,
    from the second on, which finds the sums of the first.
    """

    peaks: tuple[int, ...]
    whole: tuple[int, ...]
    during: tuple[int, ...]

    @property
    def peak(self) -> int:
        """Most bytes at any time."""
        return max(self.peaks, default=0)


def profile(
    program: Program, phases: Sequence[Phase], where: Sequence[Sequence[int]], segments: int, size: int, cost: Coster
) -> Profile:
    """Peaks of the segments. `where[stage]`: the segment of each run of the stage's body; `size`: samples."""
    walk = _Walk(program, segments, size, cost)
    for stage, phase in enumerate(phases):
        walk.phase(phase, where[stage] if stage < len(where) else ())
    return Profile(tuple(walk.peaks), tuple(walk.whole), tuple(walk.during.get(t, 0) for t in range(segments)))


class _Walk:
    def __init__(self, program: Program, segments: int, size: int, cost: Coster) -> None:
        self._program, self._size, self._cost = program, size, cost
        self._tasks = program.by_id
        self._local = [value.local for value in program.values]
        self._count = program.batch / size if size else 1.0
        self._all = Ledger()
        self._mine = Ledger() if self._count > 1 else self._all
        self.peaks, self.whole = [0] * segments, [0] * segments
        self.during: dict[int, int] = {}
        self._segment = -1
        self._results: set[tuple[int, int]] = set()  # storages of targets made so far, with their bytes
        self._targets = 0  # of this stage

    def phase(self, phase: Phase, where: Sequence[int]) -> None:
        others = max(self._count - 1, 0)
        before = self._mine.live if self._count > 1 else 0
        self._enter(where[0] if where else self._segment)
        for action in phase.once:
            high = self._take(action, self._program.batch)
            self._note(high + self._mine_elsewhere(before))
        born, self._targets = self._all.live, 0
        high_of: dict[int, int] = {}
        at = iter(where)
        for action in phase.last:
            if action.do is Do.RUN:
                self._enter(next(at))
            high = self._take(action, self._size)
            high_of[self._segment] = max(high_of.get(self._segment, 0), high)
        if self._count <= 1:
            for segment, high in high_of.items():
                self.peaks[segment] = max(self.peaks[segment], high)
            return
        after = self._mine.live
        whole = born + self._targets  # all microbatches but the last free nothing that is whole
        for segment, high in high_of.items():
            self.during[segment] = min(whole, self.during.get(segment, whole))
            self.peaks[segment] = max(self.peaks[segment], int(whole + high + others * max(before, after)))

    def _mine_elsewhere(self, before: int) -> int:
        return int(before * self._count) if self._count > 1 else 0

    def _enter(self, segment: int) -> None:
        if segment > self._segment:
            for passed in range(self._segment + 1, segment + 1):
                self.whole[passed] = self._all.live if self._count > 1 else sum(size for _, size in self._results)
            self._segment = segment

    def _note(self, high: int) -> None:
        segment = max(self._segment, 0)
        self.peaks[segment] = max(self.peaks[segment], high)

    def _take(self, action: Action, samples: int) -> int:
        """Takes one action; the most bytes of its ledger meanwhile."""
        local = action.microbatch != ALL
        ledger = self._mine if local else self._all
        if action.do is Do.FREE:
            ledger.drop((action.subject, 0))
            return 0
        if action.do in (Do.OFFLOAD, Do.FETCH):
            return ledger.live
        task = self._tasks[action.subject]
        found = self._cost(task, samples)
        if action.do is not Do.RUN:
            return self._target(action, found.outs[0].nbytes)
        high = ledger.live + found.peak
        for out in found.outs:
            alias = None if out.alias is None else (out.alias, 0)
            if alias is not None and self._local[out.alias or 0] != local:
                alias = (-1, 0)  # a slice of what no microbatch owns
            ledger.add((out.value, 0), out.nbytes, alias)
        return max(high, ledger.live)

    def _target(self, action: Action, nbytes: int) -> int:
        task = self._tasks[action.subject]
        (out,), (source,) = task.outputs, task.inputs
        assert out is not None
        part = (source, 0)
        shared = self._count <= 1 and self._mine.has(part)
        nbytes = nbytes or self._program.values[out].nbytes(None, self._program.batch)
        self._all.add((out, 0), nbytes, part if shared else None)
        storage = self._all.storage((out, 0))
        if storage is not None:
            self._results.add(storage)
        self._targets += nbytes
        extra = 4 * nbytes if task.reduction is Reduction.MOMENTS else 0
        return self._mine.live + extra
