"""Hooks that a captured step would skip in silence are refused by name; so are modes under which none is captured."""

from __future__ import annotations

from typing import Any

from fullbatch import _torch
from fullbatch._errors import CaptureError, Fault, ModelError
from fullbatch._tree import modules


def refuse_modes() -> None:
    """Raises CaptureError naming each dispatch mode around the call: a step cannot be captured under one.

    One that is captured already would show it the operators of microbatches and recomputes.
    """
    if around := _torch.modes_around():
        raise CaptureError.of(
            "A step cannot be captured under a dispatch mode (TorchDispatchMode), which sees every operator.",
            got=", ".join(around),
            expected="Step made and called outside of it",
            next="leave the mode before step(batch); what it is to see is loss_fn(model, batch) by itself",
        )


def refuse_hooks(model: Any) -> None:
    """Raises ModelError naming each module with a hook that the step would skip, or run once a microbatch."""
    faults = _backward_faults(model)
    if everywhere := _torch.global_hooks("forward"):
        faults.append(
            Fault(
                "A forward hook on every module (a global hook) cannot be captured.",
                got=_names(everywhere),
                expected="forward hooks on the modules that need them",
                next="module.register_forward_hook(...), and remove the global one with its handle",
            )
        )
    if faults:
        raise ModelError(*faults)


def refuse_backward_hooks(model: Any) -> None:
    """Raises ModelError naming each module with a hook that would see the gradient of a microbatch."""
    if faults := _backward_faults(model):
        raise ModelError(*faults)


def _backward_faults(model: Any) -> list[Fault]:
    faults = []
    for prefix, root in modules(model).items():
        for name, module in root.named_modules():
            hooks = _torch.backward_hooks(module)
            if hooks:
                faults.append(_fault(f"{prefix}.{name}".strip(".") or type(module).__name__, hooks))
    if everywhere := _torch.global_hooks("backward"):
        faults.append(_fault("every module (a global hook)", everywhere))
    return faults


def _fault(where: str, hooks: list[Any]) -> Fault:
    return Fault(
        f"A backward hook on {where} cannot run on the whole batch's gradient.",
        got=_names(hooks),
        expected="forward hooks, or hooks on parameters (register_hook, register_post_accumulate_grad_hook)",
        next="remove it with the handle that register_full_backward_hook returned",
    )


def _names(hooks: list[Any]) -> str:
    return ", ".join(getattr(hook, "__qualname__", repr(hook)) for hook in hooks)
