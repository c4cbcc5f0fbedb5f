"""What `loss_fn` must return, (loss_sum, count), checked at each microbatch and added up."""

from __future__ import annotations

import math
from typing import Any

import torch

from fullbatch._errors import LossError

_FORM = "(loss_sum, count): the scalar sum of the losses of this microbatch, and how many elements it is the sum of"
_NEXT = 'return F.cross_entropy(output, target, reduction="sum"), target.numel()'


class Sums:
    """Sums over the microbatches so far, of `size` samples in all."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.count: int | float = 0
        self.reference = 1.0  # a power of two near the whole batch's count
        self.differentiable = False
        self.loss: torch.Tensor | None = None
        self._dtype = torch.float32
        self._samples = 0

    def add(self, loss: torch.Tensor, count: int | float, samples: int) -> None:
        """Adds one microbatch, without its graph."""
        value = loss.detach()
        wide = value.to(torch.promote_types(value.dtype, torch.float32))
        if self.loss is None:
            self.loss, self._dtype = wide.clone(), value.dtype
            self.reference = 2.0 ** round(math.log2((count or samples) * self._size / samples))
        else:
            self.loss = self.loss + wide
        self.count += count
        self._samples += samples
        self.differentiable = self.differentiable or loss.requires_grad

    def check(self) -> None:
        """Raises LossError where there is nothing to divide by, or no gradient."""
        if not self.differentiable:
            raise LossError.of(
                "No parameter reaches the loss.", got="a loss_sum without a gradient in every microbatch",
                expected="a loss that depends on at least one tensor with requires_grad",
                next="check requires_grad_() of the parameters, and that loss_fn does not detach or run under no_grad",
            )  # fmt: skip
        if self.count == 0:
            raise LossError.of(
                "The counts of all microbatches add up to zero.", got=f"count 0 over {self._samples} samples",
                expected="a count above zero: the gradient is divided by it",
                next="leave this batch out, or return a count that is never zero",
            )  # fmt: skip

    def mean(self) -> torch.Tensor:
        """The loss of the whole batch: sum of the losses by sum of the counts."""
        assert self.loss is not None
        return (self.loss / self.count).to(self._dtype)


def checked(returned: Any) -> tuple[torch.Tensor, int | float]:
    """(loss_sum, count) as a scalar tensor and a number. Raises LossError."""
    if isinstance(returned, torch.Tensor):
        raise LossError.of(
            "loss_fn returned the loss alone; microbatches are weighted by a count.",
            got=f"a tensor of shape {tuple(returned.shape)}", expected=_FORM, next=_NEXT,
        )  # fmt: skip
    if not isinstance(returned, (tuple, list)) or len(returned) != 2:
        kind = f"{type(returned).__name__} of {len(returned)}" if isinstance(returned, (tuple, list)) else None
        raise LossError.of(
            "loss_fn did not return a loss and a count.", got=kind or f"{type(returned).__name__}: {returned!r:.80}",
            expected=_FORM, next=_NEXT,
        )  # fmt: skip
    loss, count = returned
    return _loss(loss), _count(count)


def _loss(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor):
        raise LossError.of(
            "The loss_sum is not a tensor.", got=f"{type(loss).__name__}: {loss!r:.80}", expected=_FORM, next=_NEXT
        )
    if loss.numel() != 1:
        raise LossError.of(
            "The loss_sum is not a scalar.", got=f"a tensor of shape {tuple(loss.shape)}", expected=_FORM,
            next="return losses.sum(), losses.numel()",
        )  # fmt: skip
    if not loss.is_floating_point():
        raise LossError.of("The loss_sum is not a real number.", got=str(loss.dtype), expected=_FORM, next=_NEXT)
    return loss.reshape(())


def _count(count: Any) -> int | float:
    if isinstance(count, torch.Tensor):
        if count.requires_grad:
            raise LossError.of(
                "The count has a gradient.", got="a count that depends on a parameter",
                expected="a number that depends on the data alone", next="return loss_sum, count.detach()",
            )  # fmt: skip
        if count.numel() != 1 or count.is_complex():
            raise _no_count(f"a tensor of shape {tuple(count.shape)} in {count.dtype}")
        count = count.item()
    if hasattr(count, "item"):  # a number of NumPy's
        count = count.item()
    if not isinstance(count, (int, float)):
        raise _no_count(f"{type(count).__name__}: {count!r:.80}")
    if not math.isfinite(count) or count < 0:
        raise _no_count(repr(count))
    return int(count) if isinstance(count, bool) else count


def _no_count(got: str) -> LossError:
    return LossError.of(
        "The count is not a number to divide by.", got=got,
        expected="a finite number, zero or above: an int, a float, or a tensor of one element", next=_NEXT,
    )  # fmt: skip
