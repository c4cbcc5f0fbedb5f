"""A normalisation that cannot take one sample: known by torch's own error, and said by name.

Limit that forced it: `F.batch_norm` with statistics of what it is given shows in no module, and it normalises weights
too, in which no samples meet. Shape of the answer: where one sample is too few for it, and two are not, samples meet in
it; the innermost module among the frames of the error is where.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch import nn

from fullbatch import _torch
from fullbatch._errors import ModelError
from fullbatch.eager._cut import Cut
from fullbatch.eager._recompute import named_modules

_SAID = "Expected more than 1 value per channel when training"


def is_too_few(error: BaseException) -> bool:
    """Whether an error says that a channel has one value, which has no variance."""
    return isinstance(error, ValueError) and str(error).startswith(_SAID)


def normaliser(error: BaseException, model: Any) -> str:
    """Which normalisation raised it: "name (class)" of a BatchNorm, else the function and the module that calls it."""
    names = {id(module): f"{name or 'model'} ({type(module).__name__})" for name, module in named_modules(model)}
    there = [frame.f_locals.get("self") for frame in _frames(error)]
    modules = [one for one in there if isinstance(one, nn.Module) and id(one) in names]
    if not modules:
        return "F.batch_norm"
    where = names[id(modules[-1])]
    return where if isinstance(modules[-1], _torch.BatchNorm) else f"F.batch_norm in {where}"


def _frames(error: BaseException) -> Iterator[FrameType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def leaves_one(size: int, microbatch: int) -> bool:
    """Whether microbatches of at most so many samples leave one of a single sample."""
    start, stop = Cut(size, {}).spans(microbatch)[-1]
    return stop - start == 1


def few_refused(name: str, size: int, microbatch: int) -> ModelError:
    """The error where no cut of a batch of `size` gives it more than one sample everywhere."""
    enough = next(m for m in range(2, size + 1) if not leaves_one(size, m))
    return ModelError.of(
        f"{name} cannot take one sample: one value has no variance.",
        got=f"{size} samples in microbatches of at most {microbatch}, one of which is a single sample",
        expected="two samples or more in each microbatch",
        next=f"microbatch={enough}, or batches that divide evenly (a loader's drop_last=True)",
    )
