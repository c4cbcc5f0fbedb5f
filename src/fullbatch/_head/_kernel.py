"""The loss of each token from its features, without the logits of all tokens.

Limit that forced it: the logits of a vocabulary ([tokens, 50,000]) are the largest tensor of a language model, their
softmax and their gradient two more, and in half precision rounding them to 8 bits makes the loss wrong in its third
digit. Shape of the answer: tiles of tokens by vocabulary, small and in float32, are made, folded into one number a
token and dropped; the backward makes them again from that number. A tile is bounded in both directions, so that one
token of a large vocabulary is cut too, and so that half precision weights are converted a tile at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fullbatch import _torch

TILE = 8 << 20
"""Bytes of a tile of logits, and of a converted tile of the weight."""

TOKENS = 256
"""Tokens a slice where none are asked for: enough that a product takes longer than reading the weight."""


@dataclass(frozen=True)
class Form:
    """What of the loss is no tensor. `softcap` 0 is none, `slice` 0 is a slice of the kernel's choice."""

    ignore_index: int
    smoothing: float
    softcap: float
    slice: int


def compute_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype of logits and losses: float32 for half precision, else that of the features."""
    return torch.float32 if hidden.dtype in (torch.float16, torch.bfloat16) else hidden.dtype


def _steps(total: int, size: int) -> Iterator[tuple[int, int]]:
    return ((begin, min(begin + size, total)) for begin in range(0, total, size))


def _tile(hidden: Tensor, weight: Tensor, form: Form) -> tuple[int, int]:
    """Tokens and words of a tile."""
    itemsize = compute_dtype(hidden).itemsize
    tokens = max(1, min(form.slice or TOKENS, hidden.shape[0]))
    # A product of converted weights holds both, of plain weights only the logits.
    width = tokens if weight.dtype == compute_dtype(hidden) else max(tokens, hidden.shape[1])
    return tokens, max(1, min(weight.shape[0], TILE // (width * itemsize)))


def _logits(part: Tensor, weight: Tensor, bias: Tensor | None, softcap: float) -> Tensor:
    logits = part @ weight.t()
    if bias is not None:
        logits += bias.to(part.dtype)
    return logits.div_(softcap).tanh_().mul_(softcap) if softcap else logits


def _inside(target: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor]:
    """Which of the tokens have their word in the tile, and its column there (any column where they have not)."""
    return (target >= begin) & (target < end), (target - begin).clamp(0, end - begin - 1).unsqueeze(1)


def check_target(target: Tensor, words: int, ignore_index: int) -> None:
    """Raises IndexError where a target is no word: on the CPU at once, on CUDA as the device's own assertion."""
    valid = ((target >= 0) & (target < words)) | (target == ignore_index)
    if target.device.type == "cuda":
        _torch.assert_on_device(valid.all())
    elif not bool(valid.all()):
        wrong = int(target[~valid][0])
        raise IndexError(
            f"Target {wrong} is out of bounds: a vocabulary of {words} has words 0 to {words - 1}, and "
            f"ignore_index={ignore_index} is left out."
        )


def forward(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """Losses [tokens] (zero where ignored) and log-sum-exps [tokens], in `compute_dtype`."""
    check_target(target, weight.shape[0], form.ignore_index)
    dtype, (tokens, words) = compute_dtype(hidden), _tile(hidden, weight, form)
    losses = hidden.new_empty(hidden.shape[0], dtype=dtype)
    totals = torch.empty_like(losses)
    for begin, end in _steps(hidden.shape[0], tokens):
        part, aim = hidden[begin:end].to(dtype), target[begin:end]
        total = part.new_full((end - begin,), float("-inf"))
        picked, added = torch.zeros_like(total), torch.zeros_like(total)
        for first, last in _steps(weight.shape[0], words):
            some = None if bias is None else bias[first:last]
            logits = _logits(part, weight[first:last].to(dtype), some, form.softcap)
            here, column = _inside(aim, first, last)
            picked = torch.where(here, logits.gather(1, column).squeeze(1), picked)
            if form.smoothing:
                added += logits.sum(1)
            total = torch.logaddexp(total, _log_sum_exp(logits))
            del logits  # or the next tile would be made beside it
        loss = total - picked
        if form.smoothing:
            mean = added / weight.shape[0]
            loss = (1 - form.smoothing) * loss + form.smoothing * (total - mean)
        losses[begin:end] = loss.masked_fill_(aim == form.ignore_index, 0)
        totals[begin:end] = total
    return losses, totals


def _log_sum_exp(logits: Tensor) -> Tensor:
    """`logsumexp` over words; `logits` is used up. A row of -inf gives -inf, as there."""
    top = logits.amax(1, keepdim=True)
    top.masked_fill_(top == float("-inf"), 0)
    return logits.sub_(top).exp_().sum(1).log_().add_(top.squeeze(1))


def backward(
    grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, totals: Tensor, form: Form,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the features (in their dtype), weight and bias (in `compute_dtype`); empty where not wanted."""
    dtype, (tokens, words) = compute_dtype(hidden), _tile(hidden, weight, form)
    grad_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if wanted[0] else hidden.new_empty(0)
    grad_weight = weight.new_zeros(weight.shape if wanted[1] else 0, dtype=dtype)
    grad_bias = weight.new_zeros(weight.shape[0] if wanted[2] else 0, dtype=dtype)
    for begin, end in _steps(hidden.shape[0], tokens):
        part, aim = hidden[begin:end].to(dtype), target[begin:end]
        scale = grad[begin:end].masked_fill(aim == form.ignore_index, 0)
        grad_part = torch.zeros_like(part) if wanted[0] else part
        for first, last in _steps(weight.shape[0], words):
            matrix, some = weight[first:last].to(dtype), None if bias is None else bias[first:last]
            logits = _logits(part, matrix, some, form.softcap)
            slopes = _slopes(logits, totals[begin:end], _inside(aim, first, last), scale, weight.shape[0], form)
            if wanted[0]:
                grad_part.addmm_(slopes, matrix)
            if wanted[1]:
                grad_weight[first:last].addmm_(slopes.t(), part)
            if wanted[2]:
                grad_bias[first:last] += slopes.sum(0)
            del logits, slopes, matrix
        if wanted[0]:
            grad_hidden[begin:end] = grad_part
    return grad_hidden, grad_weight, grad_bias


def _slopes(
    logits: Tensor, totals: Tensor, inside: tuple[Tensor, Tensor], scale: Tensor, words: int, form: Form
) -> Tensor:
    """The gradient of a tile of logits, in its place."""
    curve = logits.div(form.softcap).square_().neg_().add_(1) if form.softcap else None
    slopes = logits.sub_(totals.unsqueeze(1)).exp_()
    if form.smoothing:
        slopes -= form.smoothing / words
    here, column = inside
    slopes.scatter_add_(1, column, here.unsqueeze(1).to(slopes.dtype).mul_(form.smoothing - 1))
    slopes *= scale.unsqueeze(1)
    return slopes if curve is None else slopes.mul_(curve)
