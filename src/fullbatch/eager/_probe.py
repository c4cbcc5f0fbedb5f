"""Samples together beside the same samples in parts, run to see whether they add up.

Limit that forced it: whether samples meet in code that is not traced can only be tried. Shape of the answer: forwards
from one state, in which every random operator gives a constant and nothing is kept for a backward, so that many
samples fit. Their loss sums, counts and buffers are compared, and where there is memory for it gradients too: those
of the whole less those of its halves, in one set of sums.

What a trial on one batch cannot see: coupling in a branch that the example does not take, or that is weaker than the
rounding of the computation's coarsest type (the square root of its eps, relative to the loss); coupling among more
samples than fit at once in a forward; a difference that NumPy's or Python's random numbers hide, in which case the plan
says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fullbatch._memory._measure import measure
from fullbatch._tree import named_tensors
from fullbatch.eager._buffers import Buffers, Rule
from fullbatch.eager._coupled import Findings, Seen, compared, coupled_gradient
from fullbatch.eager._cut import Cut, Span
from fullbatch.eager._fixed import Fixed, Released, nothing_kept
from fullbatch.eager._gradients import Gradients
from fullbatch.eager._loop import Job, out_of_memory, preserved
from fullbatch.eager._recompute import checkpointed
from fullbatch.eager._returned import checked
from fullbatch.eager._state import Generators, Snapshot


def probe(
    job: Job, cut: Cut, batch: Any, microbatch: int, checkpoints: Sequence[str], room: int, peak: int
) -> Findings:
    """Compares samples together with the microbatches that they are cut into.

    `room` is the memory in bytes that the probe may take, `peak` what one microbatch of the step takes. State is
    afterwards as before.
    """
    findings = Findings()
    if cut.size < 2:
        return findings
    with preserved(job, always=True), torch.inference_mode(False), torch.enable_grad():
        try:
            _probe(_Trial(job, cut, batch), microbatch, tuple(checkpoints), room, peak, findings)
        except Exception as error:
            if not out_of_memory(error):
                raise
            findings.notes.append("not compared: samples together, for which memory ran out")
    return findings


def _probe(
    trial: _Trial, microbatch: int, checkpoints: tuple[str, ...], room: int, peak: int, findings: Findings
) -> None:
    size = trial.most(microbatch, room)
    trial.compare(size, microbatch if microbatch < size else -(-size // 2), findings)
    group = microbatch if microbatch > 1 else 2
    if not trial.comparable:
        findings.notes.append(
            "not compared: whether samples are coupled; random numbers of NumPy or Python are drawn, which differ "
            "between a batch and its parts"
        )
    elif microbatch > 1 or 2 * peak <= room:
        trial.compare_gradients(group, checkpoints, findings)
    else:
        findings.notes.append("not compared: gradients of two samples together, for want of memory")


class _Trial:
    """Forwards of the example from one state, again and again."""

    def __init__(self, job: Job, cut: Cut, batch: Any) -> None:
        self._job, self._cut, self._batch = job, cut, batch
        self._state, self._generators = Snapshot(job.roots()), Generators(job.device)
        self._keeps = False  # whether a forward must keep what a backward inside of it reads
        self.comparable = True

    def most(self, microbatch: int, room: int) -> int:
        """Samples that a forward alone has room for: all, or at least two."""
        size = min(max(microbatch, 2), self._cut.size)
        buffers = Buffers(self._job.model)
        peak = max(measure(lambda: self._forward((0, size), buffers), self._job.device).peak, 1)
        self.comparable = not (self._generators.drawn_outside_torch() or self._state.drawn())
        self._back(buffers)
        return min(self._cut.size, max(size, size * room // peak))

    def compare(self, size: int, microbatch: int, findings: Findings) -> None:
        """The forward of `size` samples beside those of its microbatches: loss, count and buffers."""
        spans = Cut(size, {}).spans(microbatch)
        buffers, parts = Buffers(self._job.model), []
        for span in spans:
            parts.append(self._forward(span, buffers))
            buffers.note(span[1] - span[0])
            self._back(buffers)
        whole = self._forward((0, size), buffers)
        together = {name: held.now() for name, held in buffers.held.items() if name in buffers.moving}
        eps = max([whole.eps, *(part.eps for part in parts)])
        for name, value in together.items():
            findings.rules[name] = _rule(buffers, name, value, eps)
        self._back(buffers)
        if self.comparable:
            findings.coupled += compared(whole, parts, spans, math.sqrt(eps), findings.notes)

    def compare_gradients(self, size: int, checkpoints: tuple[str, ...], findings: Findings) -> None:
        """The gradient of `size` samples less those of its two halves, by name where it is not zero."""
        half = -(-size // 2)
        buffers, fixed = Buffers(self._job.model), Fixed()
        scale, left = 0.0, {"": 0.0}
        try:
            with Gradients(named_tensors(self._job.model, "parameters")) as gradients, checkpointed(
                self._job.model, checkpoints, self._job.moving, self._job.device
            ):  # fmt: skip
                for span, sign in (((0, size), 1.0), ((0, half), -1.0), ((half, size), -1.0)):
                    self._backward(span, sign / size, gradients, fixed)
                    self._back(buffers)
                    left = {name: float(gradient.abs().max()) for name, gradient in gradients.peek()
                            if gradient.numel()} or left  # fmt: skip
                    scale = scale or max(left.values())
        finally:
            self._back(buffers)
        name = max(left, key=lambda name: left[name])
        if math.isfinite(scale) and left[name] > math.sqrt(fixed.eps) * max(scale, 1e-300):
            findings.coupled.append(coupled_gradient(size, name, left[name], scale))

    def _backward(self, span: Span, sign: float, gradients: Gradients, fixed: Fixed) -> None:
        part = self._cut.take(self._batch, span, self._job.device)
        with fixed:
            loss, _ = checked(self._job.loss_fn(self._job.model, part))
            if loss.requires_grad:
                gradients.meet(loss)
                with torch.autocast(self._job.device.type, enabled=False):
                    torch.autograd.backward(loss, torch.full_like(loss, sign))
        gradients.widen()

    def _forward(self, span: Span, buffers: Buffers) -> Seen:
        part = self._cut.take(self._batch, span, self._job.device)
        fixed = Fixed()
        if not self._keeps:
            try:
                with fixed, nothing_kept():
                    return self._seen(part, fixed)
            except Released:
                self._keeps = True
                self._back(buffers)
        with fixed:
            return self._seen(part, fixed)

    def _seen(self, part: Any, fixed: Fixed) -> Seen:
        loss, count = checked(self._job.loss_fn(self._job.model, part))
        return Seen(float(loss.detach()), float(count), max(fixed.eps, torch.finfo(loss.dtype).eps))

    def _back(self, buffers: Buffers) -> None:
        """The state of the beginning."""
        torch.clear_autocast_cache()
        self._state.restore()
        self._state.rewind()
        self._generators.restore()
        buffers.bind()
        buffers.rewind()


def _rule(buffers: Buffers, name: str, whole: torch.Tensor | None, eps: float) -> Rule:
    if whole is None:
        return Rule.NONE
    for rule in (Rule.SAME, Rule.MEAN, Rule.SUM):
        value = buffers.value(name, rule)
        if value is not None and value.shape == whole.shape and _close(value, whole, math.sqrt(eps)):
            return rule
    return Rule.NONE


def _close(value: torch.Tensor, whole: torch.Tensor, tolerance: float) -> bool:
    if not (whole.is_floating_point() or whole.is_complex()):
        return torch.equal(value, whole)
    tolerance = max(tolerance, math.sqrt(torch.finfo(whole.dtype).eps))
    size = float(whole.detach().abs().max()) if whole.numel() else 0.0
    return torch.allclose(value, whole, rtol=0.0, atol=tolerance * size, equal_nan=True)
