"""`fullbatch.eager.Step`: the training step of a model that cannot be captured as one graph.

Limit that forced it: a forward that branches on data or calls into NumPy is no graph, so that nothing can be derived
from it. Shape of the answer: it is run as it is, in plain microbatches, each weighted by the count that `loss_fn`
returns. What is exact that way is done exactly; what is not is refused by name, or named where `allow_inexact=True`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from fullbatch._arguments import check_callable, check_memory, check_microbatch
from fullbatch._closure import closure_of
from fullbatch._errors import ModelError, check_all
from fullbatch._memory._twin import each_of
from fullbatch._prepared import Prepared
from fullbatch._run._commit import Pending, commit
from fullbatch._scaler import scale_of
from fullbatch._size import parse_bytes
from fullbatch._tree import check_devices, named_tensors
from fullbatch.eager._buffers import Rule
from fullbatch.eager._cut import find_cut
from fullbatch.eager._loop import Job, Mode, Result, preserved, run
from fullbatch.eager._plan import Plan, listed
from fullbatch.eager._planning import Planning, Settings
from fullbatch.eager._recompute import caches_off
from fullbatch.eager._resume import load_state, state_of
from fullbatch.eager._state import Generators


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
    torch, Python and NumPy, the buffers and the Python state of the forward, and leaves no trace in them. The first
    step in which a buffer moves that was left alone before is run twice, to recompute from its old value. State outside
    of the modules and of the arguments of a checkpointed module is not put back: where it changes the result, the
    module is not checkpointed and the plan says so. Random numbers follow your seed, microbatch by microbatch: they are
    not those that the undivided batch would draw.

    Two things couple samples, and are refused by name: what uses statistics of the batch (BatchNorm in train mode; a
    call of `F.batch_norm` that cannot take one sample), and a loss whose sum or count is not that of its parts. The
    second is tried on the example, with every random operator a constant. The trial cannot see coupling in a branch
    that the example does not take, coupling weaker than the square root of the rounding of the coarsest dtype in the
    step, and coupling that only shows in more samples than a forward has room for. A microbatch of the whole batch,
    where asked for, is exact whatever couples it.

    `prepare` plans for every form of a batch before training, and `state_dict` in a checkpoint makes a resumed run end
    with the same bits. What `fullbatch.Step` has besides, this has not: no `verify`, and no saved plans.

    Args:
        loss_fn: `loss_fn(model, batch) -> (loss_sum, count)`: a scalar sum of losses, and what it is to be divided by
            (an int, float or tensor without gradient). Both must add up over microbatches; a count may be zero in some.
        model: a Module, or a tuple or dict of Modules, on one device.
        batch: one example of the batch that you want, any nest of tensors, which is run. A list without tensors, and a
            NumPy array, that has one entry a sample is cut with the tensors, and named in the plan; other values, a
            tuple among them, are the same for all.
        memory: the budget in bytes, or "6GiB", of all that the step owns and allocates. None: what is free now plus
            what the step owns, less a reserve of 10 %.
        microbatch: the most samples in a microbatch, instead of or besides a budget. A batch is cut evenly: 33 samples
            in eights are 7, 7, 7, 6, 6.
        optimizer: counted in the budget with the state that it has or will have; of a list or tuple of them, all are.
        batch_dims: which dimension of each tensor carries the batch: a nest like the batch, of dimensions and None, and
            "list" for a list that has one entry a sample, such as images of different sizes.
        allow_inexact: what couples samples is computed within microbatches, and named in `plan.inexact`. BatchNorm then
            uses the statistics of each microbatch; its running statistics make one update a step with the mean of the
            microbatches' statistics, weighted by samples, and `num_batches_tracked` goes up by one. One that cannot
            take a single sample gets none; where no cut into microbatches avoids it, that is a ModelError.

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
        self._model, self._optimizers, self._allow = model, each_of(optimizer), allow_inexact
        settings = Settings(None if memory is None else parse_bytes(memory), microbatch, allow_inexact)
        job = Job(loss_fn, model, check_devices(model))
        self._planning = Planning(job, settings, batch_dims, self._optimizers)
        self._plan = self._planning.place(batch)[2]
        self._steps = 0

    @property
    def plan(self) -> Plan:
        """The plan of the last call; before the first, that of the example batch. A loaded state changes it."""
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
        cut, placement, plan = self._planning.place(batch)
        job = self._planning.job
        scale = scale_of(scaler, job.device)
        mode = Mode(plan.checkpointed, 1.0 if scale is None else float(scale))
        try:
            with preserved(job, always=False), caches_off(self._model):
                result = run(job, cut, batch, cut.spans(plan.microbatch), mode)
                self._commit(result, placement.findings.rules)
        except ValueError as error:
            self._planning.explain(error, batch)
            raise
        self._plan = plan
        self._steps += 1
        return result.sums.mean()

    def closure(self, batch: Any) -> Callable[[], torch.Tensor]:
        """What an optimizer that evaluates the loss again calls: `optimizer.step(step.closure(batch))`, as LBFGS needs.

        Each call of it clears the gradients of the model and of the step's optimizers, runs one step, and returns the
        loss. It is a step in all else: buffers move, and dropout draws new masks.
        """
        return closure_of(self, self._model, self._optimizers, batch)

    def prepare(self, batches: Iterable[Any]) -> Prepared:
        """Plans each distinct form of a batch before training: the worst is known then, and later none is tried.

        Each form is run several times, as the example was, on the first batch that has it; the state of all that the
        constructor keeps is afterwards as before, and that of the default generators too, from which a loader may
        draw. A form is the shapes and dtypes of tensors and NumPy arrays: other values in a batch are not looked at. A
        batch of a form that is not among them runs as without `prepare`, planned anew where it is heavier than the
        example. What a form takes is measured on that one batch: another of the same form may branch otherwise.

        Args:
            batches: batches like the example, as a list or a loader gives them, with values: nothing can be run on
                `meta`.

        Returns:
            The forms, that with the largest predicted peak (bytes) first. `overhead` is NaN: no time is predicted.

        Raises:
            BudgetError: some forms fit no plan; all of them are named, `.smallest` is the budget for the worst.
            BatchError: there is no batch in it, or one on `meta`.
            FullbatchError: what the constructor raises, for all forms together. Nothing is planned then.
        """
        generators = Generators(self._planning.job.device)
        try:
            return self._planning.prepare(batches)
        finally:
            generators.restore()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold besides model and optimizer, for the resumed run to end with the same bits.

        These are the number of steps taken, the placement (microbatch, checkpointed modules, how buffers follow), of
        the forms that were prepared too, and the state of generators: torch's default ones (of the CPU and of the
        step's device), Python's, NumPy's, and those that modules hold or that `loss_fn` closes over, three levels deep.
        `torch.save` it with the rest; `torch.load(weights_only=True)` reads it.

        Not in it: a generator that is found elsewhere, such as in a global, and Python attributes of modules (a counter
        that the forward reads), which `model.state_dict()` has not either.
        """
        return state_of(self._planning, self._steps)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state_dict` was taken. Sets the generators: load after everything is built and prepared.

        Steps run in the checkpoint's placement, as if it had been measured here, within the budget of this step: where
        that is less than the run had which was saved, the microbatch stays and checkpoints are placed anew, which
        changes no bit. What neither run has measured when the checkpoint is taken, a batch heavier than any before, is
        planned anew; `prepare` rules that out. Without `memory=` and `microbatch=` the checkpoint's are used; of what
        is free, no more than there was. On another kind of device, with other threads or another torch, the run goes
        on, but not to the same bits.

        Raises:
            PlanError: `state` is none, or of another model, or this step was given another microbatch. All that is
                wrong is listed, and nothing of it is loaded.
        """
        self._steps = load_state(self._planning, state)
        self._plan = self._planning.again()

    # ---- the end of a step

    def _commit(self, result: Result, rules: Mapping[str, Rule]) -> None:
        """Gradients and buffers, all or nothing; hooks that may raise run before anything is written."""
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
