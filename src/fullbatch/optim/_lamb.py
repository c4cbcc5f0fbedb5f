"""LAMB: Adam's direction, as long as the tensor that it moves (You et al. 2019, arXiv:1904.00962, algorithm 2)."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from fullbatch.optim._trust import Trusting, computed, empty_state


class LAMB(Trusting):
    """Adam with decoupled decay, whose step of each tensor is the learning rate's share of the tensor's length.

    With `u = m / (sqrt(v) + eps) + weight_decay * w`, of Adam's bias-corrected moments `m` and `v`, a step is
    `w -= lr * (|w| / |u|) * u`: so `|dw| / |w| = lr`, in every step and whatever the decay, for each tensor of a group
    with `adapt=True`. Where `adapt=False` it is `w -= lr * u`, AdamW. A tensor of zeros, or an update of zeros, has the
    ratio 1. `fullbatch.optim.param_groups` makes the groups of the paper's own code, in which biases and normalisations
    are not adapted. The paper's bound on `|w|` (its function phi) is the identity here, as in its experiments.

    Args:
        params: parameters, or groups of them, each with options of its own.
        lr: a rate, or a scalar tensor. Typical: 1e-3 to 1e-2, times `sqrt` of the batch (`fullbatch.lr.scaled`).
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: added to the direction, times the weight. Typical: 0.01.
        adapt: whether the trust ratio applies; an option of each group.

    State: two tensors a parameter, in its form (of float16 in float32), and a count. Working memory: two tensors of the
    largest, of halves in float32.

    Raises:
        OptimizerError: an option out of range; at a step, a sparse gradient.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        adapt: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapt": adapt})

    def _update(self, parameter: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> torch.Tensor:
        if not state:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = empty_state(parameter), empty_state(parameter)
        state["step"] += 1
        first, second = group["betas"]
        _average(parameter, state["exp_avg"], state["exp_avg_sq"], first, second)
        root = state["exp_avg_sq"].sqrt().to(computed(parameter.dtype))
        root.div_((1 - second ** state["step"]) ** 0.5).add_(group["eps"])
        update: torch.Tensor = state["exp_avg"].to(root.dtype, copy=True).div_(root).div_(1 - first ** state["step"])
        del root
        return update.add_(parameter.to(update.dtype), alpha=group["weight_decay"])


def _average(parameter: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, first: float, second: float) -> None:
    """Moves both moments on, in their own form."""
    assert parameter.grad is not None
    gradient = parameter.grad.to(mean.dtype)
    mean.lerp_(gradient, 1 - first)
    square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
