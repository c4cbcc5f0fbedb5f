"""Modules of torch whose forward turns a tensor into a Python number, written so that it stays a tensor.

BatchNorm with `momentum=None` averages its statistics over all batches so far: its factor is
1 / float(num_batches_tracked), a value that changes at every step. As a number it would be frozen, or captured anew at
every step; as a tensor it is data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fullbatch import _torch
from fullbatch._tree import modules


def _cumulative(self: Any, input: torch.Tensor) -> torch.Tensor:
    """BatchNorm's training forward with a cumulative average of the statistics."""
    self._check_input_dim(input)
    self.num_batches_tracked.add_(1)
    with torch.no_grad():
        dims = [0, *range(2, input.dim())]
        var, mean = torch.var_mean(input, dims, correction=1)
        factor = 1.0 / self.num_batches_tracked.to(self.running_mean.dtype)
        self.running_mean.add_((mean.to(self.running_mean.dtype) - self.running_mean) * factor)
        self.running_var.add_((var.to(self.running_var.dtype) - self.running_var) * factor)
    return F.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)


@contextlib.contextmanager
def traceable(model: Any) -> Iterator[None]:
    """While it is entered, such modules of `model` run the forward that can be captured."""
    changed = [
        module
        for root in modules(model).values()
        for module in root.modules()
        if isinstance(module, _torch.BatchNorm) and _counts(module)
    ]
    for module in changed:
        module.__dict__["forward"] = MethodType(_cumulative, module)
    try:
        yield
    finally:
        for module in changed:
            del module.__dict__["forward"]


def _counts(module: nn.Module) -> bool:
    own = type(module).forward in (_torch.BatchNorm.forward, nn.SyncBatchNorm.forward) and "forward" not in vars(module)
    return own and module.momentum is None and module.training and module.num_batches_tracked is not None
