"""One model, plain and in microbatches: how far apart they are, or by what name it was refused."""

from __future__ import annotations

import re
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

import fullbatch

from .inputs import Inputs
from .models import Built, CannotRun, build, whole

LIMIT = 1e-9
MICROBATCHES = (1, 3)  # of a batch of four: even, and uneven
Plain = Callable[[nn.Module, Inputs], torch.Tensor]


@dataclass
class Outcome:
    """What came of one model. `kind` is exact, random, different, refused, crashed, too slow or not counted."""

    name: str
    kind: str
    error: float = 0.0  # largest over loss, gradients and buffers
    stages: int = 0
    full_batch: int = 0  # operators that run on the whole batch
    seconds: float = 0.0  # to capture and plan
    inputs: tuple[str, ...] = ()
    strength: str = ""
    parameters: int = 0
    refusal: str = ""
    detail: str = ""


def judge(name: str, build: Callable[[str], Built] = build) -> dict[str, Any]:
    """The outcome for the model `name`, which `build` makes, as plain values."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    try:
        built = build(name)
    except CannotRun as error:
        return asdict(Outcome(name, "not counted", detail=_without_paths(str(error))[:400]))
    found = Outcome(name, "", inputs=tuple(built.batch), strength=built.strength, parameters=built.parameters)
    try:
        _judge(found, built)
    except fullbatch.FullbatchError as error:
        found.kind, found.refusal, found.detail = "refused", type(error).__name__, _without_paths(str(error))[:400]
    except Exception as error:
        found.kind, found.refusal = "crashed", type(error).__name__
        found.detail = _without_paths(traceback.format_exc())[-3000:]
    return asdict(found)


def _without_paths(text: str) -> str:
    """What is the same on all machines."""
    return re.sub(r"[^\s'\"]*/site-packages/", "", text)


def _judge(found: Outcome, built: Built) -> None:
    model, batch, plain = built.model, built.batch, whole(built.loss)
    random = _draws(plain, model, batch)
    began = time.process_time()
    step = fullbatch.Step(built.loss, model, batch, microbatch=MICROBATCHES[0], **built.options)
    found.seconds = round(time.process_time() - began, 2)
    found.stages, found.full_batch = step.plan.stages, len(step.plan.full_batch_nodes)
    errors = []
    for microbatch in MICROBATCHES:
        step._microbatch = microbatch  # one capture serves both
        errors.append(_certified(step, batch) if random else _error(step, plain, model, batch))
    found.error = max(errors)
    within = all(error <= LIMIT for error in errors)  # false for NaN too
    found.kind = ("random" if random else "exact") if within else "different"


def _draws(plain: Plain, model: nn.Module, batch: Inputs) -> bool:
    """Whether the step draws random numbers."""
    buffers = {key: value.clone() for key, value in model.named_buffers()}
    before = torch.get_rng_state()
    plain(model, batch)
    _restore(model, buffers)
    return not torch.equal(before, torch.get_rng_state())


def _certified(step: fullbatch.Step, batch: Inputs) -> float:
    found = step.verify(batch)
    return max(found.loss_error, found.gradient_error, found.buffer_error)


def _error(step: fullbatch.Step, plain: Plain, model: nn.Module, batch: Inputs) -> float:
    """The largest of the relative differences of loss, gradients and buffers, after one step each from one state."""
    buffers = {key: value.clone() for key, value in model.named_buffers()}
    wanted = _results(model, lambda: _backward(plain(model, batch)))
    _restore(model, buffers)
    ours = _results(model, lambda: step(batch))
    _restore(model, buffers)
    return max(_apart(a, b) for a, b in zip(wanted, ours, strict=True))


def _backward(loss: torch.Tensor) -> torch.Tensor:
    loss.backward()
    return loss.detach()


Group = dict[str, torch.Tensor | None]


def _results(model: nn.Module, run: Any) -> tuple[Group, Group, Group]:
    model.zero_grad(set_to_none=True)
    loss = run()
    gradients: Group = {name: p.grad for name, p in model.named_parameters()}
    buffers: Group = {name: b.clone() for name, b in model.named_buffers() if b.dtype.is_floating_point or b.numel()}
    model.zero_grad(set_to_none=True)
    return {"loss": loss}, gradients, buffers


def _restore(model: nn.Module, buffers: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, value in model.named_buffers():
            value.copy_(buffers[name])


def _apart(plain: Group, ours: Group) -> float:
    """max|a - b| / max|a| over all tensors of a group; infinite where one has a tensor that the other lacks."""
    scale = worst = 0.0
    for name, a in plain.items():
        b = ours[name]
        if (a is None) != (b is None) or (a is not None and b is not None and a.shape != b.shape):
            return float("inf")
        if a is None or b is None or not a.numel():
            continue
        wide = torch.complex128 if a.is_complex() else torch.float64
        difference = float((a.to(wide) - b.to(wide)).abs().max())
        same = a.isfinite() & b.isfinite() | (a == b)
        scale = max(scale, float(torch.nan_to_num(a.to(wide)).abs().max()))
        if not bool(same.all()):
            return float("inf")
        worst = max(worst, difference if difference == difference else 0.0)
    return worst / scale if scale else worst
