"""The usual remedies, each as a function that runs one step: what fullbatch is compared with.

Each works on a copy of the model, since some of them change it for good.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from built import Model
from fullbatch._memory._cap import available
from measuring import Action, Plain, peak

COMPILE_BUDGETS = (0.8, 0.6, 0.4, 0.2, 0.0)


@dataclass(frozen=True)
class Technique:
    """One point of a peer: its name, its setting, the step and the copy of the model that it runs on."""

    peer: str
    setting: str
    run: Action
    model: nn.Module


def _step(plain: Plain, model: nn.Module, forward: Any = None) -> Action:
    """The plain step on `model`, or on `forward` where that stands for it."""
    return lambda: plain.loss_fn(model if forward is None else forward, plain.batch).backward()


def per_block(model: Model, plain: Plain) -> Iterator[Technique]:
    """torch.utils.checkpoint around each block. BatchNorm's running statistics move twice a step under it."""
    twin = copy.deepcopy(plain.model)
    blocks = model.find_blocks(twin)
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    yield Technique("checkpoint", f"{len(blocks)} blocks", _step(plain, twin), twin)


def sequential(model: Model, plain: Plain) -> Iterator[Technique]:
    """checkpoint_sequential where the model is a chain: of all segment counts the one with the least peak."""
    if not isinstance(plain.model, nn.Sequential):
        return
    twin = copy.deepcopy(plain.model)

    def technique(segments: int) -> Technique:
        forward = partial(checkpoint_sequential, twin, segments, use_reentrant=False)
        run = _step(plain, twin, lambda x: forward(input=x))
        return Technique("checkpoint_sequential", f"{segments} of 2 to {len(twin)} segments", run, twin)

    yield min((technique(count) for count in range(2, len(twin) + 1)), key=lambda found: peak(found.run, twin))


def huggingface(model: Model, plain: Plain) -> Iterator[Technique]:
    """gradient_checkpointing_enable() of transformers' models."""
    if not hasattr(plain.model, "gradient_checkpointing_enable"):
        return
    twin = copy.deepcopy(plain.model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # that it will have another name
        twin.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    yield Technique("transformers", "gradient_checkpointing_enable", _step(plain, twin), twin)


def compiled(model: Model, plain: Plain, backend: str) -> Iterator[Technique]:
    """torch.compile with an activation memory budget, in steps from 0.8 to 0."""
    for budget in COMPILE_BUDGETS:
        torch._dynamo.reset()
        twin = copy.deepcopy(plain.model)
        run = torch.compile(plain.loss_fn, backend=backend, fullgraph=True, dynamic=False)
        action = partial(_backward, run, twin, plain.batch)
        with functorch_config.patch(activation_memory_budget=budget):
            action()  # inductor compiles the backward at its first run
        yield Technique("compile", f"{backend}, budget {budget:g}", action, twin)


def _backward(run: Callable[..., Any], model: nn.Module, batch: Any) -> None:
    run(model, batch).backward()


def accumulation(model: Model, plain: Plain) -> Iterator[Technique]:
    """Gradients added up over k microbatches with the loss divided by k, where that is exact; k in powers of two."""
    if not model.additive:
        return
    parts = 2
    while parts <= plain.samples:
        if plain.samples % parts == 0:
            yield accumulate(plain, parts)
        parts *= 2


def accumulate(plain: Plain, parts: int) -> Technique:
    """Plain accumulation in that many equal microbatches."""
    twin, size = copy.deepcopy(plain.model), plain.samples // parts

    def run() -> None:
        for start in range(0, plain.samples, size):
            part = pytree.tree_map_only(torch.Tensor, lambda x, at=start: x[at : at + size], plain.batch)
            (plain.loss_fn(twin, part) / parts).backward()

    return Technique("accumulation", f"{parts} microbatches", run, twin)


PEERS = {
    "checkpoint": per_block,
    "sequential": sequential,
    "transformers": huggingface,
    "compile": compiled,
    "accumulation": accumulation,
}


def points(name: str, model: Model, plain: Plain, backend: str) -> Iterator[Technique]:
    """The points of the peer of that name, one at a time; none where it does not apply."""
    return compiled(model, plain, backend) if name == "compile" else PEERS[name](model, plain)


def default_backend() -> str:
    """Inductor where there is a compiler for it, else eager kernels behind the same partitioner."""
    with contextlib.suppress(Exception):
        if available() is None:
            return "inductor"
    return "aot_eager_decomp_partition"
