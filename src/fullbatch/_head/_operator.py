"""The kernel as two operators of torch, so that a captured step holds each as one node.

Traced, the loops over tiles would be thousands of nodes, and a planner could not know that their tiles are small. As an
operator with a shape function and a derivative the head is captured whole; `_axis/_rules/_head.py` says how it runs on
some of the tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fullbatch._head._kernel import Form, backward, compute_dtype, forward

_REST = "int ignore_index, float smoothing, float softcap, int slice"


def _losses(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignore_index: int, smoothing: float,
    softcap: float, slice: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    with torch.autocast(hidden.device.type, enabled=False):  # it would round what is float32 inside of an operator too
        return forward(hidden, weight, bias, target, Form(ignore_index, smoothing, softcap, slice))


def _losses_backward(
    grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, totals: Tensor,
    ignore_index: int, smoothing: float, softcap: float, slice: int, wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    form = Form(ignore_index, smoothing, softcap, slice)
    with torch.autocast(hidden.device.type, enabled=False):
        return backward(grad, hidden, weight, bias, target, totals, form, wanted)


token_losses = torch.library.custom_op(
    "fullbatch::token_losses", _losses, mutates_args=(),
    schema=f"(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, {_REST}) -> (Tensor, Tensor)",
)  # fmt: skip
token_losses_backward = torch.library.custom_op(
    "fullbatch::token_losses_backward", _losses_backward, mutates_args=(),
    schema=(
        "(Tensor grad, Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor totals, "
        f"{_REST}, bool[] wanted) -> (Tensor, Tensor, Tensor)"
    ),
)  # fmt: skip


@token_losses.register_fake
def _losses_form(hidden: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out = hidden.new_empty(hidden.shape[0], dtype=compute_dtype(hidden))
    return out, torch.empty_like(out)


@token_losses_backward.register_fake
def _losses_backward_form(
    grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, totals: Tensor,
    ignore_index: int, smoothing: float, softcap: float, slice: int, wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dtype = compute_dtype(hidden)
    return (
        hidden.new_empty(hidden.shape if wanted[0] else 0),
        weight.new_empty(weight.shape if wanted[1] else 0, dtype=dtype),
        weight.new_empty(weight.shape[0] if wanted[2] else 0, dtype=dtype),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, weight, bias, target, *ctx.rest = inputs
    ctx.save_for_backward(hidden, weight, bias, target, output[1])
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    hidden, weight, bias, target, totals = ctx.saved_tensors
    needs = ctx.needs_input_grad
    wanted = [bool(needs[0]), bool(needs[1]), bias is not None and bool(needs[2])]
    found = token_losses_backward(grad, hidden, weight, bias, target, totals, *ctx.rest, wanted)
    # The sums over tokens are rounded to the dtype of weight and bias here, outside of the operator: in a step of
    # several microbatches that is once, after they have been added up.
    given = (hidden, weight, bias)
    return (*(x.to(y.dtype) if on else None for x, y, on in zip(found, given, wanted, strict=True)), *[None] * 5)


token_losses.register_autograd(_differentiate, setup_context=_save)


@register_flop_formula(torch.ops.fullbatch.token_losses)
def _losses_flops(hidden: Any, weight: Any, *rest: Any, **_: Any) -> int:
    return 2 * int(hidden[0]) * int(weight[0]) * int(weight[1])


@register_flop_formula(torch.ops.fullbatch.token_losses_backward)
def _losses_backward_flops(grad: Any, hidden: Any, weight: Any, *rest: Any, **_: Any) -> int:
    wanted = rest[-1]
    return 2 * int(hidden[0]) * int(weight[0]) * int(weight[1]) * (1 + bool(wanted[0]) + bool(wanted[1]))
