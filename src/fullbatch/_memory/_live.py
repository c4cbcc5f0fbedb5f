"""The peak of what a function of tensors without storage would hold, and of what its operators need inside themselves.

Limit that forced it: an optimizer's step makes temporaries of the size of all parameters, and nothing can be measured
before there is memory for it. Shape of the answer: the step runs on tensors without storage; each storage is counted
from the operator that made it to the moment Python lets it go. What a matrix product or a norm needs inside itself is
found by running it once alone on dummies; a pointwise operator allocates its outputs and a number or two.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from fullbatch import _torch
from fullbatch._cost._forms import Meta
from fullbatch._errors import MeasureError
from fullbatch._memory._measure import measure

# A number that meets a tensor is a tensor of eight bytes for a moment, and once more in the tensor's own type.
NUMBER = 16

# These allocate their output and nothing else.
_PLAIN = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "zeros", "zeros_like", "new_zeros",
    "ones", "ones_like", "new_ones", "full", "full_like", "new_full", "scalar_tensor", "_to_copy", "lift_fresh_copy",
}  # fmt: skip

_Call = tuple[Any, tuple[Any, ...], tuple[tuple[str, Any], ...]]
# What an operator allocates alone, for the life of the process; None where it could not be run on zeros.
_INSIDE: dict[_Call, int | None] = {}


class Live(_torch.DispatchMode):
    """While entered: counts the storages on one device that operators make. Those of `held` are there already."""

    def __init__(self, device: torch.device, held: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.device, self.level, self.peak = device, 0, 0
        self._known: dict[int, Any] = {}
        self._calls: dict[_Call, int] = {}  # operators whose inside is not known, and the highest level before them
        for tensor in held:
            for part in _torch.plain_parts(tensor):
                self._known[_torch.storage_key(part)] = part

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(_torch.is_wrapper(kind) for kind in types):  # it answers with operators on its parts, which come here
            return NotImplemented
        before = self.level
        out = func(*args, **kwargs)
        for tensor in _tensors(out):
            self._add(tensor)
        number = self.device.type == "cpu" and any(_is_number(leaf) for leaf in _leaves(args))
        self.peak = max(self.peak, self.level + NUMBER * number)
        if _has_inside(func):
            call = func, _formed(args), tuple(_formed(sorted(kwargs.items())))
            with contextlib.suppress(TypeError):  # an argument that is no form and no number
                self._calls[call] = max(self._calls.get(call, 0), before)
        return out

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = _torch.storage_key(tensor), int(storage.nbytes())
        if key in self._known or tensor.device != self.device:
            return

        def gone(_: Any) -> None:
            self._known.pop(key, None)
            self.level -= nbytes

        self._known[key] = weakref.ref(storage, gone)
        self.level += nbytes

    def inside(self) -> tuple[int, bool]:
        """The peak, with what operators allocate inside themselves; and whether each of them could be run alone.

        Call it after the mode is left.
        """
        found = {call: _inside(call, self.device) for call in self._calls}
        within = [before + (found[call] or 0) for call, before in self._calls.items()]
        return max([self.peak, *within]), None not in found.values()


def _is_number(leaf: Any) -> bool:
    return type(leaf) in (int, float) or (isinstance(leaf, torch.Tensor) and leaf.ndim == 0)


def _has_inside(func: Any) -> bool:
    """Whether the operator may allocate more than its outputs: no pointwise one, no view, none of whole lists."""
    name = func.name().removeprefix("aten::").split(".")[0]
    if name in _PLAIN or name.startswith(("_foreach_", "_fused_")):  # loops of pointwise operators over everything
        return False
    return torch.Tag.pointwise not in func.tags and any(not value.alias_info for value in _torch.schema(func).returns)


def _inside(call: _Call, device: torch.device) -> int | None:
    if call not in _INSIDE:
        func, args, kwargs = call
        with contextlib.suppress(MeasureError):  # a profiler runs: another time
            _INSIDE[call] = _alone(func, args, dict(_thawed(kwargs)), device)
    return _INSIDE.get(call)


def _alone(func: Any, args: Any, kwargs: Any, device: torch.device) -> int | None:
    try:
        real = _torch.tree_map(lambda leaf: leaf.dummy() if isinstance(leaf, Meta) else leaf, (_thawed(args), kwargs))
        with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            return measure(lambda: func(*real[0], **real[1]), device).peak
    except MeasureError:
        raise
    except (RuntimeError, ValueError):  # it refuses zeros: its outputs are counted
        return None


def _formed(args: Any) -> Any:
    """Arguments as a value that can be compared: each tensor as its form."""
    if isinstance(args, torch.Tensor):
        return Meta.of(args)
    return tuple(_formed(arg) for arg in args) if isinstance(args, (list, tuple)) else args


def _thawed(args: Any) -> Any:
    return [_thawed(arg) for arg in args] if isinstance(args, tuple) else args


def _leaves(args: Any) -> list[Any]:
    if isinstance(args, (list, tuple)):
        return [leaf for arg in args for leaf in _leaves(arg)]
    return [args]


def _tensors(out: Any) -> list[torch.Tensor]:
    found = [leaf for leaf in _leaves(out) if isinstance(leaf, torch.Tensor)]
    return [part for tensor in found for part in _torch.plain_parts(tensor)]
