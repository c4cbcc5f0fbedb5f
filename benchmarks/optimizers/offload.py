"""CPU offload (`torchao.optim.CPUOffloadOptimizer`) without a GPU: bytes on the device and on the host.

Limit that forced it: it asks for CUDA's streams and page-locked memory. Shape of the answer: torchao's own class runs,
and sees in the place of `torch` one whose streams and events do nothing and whose copies are in ordinary memory. Its
tensors are then all on the CPU, and an allocation is told apart by whose it is: copies, and all that their optimizers
allocate, are the host's; gradients of parameters, and all that the optimizer of small parameters allocates, are the
device's. CUDA's allocator, which rounds each tensor up to 512 bytes, and what page-locked memory is rounded up to, are
no part of this.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import fullbatch
from fullbatch._memory._optimizer import footprint
from fullbatch._memory._twin import state_bytes, tensors_in

CPU = torch.device("cpu")
Loss = Callable[[Any, Any], torch.Tensor]


class _Stream:
    """A stream, and an event: what one would wait for has happened."""

    def wait_stream(self, _: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> _Stream:
        return self


class _Torch:
    """What torchao's module sees as `torch`. Copies are on `host`, and page-locked nowhere."""

    cuda = SimpleNamespace(Stream=_Stream, current_stream=_Stream, stream=contextlib.nullcontext)

    def __init__(self, host: str) -> None:
        self._host = host

    def empty_like(self, like: torch.Tensor, *, device: str | None = None, pin_memory: bool = False) -> torch.Tensor:
        assert pin_memory
        return torch.empty_like(like, device=self._host if device == "cpu" else device)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def without_cuda(host: str = "cpu") -> Iterator[Any]:
    """While entered, torchao's class (which is given) offloads parameters that are on the CPU to `host`.

    With `host="meta"` there are two devices, as on a machine with a GPU; but the copies have no numbers, and no step.
    """
    module = importlib.import_module("torchao.optim.cpu_offload")
    optimizers = importlib.import_module("torch.optim.optimizer")  # torch.optim hides it
    fused = [*optimizers._get_fused_kernels_supported_devices(), host]  # or AdamW refuses "meta"
    with (
        patch.object(optimizers, "_get_fused_kernels_supported_devices", lambda: fused),
        patch.object(module, "torch", _Torch(host)),
        patch.object(module, "get_available_devices", lambda: ["cpu", "cuda"]),
        patch.object(torch.Tensor, "record_stream", lambda *_: None),
    ):
        yield module.CPUOffloadOptimizer


@dataclass(frozen=True)
class Bytes:
    """Of one model and optimizer.

    On the device: `peak` is the most during forward and backward of plain PyTorch, with all that is owned; `gradients`,
    `state` and `working` are there while `optimizer.step()` runs, besides the parameters. On the host: `copies` of
    parameters and gradients, `host_state`, and `host_working` while `optimizer.step()` runs.
    """

    peak: int
    gradients: int
    state: int
    working: int
    copies: int
    host_state: int
    host_working: int

    @property
    def device(self) -> int:
        """The most over the parameters while `optimizer.step()` runs."""
        return self.gradients + self.state + self.working

    @property
    def host(self) -> int:
        """The same of the host."""
        return self.copies + self.host_state + self.host_working


def predicted(loss_fn: Loss, make: Callable[[], nn.Module], batch: Any, **options: Any) -> Bytes:
    """What fullbatch says before anything runs. `make` makes the model: an optimizer leaves its hooks on parameters."""
    model = make()
    with without_cuda("meta") as offload:
        optimizer = offload(model.parameters(), **options)
        ledger = fullbatch.explain(loss_fn, model, batch, optimizer)
        assert ledger.after.exact
        # A count of steps may be on the CPU wherever its parameter is: that is the host where there is a GPU, not here.
        counts = sum(sum(footprint(one, CPU).states.values()) for one in optimizer.optim_dict.values())
        assert counts in (0, 4 * len(optimizer.optim_dict)), counts
    with without_cuda() as offload:
        optimizer = offload(make().parameters(), **options)
        host = [footprint(one, CPU) for one in optimizer.optim_dict.values()]
    return Bytes(
        ledger.peak - counts, ledger.after.gradients, ledger.owned.optimizer - counts, ledger.after.working,
        _copies(optimizer), sum(sum(one.states.values()) for one in host), max(one.working for one in host),
    )  # fmt: skip


def measured(loss_fn: Loss, make: Callable[[], nn.Module], batch: Any, steps: int = 3, **options: Any) -> Bytes:
    """What was allocated in `steps` steps of plain PyTorch."""
    model = make()
    owned = sum(one.nbytes for one in [*model.parameters(), *model.buffers(), *tensors_in(batch)])
    with without_cuda() as offload:
        making = fullbatch.measure(lambda: offload(model.parameters(), **options), CPU)
        optimizer = making.result
        parts = [optimizer.d_opt, *optimizer.optim_dict.values()]
        assert 0 <= making.retained - _copies(optimizer) <= 4 * len(parts)  # a rate may be a tensor
        small, large = _Steps(parts[:1]), _Steps(parts[1:])
        for step in range(steps + 1):
            optimizer.zero_grad()
            backward = fullbatch.measure(lambda: loss_fn(model, batch).backward(), CPU)
            gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
            if step < steps:
                with small, large:
                    optimizer.step()
        whole = fullbatch.measure(optimizer.step, CPU)  # nothing is allocated but by the two
        assert (whole.peak, whole.retained) == (max(small.last, large.last), 0), (whole, small.last, large.last)
    peak = owned + small.state + backward.peak
    return Bytes(peak, gradients, small.state, small.working, _copies(optimizer), large.state, large.working)


class _Steps:
    """While entered, each step of each of these optimizers is measured alone."""

    def __init__(self, optimizers: list[Any]) -> None:
        self._optimizers, self.working, self.last = optimizers, 0, 0

    @property
    def state(self) -> int:
        """Bytes of all that they keep."""
        return sum(state_bytes(dict(one.state), CPU) for one in self._optimizers)

    def __enter__(self) -> None:
        self.last = 0
        for one in self._optimizers:
            one.step = lambda one=one: self._measured(one)

    def __exit__(self, *_: Any) -> None:
        for one in self._optimizers:
            del one.step

    def _measured(self, optimizer: Any) -> None:
        before = self.state
        found = fullbatch.measure(lambda: type(optimizer).step(optimizer), CPU)
        self.working = max(self.working, found.peak - (self.state - before))
        self.last = max(self.last, found.peak)


def _copies(optimizer: Any) -> int:
    """Bytes of the copies of parameters, and of their gradients."""
    return sum(copy.nbytes + copy.grad.nbytes for copy in optimizer.param_d2h_map.values())
