"""The changes that are looked at, each as a function that builds the changed step from the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fullbatch._errors import FullbatchError
from fullbatch._memory._twin import Optimizers, each_of
from fullbatch._propose._logits import Head, replace_head
from fullbatch._propose._tried import Graph, Tried
from fullbatch._propose._twin import Untried, rebound, without_values
from fullbatch._tree import leaves, map_tensors, named_tensors


@dataclass(frozen=True)
class Asked:
    """What the user gave, checked."""

    loss_fn: Any
    model: Any
    batch: Any
    device: torch.device
    optimizer: Optimizers | None
    batch_dims: Any
    timed: bool

    def tried(self, loss_fn: Any = None, batch: Any = None, rewrite: Graph | None = None) -> Tried:
        """The user's own step, with another function or batch. Raises what `Step` raises."""
        return Tried(
            loss_fn or self.loss_fn, self.model, self.batch if batch is None else batch, optimizer=self.optimizer,
            batch_dims=self.batch_dims, timed=self.timed, rewrite=rewrite,
        )  # fmt: skip

    def on_twin(self, dtype: torch.dtype | None, batch: Any) -> Tried:
        """The step of a copy of the model without numbers."""
        model, twins = without_values(self.model, dtype)
        step = Tried(
            self.loss_fn, model, batch, optimizer=rebound(self.optimizer, twins), batch_dims=self.batch_dims,
            timed=self.timed,
        )  # fmt: skip
        if step.reads & twins.keys():
            raise Untried("loss_fn reads the model by another name than its argument, so that no copy can stand for it")
        return step


@dataclass(frozen=True)
class Made:
    """A changed step, the line that makes the change in the user's code, and what else is to be known of it."""

    step: Tried
    line: str
    reason: str = ""
    optimizer: Optimizers | None = None  # to be put in the place of the step's
    what: str = ""  # where it is another than was asked for


@dataclass(frozen=True)
class Change:
    """`make` builds the changed step, or raises what says why it cannot. `line` is what stands for it then.

    `if_less`: it is of interest only where it takes less memory.
    """

    what: str
    line: str
    same: bool
    make: Callable[[], Made]
    if_less: bool = False


def refusal(error: Exception) -> str:
    """One line of what an error says."""
    if isinstance(error, FullbatchError):
        fault = error.faults[0]
        text = f"{fault.what} {fault.got}"
    else:
        text = str(error) if isinstance(error, Untried) else f"{type(error).__name__}: {error}"
    text = " ".join(text.split())
    return text if len(text) <= 240 else f"{text[:237]}..."


def precision(asked: Asked) -> Iterator[Change]:
    """Arithmetic and weights in bfloat16."""
    autocast = f'torch.autocast("{asked.device.type}", torch.bfloat16)'
    pair = isinstance(asked.loss_fn, (tuple, list))
    line = f"loss_fn = {f'({autocast}(forward), {autocast}(loss))' if pair else f'{autocast}(loss_fn)'}"

    def mixed() -> Made:
        within = torch.autocast(asked.device.type, torch.bfloat16)
        fn = tuple(within(one) for one in asked.loss_fn) if pair else within(asked.loss_fn)
        return Made(asked.tried(fn), line)

    yield Change("autocast to bfloat16", line, False, mixed)
    floats = [p for p in named_tensors(asked.model, "parameters").values() if p.is_floating_point()]
    if any(p.dtype != torch.bfloat16 for p in floats):
        yield Change("weights in bfloat16", _HALF, False, lambda: _in_bfloat16(asked))


_HALF = "model.to(torch.bfloat16), before the optimizer is made"


def _in_bfloat16(asked: Asked) -> Made:
    """Weights alone, where the step takes the batch as it is; else the batch's floating point tensors as well."""
    floating = [path for path, leaf in leaves(asked.batch) if leaf.is_floating_point() and leaf.dtype != torch.bfloat16]
    try:
        step = asked.on_twin(torch.bfloat16, asked.batch)
    except FullbatchError:
        if not floating:
            raise
    else:
        if not floating or not step.fails:
            return Made(step, _HALF)
    batch = map_tensors(_bfloat16, asked.batch)
    casts = "; ".join(f"{path} = {path}.to(torch.bfloat16)" for path in floating)
    return Made(asked.on_twin(torch.bfloat16, batch), f"{_HALF}; {casts}")


def _bfloat16(leaf: torch.Tensor) -> torch.Tensor:
    if not leaf.is_floating_point():
        return leaf
    return torch.empty_like(leaf.detach(), dtype=torch.bfloat16).requires_grad_(leaf.requires_grad)


def head(asked: Asked, found: Head | None) -> Iterator[Change]:
    """The loss of a vocabulary without its logits."""
    if found is not None:
        line = found.line
        yield Change("the loss without logits", line, True, lambda: Made(asked.tried(rewrite=_rewrite), line), True)


def _rewrite(graph: fx.GraphModule) -> None:
    replace_head(graph)


def gradients(asked: Asked) -> Iterator[Change]:
    """Gradients that are there are added to; without them a step makes them itself."""
    there = [p.grad for p in named_tensors(asked.model, "parameters").values() if p.grad is not None]
    if not there:
        return
    empty = not any(bool(grad.detach().any()) for grad in there)
    reason = "" if empty else "the gradients in .grad are not zero: a loop that adds up several steps needs them"
    line = "optimizer.zero_grad(set_to_none=True)" if len(each_of(asked.optimizer)) == 1 else "model.zero_grad()"
    yield Change(
        "no gradients before the step", line, empty, lambda: Made(asked.on_twin(None, asked.batch), line, reason)
    )
