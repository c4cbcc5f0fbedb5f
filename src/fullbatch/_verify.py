"""The certificate: the planned step and the plain one, side by side, on copies.

A claim of exactness is worth what can be checked where it is used. Both steps run on a copy of the model, in float64,
at a size that fits, and every gradient, every buffer and the loss are compared. With active dropout the plain step is
given the masks that the planned one drew.
"""

from __future__ import annotations

import contextlib
import copy
import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.table import Table

from fullbatch import _torch
from fullbatch._capture._joint import Joint
from fullbatch._capture._precision import precisions
from fullbatch._errors import VerifyError
from fullbatch._memory._free import free_bytes
from fullbatch._plan._plan import Plan
from fullbatch._printed import Printed
from fullbatch._replay import Draws, Replay
from fullbatch._tree import BatchShape, leaves, map_tensors, modules, named_tensors

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 5e-2}
"""Largest relative difference that counts as equal. In float64 it is rounding; in others a network amplifies it."""

_WITHOUT_CASTS = (
    "autocast converts no float64: this compares the step without its conversions. "
    "verify(dtype=None) compares with them"
)


@dataclass(frozen=True)
class Certificate(Printed):
    """How far the planned step is from the plain one. Errors are relative: max|g - g_ref| / max|g_ref|.

    The denominator is the largest gradient of the whole model, since a single gradient may truly be zero (a bias before
    a batch normalisation). `parameters` has each parameter's own largest difference on that scale.
    """

    ok: bool
    loss_error: float
    gradient_error: float
    buffer_error: float
    worst_parameter: str
    worst_buffer: str
    samples: int
    microbatch: int
    recomputed: int  # operators that the compared step ran again, as the plan has it
    dtype: torch.dtype
    tolerance: float
    realised_masks: bool
    notes: tuple[str, ...] = ()
    autocast: tuple[torch.dtype, ...] = ()  # what autocast converted to in the comparison: nothing, in float64
    parameters: dict[str, float] = field(default_factory=dict, repr=False)

    def __bool__(self) -> bool:
        """`ok`: so that `assert step.verify()` says what it seems to say."""
        return self.ok

    def __rich__(self) -> Table:
        title = "fullbatch certificate: " + ("the same gradient" if self.ok else "NOT the same gradient")
        table = Table(title=title, show_header=False, title_justify="left")
        converted = " and ".join(map(str, self.autocast))
        precision = f"{self.dtype} under autocast to {converted}" if converted else str(self.dtype)
        again = f", {self.recomputed} runs made again" if self.recomputed else ""
        table.add_row("compared", f"{self.samples} samples in microbatches of {self.microbatch}{again}, {precision}")
        table.add_row("loss", f"{self.loss_error:.1e}")
        table.add_row("gradients", f"{self.gradient_error:.1e}, largest at {self.worst_parameter or 'none'}")
        at = f", largest at {self.worst_buffer}" if self.worst_buffer else ""
        table.add_row("buffers", f"{self.buffer_error:.1e}{at}")
        table.add_row("tolerance", f"{self.tolerance:.0e} (relative to the largest gradient)")
        if self.realised_masks:
            table.add_row("randomness", "compared on the masks that the planned step drew")
        for note in self.notes:
            table.add_row("note", note)
        return table


class LastBatch:
    """The last batch without keeping it alive: its nest, with weak references in place of tensors."""

    def __init__(self, batch: Any) -> None:
        self._nest = map_tensors(lambda tensor: _Weak(tensor), batch)

    def get(self) -> Any:
        """The batch, or None where one of its tensors is gone."""
        gone = False

        def revive(item: Any) -> Any:
            nonlocal gone
            tensor = item.reference()
            gone = gone or tensor is None
            return tensor

        nest = _map_weak(revive, self._nest)
        return None if gone else nest


class _Weak:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.reference = weakref.ref(tensor)


def _map_weak(fn: Callable[[Any], Any], nest: Any) -> Any:
    return map_tensors(fn, nest, leaf=_Weak)


def verify(
    make_step: Callable[[Any, Any, int], Any],
    loss_fn: Callable[[Any, Any], Any],
    model: Any,
    batch: Any,
    shape: BatchShape,
    plan: Plan,
    dtype: torch.dtype | None,
    need: int,
) -> Certificate:
    """Compares both steps. `make_step(model, batch, microbatch)` makes one that follows `plan`, which is the step's.

    `need` is the plain step's bytes. A plan that runs the batch whole, and nothing again, is compared split in two.
    """
    original = _floating(model)
    dtype = original if dtype is None else dtype
    samples = _samples_that_fit(shape.size, need, original, dtype, model)
    part = _first(batch, shape, samples)
    size = samples if plan.whole and plan.recomputed else min(plan.microbatch, max(1, -(-samples // 2)))
    notes: list[str] = []
    with torch.random.fork_rng(devices=_cuda(model)), _python_as_before():
        try:
            pair = _both(make_step, loss_fn, model, part, size, dtype, original)
        except RuntimeError as error:
            if dtype == original or "dtype" not in str(error).lower():
                raise
            notes.append(f"compared in {original}: the step itself fixes a dtype ({str(error).splitlines()[0][:80]})")
            dtype = original
            pair = _both(make_step, loss_fn, model, part, size, dtype, original)
    *results, joint, again = pair
    autocast = joint.autocast
    if autocast and dtype == torch.float64:
        notes.append(_WITHOUT_CASTS)
        autocast = ()
    lower = [each for each in precisions(joint.graph) if each.itemsize < dtype.itemsize]
    return _compare(
        *results,
        samples=samples,
        microbatch=size,
        recomputed=again,
        dtype=dtype,
        notes=notes,
        autocast=autocast,
        lower=lower,
    )


def _both(
    make_step: Callable[[Any, Any, int], Any], loss_fn: Any, model: Any, batch: Any, size: int,
    dtype: torch.dtype, original: torch.dtype,
) -> tuple[Any, Any, Any, Any, bool, Joint, int]:  # fmt: skip
    def converted(tensor: torch.Tensor) -> torch.Tensor:
        twin = tensor.detach().clone()
        twin = twin.to(dtype) if twin.dtype == original else twin
        return twin.requires_grad_(tensor.requires_grad)

    planned_model, plain_model = _twin(model, dtype), _twin(model, dtype)
    planned_batch, plain_batch = map_tensors(converted, batch), map_tensors(converted, batch)
    step = make_step(planned_model, planned_batch, size)
    draws, pythons = Draws(), random.getstate()
    try:
        planned, joint = step._call_with(planned_batch, draws)
    finally:
        random.setstate(pythons)
    with torch.enable_grad(), Replay(draws):
        plain = loss_fn(plain_model, plain_batch)
        with _without_autocast(plain_model):
            (plain[0] if isinstance(plain, tuple) else plain).backward()
    return planned, plain, planned_model, plain_model, bool(draws), joint, step.plan.recomputed


@contextlib.contextmanager
def _python_as_before() -> Iterator[None]:
    """A comparison draws, as a step does, from Python's generator where loss_fn does; the next step must not see it."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def _twin(model: Any, dtype: torch.dtype) -> Any:
    """A copy in `dtype` with gradients cleared."""
    try:
        twin = copy.deepcopy(model)
    except Exception as error:
        raise VerifyError.of(
            f"The model cannot be copied: {type(error).__name__}: {str(error)[:200]}",
            expected="a model that copy.deepcopy can copy", next="step.verify() before the first backward",
        ) from error  # fmt: skip
    for module in modules(twin).values():
        module.to(dtype)
        module.zero_grad(set_to_none=True)
        for parameter in module.parameters():  # hooks of the user's must not see a trial run
            _torch.drop_hooks(parameter)
    return twin


def _floating(model: Any) -> torch.dtype:
    tensors = [*named_tensors(model, "parameters").values(), *named_tensors(model, "buffers").values()]
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)


@contextlib.contextmanager
def _without_autocast(model: Any) -> Iterator[None]:
    """The backward stands outside of an autocast that surrounds the step, as the planned one's does."""
    kind = next(iter(named_tensors(model, "parameters").values())).device.type
    with torch.autocast(kind, enabled=False):
        yield


def _cuda(model: Any) -> list[torch.device]:
    devices = {p.device for p in named_tensors(model, "parameters").values()}
    return [device for device in devices if device.type == "cuda"]


def _samples_that_fit(batch: int, need: int, original: torch.dtype, dtype: torch.dtype, model: Any) -> int:
    """As many samples as half of the free memory holds for the plain step in `dtype`; at least two where there are."""
    device = next(iter(named_tensors(model, "parameters").values())).device
    grows = dtype.itemsize / original.itemsize
    per_sample = max(1.0, need * grows * 1.5 / batch)
    return int(max(min(2, batch), min(batch, 0.5 * free_bytes(device) / per_sample)))


def _first(batch: Any, shape: BatchShape, samples: int) -> Any:
    """The first samples of a batch."""
    dims = {id(leaf): dim for (_, leaf), dim in zip(leaves(batch), shape.dims, strict=True)}

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        dim = dims.get(id(tensor))
        if dim is None or samples == shape.size:
            return tensor
        return tensor.detach().narrow(dim, 0, samples).requires_grad_(tensor.requires_grad)

    return map_tensors(cut, batch)


def _compare(
    planned: Any, plain: Any, planned_model: Any, plain_model: Any, drawn: bool, *, samples: int, microbatch: int,
    recomputed: int, dtype: torch.dtype, notes: list[str], autocast: tuple[torch.dtype, ...], lower: list[torch.dtype],
) -> Certificate:  # fmt: skip
    loss, expected = (out[0] if isinstance(out, tuple) else out for out in (planned, plain))
    gradients = {name: p.grad for name, p in named_tensors(planned_model, "parameters").items()}
    reference = {name: p.grad for name, p in named_tensors(plain_model, "parameters").items()}
    scale = max((_largest(grad) for grad in reference.values() if grad is not None), default=0.0)
    errors: dict[str, float] = {}
    for name, grad in reference.items():
        ours = gradients[name]
        if grad is None or ours is None:
            errors[name] = 0.0 if grad is None and ours is None else float("inf")
        else:
            errors[name] = _distance(ours, grad) / (scale or 1.0)
    buffers = {
        name: _distance(buffer, other) / max(1.0, _largest(other))
        for (name, buffer), other in zip(
            named_tensors(planned_model, "buffers").items(), named_tensors(plain_model, "buffers").values(), strict=True
        )
    }
    worst = max(errors, key=lambda name: _rank(errors[name]), default="")
    worst_buffer = max(buffers, key=lambda name: _rank(buffers[name]), default="")
    loss_error = _distance(loss, expected) / max(_largest(expected), 1e-300)
    found = (loss_error, errors.get(worst, 0.0), buffers.get(worst_buffer, 0.0))
    tolerance = TOLERANCE.get(dtype, 1e-3)
    if lower and not all(error <= tolerance for error in found):
        # Held to what the step's own arithmetic can give, where the dtype of the comparison is not all that it uses.
        tolerance = max(tolerance, *(TOLERANCE.get(each, 1e-3) for each in lower))
        if not autocast:
            named = " and ".join(map(str, lower))
            notes = [*notes, f"the step itself computes in {named}, to whose rounding it is held"]
    return Certificate(
        ok=all(error <= tolerance for error in found), loss_error=found[0], gradient_error=found[1],
        buffer_error=found[2], worst_parameter=worst, worst_buffer=worst_buffer, samples=samples,
        microbatch=microbatch, recomputed=recomputed, dtype=dtype, tolerance=tolerance, realised_masks=drawn,
        notes=tuple(notes), autocast=autocast, parameters=errors,
    )  # fmt: skip


def _rank(error: float) -> float:
    return float("inf") if error != error else error


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def _distance(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest absolute difference; equal where both are the same, NaN for NaN included."""
    ours, reference = ours.detach(), reference.detach()
    if ours.shape != reference.shape or ours.dtype != reference.dtype:
        return float("inf")
    if reference.numel() == 0 or torch.equal(torch.nan_to_num(ours), torch.nan_to_num(reference)):
        return 0.0
    if not (reference.is_floating_point() or reference.is_complex()):
        return float("inf")
    return float((ours - reference).abs().max())
