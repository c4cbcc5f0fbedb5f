"""Random operators that give constants, so that a batch and its parts can be compared.

Limit that forced it: the masks of six samples and those of twice three are not the same draws, so that with dropout no
loss is the sum of its parts. Switching dropout modules off would miss `F.dropout` and noise, and would turn
BatchNorm's kin into other functions. Shape of the answer: below all modules, every random operator gives the same
constant at each element, which no division of the batch changes: dropout keeps all, uniform numbers are their mean. A
permutation is reversed, so that mixing samples is seen as such.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from fullbatch import _torch

_HALF_A_DEVIATION = 0.5


class Fixed(_torch.DispatchMode):  # type: ignore[misc]
    """While entered, nothing is random. `eps` is the coarsest rounding of any floating result so far."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 0.0
        self.replaced = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = _without_dropout(func, args, dict(kwargs or {}))
        name = func.overloadpacket.__name__
        fixed = _FIXED.get(name)
        if fixed is None:
            out = func(*args, **kwargs)
        else:
            self.replaced = True
            out = fixed(func, args, kwargs)
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        if isinstance(first, torch.Tensor) and first.is_floating_point():
            self.eps = max(self.eps, torch.finfo(first.dtype).eps)
        return out


def _without_dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Fused attention and recurrent kernels draw inside: their probability becomes zero."""
    for index, argument in enumerate(_torch.schema(func).arguments):
        if argument.name not in ("dropout_p", "dropout"):
            continue
        if argument.name in kwargs:
            kwargs[argument.name] = 0.0
        elif index < len(args):
            args = (*args[:index], 0.0, *args[index + 1 :])
    return args, kwargs


def _argument(func: Any, args: Any, kwargs: Any, name: str, default: Any) -> Any:
    for index, argument in enumerate(_torch.schema(func).arguments):
        if argument.name == name:
            return kwargs.get(name, args[index] if index < len(args) else default)
    return default


def _filled(value: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """An operator in place: its operand holds `value` everywhere."""
    return lambda func, args, kwargs: args[0].fill_(value(func, args, kwargs))


def _made(value: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """An operator that makes a tensor: it runs, for its form, and is overwritten."""
    return lambda func, args, kwargs: func(*args, **kwargs).fill_(value(func, args, kwargs))


def _bernoulli(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    probability = _argument(func, args, kwargs, "p", None)
    if isinstance(probability, torch.Tensor):
        return args[0].copy_(probability >= 0.5)  # type: ignore[no-any-return]
    if func.overloadpacket.__name__ == "bernoulli_":
        return args[0].fill_(1)  # type: ignore[no-any-return]
    return torch.ones_like(args[0]) if probability is not None else (args[0] >= 0.5).to(args[0].dtype)


def _dropout(func: Any, args: Any, kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    p, train = args[1], args[2] if len(args) > 2 else True
    kept = args[0] / (1 - p) if train and p < 1 else args[0].clone()
    return kept, torch.ones_like(args[0], dtype=torch.bool)


def _normal(func: Any, args: Any, kwargs: Any) -> Any:
    """normal(mean, std) in its overloads: half a deviation above the mean."""
    out = func(*args, **kwargs)
    mean, std = _argument(func, args, kwargs, "mean", 0.0), _argument(func, args, kwargs, "std", 1.0)
    return out.copy_(torch.as_tensor(mean + _HALF_A_DEVIATION * std))


def _reversed(func: Any, args: Any, kwargs: Any) -> Any:
    out = func(*args, **kwargs)
    return out.copy_(torch.arange(out.numel() - 1, -1, -1, device=out.device))


def _between(func: Any, args: Any, kwargs: Any) -> float:
    low, high = _argument(func, args, kwargs, "from", 0.0), _argument(func, args, kwargs, "to", 1.0)
    return float(low + high) / 2 if high is not None else 0.0


def _most_likely(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """multinomial: the most likely entry of each row, as often as asked."""
    count = _argument(func, args, kwargs, "num_samples", 1)
    return args[0].argmax(-1, keepdim=True).repeat_interleave(count, dim=-1)  # type: ignore[no-any-return]


_LOW = _made(lambda func, args, kwargs: _argument(func, args, kwargs, "low", 0))
_HALF = _made(lambda func, args, kwargs: 0.5)
_ONE = _filled(lambda func, args, kwargs: 1)
_FIXED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "bernoulli": _bernoulli, "bernoulli_": _bernoulli, "native_dropout": _dropout,
    "rand": _HALF, "rand_like": _HALF, "randn": _HALF, "randn_like": _HALF, "randint": _LOW, "randint_like": _LOW,
    "uniform_": _filled(_between), "random_": _filled(lambda f, a, k: int(_between(f, a, k))),
    "normal_": _filled(
        lambda f, a, k: _argument(f, a, k, "mean", 0.0) + _HALF_A_DEVIATION * _argument(f, a, k, "std", 1.0)
    ),
    "normal": _normal, "randperm": _reversed, "exponential_": _ONE, "geometric_": _ONE, "log_normal_": _ONE,
    "cauchy_": _ONE, "multinomial": _most_likely,
}  # fmt: skip


class Released(Exception):
    """A backward inside of loss_fn asks for what was not kept."""


def nothing_kept() -> contextlib.AbstractContextManager[Any]:
    """While entered, a forward with gradients keeps nothing for a backward, and takes no more memory than without."""

    def needed(_: Any) -> Any:
        raise Released

    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, needed)
