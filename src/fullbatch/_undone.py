"""A trial run of a training step that leaves no trace: gradients, buffers, hooks and generators are as they were."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

from fullbatch import _torch
from fullbatch._tree import modules, named_tensors


@contextlib.contextmanager
def undone(model: Any, device: torch.device) -> Iterator[None]:
    """What the body does to the model's gradients and buffers and to the default generators is undone at its end.

    What is kept lies in the host's memory, so that on another device the body has all of that device. A gradient that
    is there is added to, as in the loop; hooks on parameters, which may step an optimizer, do not run. Python state (a
    counter in a module) is not undone.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(generators(device))
        stack.enter_context(_buffers(model))
        stack.enter_context(_gradients(model))
        yield


@contextlib.contextmanager
def _gradients(model: Any) -> Iterator[None]:
    kept = [
        (one, one.grad, None if one.grad is None else _copy(one.grad), _torch.take_hooks(one))
        for one in named_tensors(model, "parameters").values()
    ]
    try:
        yield
    finally:
        for one, grad, copy, hooks in kept:
            if grad is not None and copy is not None:
                with torch.no_grad():
                    grad.copy_(copy)
            one.grad = grad
            _torch.give_hooks(one, hooks)


@contextlib.contextmanager
def _buffers(model: Any) -> Iterator[None]:
    owners = {id(module): module for root in modules(model).values() for module in root.modules()}
    kept = [
        (module, name, value, _copy(value))
        for module in owners.values()
        for name, value in module.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, value, copy in kept:
                value.copy_(copy)
                setattr(module, name, value)


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
