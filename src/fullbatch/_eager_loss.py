"""A loss that no graph can hold, as one task of the program: it runs as it is, once a step, on the whole batch.

Matching boxes to targets, `x[mask]`, `.item()`: shapes and order depend on the data. But such a loss stands at the end
of a step, where little is left of the batch's memory: the captured part ends at the outputs of the forward, these are
gathered, the loss runs in plain PyTorch on tensors that begin a graph of their own, and its gradients by them enter the
captured backward.

A captured call returns before any of that: with tensors that are empty yet, so that Dynamo builds the user's own nest
of outputs, and whatever the forward stored elsewhere, around them. They are filled when the loss is about to run.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from fullbatch import _torch
from fullbatch._axis._strides import has_dense_strides
from fullbatch._cost._forms import Meta
from fullbatch._errors import Fault, LossError, ModelError
from fullbatch._memory._measure import counting
from fullbatch._run._commit import restore_generator, save_generator
from fullbatch._run._slices import covers_storage
from fullbatch._size import format_bytes
from fullbatch._tree import leaves

T = TypeVar("T")

Turns = Generator[None, list[Any], T]
"""What waits where the loss is run by code that does not call it: sent `[what the loss returned]`, it goes on."""


def finished(turns: Turns[T]) -> T:
    """The result of what has nothing to wait for."""
    try:
        next(turns)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("it waits for a loss that nobody runs")


NOT_COUNTED = (
    "the memory of the loss, which runs as it is on the outputs of the whole batch, is not known before it has run: it "
    "is not in the predicted peak"
)


_REHEARSING: list[bool] = []


@contextlib.contextmanager
def rehearsal() -> Iterator[None]:
    """While entered, a step is run for what it allocates, and its loss is not."""
    _REHEARSING.append(True)
    try:
        yield
    finally:
        _REHEARSING.pop()


def cotangent_form(tensor: torch.Tensor) -> Meta:
    """A cotangent of `tensor` as the captured backward expects it: in dense strides."""
    dense = tensor.stride() if has_dense_strides(tensor) else torch.empty(tensor.shape, device="meta").stride()
    return Meta(tuple(tensor.shape), tuple(dense), tensor.dtype, tensor.device)


def _empty(form: Meta) -> torch.Tensor:
    return torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=form.device)


@dataclass
class Generators:
    """The state of the default generators of torch, Python and NumPy, outside of the memory that is measured."""

    device: torch.device
    cpu: bytes
    cuda: bytes | None
    python: Any
    numpy: Any

    @classmethod
    def now(cls, device: torch.device) -> Generators:
        """As they are."""
        cuda = torch.cuda.get_rng_state(device).numpy().tobytes() if device.type == "cuda" else None
        return cls(device, save_generator(), cuda, random.getstate(), np.random.get_state())

    def restore(self) -> None:
        """Brings them back."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        restore_generator(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(torch.frombuffer(bytearray(self.cuda), dtype=torch.uint8), self.device)


@dataclass
class LossCall:
    """What one step gives to its loss, and what comes of it.

    `nest` is what the forward returned, around the tensors of `EagerLoss.begin`. `buffers` are those that the forward
    changes, whose new values are not written yet; `read` is all else that the captured graph reads. `forked`: the
    default generators are the program's while it runs. `loss_fn` None: it is run by code that goes on while the
    captured part waits, and sends what it returned.
    """

    loss_fn: Callable[[Any, Any], Any] | None
    nest: Any
    batch: Any
    buffers: Sequence[torch.Tensor]
    read: Sequence[tuple[str, torch.Tensor]]
    device: torch.device
    generators: Generators
    scale: torch.Tensor | None = None
    autocast: tuple[bool, torch.dtype] | None = None
    forked: bool = False
    began: Generators | None = None  # when the loss began to draw
    ended: Generators | None = None
    result: tuple[torch.Tensor, Any, bool] | None = None
    gradients: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # of leaves that only it reads
    changed: dict[int, torch.Tensor] = field(default_factory=dict)  # of `buffers`, by position
    reached: set[int] = field(default_factory=set)  # cotangents of outputs that the loss reads

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """While entered, the default generators are the user's: where the step's one draw has left them."""
        if self.forked:
            self.generators.restore()
            torch.empty((), dtype=torch.int64).random_()
        self.began = Generators.now(self.device)
        yield
        self.ended = Generators.now(self.device)

    @contextlib.contextmanager
    def written(self, values: Sequence[torch.Tensor]) -> Iterator[None]:
        """While entered, buffers that the forward changes hold what it left in them, as in the plain step."""
        before = [buffer.clone() for buffer in self.buffers]
        for buffer, value in zip(self.buffers, values, strict=True):
            buffer.copy_(value)
        versions = [_torch.version(buffer) for buffer in self.buffers]
        try:
            yield
            for at, (buffer, value, version) in enumerate(zip(self.buffers, values, versions, strict=True)):
                # Kernels of BatchNorm write running statistics without counting it.
                if _torch.version(buffer) != version or not torch.equal(buffer, value):
                    self.changed[at] = buffer.clone()
        finally:
            for buffer, old in zip(self.buffers, before, strict=True):
                buffer.copy_(old)

    def evaluate(self) -> Turns[torch.Tensor]:
        """Calls the loss, or waits for it; returns it, multiplied by the scale where there is one."""
        kind = self.device.type
        enabled, dtype = self.autocast or (False, None)
        if self.loss_fn is None:
            found = (yield).pop()
        else:
            with torch.enable_grad(), torch.autocast(kind, dtype=dtype, enabled=enabled):
                found = self.loss_fn(self.nest, self.batch)
        loss, aux, has_aux = checked(found, FOUND if self.loss_fn is None else PAIR)
        self.result = loss.detach(), aux, has_aux
        with torch.enable_grad():
            return loss if self.scale is None else loss * self.scale


class EagerLoss:
    """The loss of one captured graph, as the kernel of a task: outputs in, their cotangents out.

    `forms` are those of the cotangents, and `wanted` says of which outputs they are. From those in `above` the forward
    computes others of them. `reaches`: for each gradient, by
    the position of its input in the graph, the cotangents that it is made of. `workspace` is the most bytes that
    the loss allocated when it ran first, its cotangents included; None: not known. `kept` are the bytes that stay until
    the end of the step: the loss, its aux, gradients of what only the loss reads.
    """

    _qualified = "the loss"

    def __init__(self, origin: str = "") -> None:
        self.forms: list[Meta] = []
        self.wanted: list[int] = []
        self.above: frozenset[int] = frozenset()
        self.reaches: dict[int, frozenset[int]] = {}
        self.call: LossCall | None = None
        self.workspace: int | None = None
        self.kept = 0
        self.beside = 0  # bytes that the user's code before a split that was found takes, besides its result
        self.origin = origin  # where such a split is
        self._begun: list[torch.Tensor] = []

    def begin(self, forms: Sequence[Any]) -> list[Any]:
        """For each output of the captured graph an empty tensor, to be filled when the loss runs."""
        answer = [
            torch.empty(0, dtype=form.dtype, device=form.device) if isinstance(form, torch.Tensor) else form
            for form in forms
        ]
        self._begun = [item for item in answer if isinstance(item, torch.Tensor)]
        return answer

    def __call__(self, outputs: Sequence[torch.Tensor], changed: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The cotangents of those outputs that have one."""
        return finished(self.turns(outputs, changed))

    def turns(self, outputs: Sequence[torch.Tensor], changed: Sequence[torch.Tensor]) -> Turns[Sequence[torch.Tensor]]:
        """The cotangents of those outputs that have one; it waits where the loss is run by somebody else."""
        call = self.call
        if call is None or _REHEARSING:
            return self.stand_in(outputs, changed)
        if self.workspace is not None or _torch.profiler_running():
            return (yield from self._run(call, outputs, changed))
        with counting(call.device) as counted:
            result = yield from self._run(call, outputs, changed)
        self.workspace, self.kept = counted.peak, max(0, counted.retained - self._own) + _shown(call, outputs)
        return result

    @property
    def _own(self) -> int:
        """Bytes of the cotangents."""
        return sum(form.dtype.itemsize * math.prod(form.shape) for form in self.forms)

    def stand_in(self, outputs: Sequence[torch.Tensor], changed: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Takes the memory that the loss takes, as far as it is known, and leaves zeros."""
        rest = max(0, (self.workspace or 0) - self._own)
        scratch = torch.empty(rest, dtype=torch.uint8, device=self.forms[0].device)
        made = [_empty(form).zero_() for form in self.forms]
        del scratch
        return made

    @property
    def notes(self) -> tuple[str, ...]:
        """What a plan says of the loss's memory."""
        origin = (self.origin,) if self.origin else ()
        if self.workspace is None:
            return (*origin, NOT_COUNTED)
        taken = f"{self.workspace:,} bytes ({format_bytes(self.workspace)})"
        return (*origin,
                f"the loss runs as it is on the outputs of the whole batch; it took {taken} when it first ran, and is "
                "counted with as much")  # fmt: skip

    def _run(
        self, call: LossCall, outputs: Sequence[torch.Tensor], changed: Sequence[torch.Tensor]
    ) -> Turns[Sequence[torch.Tensor]]:
        begun, self._begun = self._begun, []
        for empty, value in zip(begun, outputs, strict=True):
            empty.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())
        inputs = [begun[at].requires_grad_() for at in self.wanted]
        above = [begun[at] for at in sorted(self.above)]
        given = [*(("one of the outputs", tensor) for tensor in begun), *leaves(call.batch), *call.read]
        versions = [_torch.version(tensor) for _, tensor in given]
        with call.written(changed), call.drawing():
            with _torch.watched_backward(lambda of, by: _refuse_backward(of, by, inputs, [*call.read, *_named(above)])):
                loss = yield from call.evaluate()
            _refuse_hooked_outputs(above)
            _refuse_changed(given, versions)
            others = leaves_behind(loss, inputs)
            _refuse_hooked(others)
            found = torch.autograd.grad(loss, [*inputs, *others], allow_unused=True)
        del loss
        call.reached = {at for at, grad in enumerate(found[: len(inputs)]) if grad is not None}
        call.gradients = [
            (leaf, grad) for leaf, grad in zip(others, found[len(inputs) :], strict=True) if grad is not None
        ]
        for tensor in inputs:
            tensor.requires_grad_(False)
        call.nest = None  # or the outputs would live as long as the step
        taken = {_torch.storage_key(tensor) for _, tensor in given}
        return [_formed(grad, form, taken) for grad, form in zip(found, self.forms, strict=False)]


PAIR, FOUND = "The loss of (forward, loss)", "loss_fn"


def checked(found: Any, who: str = PAIR) -> tuple[torch.Tensor, Any, bool]:
    """(loss, aux, has_aux) of what the loss returned. Raises LossError."""

    def bad(got: str, expected: str) -> LossError:
        return LossError.of(
            f"{who} did not return a loss to differentiate.", got=got, expected=expected,
            next=f"return loss, or (loss, aux), from {'loss(outputs, batch)' if who is PAIR else who}",
        )  # fmt: skip

    has_aux = isinstance(found, tuple) and len(found) == 2
    loss, aux = found if has_aux else (found, None)
    if not isinstance(loss, torch.Tensor):
        raise bad(f"a {type(found).__name__}", "a scalar tensor, or (loss, aux)")
    if loss.numel() != 1:
        raise bad(f"a tensor of shape {tuple(loss.shape)}", "a scalar")
    if loss.is_complex():
        raise bad(f"a loss of dtype {loss.dtype}", "a real scalar")
    if not loss.requires_grad:
        raise bad("a loss that no output of the forward reaches", "a loss that depends on the outputs")
    return loss, aux, has_aux


def _named(above: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Outputs from which the forward computes other outputs, in words."""
    return [(f"an output of shape {tuple(tensor.shape)}, of which another output is made", tensor) for tensor in above]


def _refuse_hooked_outputs(above: Sequence[torch.Tensor]) -> None:
    """A hook sees what comes from the loss: in plain PyTorch also what comes through the other outputs."""
    hooked = [(name, tensor) for name, tensor in _named(above) if _torch.gradient_hooks(tensor)]
    if hooked:
        raise LossError(
            *(
                Fault(
                    f"The loss calls register_hook on {name}: the way between them is not in its autograd graph.",
                    expected="hooks on outputs from which the forward computes no other output",
                    next="register the hook in the forward, on the tensor before it is returned",
                )
                for name, _ in hooked
            )
        )


def _refuse_backward(
    of: Sequence[torch.Tensor],
    by: Sequence[Any] | None,
    outputs: Sequence[torch.Tensor],
    read: Sequence[tuple[str, torch.Tensor]],
) -> None:
    """A gradient `of` values of the loss, taken within it, `by` tensors (none: by all leaves, into their `.grad`).

    The autograd graph of the loss begins at the outputs of the forward: what lies before them cannot be reached.
    """
    before = {id(tensor): name for name, tensor in read}
    named = dict.fromkeys(before[id(tensor)] for tensor in by or () if id(tensor) in before)
    ours = {id(output) for output in outputs}
    through = not by and any(id(leaf) in ours for value in of for leaf in _torch.graph_leaves(value))
    if named or through:
        wrong = f"asks for the gradient by {', '.join(named)}" if named else "calls backward() on what it computed"
        raise LossError.of(
            f"The loss {wrong}: what lies before the outputs of the forward is not in its autograd graph.",
            expected="torch.autograd.grad by values of the loss, or by outputs of which no other output is made",
            next="return the loss, and take such a gradient in plain PyTorch",
        )  # fmt: skip


def leaves_behind(loss: torch.Tensor, known: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves that need a gradient and that `loss` was computed of, besides `known`: its own parameters."""
    seen, found = {id(tensor) for tensor in known}, []
    for leaf in _torch.graph_leaves(loss):
        if id(leaf) not in seen:
            seen.add(id(leaf))
            found.append(leaf)
    return found


def _refuse_changed(given: Sequence[tuple[str, torch.Tensor]], versions: Sequence[int]) -> None:
    """The backward reads what the forward read and made, or makes it again: it must find it as it was."""
    changed = [
        name for (name, tensor), version in zip(given, versions, strict=True) if _torch.version(tensor) != version
    ]
    if changed:
        named = ", ".join(dict.fromkeys(changed))
        raise LossError.of(
            f"The loss changes {named} in place.",
            expected="in-place changes of the loss's own values only",
            next="x = x.clone() before the in-place operation; update parameters and averages of them after the step",
        )  # fmt: skip


def _refuse_hooked(others: Sequence[torch.Tensor]) -> None:
    hooked = [leaf for leaf in others if _torch.gradient_hooks(leaf)]
    if hooked:
        raise ModelError(
            *(
                Fault(
                    f"A parameter of shape {tuple(leaf.shape)} that the loss reads has a hook of register_hook.",
                    expected="hooks on parameters that only the forward reads",
                    next="return the parameter from the forward, among its outputs",
                )
                for leaf in hooked
            )
        )


def _shown(call: LossCall, outputs: Sequence[torch.Tensor]) -> int:
    """Bytes of the outputs that the aux of the loss still shows."""
    held = {_torch.storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in outputs}
    aux = call.result[1] if call.result is not None else None
    return sum(held.get(key, 0) for key in {_torch.storage_key(tensor) for _, tensor in leaves(aux)})


def _formed(grad: torch.Tensor | None, form: Meta, taken: set[int]) -> torch.Tensor:
    """A cotangent in memory of its own, in the strides that the backward was traced with."""
    if grad is None:
        return _empty(form).zero_()
    key = _torch.storage_key(grad)
    if grad.stride() == form.stride and covers_storage(grad) and key not in taken and not _torch.is_view(grad):
        taken.add(key)
        return grad
    return _empty(form).copy_(grad)
