"""Tensors off the device: in host memory for an accelerator, in a file for the CPU."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch


class Stored:
    """What is left of a tensor that was moved off its device, and where it is."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._shape, self._stride, self._device = tensor.shape, tensor.stride(), tensor.device
        if tensor.device.type == "cpu":
            self._folder = tempfile.TemporaryDirectory(prefix="fullbatch-")
            self._path = Path(self._folder.name) / "value.pt"
            torch.save(tensor.contiguous(), self._path)
        else:
            self._host = tensor.cpu()

    def back(self) -> torch.Tensor:
        """The tensor on its device again, in the strides that it had."""
        source = torch.load(self._path) if self._device.type == "cpu" else self._host
        out = torch.empty_strided(self._shape, self._stride, dtype=source.dtype, device=self._device)
        return out.copy_(source)


def offload(tensor: torch.Tensor) -> Stored:
    """Moves a tensor off its device; its memory is free once nobody holds it."""
    return Stored(tensor)


def fetch(stored: Stored) -> torch.Tensor:
    """Brings it back."""
    return stored.back()
