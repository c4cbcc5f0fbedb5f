"""A model like the user's in which no number is kept: what a step of it would take can be predicted, and no more.

Limit that forced it: weights in another dtype, or without gradients, are another model, and a copy of a large one may
be more memory than there is. Shape of the answer: modules are copied, parameters and buffers are tensors of the same
form that nobody writes. On the CPU the system gives such memory no page; on another device it is taken while one
proposal is looked at.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from fullbatch import _torch
from fullbatch._memory._twin import Optimizers, each_of, parameters_of, parts_of, with_parameters
from fullbatch._tree import named_tensors


class Untried(Exception):
    """A change that cannot be looked at; its text says why."""


def without_values(model: Any, dtype: torch.dtype | None = None) -> tuple[Any, dict[int, torch.Tensor]]:
    """A copy of `model` without numbers and gradients, floating point ones in `dtype` where one is given.

    Also its tensors by the id of the one that each stands for. Raises Untried where the model cannot be copied.
    """
    kept: dict[int, torch.UntypedStorage] = {}
    named = [one for which in ("parameters", "buffers") for one in named_tensors(model, which).values()]
    twins = {id(tensor): _like(tensor, dtype, kept) for tensor in named}
    try:
        return copy.deepcopy(model, dict(twins)), twins
    except Exception as error:
        raise Untried(f"the model cannot be copied: {type(error).__name__}: {str(error)[:120]}") from error


def _like(tensor: torch.Tensor, dtype: torch.dtype | None, kept: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    if _torch.is_wrapper(type(tensor)):
        raise Untried(f"the model has a {type(tensor).__name__}, which holds other tensors")
    if dtype is not None and tensor.is_complex():
        raise Untried(f"the model has numbers in {tensor.dtype}")
    if dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype:
        made = torch.empty_like(tensor.detach(), dtype=dtype)
    else:  # tensors that share their memory go on sharing it
        storage = tensor.untyped_storage()
        key = _torch.storage_key(tensor)
        if key not in kept:
            kept[key] = torch.UntypedStorage(storage.nbytes(), device=tensor.device)
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        made.set_(kept[key], tensor.storage_offset(), tensor.shape, tensor.stride())
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made


def rebound(optimizers: Optimizers | None, twins: dict[int, torch.Tensor]) -> Optimizers | None:
    """The optimizers as they would be if they had been made for the copy, before their first step."""
    return tuple(_rebound(one, twins) for one in each_of(optimizers)) or None


def _rebound(optimizer: torch.optim.Optimizer, twins: dict[int, torch.Tensor]) -> torch.optim.Optimizer:
    if parts_of(optimizer) != [optimizer]:
        raise Untried("the optimizer keeps its state elsewhere, and is not followed")
    steps = {id(parameter): twins.get(id(parameter), parameter) for parameter in parameters_of(optimizer)}
    found: torch.optim.Optimizer = with_parameters(optimizer, steps)
    return found
