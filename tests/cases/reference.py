"""What plain PyTorch computes for a step, and how far another result is from it."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map


@dataclass
class Result:
    loss: Tensor
    aux: Any
    grads: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


@dataclass
class Errors:
    """Worst relative error of each kind, the name it is found at, and everything that cannot be a number."""

    loss: float = 0.0
    aux: float = 0.0
    grads: float = 0.0
    buffers: float = 0.0
    worst_param: str = ""
    worst_buffer: str = ""
    mismatches: list[str] = field(default_factory=list)

    def within(self, tolerance: float) -> bool:
        # Written so that a nan is a failure.
        return not self.mismatches and all(e <= tolerance for e in (self.loss, self.aux, self.grads, self.buffers))


def modules(model: Any) -> dict[str, nn.Module]:
    """The modules of a model by the prefix of their parameter names."""
    if isinstance(model, nn.Module):
        return {"": model}
    items = model.items() if isinstance(model, dict) else enumerate(model)
    return {f"{key}.": module for key, module in items}


def grads_of(model: Any) -> dict[str, Tensor | None]:
    return {
        prefix + name: None if p.grad is None else p.grad.detach().clone()
        for prefix, module in modules(model).items()
        for name, p in module.named_parameters()
    }


def buffers_of(model: Any) -> dict[str, Tensor]:
    return {
        prefix + name: b.detach().clone()
        for prefix, module in modules(model).items()
        for name, b in module.named_buffers()
    }


def training_flags(model: Any) -> dict[str, bool]:
    return {
        prefix + name: m.training for prefix, module in modules(model).items() for name, m in module.named_modules()
    }


def collect(out: Any, model: Any) -> Result:
    """The result of a step that returned ``out`` and left its gradients and buffers in ``model``."""
    loss, aux = out if isinstance(out, tuple) else (out, None)
    aux = tree_map(lambda t: t.detach().clone() if isinstance(t, Tensor) else t, aux)
    return Result(loss.detach().clone(), aux, grads_of(model), buffers_of(model))


def plain(loss_fn: Any, model: Any, batch: Any) -> Result:
    """The step in plain PyTorch, on copies of the model and of the batch."""
    model, batch = copy.deepcopy(model), copy.deepcopy(batch)
    out = loss_fn(model, batch)
    (out[0] if isinstance(out, tuple) else out).backward()
    return collect(out, model)


def _distance(value: Tensor, reference: Tensor) -> float:
    if reference.numel() == 0 or torch.equal(value, reference):
        return 0.0
    # Complex buffers and aux values keep their imaginary part.
    wide = torch.complex128 if reference.is_complex() else torch.float64
    return (value.to(wide) - reference.to(wide)).abs().max().item()


def _relative(value: Tensor, reference: Tensor) -> float:
    """Relative to the largest entry where that is above one, else absolute; integers and masks must be equal."""
    distance = _distance(value, reference)
    if distance and not (reference.is_floating_point() or reference.is_complex()):
        return float("inf")
    return distance / max(1.0, reference.abs().max().item()) if distance else distance


def _same_form(what: str, value: Tensor, reference: Tensor, errors: Errors) -> bool:
    if value.shape != reference.shape or value.dtype != reference.dtype:
        form, expected = (f"{tuple(t.shape)} {t.dtype}" for t in (value, reference))
        errors.mismatches.append(f"{what} is {form}, expected {expected}")
        return False
    return True


def _worse(error: float, worst: float) -> bool:
    return not error <= worst


def compare(result: Result, reference: Result) -> Errors:
    """Errors of ``result``; gradients are measured against the largest gradient of the whole model."""
    errors = Errors()
    if _same_form("loss", result.loss, reference.loss, errors):
        errors.loss = _distance(result.loss, reference.loss) / max(reference.loss.abs().item(), 1e-300)
    _compare_aux(result.aux, reference.aux, errors)

    if result.grads.keys() != reference.grads.keys():
        errors.mismatches.append(f"parameters differ: {sorted(result.grads.keys() ^ reference.grads.keys())}")
    largest = max((g.abs().max().item() for g in reference.grads.values() if g is not None and g.numel()), default=0.0)
    for name, expected in reference.grads.items():
        grad = result.grads.get(name)
        if grad is None or expected is None:
            if grad is not expected:
                errors.mismatches.append(f"grad of {name} is {'None' if grad is None else 'not None'}")
        elif _same_form(f"grad of {name}", grad, expected, errors):
            error = _distance(grad, expected) / max(largest, 1e-300)
            if _worse(error, errors.grads):
                errors.grads, errors.worst_param = error, name

    if result.buffers.keys() != reference.buffers.keys():
        errors.mismatches.append(f"buffers differ: {sorted(result.buffers.keys() ^ reference.buffers.keys())}")
    for name in result.buffers.keys() & reference.buffers.keys():
        value, expected = result.buffers[name], reference.buffers[name]
        if _same_form(f"buffer {name}", value, expected, errors):
            error = _relative(value, expected)
            if _worse(error, errors.buffers):
                errors.buffers, errors.worst_buffer = error, name
    return errors


def _compare_aux(value: Any, reference: Any, errors: Errors) -> None:
    leaves, spec = tree_flatten(value)
    expected, expected_spec = tree_flatten(reference)
    if spec != expected_spec:
        errors.mismatches.append(f"aux has the form {spec}, expected {expected_spec}")
        return
    for i, (leaf, want) in enumerate(zip(leaves, expected, strict=True)):
        if isinstance(leaf, Tensor) and isinstance(want, Tensor):
            if _same_form(f"aux leaf {i}", leaf, want, errors):
                error = _relative(leaf, want)
                errors.aux = error if _worse(error, errors.aux) else errors.aux
        elif leaf != want:
            errors.mismatches.append(f"aux leaf {i} is {leaf!r}, expected {want!r}")
