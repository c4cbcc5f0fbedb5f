"""Sizes of one model, predicted and run: what plain PyTorch and what a planned step take at each."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fullbatch._errors import BudgetError, Fault, FullbatchError
from fullbatch._memory._ledger import explain
from fullbatch._memory._measure import measure
from fullbatch._memory._owned import optimizer_step, owned_bytes
from fullbatch._memory._twin import Optimizers
from fullbatch._plan._plan import Plan
from fullbatch._put_back import watched
from fullbatch._search import search
from fullbatch._size import format_bytes
from fullbatch._sized import Sizes
from fullbatch._split import split_of
from fullbatch._step import Step
from fullbatch._tree import leaves, map_tensors, named_tensors
from fullbatch._undone import undone

LossFn = Callable[[Any, Any], Any] | tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]


class _RunsItsLoss(Exception):
    """A step was planned whose loss is not captured: its memory is known once it has run."""


@dataclass(frozen=True)
class Run:
    """One size that was run: its predicted and its measured peak in bytes; None where it ran out of memory."""

    size: int
    predicted: int
    measured: int | None


@dataclass(frozen=True)
class Fit:
    """The largest size that fits. Peaks are bytes of all that the step owns and allocates, `optimizer.step()` included.

    `tried` are the sizes that were run, in order; `looked_at` those whose bytes were predicted.
    """

    size: int
    predicted: int
    measured: int
    tried: tuple[Run, ...] = field(repr=False)
    looked_at: tuple[int, ...] = field(repr=False)
    plan: Plan | None = field(repr=False, default=None)


def owned_by(model: Any, device: torch.device, batch: Any, optimizer: Optimizers | None) -> int:
    """Bytes that a step of `model` on `batch` owns before it runs, optimizer state to come included."""
    parameters, buffers = (named_tensors(model, which).values() for which in ("parameters", "buffers"))
    return owned_bytes(device, parameters, buffers, [leaf for _, leaf in leaves(batch)], optimizer).total


class Trial:
    """Predictions and runs of one model, by size."""

    def __init__(
        self, loss_fn: LossFn, model: Any, device: torch.device, sizes: Sizes, memory: int, *, multiple_of: int,
        most: int, optimizer: Optimizers | None, batch_dims: Any,
    ) -> None:  # fmt: skip
        self._loss_fn, self._model, self._device, self._sizes, self._memory = loss_fn, model, device, sizes, memory
        self._unit, self._most, self._optimizer, self._dims = multiple_of, most, optimizer, batch_dims
        self._split, self._eager = split_of(loss_fn), False
        self._plain: dict[int, int] = {}
        self._least: dict[int, int] = {}

    def _search(self, nbytes: Callable[[int], float], below: int | None) -> int:
        start = self._sizes.start
        return search(lambda size: int(nbytes(size)), self._memory, start, self._unit, self._most, below)

    # ---- plain PyTorch

    def plain(self) -> Fit | None:
        """The largest size of the plain step. Measured bytes correct the predicted ones, up and down."""
        best: Run | None = None
        below, ratio, tried = None, 1.0, list[Run]()
        while True:
            size = self._search(lambda at, by=ratio: self._predicted(at) * by, below)  # type: ignore[misc]
            if size <= (0 if best is None else best.size):
                break
            predicted = self._predicted(size)
            measured = self._run(size, self._plain_step)
            tried.append(Run(size, predicted, measured))
            if measured is not None and measured <= self._memory:
                best, ratio = tried[-1], measured / predicted
            else:
                below = size
                ratio = max(ratio, (measured or self._memory) / predicted * (1.0 if measured else 1.02))
        if best is None:
            return None
        assert best.measured is not None
        return Fit(best.size, best.predicted, best.measured, tuple(tried), tuple(sorted(self._plain)))

    def _predicted(self, size: int) -> int:
        if size not in self._plain:
            batch = self._sizes.make(size, values=False)
            function: Any = self._loss_fn  # a pair too
            with _at(size):
                ledger = explain(function, self._model, batch, self._optimizer, batch_dims=self._dims)
            self._plain[size] = max(ledger.peak, ledger.optimizer_peak)
        return self._plain[size]

    def _plain_step(self, batch: Any) -> None:
        if any(leaf.device != self._device for _, leaf in leaves(batch)):
            batch = map_tensors(lambda leaf: leaf.to(self._device), batch)
        with watched(compiled=True):
            out: Any = self._split.plain(self._model, batch) if self._split is not None else self._whole(batch)
        (out[0] if isinstance(out, tuple) else out).backward()

    def _whole(self, batch: Any) -> Any:
        assert callable(self._loss_fn)
        return self._loss_fn(self._model, batch)

    # ---- fullbatch

    def planned(self) -> Fit:
        """The largest size of a planned step."""
        try:
            return self._planned()
        except _RunsItsLoss:
            self._eager = True
            return self._planned_with_loss()

    def _planned_with_loss(self) -> Fit:
        """The same where the loss is not captured: what it takes at sizes that were tried says what at others."""
        best: Fit | None = None
        below, extra, tried = None, dict[int, float](), list[Run]()
        size = min(max(self._unit, self._sizes.start // self._unit * self._unit), self._most)
        while size > (0 if best is None else best.size):
            least, plan, measured = self._run_with_loss(size)
            extra[size] = max(1.0, least - self._needed(size))
            if plan is not None:
                tried.append(Run(size, plan.predicted_peak, measured))
            if plan is not None and measured is not None and measured <= self._memory:
                best = Fit(size, plan.predicted_peak, measured, (), (), plan)
            else:
                below = size
            size = self._search(lambda at: self._needed(at) + extrapolated(extra, at), below)
        if best is None:
            least_size = min(self._least)
            self._least[least_size] += int(extrapolated(extra, least_size))
            raise self._nothing_fits()
        return replace(best, tried=tuple(tried), looked_at=tuple(sorted(self._least)))

    def _run_with_loss(self, size: int) -> tuple[float, Plan | None, int | None]:
        """The least memory for `size` with its loss, and where that is there the plan and the measured peak."""
        try:
            step = self._step(self._sizes.make(size, values=True), size, self._memory)
        except BudgetError as error:
            return error.smallest, None, None
        if not self._ran(lambda: self._once(step, size)):
            return self._memory * 1.02, None, None
        step._memory, enough = 1, step._memory
        try:
            least = step._prepare(self._sizes.make(size, values=True)).predicted_peak
        except BudgetError as error:
            least = error.smallest
        if least > self._memory:
            return least, None, None
        step._memory = enough
        measured = self._run(size, step)
        return least, step.plan, measured

    def _once(self, step: Step, size: int) -> None:
        batch = self._sizes.make(size, values=True)
        with undone(self._model, self._device, batch):
            step(batch)

    def _planned(self) -> Fit:
        below, ratio, tried = None, 1.0, list[Run]()
        while size := self._search(lambda at, by=ratio: self._needed(at) * by, below):  # type: ignore[misc]
            plan, measured = self._planned_run(size, int(self._memory / ratio))
            if plan is not None:
                tried.append(Run(size, plan.predicted_peak, measured))
                if measured is not None and measured <= self._memory:
                    looked_at = tuple(sorted(self._least))
                    return Fit(size, plan.predicted_peak, measured, tuple(tried), looked_at, plan)
                ratio *= 1.02
            below = size
        raise self._nothing_fits()

    def _needed(self, size: int) -> int:
        """The least memory that a planned step of `size` needs."""
        if size not in self._least:
            try:
                plan = self._step(self._sizes.make(size, values=self._eager), size, 1).plan
            except BudgetError as error:
                self._least[size] = error.smallest
            else:
                self._least[size] = plan.predicted_peak
        return self._least[size]

    def _step(self, batch: Any, size: int, memory: int) -> Step:
        with _at(size):
            return Step(
                self._loss_fn, self._model, batch, memory=memory, optimizer=self._optimizer, batch_dims=self._dims
            )

    def _planned_run(self, size: int, memory: int) -> tuple[Plan | None, int | None]:
        """The plan for `size`, where the memory that was found to be enough is, and its measured peak."""
        try:
            step = self._step(self._sizes.make(size, values=False), size, memory)
        except BudgetError as error:
            self._least[size] = max(error.smallest, self._memory + 1)
            return None, None
        if step._split is not None:
            raise _RunsItsLoss
        measured = self._run(size, step)
        return step.plan, measured

    def _nothing_fits(self) -> BudgetError:
        size = min(self._least)
        need = self._least[size]
        return BudgetError(
            Fault(
                f"No {self._sizes.name} fits the memory, not even {size}.",
                got=f"{self._memory:,} bytes ({format_bytes(self._memory)})",
                expected=f"at least {need:,} bytes ({format_bytes(need)})", next=f"memory={need}",
            ),
            smallest=need,
        )  # fmt: skip

    # ---- both

    def _run(self, size: int, fn: Callable[[Any], Any]) -> int | None:
        """The measured peak of one step of `size`, with all that it owns; None where the memory ran out."""
        peaks: list[int] = []

        def run() -> None:
            batch = self._sizes.make(size, values=True)
            parameters = named_tensors(self._model, "parameters").values()
            owned = owned_by(self._model, self._device, batch, self._optimizer)
            after = owned + optimizer_step(self._device, parameters, self._optimizer).total
            with undone(self._model, self._device, batch):
                found = measure(lambda: _without_result(fn, batch), self._device)
            peaks.append(max(owned + found.peak, after))

        return peaks[0] if self._ran(run) else None

    def _ran(self, fn: Callable[[], None]) -> bool:
        """Whether `fn` ran; False where the memory ran out."""
        try:
            fn()
        except (torch.OutOfMemoryError, MemoryError):
            return False
        except RuntimeError as error:
            if "allocate memory" not in str(error):  # how the CPU's own allocator says it
                raise
            return False
        return True


def extrapolated(known: dict[int, float], size: int) -> float:
    """A positive quantity at `size`: by a power of the size through the two nearest known ones, or by its first."""
    if size in known:
        return known[size]
    one, *others = sorted(known, key=lambda at: (abs(math.log(at / size)), at))
    power = math.log(known[others[0]] / known[one]) / math.log(others[0] / one) if others else 1.0
    return known[one] * math.pow(size / one, max(power, 0.0))


def _without_result(fn: Callable[[Any], Any], batch: Any) -> None:
    fn(batch)


@contextlib.contextmanager
def _at(size: int) -> Iterator[None]:
    """Errors that pass say for which size they are."""
    try:
        yield
    except FullbatchError as error:
        if not isinstance(error, BudgetError):
            error.add_note(f"fullbatch.largest: at size {size}; multiple_of= and most= bound the sizes")
        raise
