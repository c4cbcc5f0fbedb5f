"""What a finished step leaves behind: gradients and buffers, all or nothing.

`backward()` adds to `.grad` and fires hooks as it goes. Here every value is complete before the first is written, so
that a step that raises has changed nothing, and each hook sees the gradient of the whole batch once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fullbatch import _torch
from fullbatch._axis._strides import has_dense_strides
from fullbatch._errors import ModelError
from fullbatch._put_back import about_to_write
from fullbatch._run._slices import covers_storage


@dataclass
class Pending:
    """Results not yet written: (parameter, gradient) and (buffer, new value)."""

    gradients: list[tuple[torch.Tensor, torch.Tensor]]
    buffers: list[tuple[torch.Tensor, torch.Tensor]]


def commit(pending: Pending, inputs: Sequence[torch.Tensor]) -> None:
    """Writes buffers and gradients (adding to those that are there), and runs the parameters' hooks.

    Hooks that may change a gradient, or raise, run before anything is written.
    """
    taken = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    with torch.inference_mode(False), torch.no_grad():
        for at, (parameter, gradient) in enumerate(pending.gradients):
            for hook in _torch.gradient_hooks(parameter):
                # A hook may keep or change what it gets: memory of its own, as backward() would give it.
                gradient = _conform(parameter, gradient, taken) if gradient is pending.gradients[at][1] else gradient
                answer = hook(gradient)
                gradient = gradient if answer is None else _checked(parameter, gradient, answer)
            pending.gradients[at] = (parameter, gradient)
        for buffer, value in pending.buffers:  # a parameter too, where the step writes it
            about_to_write(buffer)
            buffer.copy_(value)
        while pending.gradients:
            parameter, gradient = pending.gradients.pop(0)
            if parameter.grad is None:
                parameter.grad = _conform(parameter, gradient, taken)
            else:
                parameter.grad.add_(gradient)
            del gradient
            for hook in _torch.accumulated_hooks(parameter):
                hook(parameter)


def _checked(parameter: torch.Tensor, gradient: torch.Tensor, answer: Any) -> torch.Tensor:
    if isinstance(answer, torch.Tensor) and answer.shape == gradient.shape and answer.device == gradient.device:
        return answer.to(gradient.dtype)
    got = f"shape {tuple(answer.shape)} on {answer.device}" if isinstance(answer, torch.Tensor) else repr(answer)[:80]
    raise ModelError.of(
        f"A hook on a parameter of shape {tuple(parameter.shape)} did not return a gradient.",
        got=got, expected=f"None, or a tensor of shape {tuple(gradient.shape)} on {gradient.device}",
        next="return the new gradient from the function given to register_hook",
    )  # fmt: skip


def save_generator() -> bytes:
    """The state of the default generator, outside of the memory that the step is measured by."""
    return torch.get_rng_state().numpy().tobytes()


def restore_generator(state: bytes) -> None:
    """Brings the default generator back to `state`."""
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _conform(parameter: torch.Tensor, gradient: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """`gradient` as backward() would leave it: memory of its own, in the parameter's strides."""
    address = gradient.untyped_storage().data_ptr()
    if address not in taken and covers_storage(gradient) and _same_strides(parameter, gradient):
        taken.add(address)
        if not _torch.is_view(gradient):
            return gradient
        # Only a view in name (a transposed transpose): the same memory as a tensor of its own.
        own = gradient.new_empty(0)
        return own.set_(gradient.untyped_storage(), 0, gradient.shape, gradient.stride())
    if has_dense_strides(parameter):
        own = torch.empty_strided(parameter.shape, parameter.stride(), dtype=gradient.dtype, device=gradient.device)
    else:
        own = torch.empty(parameter.shape, dtype=gradient.dtype, device=gradient.device)
    return own.copy_(gradient)


def _same_strides(parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
    pairs = zip(parameter.shape, parameter.stride(), gradient.stride(), strict=True)
    return all(size == 1 or a == b for size, a, b in pairs)
