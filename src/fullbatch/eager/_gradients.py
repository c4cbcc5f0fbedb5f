"""Gradients of sums, gathered beside `.grad`.

Limit that forced it: what a gradient is divided by is known after the last microbatch only, and `backward()` adds to
`.grad` as it goes, where an earlier gradient may be. Shape of the answer: while a step runs every `.grad` and every
gradient hook is set aside; the sums grow in the empty `.grad`, are taken out at the end, divided once, and given to the
same commit that a captured step has, which adds them and runs the hooks on the whole batch's gradient.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

import torch

from fullbatch import _torch
from fullbatch._errors import Fault, ModelError

_HALF = (torch.float16, torch.bfloat16)


class Gradients:
    """While entered, the sums of gradients of `parameters`, and of other leaves that a loss reaches."""

    def __init__(self, parameters: dict[str, torch.Tensor]) -> None:
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._parameters = [parameter for parameter in parameters.values() if parameter.requires_grad]
        self._aside: list[tuple[Callable[[], torch.Tensor | None], torch.Tensor | None, tuple[Any, Any]]] = []
        self._known: dict[int, Callable[[], torch.Tensor | None]] = {}
        self._wide: dict[int, torch.Tensor] = {}

    def __enter__(self) -> Gradients:
        for parameter in self._parameters:
            self._set_aside(parameter, functools.partial(_itself, parameter))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for alive, gradient, hooks in self._aside:
            leaf = alive()
            if leaf is not None:
                leaf.grad = gradient
                _torch.give_hooks(leaf, hooks)
        self._aside.clear()
        self._wide.clear()

    def meet(self, loss: torch.Tensor) -> None:
        """Sets aside what leaves outside of the model hold that this loss reaches."""
        for leaf in leaves_of(loss):
            known = self._known.get(id(leaf))
            if known is None or known() is not leaf:
                # Weakly: a tensor that loss_fn made, for a penalty on gradients say, goes with its microbatch.
                self._set_aside(leaf, weakref.ref(leaf))

    def widen(self) -> None:
        """Adds what one microbatch left in half precision to sums in float32: a batch is summed in no less."""
        for alive in self._known.values():
            leaf = alive()
            if leaf is None or leaf.grad is None:
                continue
            if leaf.grad.layout is not torch.strided:
                raise self._sparse(leaf)
            if leaf.dtype in _HALF:
                if id(leaf) in self._wide:
                    self._wide[id(leaf)] += leaf.grad
                else:
                    self._wide[id(leaf)] = leaf.grad.float()
                leaf.grad = None

    def take(self, factor: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(leaf, its gradient times `factor`), each in the leaf's dtype. Nothing is left behind."""
        found = []
        with torch.no_grad():
            for alive in self._known.values():
                leaf = alive()
                if leaf is None:
                    continue
                gradient = self._wide.pop(id(leaf), leaf.grad)
                leaf.grad = None
                if gradient is not None:
                    found.append((leaf, gradient.mul_(factor).to(leaf.dtype)))
                del gradient
        return found

    def peek(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and sum so far of each parameter of the model that has one."""
        for parameter in self._parameters:
            gradient = self._wide.get(id(parameter), parameter.grad)
            if gradient is not None:
                yield self._names[id(parameter)], gradient

    def _set_aside(self, leaf: torch.Tensor, alive: Callable[[], torch.Tensor | None]) -> None:
        self._aside.append((alive, leaf.grad, _torch.take_hooks(leaf)))
        self._known[id(leaf)] = alive
        leaf.grad = None

    def _sparse(self, leaf: torch.Tensor) -> ModelError:
        name = self._names.get(id(leaf), f"a tensor of shape {tuple(leaf.shape)} outside of the model")
        return ModelError(
            Fault(
                f"The gradient of {name} is not dense.",
                got=str(leaf.grad.layout if leaf.grad is not None else None),
                expected="gradients in torch.strided",
                next="nn.Embedding(..., sparse=False)",
            )
        )


def _itself(leaf: torch.Tensor) -> torch.Tensor:
    return leaf


def leaves_of(loss: torch.Tensor) -> Iterable[torch.Tensor]:
    """Every leaf that the backward of `loss` reaches."""
    pending: list[Any] = [loss.grad_fn] if loss.grad_fn is not None else []
    seen: set[Any] = set(pending)
    while pending:
        node = pending.pop()
        if hasattr(node, "variable"):
            yield node.variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
