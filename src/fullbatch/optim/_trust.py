"""The trust ratio of LARS and LAMB, and what both do around it.

Limit that forced it: with large batches the best rate of each layer is its own, and one for all diverges (You, Gitman
and Ginsburg 2017, arXiv:1708.03888). Shape of the answer: an update is scaled to the length of the tensor that it
moves, so that `|dw| / |w|` is the learning rate in every step. Several libraries' optimizers of these names do not
keep this; here it is tested. Of halves, ratio, rate and update are float32: in float16 a ratio above 65,504 is
infinite, and the squares of gradients below 1e-4 are zero, so that there the state is float32 too. Operands of two
dtypes are converted before they meet: a CPU kernel would convert them inside, where no plan sees the memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fullbatch._errors import Fault, OptimizerError
from fullbatch._number import is_number, number


class Trusting(torch.optim.Optimizer, ABC):
    """Base of both: `_update` gives the direction of one parameter, and the step is taken along it."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step over all parameters with a gradient. Returns what `closure` returns, where there is one.

        Raises OptimizerError for a sparse gradient, before any parameter has moved.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        _refuse_sparse(self.param_groups)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group)
        return loss

    def _move(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        update = self._update(parameter, group, self.state[parameter])
        if group["adapt"]:
            update.mul_(trust_ratio(parameter, update) * group.get("trust", 1.0))
        subtract(parameter, update.mul_(group["lr"]))

    @abstractmethod
    def _update(self, parameter: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> torch.Tensor:
        """The direction to move against, in memory of its own, of `computed`'s dtype."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As every optimizer's; state that is kept in float32 stays in it."""
        given: list[dict[str, Any]] = []
        last = self.register_load_state_dict_pre_hook(lambda _, loaded: given.append(loaded))  # as other hooks left it
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
        self._widen(given[0])

    def _widen(self, saved: dict[str, Any]) -> None:
        """Reads the state of float16 parameters again, which torch has cast to the parameter's dtype."""
        for group, old in zip(self.param_groups, saved["param_groups"], strict=True):
            for parameter, key in zip(group["params"], old["params"], strict=True):
                dtype = stored(parameter.dtype)
                if dtype == parameter.dtype:
                    continue
                for name, value in saved["state"].get(key, {}).items():
                    if isinstance(value, torch.Tensor) and value.is_floating_point():
                        self.state[parameter][name] = value.to(parameter.device, dtype)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; its options are checked as those of the constructor. Raises OptimizerError."""
        check({**self.defaults, **param_group})
        super().add_param_group(param_group)


def computed(dtype: torch.dtype) -> torch.dtype:
    """In which dtype an update of parameters of `dtype` is computed: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def stored(dtype: torch.dtype) -> torch.dtype:
    """In which dtype their state is kept: their own, as torch's optimizers do, but for float16's narrow range."""
    return torch.float32 if dtype == torch.float16 else dtype


def empty_state(parameter: torch.Tensor) -> torch.Tensor:
    """A tensor of zeros to keep for a parameter."""
    return torch.zeros_like(parameter, dtype=stored(parameter.dtype), memory_format=torch.preserve_format)


def subtract(parameter: torch.Tensor, update: torch.Tensor) -> None:
    """Takes an update off a parameter, which is rounded once."""
    parameter.copy_(parameter.to(update.dtype).sub_(update))  # where dtypes are the same, `to` and `copy_` do nothing


def trust_ratio(parameter: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    """`|w| / |u|`, a scalar tensor; 1 where either is zero, or a tensor of zeros could never leave zero.

    In float32 for halves: the sum of a large tensor's squares is beyond their range, as the ratio to a small one is.
    """
    weight, direction = norm(parameter), norm(update)
    known = (weight > 0) & (direction > 0)
    ratio: torch.Tensor = torch.where(known, weight / direction, torch.ones_like(weight))
    return ratio


def norm(tensor: torch.Tensor) -> torch.Tensor:
    """The Euclidean length, in float32 at least."""
    length: torch.Tensor = torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
    return length


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups of a model's parameters, as in the papers' own code: what is adapted and decays, and what is not.

    Biases and the weights of normalisations (tensors of one dimension or none) get no trust ratio and no decay: their
    length says nothing of how far they should move. Parameters that need no gradient are left out.
    """
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in wanted if p.ndim > 1], "weight_decay": weight_decay, "adapt": True},
        {"params": [p for p in wanted if p.ndim <= 1], "weight_decay": 0.0, "adapt": False},
    ]
    return [group for group in groups if group["params"]]


def _are_betas(value: Any) -> bool:
    pair = isinstance(value, (tuple, list)) and len(value) == 2
    return pair and all(is_number(beta) and 0 <= beta < 1 for beta in value)


_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "lr": (number(lambda value: value >= 0), "at least 0"),
    "weight_decay": (number(lambda value: value >= 0), "at least 0"),
    "eps": (number(lambda value: value >= 0), "at least 0"),
    "trust": (number(lambda value: value > 0), "above 0"),
    "momentum": (number(lambda value: 0 <= value < 1), "in [0, 1)"),
    "betas": (_are_betas, "two numbers in [0, 1)"),
    "adapt": (lambda value: isinstance(value, bool), "True or False"),
    "form": (lambda value: value in ("2017", "2019"), '"2017" or "2019"'),
}


def check(options: dict[str, Any]) -> None:
    """Raises OptimizerError with all options that are out of range."""
    faults = [
        Fault(f"{name} is out of range.", got=f"{name}={options[name]!r}", expected=expected)
        for name, (good, expected) in _RANGES.items()
        if name in options and not good(options[name])
    ]
    if faults:
        raise OptimizerError(*faults)


def _refuse_sparse(groups: list[dict[str, Any]]) -> None:
    for group in groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise OptimizerError.of(
                    "A gradient is sparse.", got=f"a parameter of shape {tuple(parameter.shape)}",
                    expected="dense gradients: the trust ratio is of whole tensors",
                    next="nn.Embedding(..., sparse=False), or torch.optim.SparseAdam for that parameter",
                )  # fmt: skip
