"""How the benchmarks measure: exact peaks, interleaved times, counted operations, gradients to the bit.

A machine that others use too is slow for minutes at a time, so that two times are only comparable if they were taken
side by side: what is compared runs in turn, in an order that alternates, and the median of the ratios counts.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import fullbatch
from built import Loss

Action = Callable[[], object]


class Plain:
    """The plain step: what it owns before it runs and what it allocates, in bytes."""

    def __init__(self, loss_fn: Loss, model: nn.Module, batch: Any) -> None:
        self.loss_fn, self.model, self.batch = loss_fn, model, batch
        self.samples = tensors(batch)[0].shape[0]
        self.batch_bytes = sum(tensor.nbytes for tensor in tensors(batch))
        self.owned = owned(model, batch)
        self.peak = peak(self.run, model)

    def run(self) -> None:
        """Forward and backward."""
        self.loss_fn(self.model, self.batch).backward()

    def seconds(self) -> float:
        """One run's."""
        return timed(self.run, self.model)


def tensors(batch: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]


def owned(model: nn.Module, batch: Any) -> int:
    """Bytes of parameters, buffers and batch, each storage once: what is live before a step without gradients."""
    storages = [
        tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers(), *tensors(batch))
    ]  # fmt: skip
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def peak(fn: Action, model: nn.Module) -> int:
    """The most bytes that `fn` allocates at once, after one run to warm up; gradients count."""
    timed(fn, model)
    model.zero_grad()
    gc.collect()
    measured = fullbatch.measure(fn, "cpu").peak
    model.zero_grad()
    return measured


def timed(fn: Action, model: nn.Module) -> float:
    """Seconds of one run that finds no gradients."""
    model.zero_grad()
    began = time.perf_counter()
    fn()
    return time.perf_counter() - began


def interleaved(actions: Sequence[tuple[Action, nn.Module]], repeats: int) -> list[tuple[float, ...]]:
    """Seconds of each action in each of `repeats` rounds, after a warm-up; every other round goes backwards."""
    for fn, model in actions:
        timed(fn, model)
        model.zero_grad()
    rounds = []
    for number in range(repeats):
        order = list(range(len(actions)))
        found = dict.fromkeys(order, 0.0)
        for at in reversed(order) if number % 2 else order:
            fn, model = actions[at]
            found[at] = timed(fn, model)
            model.zero_grad()
        rounds.append(tuple(found[at] for at in order))
    return rounds


def ratio(rounds: list[tuple[float, ...]], above: int, below: int) -> float:
    """The median over the rounds of one action's seconds over another's."""
    return statistics.median(times[above] / times[below] for times in rounds)


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_backward_flop_count(grad, query, key, value)


def _convolution_backward(grad: Any, source: Any, weight: Any, *rest: Any, **kwargs: Any) -> int:
    transposed, mask = rest[4], rest[7]
    places = math.prod((source if transposed else grad)[2:])
    return int(2 * grad[0] * places * math.prod(weight) * (bool(mask[0]) + bool(mask[1])))


# torch's counter knows the attention kernels of CUDA only, and counts the weights' gradient of a grouped convolution as
# if there were one group.
_MENDED = {
    torch.ops.aten.convolution_backward: _convolution_backward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


class CountedStep(fullbatch.Step):
    """A step whose operations can be counted.

    Under a counter Dynamo would not find what it captured, so that the counter is entered inside of what it calls.
    """

    counter: FlopCounterMode | None = None

    def _run(self, captured: Any, inputs: Sequence[Tensor]) -> Any:
        with self.counter or contextlib.nullcontext():
            return super()._run(captured, inputs)


def operations(plain: Plain) -> int:
    """Floating point operations of matrix products, convolutions and attention in one plain step, backward included."""
    with _counter() as counter:
        timed(plain.run, plain.model)
    plain.model.zero_grad()
    return int(counter.get_total_flops())


def operations_of(step: CountedStep, plain: Plain) -> int:
    """The same of a planned step, recomputes included."""
    step.counter = _counter()
    timed(lambda: step(plain.batch), plain.model)
    counted, step.counter = int(step.counter.get_total_flops()), None
    plain.model.zero_grad()
    return counted


def _counter() -> FlopCounterMode:
    return FlopCounterMode(display=False, custom_mapping=_MENDED)


def gradients(fn: Action, model: nn.Module) -> dict[str, Tensor]:
    """What one run leaves in `.grad`, by parameter."""
    model.zero_grad()
    fn()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found


def difference(found: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The norm of the difference of all gradients together, relative to that of the right ones."""
    if found.keys() != right.keys():
        raise SystemExit(f"Other parameters have gradients: {sorted(found.keys() ^ right.keys())}")
    off = torch.stack([(found[name] - gradient).double().norm() for name, gradient in right.items()]).norm()
    return float(off / torch.stack([gradient.double().norm() for gradient in right.values()]).norm())


def gradient_digest(fn: Action, model: nn.Module) -> str:
    """A digest of all gradients that one run leaves: equal if and, but for collisions, only if all bits are."""
    digest = hashlib.sha256()
    for name, gradient in gradients(fn, model).items():
        digest.update(name.encode())
        digest.update(gradient.contiguous().numpy().data)
    return digest.hexdigest()


def about(size: str, repeats: int) -> dict[str, Any]:
    """What the numbers of a file depend on."""
    return {"torch": torch.__version__, "threads": torch.get_num_threads(), "size": size, "repeats": repeats}


def save(out: str | None, kind: str, size: str, repeats: int, results: list[dict[str, Any]]) -> None:
    """Writes results as JSON, where a file is named."""
    if out is not None:
        text = json.dumps({"kind": kind, **about(size, repeats), "results": results}, indent=1)
        Path(out).write_text(text + "\n", encoding="utf-8")
