"""Tensors without storage: a step that is looked at without its memory. Seen on torch 2.13.

Reason: what is public (`meta`) has no device, and operators that ask for one refuse it or answer otherwise.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


def fake_mode() -> FakeTensorMode:
    """Tensors without storage: tracing at the full batch costs no memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def to_fake(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A fake tensor with the metadata of `tensor`, every size a constant."""
    return mode.from_tensor(tensor, static_shapes=True)


def is_fake(value: object) -> bool:
    """Whether `value` has metadata only; tensors on `meta` are others."""
    return isinstance(value, FakeTensor)


@contextlib.contextmanager
def quiet_shapes() -> Iterator[None]:
    """A shape that a model refuses is no message: torch logs each with a traceback, besides raising it."""
    logger = logging.getLogger(FakeTensor.__module__)
    kept = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(kept)
