"""How a tensor lies in memory."""

from __future__ import annotations

import torch


def has_dense_strides(tensor: torch.Tensor) -> bool:
    """Whether the strides are those of some permutation of a contiguous tensor."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
