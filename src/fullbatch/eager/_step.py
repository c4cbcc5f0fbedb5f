"""`fullbatch.eager.Step`: the training step of a model that cannot be captured as one graph.

Limit that forced it: a forward that branches on data or calls into NumPy is no graph, so that nothing can be derived
from it. Shape of the answer: it is run as it is, in plain microbatches, each weighted by the count that `loss_fn`
returns. What is exact that way is done exactly; what is not is refused by name, or named where `allow_inexact=True`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fullbatch._arguments import check_callable, check_memory, check_microbatch
from fullbatch._closure import closure_of
from fullbatch._errors import LossError, ModelError, check_all
from fullbatch._hooks import refuse_backward_hooks
from fullbatch._memory._free import RESERVE, free_bytes
from fullbatch._memory._owned import owned_bytes
from fullbatch._memory._twin import each_of
from fullbatch._plan._planner import microbatch_sizes
from fullbatch._run._commit import Pending, commit
from fullbatch._scaler import scale_of
from fullbatch._size import parse_bytes
from fullbatch._tree import check_devices, leaves, named_tensors
from fullbatch.eager._coupled import Findings, batch_norms, norms_named, norms_refused, only_reads
from fullbatch.eager._cut import Cut, find_cut
from fullbatch.eager._formats import refuse_formats
from fullbatch.eager._loop import Job, Mode, Result, preserved, run
from fullbatch.eager._place import Choice, Placer
from fullbatch.eager._plan import NO_CERTIFICATE, Plan, listed
from fullbatch.eager._probe import probe
from fullbatch.eager._recompute import caches_off, named_modules


@dataclass(frozen=True)
class _Planned:
    """What was found on an example, and how heavy its samples were."""

    choice: Choice
    findings: Findings
    compared: bool
    weight: float
    budget: int | None
    caches: tuple[str, ...]


class Step:
    """Forward and backward of `loss_fn(model, batch)` in plain microbatches, with the gradient of the whole batch.

    Calling the step with a batch adds to `.grad` the gradient of sum(loss_sum) / sum(count) over the batch, moves
    buffers once, and returns that loss, detached. Nothing is captured and nothing proved: `plan.notes` says that no
    certificate is given. Use `fullbatch.Step` for whatever can be captured.

    What is run to plan, on the example batch: the step in several microbatches, measured, and samples together beside
    the same samples in parts, to see that the loss adds up. Parameters, `.grad`, buffers, generators, and lists, dicts
    and attributes of modules are afterwards as before; what `loss_fn` writes elsewhere (a file, a global) is not
    undone.

    While the step runs, every microbatch begins with the buffers and Python attributes of the beginning, so that
    counters move by one a step. An attribute that keeps tensors is left as by the last microbatch, and the plan names
    it. Forward hooks run once a microbatch, gradient hooks of parameters once, on the whole batch's gradient.
    transformers' key/value caches are off. Checkpoints are non-reentrant; their recompute sees the generators of
    torch, Python and NumPy, the buffers and the Python state of the forward, and leaves no trace in them. State
    outside of the modules and of the arguments of a checkpointed module is not put back: where it changes the result,
    the module is not checkpointed and the plan says so. Random numbers follow your seed, microbatch by microbatch: they
    are not those that the undivided batch would draw.

    Two things couple samples, and are refused by name: modules that use statistics of the batch (BatchNorm in train
    mode), and a loss whose sum or count is not that of its parts. The second is tried on the example, with every
    random operator a constant. The trial cannot see coupling in a branch that the example does not take, coupling
    weaker than the square root of the rounding of the coarsest dtype in the step, and coupling that only shows in more
    samples than a forward has room for. A microbatch of the whole batch, where asked for, is exact whatever couples
    it.

    What `fullbatch.Step` has besides, this has not: no `prepare`, `verify` or saved plans, and no `state_dict`. For a
    resumed run with the same bits save the states of the generators that `loss_fn` draws from (`torch.get_rng_state()`)
    and `plan.microbatch`, and give that as `microbatch=`.

    Args:
        loss_fn: `loss_fn(model, batch) -> (loss_sum, count)`: a scalar sum of losses, and what it is to be divided by
            (an int, float or tensor without gradient). Both must add up over microbatches; a count may be zero in some.
        model: a Module, or a tuple or dict of Modules, on one device.
        batch: one example of the batch that you want, any nest of tensors, which is run. A list without tensors, and a
            NumPy array, that has one entry a sample is cut with the tensors, and named in the plan; other values, a
            tuple among them, are the same for all.
        memory: the budget in bytes, or "6GiB", of all that the step owns and allocates. None: what is free now plus
            what the step owns, less a reserve of 10 %.
        microbatch: samples a microbatch, instead of or besides a budget.
        optimizer: counted in the budget with the state that it has or will have; of a list or tuple of them, all are.
        batch_dims: which dimension of each tensor carries the batch: a nest like the batch, of dimensions and None, and
            "list" for a list that has one entry a sample, such as images of different sizes.
        allow_inexact: what couples samples is computed within microbatches, and named in `plan.inexact`. BatchNorm then
            uses the statistics of each microbatch; its running statistics make one update a step with the mean of the
            microbatches' statistics, weighted by samples, and `num_batches_tracked` goes up by one.

    Raises:
        FullbatchError: BatchError, ModelError, LossError, MemorySizeError or BudgetError, with state as before. And
            CaptureError where a tensor of the step, or what an operator of the forward makes, is in fp8 or smaller, as
            in `fullbatch.Step`. Errors of `loss_fn` come through as they are.
    """

    def __init__(
        self,
        loss_fn: Callable[[Any, Any], Any],
        model: Any,
        batch: Any,
        *,
        memory: int | str | None = None,
        microbatch: int | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        batch_dims: Any = None,
        allow_inexact: bool = False,
    ) -> None:
        check_all(
            lambda: check_devices(model),
            lambda: _check_lazy(model),
            lambda: check_callable(loss_fn, optimizer),
            lambda: check_memory(memory, model),
            lambda: check_microbatch(microbatch, find_cut(batch, batch_dims).size),
        )
        self._loss_fn, self._model, self._batch_dims = loss_fn, model, batch_dims
        self._optimizers = each_of(optimizer)
        self._memory = None if memory is None else parse_bytes(memory)
        self._microbatch, self._allow = microbatch, allow_inexact
        self._free: int | None = None
        self._planned: _Planned | None = None
        self._job = Job(loss_fn, model, check_devices(model))
        self._plan = self._prepare(batch)[1]

    @property
    def plan(self) -> Plan:
        """The plan of the last call; before the first, that of the example batch."""
        return self._plan

    def __call__(self, batch: Any, *, scaler: torch.amp.GradScaler | None = None) -> torch.Tensor:
        """One step: adds to `.grad`, moves buffers once, returns the loss of the whole batch, a scalar.

        Args:
            batch: a nest like the example, of any size. Where its samples are larger than those planned for, or more is
                owned than then, and there is a budget, the step is planned anew, which runs it several times.
            scaler: `.grad` gets the gradient of `scaler.scale(loss)`; unscaling and stepping are yours, once a step.

        Raises:
            What the constructor raises. `.grad`, buffers, generators and Python state are then as before.
        """
        cut, plan = self._prepare(batch)
        scale = scale_of(scaler, self._job.device)
        with preserved(self._job, always=False), caches_off(self._model):
            mode = Mode(plan.checkpointed, 1.0 if scale is None else float(scale))
            result = run(self._job, cut, batch, cut.spans(plan.microbatch), mode)
            self._commit(result)
        self._plan = plan
        return result.sums.mean()

    def closure(self, batch: Any) -> Callable[[], torch.Tensor]:
        """What an optimizer that evaluates the loss again calls: `optimizer.step(step.closure(batch))`, as LBFGS needs.

        Each call of it clears the gradients of the model and of the step's optimizers, runs one step, and returns the
        loss. It is a step in all else: buffers move, and dropout draws new masks.
        """
        return closure_of(self, self._model, self._optimizers, batch)

    # ---- planning

    def _prepare(self, batch: Any) -> tuple[Cut, Plan]:
        """How this batch is cut and run; plans where that is not known."""
        refuse_backward_hooks(self._model)
        cut = find_cut(batch, self._batch_dims)
        self._job = replace(self._job, device=check_devices(self._model))
        parameters, buffers = (named_tensors(self._model, which) for which in ("parameters", "buffers"))
        refuse_formats([*leaves(batch), *parameters.items(), *buffers.items()])
        norms = self._norms(cut)
        if self._planned is None:
            with caches_off(self._model):
                only_reads(self._job, cut, batch, cut.spans(self._sizes(cut.size, bool(norms))[0])[0])
            norms = self._norms(cut)  # that forward may have shown more of them
        owned = owned_bytes(
            self._job.device, parameters.values(), named_tensors(self._model, "buffers").values(),
            [leaf for _, leaf in leaves(batch)], self._optimizers,
        ).total  # fmt: skip
        if self._planned is None or not self._serves(self._planned, batch, cut, owned, bool(norms)):
            self._planned = self._search(batch, cut, owned, norms)
        return cut, self._as_plan(self._planned, cut, owned, norms)

    def _norms(self, cut: Cut) -> list[str]:
        """Modules that use statistics of the batch, where it is not run at once. Raises ModelError."""
        norms = batch_norms(self._model, self._job.moving) if self._splits(cut.size) else []
        if norms and not self._allow:
            raise norms_refused(norms)
        return norms

    def _splits(self, size: int) -> bool:
        return size > 1 and not (self._microbatch is not None and self._microbatch >= size)

    def _serves(self, planned: _Planned, batch: Any, cut: Cut, owned: int, norms: bool) -> bool:
        """Whether what was planned is good for this batch too."""
        if not planned.compared and not norms and self._splits(cut.size):
            return False
        if set(planned.choice.checkpointed) - {name for name, _ in named_modules(self._model)}:
            return False
        if planned.budget is None:
            return True
        return owned + planned.choice.activations <= planned.budget and cut.weight(batch) <= planned.weight

    def _search(self, batch: Any, cut: Cut, owned: int, norms: list[str]) -> _Planned:
        budget = self._budget(owned)
        room = None if budget is None else budget - owned
        sizes = self._sizes(cut.size, bool(norms))
        with caches_off(self._model) as caches:
            choice = Placer(self._job, cut, batch, room, owned).choose(sizes)
            findings, compared = Findings(), self._splits(cut.size) and not norms
            if compared:
                space = free_bytes(self._job.device) if room is None else room
                findings = probe(
                    self._job, cut, batch, choice.microbatch, choice.checkpointed, space, choice.activations
                )
        if findings.coupled and not self._allow:
            raise LossError(*findings.coupled)
        weight = max(cut.weight(batch), self._planned.weight if self._planned is not None else 0.0)
        return _Planned(choice, findings, compared, weight, budget, caches)

    def _budget(self, owned: int) -> int | None:
        if self._memory is not None or self._microbatch is not None:
            return self._memory
        if self._free is None:  # found once: what is free moves with every step
            self._free = free_bytes(self._job.device) + owned
        return self._free

    def _sizes(self, size: int, norms: bool) -> list[int]:
        """Microbatches to choose from, rising. BatchNorm needs more than one sample in each, the last one too."""
        if self._microbatch is not None:
            return [min(self._microbatch, size)]
        sizes = sorted(microbatch_sizes(size))
        return [m for m in sizes if m == size or (m > 1 and size % m != 1)] if norms else sizes

    def _as_plan(self, planned: _Planned, cut: Cut, owned: int, norms: list[str]) -> Plan:
        choice = planned.choice
        microbatch = min(choice.microbatch, cut.size)
        inexact: list[str] = []
        if microbatch < cut.size:
            inexact = [norms_named(norms)] if norms else []
            inexact += [f"{fault.what} {fault.got}" for fault in planned.findings.coupled]
        plan = Plan(
            cut.size, microbatch, choice.checkpointed, owned, choice.activations, planned.budget, tuple(inexact),
            trials=choice.trials,
        )  # fmt: skip
        return replace(plan, notes=tuple(self._notes(planned, cut, bool(norms))))

    def _notes(self, planned: _Planned, cut: Cut, norms: bool) -> list[str]:
        notes = [NO_CERTIFICATE, *planned.findings.notes, *planned.choice.notes]
        if norms:
            notes.append("not compared: whether the loss couples samples besides")
        if planned.caches:
            notes.append(f"key/value cache off while the step runs: {', '.join(planned.caches)}")
        if cut.entries:
            notes.append(f"cut with the tensors, one entry a sample: {', '.join(cut.entries)}")
        shared = [path for path, dim in cut.dims.items() if dim is None]
        if shared:
            notes.append(f"the same for all microbatches: {', '.join(shared)}")
        if self._memory is None and self._microbatch is None:
            notes.append(f"budget: what is free now plus what the step owns, less a reserve of {RESERVE:.0%}")
        return notes

    # ---- the end of a step

    def _commit(self, result: Result) -> None:
        """Gradients and buffers, all or nothing; hooks that may raise run before anything is written."""
        rules = self._planned.findings.rules if self._planned is not None else {}
        buffers = result.buffers.final(rules, self._allow)
        grown = [(held, value) for held, value in buffers if held.tensor.shape != value.shape]
        same = [(held.tensor, value) for held, value in buffers if held.tensor.shape == value.shape]
        commit(Pending(result.gradients, same), list(named_tensors(self._model, "parameters").values()))
        for held, value in grown:
            setattr(held.module, held.key, value)


def _check_lazy(model: Any) -> None:
    try:
        parameters = named_tensors(model, "parameters")
    except ModelError:  # said by another check
        return
    lazy = [name for name, tensor in parameters.items() if torch.nn.parameter.is_lazy(tensor)]
    if lazy:
        raise ModelError.of(
            "Parameters have no shape yet.", got=listed(lazy), expected="a model that has run once",
            next="model(inputs) before fullbatch.eager.Step(...)",
        )  # fmt: skip
