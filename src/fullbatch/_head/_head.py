"""`linear_cross_entropy`: what the user writes in place of `F.cross_entropy(F.linear(hidden, weight), target)`."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fullbatch._errors import Fault, LossError
from fullbatch._head._operator import token_losses

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    slice: int | None = None,
) -> Tensor:
    """`F.cross_entropy(F.linear(hidden, weight, bias), target)` without the logits of all tokens.

    Logits exist as tiles of at most 8 MiB, some tokens by some words, in the forward and again in the backward, which
    costs one more product of `hidden` and `weight` (four and not three). For half precision, products, logits, losses
    and sums over tokens are float32, and so is the value that is returned; only gradients are rounded, once. That tiles
    suffice is from Cut Cross-Entropy (Wijmans et al., 2024).

    It works in plain PyTorch and in a `Step`, whose microbatches it runs in. Under autocast `hidden`, `weight` and
    `bias` are converted as `F.linear` converts them. It has no second derivative: a loss that holds a gradient of it (a
    gradient penalty) needs the logits.

    Args:
        hidden: features [..., features] in float16, bfloat16, float32 or float64.
        weight: [words, features], of the same dtype (under autocast: of any of them).
        target: words [...], int64. `ignore_index` counts neither in the sum nor in the mean.
        bias: [words], or None.
        reduction: "mean" over the targets that are not ignored (nan where all are), "sum", or "none": [...].
        label_smoothing: as in `F.cross_entropy`, from 0 to 1.
        softcap: logits are `softcap * tanh(logits / softcap)`, as in Gemma 2; None: as they are.
        slice: tokens a tile; None: 256. Fewer tokens with more words each.

    Raises:
        LossError: shapes, dtypes or options that do not fit, all of them at once (from a Step: CaptureError).
        RuntimeError: from autograd, where a gradient of it is differentiated.
        IndexError: a target that is no word (on CUDA an assertion on the device, as in `F.cross_entropy`).
    """
    faults = _faults(hidden, weight, target, bias, reduction, label_smoothing, softcap, slice)
    if faults:
        _refuse(faults)
    flat = target.reshape(-1)
    given = _autocast(hidden.reshape(-1, hidden.shape[-1]), weight, bias)
    losses: Tensor
    losses, _ = token_losses(
        *given, flat, int(ignore_index), float(label_smoothing), float(softcap or 0), int(slice or 0)
    )
    if reduction == "none":
        return losses.reshape(target.shape)
    total: Tensor = losses.sum()
    # The count depends on targets alone: a step of several microbatches knows it before its forward begins.
    return total / (flat != ignore_index).sum() if reduction == "mean" else total


def _autocast(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    device = hidden.device.type
    if not torch.is_autocast_enabled(device) or hidden.dtype == torch.float64:
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _faults(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, reduction: str, smoothing: float,
    softcap: float | None, slice: int | None,
) -> list[tuple[str, str, str]]:  # fmt: skip
    found: list[tuple[str, str, str]] = []
    shapes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, target {tuple(target.shape)}"
    fit = weight.dim() == 2 and hidden.dim() >= 1 and target.shape == hidden.shape[:-1]
    if not fit or hidden.shape[-1] != weight.shape[1]:
        wanted = "hidden [..., features], weight [words, features], target [...]"
        found.append(("The shapes of the loss head do not fit.", shapes, wanted))
    elif bias is not None and bias.shape != weight.shape[:1]:
        found.append(("The bias does not fit.", f"{tuple(bias.shape)}", f"({weight.shape[0]},), one for each word"))
    if target.dtype != torch.int64:
        found.append(("The target is not of words.", f"{target.dtype}", "torch.int64"))
    dtypes = [hidden.dtype, weight.dtype] + ([bias.dtype] if bias is not None else [])
    cast = torch.is_autocast_enabled(hidden.device.type) and torch.float64 not in dtypes
    same = cast or all(dtype == hidden.dtype for dtype in dtypes)
    if not same or not all(dtype in _FLOATS for dtype in dtypes):
        found.append(
            ("The dtypes do not fit.", ", ".join([f"{dtype}" for dtype in dtypes]), "one floating point dtype")
        )
    if reduction not in ("mean", "sum", "none"):
        found.append(("There is no such reduction.", f"{reduction!r}", '"mean", "sum" or "none"'))
    if not 0 <= smoothing <= 1:
        found.append(("The smoothing is out of range.", f"label_smoothing={smoothing}", "0 to 1"))
    if softcap is not None and not softcap > 0:
        found.append(("The cap is out of range.", f"softcap={softcap}", "a number above 0, or None"))
    if slice is not None and slice < 1:
        found.append(("The slice is out of range.", f"slice={slice}", "1 or more tokens, or None"))
    return found


def _refuse(faults: list[tuple[str, str, str]]) -> None:
    if torch.compiler.is_compiling():  # Dynamo cannot make our exceptions; a step's own refusal carries the text
        raise ValueError(". ".join([f"{what} got: {got}; expected: {expected}" for what, got, expected in faults]))
    raise LossError(*(Fault(*fault) for fault in faults))
