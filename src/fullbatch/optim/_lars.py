"""LARS: momentum, as long as the tensor that it moves, in the forms of both papers.

You, Gitman and Ginsburg 2017 (arXiv:1708.03888) scale the gradient and then take its momentum; You et al. 2019
(arXiv:1904.00962, algorithm 1) take the momentum and scale that, so that every step has the length that it should.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.optim.optimizer import ParamsT

from fullbatch.optim._trust import Trusting, computed, empty_state, norm, stored, subtract


class LARS(Trusting):
    """Momentum whose step of each tensor is the learning rate's share of the tensor's length.

    `form="2019"`: `m = momentum * m + (1 - momentum) * (g + weight_decay * w)`, then
    `w -= lr * trust * (|w| / |m|) * m`: so `|dw| / |w| = lr * trust` in every step, for each tensor of a group with
    `adapt=True`.

    `form="2017"`: `rate = lr * trust * |w| / (|g| + weight_decay * |w|)`, then `v = momentum * v + rate * (g +
    weight_decay * w)` and `w -= v`. `|dw| / |w|` is `lr * trust` in the first step where there is no decay; later steps
    add up, to `1 / (1 - momentum)` times as much where gradients agree. The paper's `trust` is 0.001.

    Where `adapt=False` the ratio is left out: SGD with momentum (in the form of 2019, of averaged gradients). A tensor
    of zeros, or an update of zeros, has the ratio 1. `fullbatch.optim.param_groups` makes the usual groups.

    Args:
        params: parameters, or groups of them, each with options of its own.
        lr: a rate, or a scalar tensor.
        momentum: in [0, 1).
        weight_decay: added to the gradient, times the weight, before momentum.
        trust: the papers' trust coefficient, eta in that of 2017; it multiplies `lr` in adapted groups.
        adapt: whether the trust ratio applies; an option of each group.
        form: which paper's order of scaling and momentum.

    State: one tensor a parameter, in its form (of float16 in float32). Working memory: one tensor of the largest, of
    halves two in float32.

    Raises:
        OptimizerError: an option out of range; at a step, a sparse gradient.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 1.0,
        adapt: bool = True,
        form: Literal["2017", "2019"] = "2019",
    ) -> None:
        options = {"momentum": momentum, "weight_decay": weight_decay, "trust": trust, "adapt": adapt, "form": form}
        super().__init__(params, {"lr": lr, **options})

    def _move(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        if group["form"] == "2017":
            self._move_2017(parameter, group)
        else:
            super()._move(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> torch.Tensor:
        direction = _decayed(parameter, group)
        buffer = state.get("momentum_buffer")
        if buffer is None:
            buffer = state["momentum_buffer"] = empty_state(parameter)
        mean = buffer.to(direction.dtype).mul_(group["momentum"]).add_(direction, alpha=1 - group["momentum"])
        buffer.copy_(mean)
        return direction.copy_(mean)

    def _ratio(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        assert parameter.grad is not None
        weight, gradient = norm(parameter), norm(parameter.grad)
        known = (weight > 0) & (gradient > 0)
        ratio = group["trust"] * weight / (gradient + group["weight_decay"] * weight)
        return torch.where(known, ratio, torch.ones_like(weight))

    def _move_2017(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        rate = self._ratio(parameter, group) * group["lr"] if group["adapt"] else group["lr"]
        update = _decayed(parameter, group).mul_(rate)
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = update.to(stored(parameter.dtype))
        else:
            buffer = state["momentum_buffer"]
            update = buffer.to(update.dtype).mul_(group["momentum"]).add_(update)
            buffer.copy_(update)
        subtract(parameter, update)


def _decayed(parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """The gradient with the decay of the weights, in memory of its own and at least float32."""
    assert parameter.grad is not None
    gradient = parameter.grad.to(computed(parameter.dtype), copy=True)
    return gradient.add_(parameter.to(gradient.dtype), alpha=group["weight_decay"])
