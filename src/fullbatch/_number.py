"""Whether an argument is a number at all: compared with one, a string raises an error that names no argument."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch


def is_number(value: Any) -> bool:
    """Whether `value` is a finite real number: of Python or NumPy, or a tensor of one element."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex() and math.isfinite(value.item())
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def number(good: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Whether a value is a number, and `good`."""
    return lambda value: is_number(value) and bool(good(value))
