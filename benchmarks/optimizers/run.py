"""Bytes for each parameter that optimizers take, predicted before they exist and measured in real steps.

    python benchmarks/optimizers/run.py

Prints the two tables of docs/optimizers.md; how CPU offload is measured says `offload.py`. The model is a small
language model: an embedding, six transformer layers of width 256, 5.8 million parameters, the largest tensor 18 % of
them. `step` is the most that is held in the step of the optimizer over the parameters, so with gradients and state; the
planned step itself is no part of it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import offload
import torch
from torch import nn, optim

import fullbatch
from fullbatch._memory._optimizer import footprint
from fullbatch._memory._twin import parameters_of, state_bytes

CPU = torch.device("cpu")
LOW_BIT = ("AdamW8bit", "AdamW4bit", "AdamWFp8")
STEPS = 8  # RAdam takes its other path, with more at once, from the sixth
Make = Callable[[Any], torch.optim.Optimizer]

MAKES: dict[str, Make] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "Adafactor": lambda p: optim.Adafactor(p),
    "Adagrad": lambda p: optim.Adagrad(p),
    "RMSprop": lambda p: optim.RMSprop(p),
    "Adam, AdamW": lambda p: optim.AdamW(p),
    "AdamW fused": lambda p: optim.AdamW(p, fused=True),
    "AdamW foreach": lambda p: optim.AdamW(p, foreach=True),
    "AdamW amsgrad": lambda p: optim.AdamW(p, amsgrad=True),
    "Adadelta": lambda p: optim.Adadelta(p),
    "Adamax": lambda p: optim.Adamax(p),
    "ASGD": lambda p: optim.ASGD(p),
    "NAdam": lambda p: optim.NAdam(p),
    "RAdam": lambda p: optim.RAdam(p),
    "Rprop": lambda p: optim.Rprop(p),
    "fullbatch LAMB": lambda p: fullbatch.optim.LAMB(p),
    "fullbatch LARS": lambda p: fullbatch.optim.LARS(p, lr=0.1),
    "Muon (matrices only)": lambda p: optim.Muon([one for one in p if one.ndim == 2]),
}


def low_bit() -> dict[str, Make]:
    """torchao's, where it is installed: they compile their step, which takes some seconds."""
    if importlib.util.find_spec("torchao") is None:
        print("torchao is not installed: pip install 'fullbatch[lowbit]'", file=sys.stderr)
        return {}
    import torchao.optim

    return {f"torchao {name}": (lambda p, name=name: getattr(torchao.optim, name)(p)) for name in LOW_BIT}


def bases() -> dict[str, Any]:
    """What torchao offloads: a class of optimizers."""
    if importlib.util.find_spec("torchao") is None:
        return {}
    import torchao.optim

    return {"AdamW": optim.AdamW, **{f"torchao {name}": getattr(torchao.optim, name) for name in LOW_BIT}}


def model() -> nn.Module:
    """5.8 million parameters in float32."""
    layers = [nn.TransformerEncoderLayer(256, 4, dim_feedforward=1024, batch_first=True) for _ in range(6)]
    return nn.Sequential(nn.Embedding(4096, 256), *layers)


def row(name: str, make: Make) -> str:
    """One optimizer, predicted and then run."""
    optimizer = make(model().parameters())
    parameters = parameters_of(optimizer)
    count = sum(parameter.numel() for parameter in parameters)
    found = footprint(optimizer, CPU)
    predicted = sum(found.states.values())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    before = state_bytes(dict(optimizer.state), CPU)
    peaks = [fullbatch.measure(optimizer.step).peak for _ in range(STEPS)]
    state = state_bytes(dict(optimizer.state), CPU)
    working = max(peaks[0] - (state - before), *peaks[1:])
    numbers = [predicted, state, 4 * count + predicted + found.working, 4 * count + state + working]
    return f"| {name} | " + " | ".join(f"{number / count:.2f}" for number in numbers) + " |"


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    """A number that every parameter moves."""
    loss: torch.Tensor = model(batch).square().mean()
    return loss


def offloaded(name: str, base: Any, offload_gradients: bool) -> str:
    """One base of torchao's CPUOffloadOptimizer, predicted and then run."""
    options = {"optimizer_class": base, "offload_gradients": offload_gradients}
    batch, count = torch.randint(4096, (2, 32)), sum(parameter.numel() for parameter in model().parameters())
    found = [find(loss_fn, model, batch, **options) for find in (offload.predicted, offload.measured)]
    numbers = [number for what in ("state", "device", "host") for number in (getattr(one, what) for one in found)]
    return f"| {name} | {offload_gradients} | " + " | ".join(f"{number / count:.2f}" for number in numbers) + " |"


def main() -> None:
    """The tables, in Markdown."""
    torch.manual_seed(0)
    _head("optimizer", "state, predicted", "state, measured", "step, predicted", "step, measured")
    for name, make in {**MAKES, **low_bit()}.items():
        print(row(name, make), flush=True)
    print()
    kinds = ("state on the device", "step on the device", "step on the host")
    said = [f"{what}, {how}" for what in kinds for how in ("predicted", "measured")]
    _head("offloaded", "`offload_gradients`", *said)
    for name, base in bases().items():
        for offload_gradients in (False, True):
            print(offloaded(name, base, offload_gradients), flush=True)


def _head(*columns: str) -> None:
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")


if __name__ == "__main__":
    main()
