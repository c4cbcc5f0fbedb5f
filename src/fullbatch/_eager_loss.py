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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fullbatch import _torch
from fullbatch._axis._strides import has_dense_strides
from fullbatch._cost._forms import Meta
from fullbatch._errors import Fault, LossError, ModelError
from fullbatch._memory._measure import measure
from fullbatch._run._commit import restore_generator, save_generator
from fullbatch._run._slices import covers_storage
from fullbatch._size import format_bytes
from fullbatch._tree import leaves

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
    """The state of the default generators, of the CPU and of a CUDA device, outside of the memory that is measured."""

    device: torch.device
    cpu: bytes
    cuda: bytes | None

    @classmethod
    def now(cls, device: torch.device) -> Generators:
        """As they are."""
        cuda = torch.cuda.get_rng_state(device).numpy().tobytes() if device.type == "cuda" else None
        return cls(device, save_generator(), cuda)

    def restore(self) -> None:
        """Brings them back."""
        restore_generator(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(torch.frombuffer(bytearray(self.cuda), dtype=torch.uint8), self.device)


@dataclass
class LossCall:
    """What one step gives to its loss, and what comes of it.

    `nest` is what the forward returned, around the tensors of `EagerLoss.begin`. `buffers` are those that the forward
    changes, whose new values are not written yet; `read` is all else that the captured graph reads. `forked`: the
    default generators are the program's while it runs.
    """

    loss_fn: Callable[[Any, Any], Any]
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
            for at, (buffer, version) in enumerate(zip(self.buffers, versions, strict=True)):
                if _torch.version(buffer) != version:
                    self.changed[at] = buffer.clone()
        finally:
            for buffer, old in zip(self.buffers, before, strict=True):
                buffer.copy_(old)

    def evaluate(self) -> torch.Tensor:
        """Calls the loss; returns it, multiplied by the scale where there is one."""
        kind = self.device.type
        enabled, dtype = self.autocast or (False, None)
        with torch.enable_grad(), torch.autocast(kind, dtype=dtype, enabled=enabled):
            found = self.loss_fn(self.nest, self.batch)
        loss, aux, has_aux = checked(found)
        self.result = loss.detach(), aux, has_aux
        with torch.enable_grad():
            return loss if self.scale is None else loss * self.scale


class EagerLoss:
    """The loss of one captured graph, as the kernel of a task: outputs in, their cotangents out.

    `forms` are those of the cotangents, and `wanted` says of which outputs they are. `reaches`: for each gradient, by
    the position of its input in the graph, the cotangents that it is made of. `workspace` is the most bytes that
    the loss allocated when it ran first, its cotangents included; None: not known. `kept` are the bytes that stay until
    the end of the step: the loss, its aux, gradients of what only the loss reads.
    """

    _qualified = "the loss"

    def __init__(self) -> None:
        self.forms: list[Meta] = []
        self.wanted: list[int] = []
        self.reaches: dict[int, frozenset[int]] = {}
        self.call: LossCall | None = None
        self.workspace: int | None = None
        self.kept = 0
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
        call = self.call
        if call is None or _REHEARSING:
            return self.stand_in(outputs, changed)
        if self.workspace is not None or _torch.profiler_running():
            return self._run(call, outputs, changed)
        measured = measure(lambda: self._run(call, outputs, changed), call.device)
        self.workspace, self.kept = measured.peak, max(0, measured.retained - self._own) + _shown(call, outputs)
        result: Sequence[torch.Tensor] = measured.result
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
        if self.workspace is None:
            return (NOT_COUNTED,)
        taken = f"{self.workspace:,} bytes ({format_bytes(self.workspace)})"
        return (f"the loss runs as it is on the outputs of the whole batch; it took {taken} when it first ran, and is "
                "counted with as much",)  # fmt: skip

    def _run(
        self, call: LossCall, outputs: Sequence[torch.Tensor], changed: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        begun, self._begun = self._begun, []
        for empty, value in zip(begun, outputs, strict=True):
            empty.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())
        inputs = [begun[at].requires_grad_() for at in self.wanted]
        given = [*(("one of the outputs", tensor) for tensor in begun), *leaves(call.batch), *call.read]
        versions = [_torch.version(tensor) for _, tensor in given]
        with call.written(changed), call.drawing():
            loss = call.evaluate()
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


def checked(found: Any) -> tuple[torch.Tensor, Any, bool]:
    """(loss, aux, has_aux) of what the loss returned. Raises LossError."""
    has_aux = isinstance(found, tuple) and len(found) == 2
    loss, aux = found if has_aux else (found, None)
    if not isinstance(loss, torch.Tensor):
        raise _bad(f"a {type(found).__name__}", "a scalar tensor, or (loss, aux)")
    if loss.numel() != 1:
        raise _bad(f"a tensor of shape {tuple(loss.shape)}", "a scalar")
    if loss.is_complex():
        raise _bad(f"a loss of dtype {loss.dtype}", "a real scalar")
    if not loss.requires_grad:
        raise _bad("a loss that no output of the forward reaches", "a loss that depends on the outputs")
    return loss, aux, has_aux


def _bad(got: str, expected: str) -> LossError:
    return LossError.of(
        "The loss of (forward, loss) did not return a loss to differentiate.", got=got, expected=expected,
        next="return loss, or (loss, aux), from loss(outputs, batch)",
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
