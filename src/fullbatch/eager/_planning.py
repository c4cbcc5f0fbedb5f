"""Which placement a batch runs with: one that is known and good for it, or one that is found on it now.

Limit that forced it: a placement is measured on one batch, and the next may be longer, or be there beside gradients
that are kept. Shape of the answer: forms of a batch that were prepared have placements of their own; all others share
one, which is replaced where a batch is heavier or does not fit. A placement from a checkpoint is used as if it had been
found here; where there is less memory now, its microbatch stays, and only the checkpoints are placed anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fullbatch._errors import BatchError, LossError
from fullbatch._hooks import refuse_backward_hooks
from fullbatch._memory._free import RESERVE, free_bytes
from fullbatch._memory._owned import owned_bytes
from fullbatch._plan._sizes import microbatch_sizes
from fullbatch._prepared import Prepared, form_of, prepare
from fullbatch._tree import check_devices, leaves, named_tensors
from fullbatch.eager._coupled import Findings, batch_norms, norms_named, norms_refused, only_reads
from fullbatch.eager._cut import Cut, children, find_cut
from fullbatch.eager._few import few_refused, is_too_few, leaves_one, normaliser
from fullbatch.eager._formats import refuse_formats
from fullbatch.eager._loop import Job
from fullbatch.eager._place import Placer
from fullbatch.eager._placement import Placement
from fullbatch.eager._plan import NO_CERTIFICATE, Plan, listed
from fullbatch.eager._probe import probe
from fullbatch.eager._recompute import caches_off, named_modules


@dataclass
class Settings:
    """What a step was asked for: bytes, samples, and whether samples may be coupled within microbatches."""

    memory: int | None
    microbatch: int | None
    allow_inexact: bool


@dataclass(frozen=True)
class Looked:
    """What of a batch decides how it runs. No tensor is held."""

    form: str
    cut: Cut
    weight: float
    owned: int
    norms: list[str]


class Planning:
    """Placements of a job, for the batches that come."""

    def __init__(
        self, job: Job, settings: Settings, batch_dims: Any, optimizers: tuple[torch.optim.Optimizer, ...]
    ) -> None:
        self.job, self.settings = job, settings
        self._batch_dims, self._optimizers = batch_dims, optimizers
        self.free: int | None = None
        self.shared: Placement | None = None
        self.prepared: dict[str, Placement] = {}
        self._last: Looked | None = None
        self._functions: list[str] = []  # that were seen to need more than one sample, and are no modules

    def place(self, batch: Any) -> tuple[Cut, Placement, Plan]:
        """How a batch that is to run is cut and placed. Tries on it where that is not known."""
        looked, placement = self._settled(batch, self._known)
        if looked.form in self.prepared:
            self.prepared[looked.form] = placement
        else:
            self.shared = placement
        self._last = looked
        return looked.cut, placement, self._as_plan(placement, looked)

    def prepare(self, batches: Iterable[Any]) -> Prepared:
        """Places each form in `batches`; all of them are kept, or, where it raises, none."""
        found: dict[str, Placement] = {}

        def plan(batch: Any) -> Plan:
            _refuse_meta(batch)
            looked, placement = self._settled(batch, lambda looked: self.prepared.get(looked.form))
            found[looked.form] = placement
            return self._as_plan(placement, looked)

        result = prepare(plan, batches, self.job.device, lambda batch: _form(batch, self.job.device))
        self.prepared.update(found)
        return result

    def again(self) -> Plan:
        """The plan of the batch that was placed last, by what is known now."""
        assert self._last is not None
        placement = self._known(self._last)
        assert placement is not None
        return self._as_plan(placement, self._last)

    def explain(self, error: ValueError, batch: Any) -> None:
        """Raises what a ValueError of a run on `batch` means; returns where it shows a function that was not known."""
        cut, model = find_cut(batch, self._batch_dims), self.job.model
        if not is_too_few(error) or not self._splits(cut.size) or self._two_are_few(cut, batch):
            raise error
        name = normaliser(error, model)
        if not self.settings.allow_inexact:
            raise norms_refused([name]) from error
        if name in self._functions or name in batch_norms(model, self.job.moving):
            most = self.settings.microbatch or (self.shared.choice.microbatch if self.shared else cut.size)
            raise few_refused(name, cut.size, most) from error
        self._functions.append(name)

    def _two_are_few(self, cut: Cut, batch: Any) -> bool:
        """Whether two samples are too few as one is, so that it is not for want of samples."""
        try:
            with caches_off(self.job.model):
                only_reads(self.job, cut, batch, (0, 2))
        except ValueError as error:
            if not is_too_few(error):
                raise
            return True
        return False

    def _settled(self, batch: Any, known: Callable[[Looked], Placement | None]) -> tuple[Looked, Placement]:
        """How a batch looks and is placed; found again where it shows a function that couples samples."""
        while True:
            try:
                looked = self._look(batch)
                return looked, self._placed(known(looked), batch, looked)
            except ValueError as error:
                self.explain(error, batch)

    def _known(self, looked: Looked) -> Placement | None:
        return self.prepared.get(looked.form, self.shared)

    def _look(self, batch: Any) -> Looked:
        model = self.job.model
        refuse_backward_hooks(model)
        cut = find_cut(batch, self._batch_dims)
        self.job = replace(self.job, device=check_devices(model))
        parameters, buffers = (named_tensors(model, which) for which in ("parameters", "buffers"))
        refuse_formats([*leaves(batch), *parameters.items(), *buffers.items()])
        norms = self._norms(cut)
        if self.shared is None:
            with caches_off(model):
                only_reads(self.job, cut, batch, cut.spans(self._sizes(cut.size, bool(norms))[0])[0])
            norms = self._norms(cut)  # that forward may have shown more of them
        owned = owned_bytes(
            self.job.device, parameters.values(), named_tensors(model, "buffers").values(),
            [leaf for _, leaf in leaves(batch)], self._optimizers,
        ).total  # fmt: skip
        return Looked(_form(batch, self.job.device), cut, cut.weight(batch), owned, norms)

    def _norms(self, cut: Cut) -> list[str]:
        """What uses statistics of the batch, where it is not run at once. Raises ModelError."""
        if not self._splits(cut.size):
            return []
        norms = batch_norms(self.job.model, self.job.moving) + self._functions
        if norms and not self.settings.allow_inexact:
            raise norms_refused(norms)
        return norms

    def _splits(self, size: int) -> bool:
        return size > 1 and not (self.settings.microbatch is not None and self.settings.microbatch >= size)

    def _sizes(self, size: int, norms: bool) -> list[int]:
        """Microbatches to choose from, rising. BatchNorm needs more than one sample in each."""
        if self.settings.microbatch is not None:
            return [min(self.settings.microbatch, size)]
        sizes = sorted(microbatch_sizes(size))
        return [m for m in sizes if m == size or not leaves_one(size, m)] if norms else sizes

    # ---- what is known, or found

    def _placed(self, known: Placement | None, batch: Any, looked: Looked) -> Placement:
        """`known`, where it is good for this batch, or another."""
        sizes = self._sizes(looked.cut.size, bool(looked.norms))
        if known is not None and self._applies(known, looked) and known.fits(looked.owned, looked.weight, known.budget):
            if known.fits(looked.owned, looked.weight, self._budget(looked.owned)):
                return known
            # From a checkpoint whose run had more memory: it would go on in this microbatch.
            sizes = [min(known.choice.microbatch, looked.cut.size)]
        return self._search(batch, looked, sizes)

    def _applies(self, known: Placement, looked: Looked) -> bool:
        """Whether what was found holds for this batch, memory aside."""
        size, asked = looked.cut.size, self.settings.microbatch
        if not known.compared and not looked.norms and self._splits(size):
            return False
        if asked is not None and min(asked, size) != min(known.choice.microbatch, size):
            return False  # placed on a batch that is shorter than the microbatch
        if _most(size, known.choice.microbatch) > _most(known.batch, known.choice.microbatch):
            return False  # placed on a batch that was cut into less
        return not set(known.choice.checkpointed) - {name for name, _ in named_modules(self.job.model)}

    def _search(self, batch: Any, looked: Looked, sizes: list[int]) -> Placement:
        cut, budget = looked.cut, self._budget(looked.owned)
        room = None if budget is None else budget - looked.owned
        with caches_off(self.job.model) as caches:
            choice = Placer(self.job, cut, batch, room, looked.owned).choose(sizes)
            findings, compared = Findings(), self._splits(cut.size) and not looked.norms
            if compared:
                space = free_bytes(self.job.device) if room is None else room
                findings = probe(
                    self.job, cut, batch, choice.microbatch, choice.checkpointed, space, choice.activations
                )
        if findings.coupled and not self.settings.allow_inexact:
            raise LossError(*findings.coupled)
        return Placement(cut.size, choice, findings, compared, looked.weight, budget, caches)

    def _budget(self, owned: int) -> int | None:
        if self.settings.memory is not None or self.settings.microbatch is not None:
            return self.settings.memory
        if self.free is None:  # found once: what is free moves with every step
            self.free = free_bytes(self.job.device) + owned
        return self.free

    # ---- in words

    def _as_plan(self, placement: Placement, looked: Looked) -> Plan:
        choice, cut = placement.choice, looked.cut
        microbatch = min(choice.microbatch, cut.size)
        inexact: list[str] = []
        if microbatch < cut.size:
            inexact = [norms_named(looked.norms)] if looked.norms else []
            inexact += [f"{fault.what} {fault.got}" for fault in placement.findings.coupled]
        return Plan(
            cut.size, microbatch, choice.checkpointed, looked.owned, choice.activations, self._budget(looked.owned),
            tuple(inexact), notes=tuple(self._notes(placement, cut, bool(looked.norms))), trials=choice.trials,
        )  # fmt: skip

    def _notes(self, placement: Placement, cut: Cut, norms: bool) -> list[str]:
        notes = [NO_CERTIFICATE, *placement.findings.notes, *placement.choice.notes]
        if norms:
            notes.append("not compared: whether the loss couples samples besides")
        if placement.caches:
            notes.append(f"key/value cache off while the step runs: {', '.join(placement.caches)}")
        if cut.entries:
            notes.append(f"cut with the tensors, one entry a sample: {', '.join(cut.entries)}")
        shared = [path for path, dim in cut.dims.items() if dim is None]
        if shared:
            notes.append(f"the same for all microbatches: {', '.join(shared)}")
        if self.settings.memory is None and self.settings.microbatch is None:
            notes.append(f"budget: what is free now plus what the step owns, less a reserve of {RESERVE:.0%}")
        return notes


def _most(size: int, microbatch: int) -> int:
    """Samples in the largest microbatch of at most so many."""
    start, stop = Cut(size, {}).spans(microbatch)[0]
    return stop - start


def _form(batch: Any, device: torch.device) -> str:
    """What makes a batch another one to place: its tensors' and arrays' shapes, and not the other values in it."""
    tensors = [(path, *form_of(tensor, device)) for path, tensor in leaves(batch)]
    return repr([*tensors, *_arrays(batch, "batch")])


def _arrays(nest: Any, path: str) -> list[tuple[str, Any, str]]:
    if isinstance(nest, np.ndarray):
        return [(path, nest.shape, str(nest.dtype))]
    return [found for _, where, item in children(nest, path) for found in _arrays(item, where)]


def _refuse_meta(batch: Any) -> None:
    without = [path for path, tensor in leaves(batch) if tensor.device.type == "meta"]
    if without:
        raise BatchError.of(
            "A step that is not captured is run to be planned, and tensors on `meta` have no values.",
            got=f"on meta: {listed(without)}", expected="batches with values, as a loader gives them",
            next="step.prepare(loader)",
        )  # fmt: skip
