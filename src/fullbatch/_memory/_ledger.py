"""`explain`: where the memory of the plain step goes, without running it.

The plain step is captured on tensors without storage and walked at the whole batch. At the moment of its peak every
byte that is live has a reason: it is owned, it is a gradient, it is kept for the backward, or it is work in progress.
Each operator is run alone, one at a time, for the memory it needs inside itself, where that much is free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table

from fullbatch._captured import Captured
from fullbatch._cost._costs import Coster
from fullbatch._ir import Origin, Program
from fullbatch._memory._free import free_bytes
from fullbatch._memory._owned import OptimizerStep, Owned, optimizer_step, owned_bytes
from fullbatch._memory._twin import drops_gradient
from fullbatch._plan._schedule import Do, Schedule
from fullbatch._printed import Printed
from fullbatch._size import format_bytes
from fullbatch._step import Step
from fullbatch._tree import leaves, named_tensors


@dataclass(frozen=True)
class Ledger(Printed):
    """Predicted bytes of the plain step at its peak, by kind and by module.

    `gradients` counts those made by the step up to the peak; `owned.gradients` those that were there before. A gradient
    that is there is added to: what the step makes for it is a second buffer, freed at once. `after` is what
    `optimizer.step()` needs besides what is owned.
    """

    owned: Owned
    gradients: int
    activations: int
    working: int
    moment: str
    modules: dict[str, int]
    exact: bool
    after: OptimizerStep

    @property
    def peak(self) -> int:
        """All of it together, while the training step runs."""
        return self.owned.total + self.gradients + self.activations + self.working

    @property
    def optimizer_peak(self) -> int:
        """All of it together, while `optimizer.step()` runs; without an optimizer, what is owned."""
        return self.owned.total + self.after.total

    def __rich__(self) -> Table:
        how = "predicted, operators measured alone" if self.exact else "predicted from shapes"
        table = Table(title=f"plain step: {format_bytes(self.peak)} at its peak ({how})", title_justify="left")
        for name in ("what", "bytes", "share"):
            table.add_column(name, justify="left" if name == "what" else "right")
        rows = [
            ("parameters", self.owned.parameters), ("buffers", self.owned.buffers),
            ("gradients before the step", self.owned.gradients), ("optimizer state", self.owned.optimizer),
            ("inputs", self.owned.batch), ("gradients made by the peak", self.gradients),
            ("activations kept for the backward", self.activations), ("working memory at the peak", self.working),
        ]  # fmt: skip
        for name, nbytes in rows:
            table.add_row(name, format_bytes(nbytes), f"{nbytes / max(self.peak, 1):.0%}")
        table.add_section()
        shown = sorted(self.modules.items(), key=lambda item: -item[1])
        for name, nbytes in shown[:12]:
            table.add_row(f"kept by {name or 'the loss'}", format_bytes(nbytes), f"{nbytes / max(self.peak, 1):.0%}")
        if len(shown) > 12:
            rest = sum(nbytes for _, nbytes in shown[12:])
            share = f"{rest / max(self.peak, 1):.0%}"
            table.add_row(f"kept by {len(shown) - 12} more modules", format_bytes(rest), share)
        table.add_section()
        table.add_row("the peak is at", self.moment, "")
        if self.after.total:
            how = "" if self.after.exact else " (not known)"
            table.add_row(f"optimizer step: its working memory{how}", format_bytes(self.after.working), "")
            which = "more" if self.optimizer_peak > self.peak else "less"
            table.add_row("optimizer step: all at its peak", format_bytes(self.optimizer_peak), f"{which} than above")
        return table


class _Capturing(Step):
    _measures = False

    def _on_graph(self, graph: torch.fx.GraphModule) -> Callable[..., Any]:
        self.captured = Captured(graph, measure=False, eager=self._eager_loss())
        return lambda *inputs: self._run(self.captured, inputs)

    def _run(self, captured: Captured, inputs: Sequence[torch.Tensor]) -> Any:
        self._added = {
            at for at, one in enumerate(inputs) if one.is_leaf and (one.grad is not None or drops_gradient(one))
        }
        return super()._run(captured, inputs)

    def second_buffers(self, program: Program) -> set[int]:
        """Values that are gradients which do not stay: added at once to one that is there, or dropped by a hook."""
        joint = self.captured.joint
        values = dict(zip(joint.wanted, program.outputs, strict=False))
        return {values[node] for at, node in joint.gradients.items() if node in values and at in self._added}


def explain(
    loss_fn: Callable[[Any, Any], Any],
    model: Any,
    batch: Any,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    batch_dims: Any = None,
) -> Ledger:
    """The ledger of the plain step `loss_fn(model, batch)` and its backward, in bytes. The step is not run.

    `optimizer` is one, or a list or tuple of those that step one after another.

    Raises what `Step` raises: BatchError, ModelError, LossError, CaptureError.
    """
    step = _Capturing(loss_fn, model, batch, microbatch=1, optimizer=optimizer, batch_dims=batch_dims)
    tensors = [leaf for _, leaf in leaves(batch)]
    parameters, buffers = (list(named_tensors(model, which).values()) for which in ("parameters", "buffers"))
    device = next((parameter.device for parameter in parameters), torch.device("cpu"))
    owned = owned_bytes(device, parameters, buffers, tensors, optimizer)
    after = optimizer_step(device, parameters, optimizer)
    side = step.captured.side(step.captured.program.batch)
    program = side.program
    schedule = side.hold_all(program.batch).schedule
    largest = max((value.nbytes(None, program.batch) for value in program.values), default=0)
    measured = side.exact(program.batch) if 8 * largest < free_bytes(device) else None
    second = step.second_buffers(program)
    exact = measured is not None
    return _at_peak(program, schedule, owned, measured or side.estimate, exact, after, second)


@dataclass
class _Storage:
    nbytes: int
    origin: Origin
    values: set[int]


def _at_peak(
    program: Program,
    schedule: Schedule,
    owned: Owned,
    cost: Coster,
    exact: bool,
    after: OptimizerStep,
    second: set[int],
) -> Ledger:
    root: dict[int, _Storage] = {}
    live, best, moment, inside = 0, -1, Origin(), 0
    snapshot: list[_Storage] = []
    read_later = _readers(program)
    for action in schedule.actions:
        if action.do is Do.FREE:
            storage = root.pop(action.subject, None)
            if storage is not None:
                storage.values.discard(action.subject)
                live -= storage.nbytes if not storage.values else 0
            continue
        task = program.by_id[action.subject]
        found = cost(task, program.batch)
        within = live + found.peak
        for out in found.outs:
            base = root.get(out.alias) if out.alias is not None else None
            if out.alias is not None and base is None:
                continue
            if base is None:
                base = _Storage(out.nbytes, task.origin, set())
                live += out.nbytes
            base.values.add(out.value)
            root[out.value] = base
        if max(live, within) > best:
            best, moment = max(live, within), task.origin
            inside = best - live
            snapshot = [_Storage(s.nbytes, s.origin, set(s.values)) for s in {id(s): s for s in root.values()}.values()]
        for out in found.outs:
            if out.value in second and (added := root.pop(out.value, None)) is not None:
                added.values.discard(out.value)
                live -= added.nbytes if not added.values else 0
    wanted = set(program.outputs)
    gradients, activations, working = 0, 0, inside
    modules: dict[str, int] = {}
    for storage in snapshot:
        if storage.values & wanted and storage.origin.backward:
            gradients += storage.nbytes
        elif not storage.origin.backward and any(read_later.get(value, False) for value in storage.values):
            activations += storage.nbytes
            modules[storage.origin.module] = modules.get(storage.origin.module, 0) + storage.nbytes
        else:
            working += storage.nbytes
    return Ledger(owned, gradients, activations, working, str(moment), modules, exact, after)


def _readers(program: Program) -> dict[int, bool]:
    """Values of the forward that the backward reads."""
    return {value: True for task in program.tasks if task.origin.backward for value in task.inputs}
