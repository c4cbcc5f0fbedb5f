"""One captured graph and everything derived from it: its program, its plans, and how to run it.

Capture knows tensors by where it found them; a batch knows them by path. Here the two meet, by identity of the
tensors at a call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fullbatch._axis._build import RESLICE_ABOVE, build
from fullbatch._axis._whole import build_whole
from fullbatch._capture._joint import Joint, trace_joint
from fullbatch._capture._split import output_bytes, output_forms
from fullbatch._cost._costs import Coster
from fullbatch._cost._probe import Prober
from fullbatch._eager_loss import EagerLoss, LossCall, Turns, finished
from fullbatch._errors import BudgetError, Fault, ModelError, PlanError
from fullbatch._ir import Kind, Layout, Program
from fullbatch._memory._free import held_by_others
from fullbatch._past import Decision, Past, newest, serves
from fullbatch._plan._adopt import ANEW, Limits, adopt, bound_of, compare
from fullbatch._plan._adopt import note as loaded_note
from fullbatch._plan._fingerprint import Fingerprint, fingerprint, in_words, input_forms
from fullbatch._plan._frontier import Live, register
from fullbatch._plan._plan import TIMED, Plan
from fullbatch._plan._planner import Choice, Planner
from fullbatch._plan._reduced import Price
from fullbatch._plan._remembered import remembering
from fullbatch._plan._restore import order_of, restore
from fullbatch._plan._schedule import microbatches
from fullbatch._plan._side import Side
from fullbatch._plan._simulate import simulate
from fullbatch._plan._stages import Stages, find_stages
from fullbatch._run._commit import Pending
from fullbatch._run._executor import RANDOM_BYTES, Executor
from fullbatch._run._fuse import NOTE
from fullbatch._scaler import SOURCE, scale_bytes
from fullbatch._tree import BatchShape


@dataclass(frozen=True)
class Request:
    """What a plan is made for, besides the program."""

    budget: int | None
    microbatch: int | None
    owned: int
    note: str = ""
    saved: Plan | None = None  # a plan to use instead of planning
    must_fit: bool = False  # whether it is an error where that plan is not for this
    like: Plan | None = None  # a plan whose order to follow in another dtype, where the program has the same tasks


_SECONDS = 10.0
"""For timing the operators of one program, where asked for."""


@dataclass(frozen=True)
class _Planned:
    """A plan and the room that it was made for: bytes above what the step owns."""

    room: int | None
    microbatch: int | None
    choice: Choice
    executor: Executor
    plan: Plan
    like: Plan | None

    def serves(self, room: int | None, request: Request) -> bool:
        """Whether the plan is as good for this much room: it fits, and was made for nearly as much."""
        if request.microbatch != self.microbatch or (room is None) != (self.room is None):
            return False
        if request.like is not self.like:
            return False
        if room is None or self.room is None:
            return True
        return serves(room, self.room, self.choice.simulated.peak)


class Captured:
    """The graph of one call signature. `run` executes it; `plan` says how."""

    def __init__(
        self,
        graph: fx.GraphModule,
        reslice_above: int = RESLICE_ABOVE,
        measure: bool = True,
        compile: bool = False,
        timed: bool = False,
        eager: EagerLoss | None = None,
    ) -> None:
        self.eager = eager  # a loss that is not captured
        self._graph, self._compile, self._timed = graph, compile, timed
        self._reslice_above = reslice_above
        self._measures = measure
        self._planned: list[_Planned] = []  # the newest last
        self._probers: list[Prober] = []
        self._ready = False
        self.free_budget: int | None = None  # the budget where the user named none

    def prepare(self, inputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], shape: BatchShape) -> None:
        """Traces forward and backward and derives the program, once."""
        if self._ready:
            return
        self.joint: Joint = trace_joint(self._graph, inputs, self.eager)
        dims = {id(leaf): dim for leaf, dim in zip(leaves, shape.dims, strict=True)}
        self.batch_positions = [at for at, tensor in enumerate(inputs) if id(tensor) in dims]
        layouts: dict[int, Layout] = {}
        for at in self.batch_positions:
            dim = dims[id(inputs[at])]
            if dim is not None:
                layouts[at] = Layout(dim)
        self._refuse_mutated_batch()
        self.program: Program = build(self.joint, layouts, shape.size, self._reslice_above)
        self.stages: Stages = find_stages(self.program)
        self._whole_program = build_whole(self.joint, shape.size)
        self._arrange(inputs)
        carried = {at: layout.dim for at, layout in layouts.items()}
        gradients = [at for at, node in self.joint.gradients.items() if node is not None]
        self._forms = input_forms(inputs, self.joint.sources, carried, gradients, self.joint.mutated)
        self._replicated = shape.replicated
        self._shape = shape
        self._ready = True

    def _arrange(self, inputs: Sequence[torch.Tensor]) -> None:
        """What plans are made of: costs of the program, split and whole."""
        used = set(self.program.inputs)
        self._device = inputs[0].device if inputs else torch.device("cpu")
        given = {at: tensor for at, tensor in enumerate(inputs) if at in used}
        whole = self._whole_program
        self._probers = [Prober(self.program, given), Prober(whole, given)]
        self._split = Side(self.program, self.stages, self._probers[0].costs, self._measures, self._price(0))
        self._whole = Side(whole, find_stages(whole), self._probers[1].costs, self._measures, self._price(1))
        self._planner = Planner(self._split, self._whole)
        self._live = Live(self._planner.choose, self._planner.plain_peak, self._besides, self._device)
        self._fingerprints: dict[tuple[Side, int], Fingerprint] = {}  # by program and threads
        self._planned = []

    def _price(self, which: int) -> Price | None:
        """Measured seconds of a task over the whole batch, where asked for: split, in quarters of it."""
        batch = self.program.batch
        size = batch if which else max(1, batch // 4)
        seconds = self._probers[which].timed(frozenset([size]), _SECONDS) if self._timed else None
        if seconds is None:
            return None
        return lambda task: (
            seconds(task, batch).time if task.kind is Kind.ONCE else seconds(task, size).time * batch / size
        )

    def side(self, microbatch: int) -> Side:
        """The program that runs in microbatches of this size."""
        return self._whole if microbatch == self.program.batch else self._split

    def measured(self, samples: int) -> Coster | None:
        """Exact costs of all tasks of the split program for one microbatch size."""
        return self._probers[0].costs(frozenset([samples]))

    def _refuse_mutated_batch(self) -> None:
        wrong = [self.joint.sources[at] for at in self.joint.mutated if at in self.batch_positions]
        if wrong:
            raise ModelError(
                *(
                    Fault(
                        f"The step changes {source}, a tensor of the batch, in place.",
                        expected="in-place changes of buffers and of the step's own values only",
                        next="x = x.clone() before the in-place operation",
                    )
                    for source in wrong
                )
            )

    @property
    def random(self) -> bool:
        """Whether the step draws from the default generator."""
        return any(task.random for task in self.program.tasks)

    @property
    def plain_time(self) -> float:
        """The time of the whole batch at once, in bytes moved, or in seconds where it is timed."""
        return self._planner.plain_time

    @property
    def _besides(self) -> int:
        """Bytes that a step takes beside its program: the generator's state, the scale of the loss."""
        scaled = f"L['{SOURCE}']" in self.joint.sources
        kept = self.eager.kept + self.eager.beside if self.eager is not None else 0
        return RANDOM_BYTES * self.random + scale_bytes(self._device) * scaled + kept

    @property
    def key(self) -> str:
        """Names the program in every process: the digests of both its forms."""
        return f"{self._fingerprint(self._split).digest} {self._fingerprint(self._whole).digest}"

    def plan(self, request: Request, past: Past | None = None) -> tuple[Plan, Executor]:
        """The plan for `request`. Raises BudgetError.

        What a step owns may change a little at every call (a tensor of another size that nothing reads), so a plan that
        was made for nearly as much room, and fits, serves again. Where a budget decides the microbatch, `past` says
        what it decided before, and is told what it decides now.
        """
        if past is None or request.budget is None or request.microbatch is not None:
            return self._described(self._serving(request) or self._made(request), request)
        return self._described(self._by(past, request), request)

    def agree(self, past: Past, inputs: Sequence[torch.Tensor]) -> None:
        """Tells `past` what a loss that is not captured took when it first ran, or is told."""
        if self.eager is None:
            return
        if self.eager.workspace is not None:
            past.ran((self.eager.workspace, self.eager.kept))
        elif past.loss is not None:
            self.eager.workspace, self.eager.kept = past.loss
            self._arrange(inputs)

    def _by(self, past: Past, request: Request) -> _Planned:
        """The microbatch is decided in the budget of `past` where that is pinned, and planned in that of `request`."""
        assert request.budget is not None
        deciding = replace(request, budget=past.budget) if past.pinned else request
        decision = past.decided(self._room(deciding) or 0)
        if decision is not None:
            return self._as_decided(decision, request)
        try:
            made = self._first(past, deciding) or self._serving(deciding, exactly=True) or self._made(deciding)
        except BudgetError:
            if deciding.budget == request.budget:
                raise
            return self._made(request)  # where the saved run would have ended
        decision = Decision(self._room(deciding) or 0, made.choice.simulated.peak, made.choice.size)
        past.add(decision)
        return made if deciding.budget == request.budget else self._as_decided(decision, request)

    def _first(self, past: Past, request: Request) -> _Planned | None:
        if past.first is not None:
            with contextlib.suppress(BudgetError):
                return self._made(replace(request, microbatch=past.first))
        return None

    def _as_decided(self, decision: Decision, request: Request) -> _Planned:
        """A plan in that microbatch: one that is there, or the one that was decided on, or another."""
        room, size = self._room(request) or 0, decision.microbatch
        for planned in reversed(self._planned):
            if planned.choice.size == size and planned.serves(room, replace(request, microbatch=planned.microbatch)):
                return planned
        if decision.peak <= room:
            with contextlib.suppress(BudgetError):
                again = self._made(replace(request, budget=decision.room + request.owned + self._besides))
                if again.choice.size == size and again.choice.simulated.peak <= room:
                    return again
        try:
            return self._made(replace(request, microbatch=size))
        except BudgetError as error:
            error.add_note(f"fullbatch: the checkpoint's run takes microbatches of {size} here, and so must this one")
            raise

    def _room(self, request: Request) -> int | None:
        """Bytes above what the step owns, and needs beside its program."""
        return None if request.budget is None else request.budget - request.owned - self._besides

    def _serving(self, request: Request, exactly: bool = False) -> _Planned | None:
        """A plan that is there and is as good for `request`; `exactly`: made for as much room."""
        room = self._room(request)
        fit = (one for one in reversed(self._planned) if one.serves(room, request))
        return next((one for one in fit if not exactly or one.room == room), None)

    def _made(self, request: Request) -> _Planned:
        room = self._room(request)
        choice, note = self._choose(room, request, self._besides)
        executor = Executor(choice.program, choice.schedule, compile=self._compile)
        described = self._describe(choice, request, note)
        return _Planned(room, request.microbatch, choice, executor, described, request.like)

    def _described(self, planned: _Planned, request: Request) -> tuple[Plan, Executor]:
        """What is returned of `planned`, from now on the newest plan."""
        self._planned = newest(self._planned, planned)
        plan = planned.plan
        if plan.owned != request.owned or plan.budget != request.budget:
            more = request.owned - plan.owned
            plan = replace(
                plan, budget=request.budget, owned=request.owned, predicted_peak=plan.predicted_peak + more,
                plain_peak=plan.plain_peak + more,
            )  # fmt: skip
        return plan, planned.executor

    def _choose(self, room: int | None, request: Request, besides: int) -> tuple[Choice, str]:
        """The choice for `request`, and a note on the plan that came with it."""
        note = ""
        followed = None if request.like is None else self._followed(request.like, request.microbatch)
        if followed is not None:
            return followed, note
        if request.saved is not None:
            try:
                return self._adopted(request.saved, request, besides)
            except PlanError:
                if request.must_fit:
                    raise
                note = ANEW
        return self._searched(room, request, besides), note

    def _searched(self, room: int | None, request: Request, besides: int) -> Choice:
        def search() -> Choice:
            return self._planner.choose(room, request.microbatch, request.owned + besides)

        if room is None or self._timed or not self._measures:
            return search()
        programs = self._fingerprint(self._split).digest, self._fingerprint(self._whole).digest
        return remembering(programs, self._split, self._whole, room, request.microbatch, self._device, search)

    def _followed(self, like: Plan, microbatch: int | None) -> Choice | None:
        """The schedule in the order of `like`, a plan of this step in another dtype; None where its tasks differ."""
        side, size, batch = self._whole if like.whole else self._split, microbatch, self.program.batch
        if size is None or like.whole != (size == batch):
            return None
        try:
            schedule = restore(side.program, side.stages, like.order, microbatches(batch, size))
        except PlanError:
            return None
        cost = side.exact(size)
        simulated = simulate(side.program, schedule, cost or side.estimate)
        return Choice(
            side.program, side.stages, schedule, simulated, size, cost is not None, like.overhead, 0.0, like.whole
        )  # fmt: skip

    def _adopted(self, saved: Plan, request: Request, besides: int) -> tuple[Choice, str]:
        side = self._whole if saved.whole else self._split
        now = self._fingerprint(side)
        limits = Limits(request.budget, request.owned, request.microbatch)
        compare(saved, now, limits)
        size = saved.microbatch
        measured = side.exact(size)
        schedule, simulated = adopt(saved, side.program, side.stages, measured or side.estimate, besides, limits)
        bound = min(bound_of(saved, limits), saved.overhead)
        choice = Choice(
            side.program, side.stages, schedule, simulated, size, measured is not None, saved.overhead, bound,
            saved.whole,
        )  # fmt: skip
        return choice, loaded_note(saved, now, simulated.peak + besides)

    def _fingerprint(self, side: Side) -> Fingerprint:
        key = side, torch.get_num_threads()
        if key not in self._fingerprints:
            self._fingerprints[key] = fingerprint(side.program, self._forms, self._device)
        return self._fingerprints[key]

    def _describe(self, choice: Choice, request: Request, note: str) -> Plan:
        activations = choice.simulated.peak + self._besides
        found = self._fingerprint(self._whole if choice.whole else self._split)
        register(self._live, found.digest)
        return Plan(
            batch=self.program.batch,
            microbatch=choice.size,
            microbatches=len(choice.schedule.samples),
            stages=choice.stages.count,
            predicted_peak=request.owned + activations,
            plain_peak=request.owned + self._planner.plain_peak(),
            budget=request.budget,
            owned=request.owned,
            activations=activations,
            recomputed=choice.schedule.recomputes(choice.program),
            runs=choice.schedule.count_runs(),
            held=choice.schedule.held(choice.program),
            exact=choice.exact,
            overhead=choice.overhead,
            bound=choice.bound,
            barriers=choice.stages.barriers,
            full_batch_nodes=tuple(choice.program.full_batch),
            whole=choice.whole,
            replicated=self._replicated,
            notes=tuple(
                note
                for note in (
                    NOTE if self._compile else "",
                    TIMED if self._timed else "",
                    note,
                    request.note,
                    *self.joint.notes,
                    *(self.eager.notes if self.eager is not None else ()),
                    *(note for prober in self._probers for note in prober.notes),
                    held_by_others(self._device),
                )
                if note
            ),
            order=order_of(choice.schedule),
            fingerprint=found,
            schedule=choice.schedule,
        )

    def run(
        self, executor: Executor, inputs: Sequence[torch.Tensor], drawn: Callable[[int, int, Any], None] | None = None
    ) -> tuple[list[Any], Pending]:
        """Runs one step; returns the graph's outputs, and the gradients and buffers that are to be written."""
        return self._read(executor.run({at: inputs[at] for at in self.program.inputs}, drawn), inputs)

    def _read(self, results: list[Any], inputs: Sequence[torch.Tensor]) -> tuple[list[Any], Pending]:
        values = dict(zip(self.joint.wanted, results, strict=False))

        def result(node: Any) -> Any:
            return values[node] if isinstance(node, fx.Node) else node

        gradients = [
            (inputs[at], result(node)) for at, node in sorted(self.joint.gradients.items()) if node is not None
        ]
        buffers = [(inputs[at], result(node)) for at, node in self.joint.mutated.items()]
        outputs = [result(node) for node in self.joint.outputs]
        return outputs, Pending(gradients, buffers)

    def count_before(self, kept: int, peak: int) -> None:
        """Bytes of the user's code before the captured part. At its peak no output is there yet, for which there is
        room in every plan.
        """
        assert self.eager is not None
        self.eager.beside = max(kept, peak - output_bytes(self._graph))

    def begin(self) -> list[Any]:
        """What the captured call of a forward returns: tensors that are filled when its loss is about to run."""
        assert self.eager is not None
        return self.eager.begin(output_forms(self._graph))

    def run_with_loss(
        self, executor: Executor, inputs: Sequence[torch.Tensor], call: LossCall,
        drawn: Callable[[int, int, Any], None] | None = None,
    ) -> Pending:  # fmt: skip
        """Runs one step whose loss is not captured; `call.result` has what that returned."""
        with torch.no_grad():
            return finished(self.turns_with_loss(executor, inputs, call, drawn))

    def turns_with_loss(
        self, executor: Executor, inputs: Sequence[torch.Tensor], call: LossCall,
        drawn: Callable[[int, int, Any], None] | None = None,
    ) -> Turns[Pending]:  # fmt: skip
        """`run_with_loss`, to be taken further under no_grad: with no function in `call` it waits for the loss."""
        eager = self.eager
        assert eager is not None
        call.buffers = [inputs[at] for at, node in self.joint.mutated.items() if isinstance(node, fx.Node)]
        call.read = [
            (in_words(self.joint.sources[at]), inputs[at]) for at in self.program.inputs if at not in self.joint.mutated
        ]
        call.forked, known = self.random, eager.workspace
        eager.call = call
        try:
            results = yield from executor.turns({at: inputs[at] for at in self.program.inputs}, drawn)
            _, pending = self._read(results, inputs)
            del results
        finally:
            eager.call = None
        reached = {id(inputs[at]) for at, made in eager.reaches.items() if made & call.reached}
        pending.gradients = [(leaf, grad) for leaf, grad in pending.gradients if id(leaf) in reached]
        if call.forked and call.ended is not None:
            call.ended.restore()
        if eager.workspace != known:  # known from now on: the next call's plan counts it
            self._arrange(inputs)
        return pending
