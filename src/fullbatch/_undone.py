"""A trial run of a training step that leaves no trace in model, batch, gradients, hooks and generators."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

from fullbatch import _torch
from fullbatch._put_back import put_back
from fullbatch._tree import named_tensors


@contextlib.contextmanager
def undone(model: Any, device: torch.device, batch: Any = ()) -> Iterator[None]:
    """What a step in the body does to the model, the batch and the default generators is undone at its end.

    What is kept lies in the host's memory, so that on another device the body has all of that device. A gradient that
    is there is added to, as in the loop; hooks on parameters, which may step an optimizer, do not run. Code of the
    user's that may write weights runs under `watched`. State outside of the model (a closure) is not undone.
    """
    with generators(device), put_back(model, batch), _gradients(model):
        yield


@contextlib.contextmanager
def undone_code(model: Any, device: torch.device, batch: Any) -> Iterator[None]:
    """The same for a body that runs code of the user's, under `watched`, and no step: gradients are not copied."""
    with generators(device), put_back(model, batch), _hooks(model):
        yield


@contextlib.contextmanager
def _hooks(model: Any) -> Iterator[None]:
    """Hooks on parameters do not run, and those that the body adds are gone."""
    kept = [(one, _torch.take_hooks(one)) for one in named_tensors(model, "parameters").values()]
    try:
        yield
    finally:
        for one, hooks in kept:
            _torch.take_hooks(one)
            _torch.give_hooks(one, hooks)


@contextlib.contextmanager
def _gradients(model: Any) -> Iterator[None]:
    kept = [
        (one, one.grad, None if one.grad is None else _copy(one.grad))
        for one in named_tensors(model, "parameters").values()
    ]
    with _hooks(model):
        try:
            yield
        finally:
            for one, grad, copy in kept:
                if grad is not None and copy is not None:
                    with torch.no_grad():
                        grad.copy_(copy)
                one.grad = grad


@contextlib.contextmanager
def generators(device: torch.device) -> Iterator[None]:
    """What the body draws from the default generators of torch, Python and NumPy is as if not drawn."""
    numpy = sys.modules.get("numpy")
    drawn = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(drawn[0])
        if numpy:
            numpy.random.set_state(drawn[1])


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)
