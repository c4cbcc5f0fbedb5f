"""A copy of an optimizer that steps other tensors, and the tensors in an optimizer's state."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fullbatch import _torch

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
"""One optimizer, or several that step one after another."""


def each_of(optimizer: Optimizers | None) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that were given: none, one, or those of a list or tuple."""
    if optimizer is None:
        return ()
    return (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer)


def parts_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers that hold the state: itself, or for one that offloads (torchao's) those of its copies."""
    inner = getattr(optimizer, "optim_dict", None)
    if not isinstance(inner, dict):
        return [optimizer]
    own = getattr(optimizer, "d_opt", None)
    return [*inner.values(), *([own] if own is not None else [])]


def drops_gradient(parameter: torch.Tensor) -> bool:
    """Whether torchao's CPUOffloadOptimizer drops the gradient as soon as it has a copy (`offload_gradients=True`).

    The option is kept nowhere but in the closure of the hook that it adds to the parameter.
    """
    return any(
        inspect.isfunction(hook)
        and hook.__module__ == "torchao.optim.cpu_offload"
        and bool(inspect.getclosurevars(hook).nonlocals.get("offload_gradients"))
        for hook in _torch.accumulated_hooks(parameter)
    )


def is_stepped(parameter: torch.Tensor) -> bool:
    """Whether an optimizer steps it: it gets a gradient, or has one (a copy that offloads requires none)."""
    return parameter.requires_grad or parameter.grad is not None


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All that it steps."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def tensors_in(state: Any) -> Iterator[torch.Tensor]:
    """The tensors with storage in an optimizer's state, in whatever lists and dicts it keeps them."""
    if isinstance(state, torch.Tensor):
        yield from _torch.plain_parts(state)
    elif isinstance(state, dict):
        for value in state.values():
            yield from tensors_in(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from tensors_in(value)


def state_bytes(state: Any, device: torch.device) -> int:
    """Bytes of the storages in a state on `device`, each once."""
    storages = {_torch.storage_key(one): one for one in tensors_in(state) if one.device == device}
    return sum(int(one.untyped_storage().nbytes()) for one in storages.values())


def with_parameters(optimizer: torch.optim.Optimizer, twins: dict[int, Any]) -> Any:
    """A copy of `optimizer` without state, that steps `twins` (by id of the parameter) in the parameters' place."""
    twin = object.__new__(type(optimizer))
    twin.__dict__ = {**optimizer.__dict__}
    twin.state = type(optimizer.state)(dict)  # type: ignore[call-arg, arg-type]
    twin.param_groups = [
        {**group, "params": [twins[id(p)] for p in group["params"] if id(p) in twins]}
        for group in optimizer.param_groups
    ]
    return twin


def plain_step(optimizer: Any, *args: Any) -> Any:
    """One step without the hooks of the user's."""
    step = type(optimizer).step
    return getattr(step, "__wrapped__", step)(optimizer, *args)
