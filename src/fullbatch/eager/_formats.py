"""Formats of eight bits and fewer, refused by name as in a captured step.

Limit that forced it: their scales are taken over the tensor that is there, so those of a microbatch are not those of
the batch, by less than the comparison of samples together with their parts can see. Shape of the answer: the tensors of
a step are looked at, and below all modules what each operator of one forward makes.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from typing import Any

import torch

from fullbatch import _torch
from fullbatch._capture._frontend import user_line
from fullbatch._capture._precision import is_small, small_format


def refuse_formats(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises CaptureError where one of the tensors is of such a format."""
    for name, tensor in named:
        if is_small(tensor):
            raise small_format(tensor.dtype, name)


class Formats(_torch.DispatchMode):
    """While entered, notes the first result of such a format; what runs is not changed by it."""

    def __init__(self) -> None:
        super().__init__()
        self._dtype: torch.dtype | None = None
        self._line = ""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A model that calls torch.compile compiles as without this mode, and what is compiled is not looked into."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(_torch.is_wrapper(kind) for kind in types):  # it answers with operators on its parts, which come here
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if self._dtype is None:
            for one in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(one, torch.Tensor) and is_small(one):
                    self._dtype, self._line = one.dtype, user_line("".join(traceback.format_stack()))
        return out

    def refuse(self) -> None:
        """Raises CaptureError where there was one."""
        if self._dtype is not None:
            raise small_format(self._dtype, self._line)
