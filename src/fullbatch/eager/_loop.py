"""The microbatches of a step, one after another, as plain PyTorch runs them.

Nothing here is committed: the result is the gradients of the sums and what the buffers come to. Whatever happens,
`.grad`, hooks, buffers, Python state and generators can be put back by `preserved`, which planning always and a step
that raises does.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fullbatch import _torch
from fullbatch._errors import ModelError
from fullbatch._tree import leaves, modules, named_tensors
from fullbatch.eager._buffers import Buffers
from fullbatch.eager._cut import Cut, Span
from fullbatch.eager._gradients import Gradients
from fullbatch.eager._plan import listed
from fullbatch.eager._recompute import checkpointed
from fullbatch.eager._returned import Sums, checked
from fullbatch.eager._state import Generators, Snapshot, closed_over


@dataclass(frozen=True)
class Job:
    """What a step is of: the function, the model and its device, and the buffers that a forward is known to change."""

    loss_fn: Callable[[Any, Any], Any]
    model: Any
    device: torch.device
    moving: set[str] = field(default_factory=set)

    def roots(self) -> list[tuple[str, Any]]:
        """Where Python state is looked for."""
        return list(modules(self.model).items())


@dataclass
class Result:
    """What the microbatches came to."""

    sums: Sums
    gradients: list[tuple[torch.Tensor, torch.Tensor]]
    buffers: Buffers
    last: tuple[str, ...] = ()  # attributes that are as the last microbatch left them


@dataclass(frozen=True)
class Mode:
    """How a run differs from a step: by what the loss is multiplied, and what is asked of each microbatch."""

    checkpoints: tuple[str, ...] = ()
    scale: float = 1.0
    seen: Callable[[Gradients, Sums, int], None] | None = None  # called after each microbatch with its number
    complete: bool = True  # whether the spans are the whole batch, so that its count must be above zero


def run(job: Job, cut: Cut, batch: Any, spans: Sequence[Span], mode: Mode) -> Result:
    """Forward and backward of each span; gradients are those of sum(loss_sum) / sum(count) times the scale.

    Raises LossError where loss_fn's results are not what it must return. Generators have moved afterwards and Python
    state is that of the last microbatch; buffers are as before, and `.grad` too.
    """
    before = (Snapshot(job.roots()), Generators(job.device)) if mode.checkpoints else None
    known = set(job.moving)
    result = _run(job, cut, batch, spans, mode)
    if before is None or job.moving <= known:
        return result
    # A buffer has begun to move, and each recompute read what its forward had left in it, since nothing was kept.
    del result
    state, generators = before
    state.restore()
    state.rewind()
    generators.restore()
    return _run(job, cut, batch, spans, mode)


def _run(job: Job, cut: Cut, batch: Any, spans: Sequence[Span], mode: Mode) -> Result:
    buffers, versions = Buffers(job.model), read_only(job, batch)
    sums = Sums(sum(stop - start for start, stop in spans))
    try:
        with (
            torch.inference_mode(False), torch.enable_grad(),
            Gradients(named_tensors(job.model, "parameters")) as gradients,
            checkpointed(job.model, mode.checkpoints, job.moving, job.device),
        ):  # fmt: skip
            state = Snapshot(job.roots())  # with the checkpoints in place, or restoring it would take them away
            left = _Left(state)
            for number, span in enumerate(spans):
                if number:
                    state.restore()
                    buffers.rewind()
                after = _one(job, cut.take(batch, span, job.device), span, sums, gradients, bool(mode.checkpoints))
                if after is not None:
                    after.restore()
                check_unchanged(versions)
                gradients.widen()
                buffers.note(span[1] - span[0])
                left.note()
                if mode.seen is not None:
                    mode.seen(gradients, sums, number)
            job.moving.update(buffers.moving)
            if mode.complete:
                sums.check()
            found = gradients.take(mode.scale * sums.reference / (sums.count or 1))
    finally:
        buffers.bind()
        buffers.rewind()
    return Result(sums, found, buffers, left.names(len(spans)))


def _one(job: Job, part: Any, span: Span, sums: Sums, gradients: Gradients, checkpoints: bool) -> Snapshot | None:
    """One microbatch. Returns the Python state after its forward, where the backward may change it."""
    loss, count = checked(job.loss_fn(job.model, part))
    del part
    sums.add(loss, count, span[1] - span[0])
    after = Snapshot(job.roots()) if checkpoints else None
    if loss.requires_grad:
        gradients.meet(loss)
        # Divided by about what it will be divided by in the end, a power of two: nothing is rounded by it, and half
        # precision neither overflows nor vanishes where the plain step would not.
        seed = torch.full_like(loss, 1.0 / sums.reference)
        with torch.autocast(job.device.type, enabled=False):  # backward() belongs outside of autocast
            torch.autograd.backward(loss, seed)
    torch.clear_autocast_cache()  # casts of weights that this microbatch's graph made
    return after


class _Left:
    """Which attributes differ between what one microbatch leaves and another."""

    def __init__(self, state: Snapshot) -> None:
        self._state = state
        self._first: dict[str, Any] | None = None
        self._names: dict[str, None] = {}

    def note(self) -> None:
        now = {name: value if _is_plain(value) else _MOVED for name, value in self._state.changed().items()
               if "_buffers." not in name}  # fmt: skip
        first = now if self._first is None else self._first
        self._first = first
        for name in [*first, *now]:
            value = now.get(name)
            if value is _MOVED or not _equal(first.get(name), value):
                self._names[name] = None

    def names(self, microbatches: int) -> tuple[str, ...]:
        return tuple(self._names) if microbatches > 1 else ()


_MOVED = object()


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _equal(a: Any, b: Any) -> bool:
    both_nan = isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)
    return both_nan or bool(a == b)


Versions = list[tuple[str, torch.Tensor, int]]


def read_only(job: Job, batch: Any) -> Versions:
    """What a run must not change in place, for `check_unchanged`: the batch's tensors and the parameters."""
    named = [*leaves(batch), *named_tensors(job.model, "parameters").items()]
    return [(name, tensor, _torch.version(tensor)) for name, tensor in named]


def check_unchanged(versions: Versions) -> None:
    """Raises ModelError naming the tensors that were changed in place since."""
    changed = [name for name, tensor, version in versions if _torch.version(tensor) != version]
    if changed:
        raise ModelError.of(
            "The step changes its batch or a parameter in place.", got=f"{listed(changed)}, changed by this run",
            expected="a batch and parameters that the step only reads: the next microbatch reads them again",
            next="batch = batch.clone() first; move the update of a parameter out of loss_fn",
        )  # fmt: skip


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out; the CPU's allocator raises a plain RuntimeError."""
    text = str(error).lower()
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)
    )


@contextlib.contextmanager
def preserved(job: Job, *, always: bool) -> Iterator[None]:
    """Python state and generators are afterwards as before: always, or where an error comes through.

    `.grad`, hooks and buffers are kept by `run` itself.
    """
    roots = job.roots() + (list(closed_over(job.loss_fn)) if always else [])
    state, generators = Snapshot(roots), Generators(job.device)
    done = False
    try:
        yield
        done = True
    finally:
        if always or not done:
            state.restore()
            state.rewind()
            generators.restore()
