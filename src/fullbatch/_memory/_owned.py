"""The bytes that a step owns before it runs: parameters, buffers, gradients, optimizer state and the batch."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fullbatch import _torch


@dataclass(frozen=True)
class Owned:
    """Bytes by kind. Each storage is counted once, tensors on other devices not at all."""

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
    optimizer: torch.optim.Optimizer | None = None,
) -> Owned:
    """What the step owns on `device` now. Optimizer state that does not exist yet is predicted."""
    parameters = list(parameters)
    seen: set[int] = set()

    def count(tensors: Iterable[torch.Tensor]) -> int:
        return sum(_new_bytes(tensor, device, seen) for tensor in tensors)

    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return Owned(
        count(parameters), count(buffers), count(gradients),
        count(_state(optimizer)) if optimizer is not None else 0, count(batch),
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


def _state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    wanted = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if wanted and not optimizer.state:
        return predicted_state(optimizer)
    return [item for state in optimizer.state.values() for item in _tensors(state)]


def _tensors(state: Any) -> list[torch.Tensor]:
    values = state.values() if isinstance(state, dict) else [state]
    return [value for value in values if isinstance(value, torch.Tensor)]


def predicted_state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The state tensors that `optimizer` will have after its first step, without storage.

    Its own `step()` runs on copies of the parameters that have no storage, so that every optimizer is known that
    such tensors can drive. One that they cannot is counted as two tensors a parameter, which is what Adam has.
    """
    mode = _torch.fake_mode()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    try:
        with mode, _FixedNumbers():
            twins = {id(p): _twin(mode, p) for p in parameters}
            twin = copy.copy(optimizer)
            twin.__dict__ = {**optimizer.__dict__}
            twin.state = type(optimizer.state)(dict)
            twin.param_groups = [
                {**group, "params": [twins[id(p)] for p in group["params"]]} for group in optimizer.param_groups
            ]
            step = type(optimizer).step
            with torch.no_grad():
                getattr(step, "__wrapped__", step)(twin)
            return [item for state in twin.state.values() for item in _tensors(state)]
    except Exception:  # an optimizer that reads values, or runs a closure
        return [p.detach() for p in parameters for _ in range(2) if p.requires_grad]


class _FixedNumbers(TorchFunctionMode):
    """Where an optimizer reads a number out of a tensor (Adafactor: a norm), it reads a half: not zero, not one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.item, torch.Tensor.__float__):
            return 0.5
        return func(*args, **(kwargs or {}))


def _twin(mode: Any, parameter: torch.Tensor) -> torch.Tensor:
    twin = torch.nn.Parameter(_torch.to_fake(mode, parameter.detach()), requires_grad=parameter.requires_grad)
    if parameter.requires_grad:
        twin.grad = torch.empty_like(twin)
    return twin
