"""What a finished step leaves behind: gradients and buffers, all or nothing.

`backward()` adds to `.grad` and fires hooks as it goes. Here every value is complete before the first is written, so
that a step that raises has changed nothing, and each hook sees the gradient of the whole batch once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fullbatch._axis._strides import has_dense_strides
from fullbatch._run._executor import covers_storage


@dataclass
class Pending:
    """Results not yet written: (parameter, gradient) and (buffer, new value)."""

    gradients: list[tuple[torch.Tensor, torch.Tensor]]
    buffers: list[tuple[torch.Tensor, torch.Tensor]]


def commit(pending: Pending, inputs: Sequence[torch.Tensor]) -> None:
    """Writes gradients (adding to those that are there) and buffers, and runs the parameters' hooks."""
    taken = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    with torch.no_grad():
        while pending.gradients:
            parameter, gradient = pending.gradients.pop(0)
            gradient = _hooked(parameter, gradient)
            if parameter.grad is None:
                parameter.grad = _conform(parameter, gradient, taken)
            else:
                parameter.grad.add_(gradient)
            del gradient
            for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
                hook(parameter)
        for buffer, value in pending.buffers:
            buffer.copy_(value)


def _hooked(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    hooks: dict[int, Any] = getattr(parameter, "_backward_hooks", None) or {}
    for hook in list(hooks.values()):
        answer = hook(gradient)
        gradient = gradient if answer is None else answer
    return gradient


def _conform(parameter: torch.Tensor, gradient: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """`gradient` as backward() would leave it: memory of its own, in the parameter's strides."""
    address = gradient.untyped_storage().data_ptr()
    if address not in taken and covers_storage(gradient) and _same_strides(parameter, gradient):
        taken.add(address)
        if gradient._base is None:
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

