"""`Step`: the training step that the user wrote for the whole batch, run on the memory there is."""

from __future__ import annotations

import contextlib
import os
import random
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fullbatch._arguments import (
    check_callable,
    check_flags,
    check_memory,
    check_microbatch,
    check_precision,
    given_plan,
)
from fullbatch._budget import Wanted
from fullbatch._call import Call, PlannedOnly
from fullbatch._capture._assumed import Otherwise
from fullbatch._capture._frontend import Frontend
from fullbatch._capture._joint import Joint
from fullbatch._capture._modules import traceable
from fullbatch._captured import Captured
from fullbatch._changes import Changes
from fullbatch._closure import closure_of
from fullbatch._eager_loss import EagerLoss
from fullbatch._errors import CaptureError, VerifyError, check_all
from fullbatch._found import Nest, may_split, shape_of
from fullbatch._found_call import Found
from fullbatch._hooks import refuse_hooks, refuse_modes
from fullbatch._memory._after import planned
from fullbatch._memory._owned import optimizer_step, owned_bytes
from fullbatch._memory._twin import each_of
from fullbatch._plan._plan import Plan
from fullbatch._prepared import Prepared, prepare
from fullbatch._replay import Draws
from fullbatch._resume import Given, Progress
from fullbatch._run._commit import commit, restore_generator, save_generator
from fullbatch._run._executor import Executor
from fullbatch._run._inductor import check_compiler
from fullbatch._scaler import SOURCE, scale_of
from fullbatch._size import parse_bytes
from fullbatch._split import Split, split_of
from fullbatch._split_call import around, behind, seek
from fullbatch._tree import check_devices, find_batch, leaves, named_tensors, returned
from fullbatch._verify import Certificate, LastBatch, verify


class Step:
    """Forward and backward of `loss_fn(model, batch)` in microbatches, with the gradient of the whole batch.

    Calling the step with a batch adds the gradient to `.grad`, updates buffers once, and returns the loss (or
    `(loss, aux)`), detached. Everything that the plain step reads is watched: when it changes, the step is captured
    anew.

    Args:
        loss_fn: `loss_fn(model, batch) -> loss` or `(loss, aux)`, a scalar and any nest of tensors. Where it cannot be
            captured whole its call of the model is, and the rest runs as it is, on the whole batch; the plan says so.
            The code before that call then runs on the example when the step is made (and when a shape is prepared, or
            looked at by `propose` or `largest`), to know what the model is given. What it changes in the model
            (weights, gradients, buffers, modes, attributes of modules) and in the batch's tensors is put back, and so
            are the default generators; state outside of the model is not: a counter in a closure has counted, an
            iterator has moved on. Or a pair `(forward, loss)` where the loss depends on the data in shape or order
            (matching, `x[mask]`, `.item()`): `forward(model, batch) -> outputs`, any nest of tensors, is captured and
            split; `loss(outputs, batch)` returns the loss or `(loss, aux)`, and runs as it is, once a step, on the
            outputs of the whole batch. It may read parameters of its own, and draws from the default generators. Its
            memory is measured at its first run.
        model: a Module, or a tuple or dict of Modules, on one device.
        batch: one example of the batch that you want, any nest of tensors. Only its metadata is used, but by such code.
        memory: the budget in bytes, or "6GiB", "800MB". None: what is free on the device now plus what the step
            already owns, less a reserve of 10 %. It bounds parameters, buffers, gradients, optimizer state, batch
            and everything allocated while the step runs.
        microbatch: samples a microbatch, instead of or besides a budget.
        optimizer: counted in the budget with the state that it has or will have. Its own step is held against the same
            budget: what it allocates besides (`step.plan` says so where that sets the peak). Or a list or tuple of
            optimizers, which step one after another: the state of all, and the most that any allocates.
        batch_dims: which dimension of each tensor carries the batch, where the leading one is not it: a nest like the
            batch, of dimensions and None.
        plan: a plan, or the path of one that `step.plan.save` wrote, to use instead of planning. It must be for this
            step; its operators are measured again here. Where neither `memory` nor `microbatch` is given, the plan's
            own budget holds (no more than what is free), or where it has none its microbatch. Another shape of the
            batch at a later call is planned for anew.
        compile: TorchInductor compiles groups of pointwise operators, normalisations and reductions into one kernel
            each, within the same budget: a group that would not keep it stays as it is. The first call then runs the
            step once more, and takes seconds for each distinct group. Results are equal to rounding, not to the bit.
            On the CPU this needs a C++ compiler.
        timed: plans are chosen by seconds measured on this machine, and not by operations and bytes. Each distinct
            operator is run a few times alone, on the whole batch and on a quarter of it, for seconds to a minute; on a
            busy machine the result is noise. Seconds are remembered between processes.

    Raises:
        FullbatchError: BatchError, ModelError, LossError, CaptureError, BudgetError, MemorySizeError, PlanError or
            CompileError (no C++ compiler), at once, before anything has run.
    """

    _measures = True  # operators are run alone for their exact bytes; `explain` runs nothing

    def __init__(
        self,
        loss_fn: Callable[[Any, Any], Any] | tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]],
        model: Any,
        batch: Any,
        *,
        memory: int | str | None = None,
        microbatch: int | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        batch_dims: Any = None,
        plan: Plan | str | os.PathLike[str] | None = None,
        compile: bool = False,
        timed: bool = False,
    ) -> None:
        self._loss_fn, self._model, self._batch_dims = loss_fn, model, batch_dims
        self._microbatch = microbatch
        self._saved: Plan | None = None
        self._like: Plan | None = None  # of a twin in another dtype: the plan whose order it follows
        self._split: Split | None = None
        check_all(
            lambda: check_devices(model),
            lambda: setattr(self, "_split", split_of(loss_fn)),
            lambda: check_callable(loss_fn, optimizer),
            lambda: check_memory(memory, model),
            lambda: check_microbatch(microbatch, find_batch(batch, batch_dims).size),
            lambda: setattr(self, "_saved", given_plan(plan)),
            lambda: check_flags(compile=compile, timed=timed),
        )
        self._optimizers = each_of(optimizer)
        self._memory = None if memory is None else parse_bytes(memory)
        self._device, self._compile, self._timed = check_devices(model), compile, timed
        if compile:
            check_compiler(self._device)
        self._frontend = Frontend(self._captured_fn, self._on_graph, forward_only=self._split is not None)
        self._call: Call | None = None
        self._changes = Changes()
        self._progress = Progress()
        self._plan = self._prepare(batch)
        self._last = LastBatch(batch)

    # ---- what the user sees

    @property
    def plan(self) -> Plan:
        """The plan of the last call; before the first, that of the example batch."""
        return self._plan

    def __call__(self, batch: Any, *, scaler: torch.amp.GradScaler | None = None) -> Any:
        """One step: adds to `.grad`, updates buffers, returns the loss or `(loss, aux)`.

        Args:
            batch: a nest of tensors like the example, of any size.
            scaler: `.grad` gets the gradient of `scaler.scale(loss)`, as plain PyTorch leaves it; the loss is returned
                as it is. `scaler.unscale_`, `scaler.step` and `scaler.update` are yours to call, once a step. The
                scale is an input: another value captures nothing anew. The first call with a scaler does.

        Raises:
            ModelError: `scaler` is no GradScaler.
        """
        call = self._start(batch, only_plan=False)
        call.scale = scale_of(scaler, self._device)
        self._last = LastBatch(batch)
        return self._finish(batch, call)

    def verify(self, batch: Any = None, dtype: torch.dtype | None = torch.float64) -> Certificate:
        """Runs the plain step and the planned one on copies and compares loss, every gradient and every buffer.

        `loss_fn` runs several times for it. Model, batch and generators stay as they are; state of Python's that it
        changes outside of the model (a counter or a running mean in a closure, an iterator) is changed by that, and the
        next step reads it so.

        Args:
            batch: what to compare on; None: the last batch, if it is still alive. As many of its samples are used as
                fit for the plain step.
            dtype: the precision of the comparison; None: the model's own. Autocast does not convert float64, so that a
                step under autocast is compared with its conversions only where this is None.

        Raises:
            VerifyError: the last batch is gone, the model cannot be copied, or `dtype` is none of floating point.
        """
        check_precision(dtype)
        batch = self._last.get() if batch is None else batch
        if batch is None:
            raise VerifyError.of(
                "The last batch is no longer in memory.", expected="a batch to compare on", next="step.verify(batch)"
            )
        shape = find_batch(batch, self._batch_dims)
        need = self._plan.plain_peak * shape.size // max(self._plan.batch, 1)
        with contextlib.ExitStack() as stack:
            split = self._split
            plain = self._captured_fn if split is None else stack.enter_context(split.trial(self._model))
            return verify(self._twin_step, plain, self._model, batch, shape, self._plan, dtype, need)

    def closure(self, batch: Any) -> Callable[[], torch.Tensor]:
        """What an optimizer that evaluates the loss again calls: `optimizer.step(step.closure(batch))`, as LBFGS needs.

        Each call of it clears the gradients of the model and of the step's optimizers, runs one step, and returns the
        loss, detached; `aux` is dropped. It is a step in all else: buffers move, and dropout draws new masks.
        """
        return closure_of(self, self._model, self._optimizers, batch)

    def prepare(self, batches: Iterable[Any], *, scaler: torch.amp.GradScaler | None = None) -> Prepared:
        """Captures and plans each distinct shape of a batch, and runs nothing: the worst is known before training.

        Later calls with these shapes run at once. A shape that is not among them is still planned for when it comes.

        Args:
            batches: batches like the example, as a list or a loader gives them. Their values are not read: tensors on
                `meta` do (`torch.empty(8, 900, device="meta")`), and stand for tensors on the model's device.
            scaler: the one that the calls will have. A step with a scale is another one than without, of which the
                scale takes some bytes, so that it is this one that is planned.

        Raises:
            BudgetError: some shapes fit no plan; all of them are named, `.smallest` is the budget for the worst.
            BatchError: there is no batch in it.
            ModelError: `scaler` is no GradScaler.
        """
        scale = scale_of(scaler, self._device)
        with self._frontend.keeping():
            return prepare(lambda batch: self._prepare(batch, scale, anew=True), batches, self._device)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold besides model and optimizer, for the resumed run to end with the same bits.

        These are the state of the default generators (torch's, of the CPU and of the step's device, Python's, NumPy's),
        the number of steps taken, and what decides the microbatches, from which masks and rounding follow: what was
        asked for, and for each form of a batch what it was planned for. `torch.save` it with the rest;
        `torch.load(weights_only=True)` reads it.

        Not in it: a generator of your own (`torch.Generator`, `numpy.random.Generator`, `random.Random`) that a loss or
        a loader draws from, whose state is yours to save; and gradients. Within a window of accumulation, save `.grad`
        too, and set it before the next call.
        """
        return self._progress.state(self._device, self._given)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state_dict` was taken. Sets the default generators: load after everything is built.

        Each call runs in the microbatch that the saved run would have taken, within the budget of this step. Forms of a
        batch that the checkpoint does not know are decided in its `memory=`, unless this step has one or a plan; where
        none was named they follow what is free. Of a state of fullbatch that had microbatches by the number of samples
        alone, these are taken where they fit. On another kind of device, with other threads or another torch, the run
        goes on, but not to the same bits.

        Raises:
            PlanError: `state` is none, or this step was given another microbatch, or a plan with another.
        """
        self._progress.load(state, self._device, self._given)

    @property
    def _given(self) -> Given:
        return Given(self._memory, self._microbatch, self._saved)

    @property
    def _captured_fn(self) -> Callable[[Any, Any], Any]:
        """What is captured: `loss_fn`, or of a pair the forward."""
        if self._split is not None:
            return self._split.forward
        assert callable(self._loss_fn)
        return self._loss_fn

    def _twin_step(self, model: Any, batch: Any, microbatch: int) -> Step:
        settings: dict[str, Any] = {"batch_dims": self._batch_dims, "compile": self._compile}
        twin = Step(self._loss_fn, model, batch, microbatch=microbatch, **settings)
        twin._like = self._plan
        if self._split is not None:
            twin._split = self._split  # it notes what the loss drew
        return twin

    def _call_with(self, batch: Any, draws: Draws) -> tuple[Any, Joint]:
        """One step that records what its random operators draw; its result, and what was captured."""
        call = self._start(batch, only_plan=False)
        call.drawn, call.again = draws.record, draws.forget
        result = self._finish(batch, call)
        assert call.captured is not None
        draws.join(call.captured.side(self._plan.microbatch).program, self._plan.schedule.samples)
        return result, call.captured.joint

    def _finish(self, batch: Any, call: Call) -> Any:
        """The step; where a branch that was captured goes the other way it begins again, as if nothing had run."""
        before, drawn, again = replace(call, outputs=[]), random.getstate(), False
        while True:
            try:
                result = self._finish_once(batch, call)
            except Otherwise as other:
                self._frontend.turn(other.index)
            except BaseException:
                self._frontend.settle(done=False)
                raise
            else:
                if again:
                    self._frontend.settle(done=True)
                return result
            again = True
            random.setstate(drawn)
            vars(call).update(vars(replace(before, outputs=[])))
            call.again()

    def _finish_once(self, batch: Any, call: Call) -> Any:
        try:
            result = self._invoke(batch, call)
            if call.executor is not None:
                call.outputs, result = [result], None  # held in one place, to be let go once the loss has run
                assert self._split is not None
                result = behind(self._split, batch, call)
            if call.pending is None or call.plan is None:
                raise CaptureError.of(
                    "loss_fn ran without being captured.",
                    got="a call of Step inside of something that suspends TorchDynamo",
                    expected="Step called from ordinary code",
                    next="step(batch) outside of it",
                )
            commit(call.pending, call.inputs)
        except BaseException:
            if call.generator is not None:
                restore_generator(call.generator)
            raise
        self._plan = call.plan
        self._progress.steps += 1
        if call.past is not None and call.captured is not None:
            call.captured.agree(call.past, call.inputs)
        loss, aux, has_aux = result
        if call.scale is not None and self._split is None:
            _, loss = loss
        return (loss, returned(aux)) if has_aux else loss

    # ---- one call

    def _prepare(self, batch: Any, scale: torch.Tensor | None = None, anew: bool = False) -> Plan:
        call = self._start(batch, only_plan=True)
        call.anew, call.scale = anew, scale
        saved = self._saved.fingerprint if self._saved is not None else None
        if not anew and saved is not None and any(form.source == SOURCE for form in saved.inputs):
            call.scale = torch.ones((), device=self._device, dtype=torch.float32)
        with contextlib.suppress(PlannedOnly):
            self._invoke(batch, call)
        assert call.plan is not None
        return call.plan

    def _start(self, batch: Any, only_plan: bool) -> Call:
        self._device = check_devices(self._model)
        check_all(refuse_modes, lambda: refuse_hooks(self._model))
        shape = find_batch(batch, self._batch_dims)
        return Call([leaf for _, leaf in leaves(batch)], shape, self._device, only_plan)

    def _invoke(self, batch: Any, call: Call) -> Any:
        """What the captured call returns; a step that cannot be captured whole is split, from then on."""
        if not isinstance(self._split, Found):
            try:
                return self._capture(batch, call)
            except CaptureError as error:
                if self._split is not None or not may_split(error):
                    raise
                self._split = self._found(error, batch, call)
        return around(self._split, self._model, batch, call, self._capture)

    def _found(self, refusal: CaptureError, batch: Any, call: Call) -> Found:
        """Where a step that is refused can be split. Raises CaptureError, and leaves the step as it was."""
        before, batch = self._frontend, call.brought(batch)

        def attempt(found: Found, nest: Nest) -> None:
            trial = self._start(batch, only_plan=True)
            trial.anew = call.anew
            trial.leaves, trial.shape = shape_of(nest, found.place, batch, trial.shape)
            self._split, self._frontend = found, Frontend(found.forward, self._on_graph, forward_only=True)
            try:
                with contextlib.suppress(PlannedOnly):
                    self._capture(nest, trial)
            finally:
                self._split = None

        try:
            return seek(self._captured_fn, self._model, batch, self._device, refusal, attempt)
        except BaseException:
            self._frontend = before
            raise

    def _capture(self, batch: Any, call: Call) -> Any:
        """What is captured, called with `batch`: the whole step, or the part of it that is split."""
        captures = self._frontend.captures
        self._call = call
        moved, scale = call.moved, None if self._split is not None else call.scale
        try:
            with traceable(self._model):
                result = self._frontend(self._model, batch, moved, scale)
        finally:
            self._call = None
            if self._frontend.captures == captures:
                self._changes.nothing()
            elif not call.only_plan:
                self._changes.add(self._frontend.why(self._model, batch, moved, scale))
        return result

    def _on_graph(self, graph: torch.fx.GraphModule) -> Callable[..., Any]:
        captured = Captured(
            graph, measure=self._measures, compile=self._compile, timed=self._timed, eager=self._eager_loss()
        )
        alive = weakref.ref(self)  # what Dynamo holds must not hold the step, and with it the model

        def run(*inputs: torch.Tensor) -> Any:
            step = alive()
            assert step is not None
            return step._run(captured, inputs)

        return run

    def _eager_loss(self) -> EagerLoss | None:
        if self._split is None:
            return None
        return EagerLoss(self._split.note if isinstance(self._split, Found) else "")

    def _run(self, captured: Captured, inputs: Sequence[torch.Tensor]) -> Any:
        call = self._call
        assert call is not None
        captured.prepare(inputs, call.leaves, call.shape)
        call.captured, call.inputs = captured, inputs
        if captured.eager is not None:
            captured.count_before(*call.before)
        call.plan, executor = self._plan_for(captured, call)
        if call.only_plan:
            raise PlannedOnly
        if captured.eager is not None:  # what Dynamo makes of the outputs comes first, then the loss
            call.executor = executor
            return captured.begin()
        if captured.random:
            call.generator = save_generator()
        with torch.autocast(self._device.type, enabled=False):  # the graph says each conversion
            outputs, call.pending = captured.run(executor, inputs, call.drawn)
        return outputs

    def _plan_for(self, captured: Captured, call: Call) -> tuple[Plan, Executor]:
        parameters, buffers = (named_tensors(self._model, which).values() for which in ("parameters", "buffers"))
        tensors = [*call.owned, *call.leaves]
        owned = owned_bytes(self._device, parameters, buffers, tensors, self._optimizers).total
        microbatch = self._progress.microbatch if self._microbatch is None else self._microbatch
        wanted = Wanted(self._memory, microbatch, self._saved)
        if microbatch is None and captured.free_budget is None:
            captured.free_budget = self._progress.free(captured.key)
        must_fit = call.only_plan and not call.anew
        request = replace(wanted.request(captured, call.shape.size, self._device, owned, must_fit), like=self._like)
        if request.microbatch is None and request.budget is not None:
            call.past = self._progress.past(captured.key, call.shape.size, request.budget, self._given)
            captured.agree(call.past, call.inputs)
        after = optimizer_step(self._device, parameters, self._optimizers)
        return planned(lambda: captured.plan(request, call.past), request.budget, owned, after)
