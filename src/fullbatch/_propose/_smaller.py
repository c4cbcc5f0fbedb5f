"""Smaller images and shorter sequences: which dimensions of a batch are sides or lengths, and sizes that a model takes.

A model may refuse a size (a UNet halves it, a transformer has a table of positions), and says so only when it is
traced. So each size is captured: the one asked for, then the nearest multiples of 2, 4, ... 32, until one is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fullbatch import _torch
from fullbatch._errors import FullbatchError
from fullbatch._propose._changed import Asked, Change, Made, refusal
from fullbatch._propose._twin import Untried
from fullbatch._tree import find_batch, leaves, map_tensors

_RATIOS = (0.75, 0.5)
_UNITS = (1, 2, 4, 8, 16, 32)
_LEAST = 8  # a dimension of less is no side and no length
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool)


@dataclass(frozen=True)
class Sides:
    """Dimensions of a batch that shrink together. `along`: those of each leaf, each with which of `sizes` it has."""

    what: str
    sizes: tuple[int, ...]
    along: tuple[dict[int, int], ...]

    def at(self, ratio: float, unit: int) -> tuple[int, ...]:
        """Sizes of about `ratio`, in multiples of `unit`."""
        return tuple(max(unit, round(ratio * size / unit) * unit) for size in self.sizes)


def smaller(asked: Asked) -> Iterator[Change]:
    """Steps of a batch with smaller images, or shorter sequences, where the batch has such."""
    found = _sides(asked.batch, asked.batch_dims)
    for ratio in _RATIOS if found is not None else ():
        assert found is not None
        what = f"{found.what} of {_text(found.at(ratio, 1))}"
        line = _line(asked.batch, found, found.at(ratio, 1))
        yield Change(what, line, False, lambda ratio=ratio: _taken(asked, found, ratio))  # type: ignore[misc]


def _taken(asked: Asked, sides: Sides, ratio: float) -> Made:
    """The step at the first size that can be captured. Raises Untried with all that were refused."""
    refused: dict[tuple[int, ...], str] = {}
    for sizes in dict.fromkeys(sides.at(ratio, unit) for unit in _UNITS):
        if all(now < before for now, before in zip(sizes, sides.sizes, strict=True)):
            try:
                with _torch.quiet_shapes():
                    step = asked.tried(batch=_resized(asked.batch, sides, sizes))
            except FullbatchError as error:
                refused[sizes] = refusal(error)
                continue
            what = f"{sides.what} of {_text(sizes)}"
            return Made(step, _line(asked.batch, sides, sizes), _refused(refused), what=what)
    raise Untried(_refused(refused) or "there is no smaller size")


def _refused(found: dict[tuple[int, ...], str]) -> str:
    if not found:
        return ""
    return f"refused: {', '.join(_text(sizes) for sizes in found)}. {next(iter(found.values()))}"


def _text(sizes: tuple[int, ...]) -> str:
    return " x ".join(str(size) for size in sizes)


def _sides(batch: Any, batch_dims: Any) -> Sides | None:
    found, dims = [leaf for _, leaf in leaves(batch)], find_batch(batch, batch_dims).dims
    free = [[at for at in range(leaf.dim()) if at != dim] for leaf, dim in zip(found, dims, strict=True)]
    carried = [(leaf, own) for leaf, own, dim in zip(found, free, dims, strict=True) if dim is not None]
    for leaf, own in carried:
        if (leaf.is_floating_point() or leaf.dtype == torch.uint8) and len(own) >= 3:
            height, width = own[-2:] if leaf.shape[own[-1]] > 4 else own[-3:-1]
            sides = leaf.shape[height], leaf.shape[width]
            if min(sides) >= _LEAST:
                return Sides("images", sides, tuple(map(_pairs, found, free, [sides] * len(found))))
    words = [(leaf, own) for leaf, own in carried if leaf.dtype in _INTEGERS and own]
    for leaf, own in words or [(leaf, own) for leaf, own in carried if len(own) >= 2]:
        length = leaf.shape[own[0]]
        if length >= _LEAST:
            return Sides("sequences", (length,), tuple(map(_lengths, found, free, [length] * len(found))))
    return None


def _pairs(leaf: torch.Tensor, free: list[int], sides: tuple[int, ...]) -> dict[int, int]:
    """The dimensions of a leaf that are the two sides, one after the other: those of a mask as well."""
    for first, second in reversed(list(zip(free, free[1:], strict=False))):
        if (leaf.shape[first], leaf.shape[second]) == sides:
            return {first: 0, second: 1}
    return {}


def _lengths(leaf: torch.Tensor, free: list[int], length: int) -> dict[int, int]:
    """The dimensions of a leaf that are the length; of one of features only the first, the last may be so by chance."""
    of_words = free if leaf.dtype in _INTEGERS else free[:1]
    return {at: 0 for at in of_words if leaf.shape[at] == length}


def _resized(batch: Any, sides: Sides, sizes: tuple[int, ...]) -> Any:
    """The batch at these sizes; its tensors hold nothing, and on the CPU take no memory."""
    along = iter(sides.along)

    def resized(leaf: torch.Tensor) -> torch.Tensor:
        changed = next(along)
        if not changed:
            return leaf
        shape = [sizes[changed[at]] if at in changed else size for at, size in enumerate(leaf.shape)]
        order = sorted(range(leaf.dim()), key=lambda at: (-leaf.stride()[at], at))
        made = torch.empty([shape[at] for at in order], dtype=leaf.dtype, device=leaf.device)
        return made.permute([order.index(at) for at in range(leaf.dim())]).requires_grad_(leaf.requires_grad)

    return map_tensors(resized, batch)


def _line(batch: Any, sides: Sides, sizes: tuple[int, ...]) -> str:
    """What makes such a batch of the user's."""
    parts = []
    for (path, leaf), changed in zip(leaves(batch), sides.along, strict=True):
        if not changed:
            continue
        if sides.what == "sequences":
            cut = ", ".join(f":{sizes[0]}" if at in changed else ":" for at in range(max(changed) + 1))
            parts.append(f"{path}[{cut}].clone()")
        elif leaf.dim() == 4 and max(changed) == 3 and leaf.is_floating_point():
            parts.append(f"F.interpolate({path}, size={sizes})")
        else:
            shape = [sizes[changed[at]] if at in changed else size for at, size in enumerate(leaf.shape)]
            parts.append(f"{path} of {'x'.join(str(size) for size in shape)}")
    return ", ".join(parts)
