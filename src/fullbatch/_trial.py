"""Sizes of one model, predicted and run: what plain PyTorch and what a planned step take at each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from fullbatch._errors import BudgetError, Fault, FullbatchError
from fullbatch._memory._ledger import explain
from fullbatch._memory._measure import measure
from fullbatch._memory._owned import optimizer_step, owned_bytes
from fullbatch._plan._plan import Plan
from fullbatch._search import search
from fullbatch._size import format_bytes
from fullbatch._sized import Sizes
from fullbatch._step import Step
from fullbatch._tree import leaves, map_tensors, named_tensors
from fullbatch._undone import undone

LossFn = Callable[[Any, Any], Any]


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


def owned_by(model: Any, device: torch.device, batch: Any, optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes that a step of `model` on `batch` owns before it runs, optimizer state to come included."""
    parameters, buffers = (named_tensors(model, which).values() for which in ("parameters", "buffers"))
    return owned_bytes(device, parameters, buffers, [leaf for _, leaf in leaves(batch)], optimizer).total


class Trial:
    """Predictions and runs of one model, by size."""

    def __init__(
        self, loss_fn: LossFn, model: Any, device: torch.device, sizes: Sizes, memory: int, *, multiple_of: int,
        most: int, optimizer: torch.optim.Optimizer | None, batch_dims: Any,
    ) -> None:  # fmt: skip
        self._loss_fn, self._model, self._device, self._sizes, self._memory = loss_fn, model, device, sizes, memory
        self._unit, self._most, self._optimizer, self._dims = multiple_of, most, optimizer, batch_dims
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
            with _at(size):
                ledger = explain(self._loss_fn, self._model, batch, self._optimizer, batch_dims=self._dims)
            self._plain[size] = max(ledger.peak, ledger.optimizer_peak)
        return self._plain[size]

    def _plain_step(self, batch: Any) -> None:
        if any(leaf.device != self._device for _, leaf in leaves(batch)):
            batch = map_tensors(lambda leaf: leaf.to(self._device), batch)
        out = self._loss_fn(self._model, batch)
        (out[0] if isinstance(out, tuple) else out).backward()

    # ---- fullbatch

    def planned(self) -> Fit:
        """The largest size of a planned step."""
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
                plan = self._step(self._sizes.make(size, values=False), size, 1).plan
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
        try:
            batch = self._sizes.make(size, values=True)
            parameters = named_tensors(self._model, "parameters").values()
            owned = owned_by(self._model, self._device, batch, self._optimizer)
            after = owned + optimizer_step(self._device, parameters, self._optimizer).total
            with undone(self._model, self._device):
                found = measure(lambda: _without_result(fn, batch), self._device)
        except (torch.OutOfMemoryError, MemoryError):
            return None
        except RuntimeError as error:
            if "allocate memory" not in str(error):  # how the CPU's own allocator says it
                raise
            return None
        return max(owned + found.peak, after)


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
