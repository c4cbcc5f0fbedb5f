"""Learning rates of large batches: how far a rate goes with the batch, and the warm-up that lets it get there.

Limit that forced it: a rate that is right for one batch is wrong for another, and the two rules that are in use are
right for different optimizers. Shape of the answer: a function that is one formula, and a warm-up made of torch's own
schedulers, which are counted in optimizer steps and saved with `state_dict`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LinearLR, LRScheduler, SequentialLR

from fullbatch._errors import Fault, OptimizerError
from fullbatch._number import is_number

__all__ = ["scaled", "warmup"]


def scaled(base_lr: float, base_batch: int, batch: int, rule: Literal["linear", "sqrt"] = "linear") -> float:
    """The rate at `batch` samples that does what `base_lr` does at `base_batch`.

    `"linear"`: times `batch / base_batch`. For SGD: k steps along nearly the same gradient are one step of k times the
    length (Goyal et al. 2017, arXiv:1706.02677). It needs a warm-up, and holds up to a batch that depends on the task
    (8192 there).

    `"sqrt"`: times the square root of that. It keeps the variance of a step's noise (Krizhevsky 2014, arXiv:1404.5997;
    Hoffer et al. 2017, arXiv:1705.08741), is the rule for Adam and RMSprop, whose step does not grow with the gradient
    (Malladi et al. 2022, arXiv:2205.10287, which scales the betas and epsilon too), and that of LAMB's authors.

    Raises:
        OptimizerError: a rate or a batch that is not above zero, or another rule; all of them at once.
    """
    faults = [
        Fault(f"{name} is not above zero.", got=f"{name}={value!r}", expected="a number above zero")
        for name, value in (("base_lr", base_lr), ("base_batch", base_batch), ("batch", batch))
        if not (is_number(value) and value > 0)
    ]
    if rule not in ("linear", "sqrt"):
        faults.append(Fault("There is no such rule.", got=f"rule={rule!r}", expected='"linear" or "sqrt"'))
    if faults:
        raise OptimizerError(*faults)
    ratio = batch / base_batch
    return base_lr * (ratio if rule == "linear" else ratio**0.5)


def warmup(
    optimizer: torch.optim.Optimizer, steps: int, *, start: float | None = None, after: LRScheduler | None = None
) -> LRScheduler:
    """Each group's rate rises in a line from `start` times itself to itself, over `steps` optimizer steps.

    Optimizer step k (counted from 0) runs at `start + (1 - start) * k / steps` of the rate, for k up to `steps`; from
    there on at the rate, or as `after` says, which then begins at its own beginning. Call `scheduler.step()` once after
    every `optimizer.step()`, so once a batch: microbatches are no steps. Gradual warm-up is from Goyal et al. 2017
    (arXiv:1706.02677), which rises from the rate of the small batch: `start=base_batch / batch` for the linear rule.

    Args:
        optimizer: its groups' rates as they are now are what the warm-up ends at.
        steps: optimizer steps, at least 1.
        start: a share in (0, 1]; None: `1 / (steps + 1)`, the first step of a rise from zero.
        after: a scheduler of the same optimizer, made before this call, for the steps that follow.

    Returns:
        torch's `LinearLR`, or with `after` its `SequentialLR`.

    Raises:
        OptimizerError: no optimizer of torch, no steps, a start outside of (0, 1], or what is no scheduler of this
            optimizer; all of them at once.
    """
    faults = list(_not_of_torch(optimizer, after))
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        faults.append(Fault("The warm-up has no steps.", got=f"steps={steps!r}", expected="an int of at least 1"))
    if start is not None and not (is_number(start) and 0 < start <= 1):
        faults.append(Fault("The warm-up starts nowhere.", got=f"start={start!r}", expected="a share in (0, 1]"))
    if faults:
        raise OptimizerError(*faults)
    rise = LinearLR(optimizer, start_factor=start or 1 / (steps + 1), end_factor=1.0, total_iters=steps)
    return rise if after is None else SequentialLR(optimizer, [rise, after], milestones=[steps])


def _not_of_torch(optimizer: Any, after: Any) -> Iterator[Fault]:
    if not isinstance(optimizer, torch.optim.Optimizer):
        yield Fault(
            "There is no optimizer to warm up.", got=f"{type(optimizer).__name__}: {optimizer!r:.80}",
            expected="a torch.optim.Optimizer", next="fullbatch.lr.warmup(optimizer, steps)",
        )  # fmt: skip
    elif after is not None and getattr(after, "optimizer", None) is not optimizer:
        yield Fault(
            "after= is no scheduler of this optimizer.", got=f"{type(after).__name__}: {after!r:.80}",
            expected="one of torch.optim.lr_scheduler, made of the same optimizer",
            next="after=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)",
        )  # fmt: skip
