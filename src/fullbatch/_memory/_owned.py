"""The bytes that a step owns before it runs: parameters, buffers, gradients, optimizer state and the batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from fullbatch import _torch
from fullbatch._memory._optimizer import footprint
from fullbatch._memory._twin import Optimizers, drops_gradient, each_of, parts_of, tensors_in


@dataclass(frozen=True)
class Owned:
    """Bytes by kind. Each storage is counted once, tensors on other devices not at all.

    `optimizer` is its state (of several, that of all), and for LBFGS what it holds besides while it runs the step as
    its closure.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    batch: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameters + self.buffers + self.gradients + self.optimizer + self.batch


def owned_bytes(
    device: torch.device,
    parameters: Iterable[torch.Tensor],
    buffers: Iterable[torch.Tensor],
    batch: Iterable[torch.Tensor],
    optimizer: Optimizers | None = None,
) -> Owned:
    """What the step owns on `device` now. Optimizer state that does not exist yet is predicted."""
    parameters = list(parameters)
    seen: set[int] = set()

    def count(tensors: Iterable[torch.Tensor]) -> int:
        return sum(_new_bytes(tensor, device, seen) for tensor in tensors)

    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return Owned(
        count(parameters), count(buffers), count(gradients),
        _optimizer_bytes(each_of(optimizer), device, seen), count(batch),
    )  # fmt: skip


def _new_bytes(tensor: torch.Tensor, device: torch.device, seen: set[int]) -> int:
    if tensor.device != device:
        return 0
    if _torch.is_fake(tensor):
        return tensor.numel() * tensor.element_size()
    key = _torch.storage_key(tensor)
    if key in seen:
        return 0
    seen.add(key)
    return int(tensor.untyped_storage().nbytes())


@dataclass(frozen=True)
class OptimizerStep:
    """Bytes that `optimizer.step()` needs besides what the step owns: gradients not yet made, and working memory."""

    gradients: int
    working: int
    exact: bool

    @property
    def total(self) -> int:
        """Both."""
        return self.gradients + self.working


def optimizer_step(
    device: torch.device, parameters: Iterable[torch.Tensor], optimizer: Optimizers | None
) -> OptimizerStep:
    """What one `optimizer.step()` needs above `owned_bytes` on `device`; nothing where there is no optimizer.

    Several step one after another, and what one works on is gone before the next: the most of any is needed.
    """
    found = [footprint(one, device) for one in each_of(optimizer)]
    if not found:
        return OptimizerStep(0, 0, exact=True)
    bare = {id(p): p for p in parameters if p.grad is None and p.requires_grad and p.device == device}
    gradients = sum(p.numel() * p.element_size() for p in bare.values() if not drops_gradient(p))
    # What is held over a closure is counted as owned, and is there while only one of them steps.
    working = max(one.working for one in found) - max(one.held for one in found)
    return OptimizerStep(gradients, max(working, 0), all(one.exact for one in found))


def _optimizer_bytes(optimizers: tuple[torch.optim.Optimizer, ...], device: torch.device, seen: set[int]) -> int:
    """State that is there, that will be, and the most that any holds while it runs the step as its closure."""
    held = max((footprint(one, device).held for one in optimizers), default=0)
    return held + sum(_state_bytes(one, device, seen) for one in optimizers)


def _state_bytes(optimizer: torch.optim.Optimizer, device: torch.device, seen: set[int]) -> int:
    found = footprint(optimizer, device)
    if found.shared:
        return found.shared
    state = {one: held for part in parts_of(optimizer) for one, held in part.state.items() if held}
    coming = found.states.keys() - {id(parameter) for parameter in state}
    there = (tensor for held in state.values() for tensor in tensors_in(held))
    return sum(found.states[at] for at in coming) + sum(_new_bytes(tensor, device, seen) for tensor in there)
