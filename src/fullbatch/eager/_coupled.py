"""What makes a batch more than the sum of its samples: modules that are known to mix them, and what comparing finds.

Limit that forced it: code that is not traced says nothing of how samples meet in it. Shape of the answer: modules with
statistics of the batch are named, by their class or by the running statistics that a forward was seen to move; for all
else `_probe.py` compares samples together with their parts, and what differs is a fault in words.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fullbatch import _torch
from fullbatch._errors import Fault, ModelError
from fullbatch._tree import map_tensors
from fullbatch.eager._buffers import Buffers, Rule
from fullbatch.eager._cut import Cut, Span
from fullbatch.eager._fixed import Released, nothing_kept
from fullbatch.eager._formats import Formats
from fullbatch.eager._loop import Job, check_unchanged, preserved, read_only
from fullbatch.eager._recompute import named_modules
from fullbatch.eager._returned import checked

_UPDATING = (_torch.BatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


@dataclass
class Findings:
    """What couples samples, how each buffer's value follows from the microbatches', and what was not compared."""

    coupled: list[Fault] = field(default_factory=list)
    rules: dict[str, Rule] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass
class Seen:
    """What one forward gave: loss sum, count, and the coarsest rounding in it."""

    loss: float
    count: float
    eps: float


def batch_norms(model: Any, moving: set[str]) -> list[str]:
    """Modules that use statistics of the batch, or update running ones: "name (class)" each.

    `moving` are the buffers that a forward was seen to change: a class that is not torch's is known by them, so that
    one with frozen statistics (torchvision's FrozenBatchNorm2d) is not taken for one that trains.
    """
    found = []
    for name, module in named_modules(model):
        kept = [key for key in ("running_mean", "running_var") if getattr(module, key, None) is not None]
        statistics = isinstance(module, _torch.BatchNorm) and not kept  # in train mode as in eval mode
        moves = isinstance(module, _UPDATING) or any((f"{name}.{key}" if name else key) in moving for key in kept)
        if statistics or (kept and module.training and moves):
            found.append(f"{name or 'model'} ({type(module).__name__})")
    return found


def norms_refused(norms: list[str]) -> ModelError:
    """The error that names them."""
    return ModelError(
        *(
            Fault(
                f"{name} uses statistics of the batch, and would use those of microbatches.",
                got="a module that couples samples, in train mode",
                expected="samples that do not meet before the loss",
                next="fullbatch.Step if the step can be captured; else .eval() on it, GroupNorm in its place, or "
                "allow_inexact=True",
            )
            for name in norms
        )
    )


def norms_named(norms: list[str]) -> str:
    """What the plan says of them, where they are allowed."""
    return (
        f"statistics of microbatches in {', '.join(norms)}; running ones make one update a step, with the mean of the "
        "microbatches' statistics"
    )


def only_reads(job: Job, cut: Cut, batch: Any, span: Span) -> None:
    """One forward of `span`, for what it changes: notes the buffers that it moves in `job.moving`. State is kept.

    Raises ModelError where it changes its batch, which is a copy here, or a parameter in place, and CaptureError where
    it makes numbers of eight bits.
    """
    copied = map_tensors(torch.clone, cut.take(batch, span, job.device))
    versions, buffers, formats = read_only(job, copied), Buffers(job.model), Formats()
    try:
        with preserved(job, always=True), torch.inference_mode(False), torch.enable_grad():
            try:
                with nothing_kept(), formats:  # activations may be what there is no room for
                    checked(job.loss_fn(job.model, copied))
            except Released:
                pass  # the trials that follow note what moves
            buffers.note(span[1] - span[0])
    finally:
        buffers.bind()
        buffers.rewind()
    job.moving.update(buffers.moving)
    check_unchanged(versions)
    formats.refuse()


def coupled_gradient(size: int, name: str, left: float, scale: float) -> Fault:
    """The fault of a gradient of `size` samples that is not that of its halves."""
    return Fault(
        f"The gradient of {size} samples is not the sum of those of its halves: samples are coupled.",
        got=f"{name}: {left:.3g} is left over, beside a largest gradient of {scale:.3g}",
        expected="a loss_sum of terms that depend on one sample each",
        next="fullbatch.Step if the step can be captured, or allow_inexact=True",
    )


def compared(whole: Seen, parts: list[Seen], spans: list[Span], tolerance: float, notes: list[str]) -> list[Fault]:
    """The faults of a count and a loss that are not those of the parts; what is not finite is noted."""
    faults = []
    samples, pieces = spans[-1][1], f"{len(spans)} microbatches"
    count = math.fsum(part.count for part in parts)
    if abs(whole.count - count) > 1e-6 * max(abs(whole.count), abs(count)):
        faults.append(
            Fault(
                f"The count of {samples} samples is not the sum of the counts of its {pieces}.",
                got=f"{whole.count:.6g} together, {count:.6g} in parts",
                expected="a count that adds up: of samples, of valid tokens, of positives",
                next="count what loss_sum is the sum of: return loss_sum, mask.sum()",
            )
        )
    loss, size = math.fsum(part.loss for part in parts), math.fsum(abs(part.loss) for part in parts)
    if not (math.isfinite(whole.loss) and math.isfinite(loss)):
        notes.append("not compared: the losses of the example, which are not finite")
    elif abs(whole.loss - loss) > tolerance * max(abs(whole.loss), size):
        faults.append(_coupled_loss(whole.loss, loss, samples, len(spans), pieces, tolerance))
    return faults


def _coupled_loss(whole: float, loss: float, samples: int, number: int, pieces: str, tolerance: float) -> Fault:
    is_mean = abs(whole - loss / number) <= max(tolerance, 0.2) * abs(whole)
    return Fault(
        f"The loss_sum of {samples} samples is not the sum of those of its {pieces}"
        + (": it looks like a mean." if is_mean else ": the loss couples samples, or has a term that belongs to none."),
        got=f"{whole:.6g} together, {loss:.6g} in parts",
        expected="a sum of terms that depend on one sample each",
        next='reduction="sum"' if is_mean
        else "multiply a penalty on weights by the count; for a loss that compares samples fullbatch.Step, if the step "
        "can be captured, or allow_inexact=True",
    )  # fmt: skip
