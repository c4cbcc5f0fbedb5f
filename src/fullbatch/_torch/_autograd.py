"""Hooks of tensors and modules, and where a gradient goes. Seen on torch 2.13.

Reason: hooks must see the gradient of the whole batch, once. torch registers and removes them by handle, and shows them
to nobody; nor does it say to which tensors a backward will add.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fullbatch._torch._replace import replaced


def gradient_hooks(parameter: torch.Tensor) -> list[Callable[..., Any]]:
    """What register_hook added to a parameter, in order; torch has no reader of it."""
    return list((getattr(parameter, "_backward_hooks", None) or {}).values())


def accumulated_hooks(parameter: torch.Tensor) -> list[Callable[..., Any]]:
    """What register_post_accumulate_grad_hook added to a parameter, in order; torch has no reader of it."""
    return list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())


def backward_hooks(module: torch.nn.Module) -> list[Callable[..., Any]]:
    """The backward hooks of a module, those that run before its backward among them; torch has no reader of it."""
    return [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]


def global_hooks(kind: str) -> list[Callable[..., Any]]:
    """Hooks of all modules, of kind "forward" or "backward"; torch has no reader of it."""
    tables = (f"_global_{kind}_hooks", f"_global_{kind}_pre_hooks")
    return [hook for table in tables for hook in getattr(torch.nn.modules.module, table, {}).values()]


def drop_hooks(parameter: torch.Tensor) -> None:
    """Removes every gradient hook of a copied parameter: the user's hooks must not see a trial run."""
    parameter._backward_hooks = None  # type: ignore[assignment]
    if hasattr(parameter, "_post_accumulate_grad_hooks"):
        parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]


def take_hooks(tensor: torch.Tensor) -> tuple[Any, Any]:
    """Takes a leaf's gradient hooks away, for `give_hooks`: they must see the gradient of the whole batch, once.

    Handles that register_hook returned stay valid, since they refer to the dictionaries that come back.
    """
    taken = (getattr(tensor, "_backward_hooks", None), getattr(tensor, "_post_accumulate_grad_hooks", None))
    if taken[0]:
        tensor._backward_hooks = None
    if taken[1]:
        # An empty table: None leaves torch's own pointer to the old one (2.13).
        tensor._post_accumulate_grad_hooks = OrderedDict()  # type: ignore[attr-defined]
    return taken


def give_hooks(tensor: torch.Tensor, taken: tuple[Any, Any]) -> None:
    """Puts back what `take_hooks` took."""
    if taken[0]:
        tensor._backward_hooks = taken[0]
    if taken[1]:
        tensor._post_accumulate_grad_hooks = taken[1]  # type: ignore[attr-defined]


def graph_leaves(result: torch.Tensor) -> list[torch.Tensor]:
    """The tensors at which the autograd graph of `result` ends; an AccumulateGrad node alone knows its `variable`."""
    found: list[torch.Tensor] = [result] if result.grad_fn is None and result.requires_grad else []
    stack, seen = [result.grad_fn], {result.grad_fn}
    while stack:
        node = stack.pop()
        if node is None:
            continue
        if hasattr(node, "variable"):
            found.append(node.variable)
        new = [following for following, _ in node.next_functions if following not in seen]
        seen.update(new)
        stack.extend(new)
    return found


@contextlib.contextmanager
def watched_backward(look: Callable[[Sequence[Any], Sequence[Any] | None], None]) -> Iterator[None]:
    """While entered, `look(of, by)` sees each call of autograd's engine before it runs, and may raise.

    `backward()` and `grad()` both go through this function (2.13). No `by`: gradients are left in all leaves.
    """
    run: Callable[..., Any] = vars(torch.autograd)["_engine_run_backward"]

    def watched(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        look(outputs, args[3] if len(args) > 3 else ())
        return run(outputs, *args, **kwargs)

    with replaced(torch.autograd, "_engine_run_backward", watched):
        yield
