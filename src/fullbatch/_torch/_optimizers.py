"""Optimizers of torch that step on stand-ins for their parameters. Seen on torch 2.13.

Reason: what `optimizer.step()` allocates is asked before it has run. torch's optimizers look at the exact type of a
parameter, and one keeps its parameters in a list of its own.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from fullbatch._torch._replace import replaced


@contextlib.contextmanager
def optimizer_on_fakes() -> Iterator[list[str]]:
    """While entered, an optimizer steps on fake tensors as it would on real ones; yields the names of what it compiles.

    Optimizers choose their implementation over all parameters at once (foreach) by exact type, from a list of torch's.
    One that compiles its own step (torchao) runs it uncompiled.
    """
    compiled: list[str] = []

    def uncompiled(fn: Any, *_: Any, **__: Any) -> Any:
        compiled.append(getattr(fn, "__name__", str(fn)))
        return fn

    supported = sys.modules["torch.optim.optimizer"]._foreach_supported_types  # torch.optim hides its module
    supported.append(FakeTensor)  # type: ignore[arg-type]
    try:
        with replaced(torch, "compile", uncompiled):
            yield compiled
    finally:
        supported.remove(FakeTensor)  # type: ignore[arg-type]


def optimizes(optimizer: torch.optim.LBFGS, parameters: list[torch.Tensor]) -> None:
    """LBFGS steps on these: it reads its list of them, and their size, once, when it is made, and not its groups."""
    optimizer._params, optimizer._numel_cache = parameters, None
