"""Runs a schedule and nothing else.

Every decision has been made; what remains is a walk over actions with one table of live tensors. Random operators
draw from the generator seeded by (step seed, task, microbatch), so that a recompute sees what its first run saw.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fullbatch import _torch
from fullbatch._axis._strides import has_dense_strides
from fullbatch._ir import Kind, Layout, Program, Reduction, Task
from fullbatch._plan._schedule import ALL, Action, Do, Schedule

_Slot = tuple[int, int]

# The state of the default generator (a Mersenne twister) is kept in a tensor while a step with random operators runs.
RANDOM_BYTES = 2 * 5056


class Executor:
    """A schedule bound to its program, ready to run many times.

    `run` takes the captured inputs by position and returns the values of `program.outputs`. `drawn`, where given,
    receives every random task's outputs as (task, microbatch, tensors).
    """

    def __init__(self, program: Program, schedule: Schedule) -> None:
        self._program, self._schedule = program, schedule
        bounds = [0]
        for samples in schedule.samples:
            bounds.append(bounds[-1] + samples)
        self._bounds = list(zip(bounds, bounds[1:], strict=False))
        self._kernels = {task.id: task.kernel.bind() for task in program.tasks if task.kernel is not None}
        self._has_random = any(task.random for task in program.tasks)
        self._local = [value.local for value in program.values]
        self._steps = [self._prepare(action) for action in schedule.actions]

    def run(self, inputs: dict[int, torch.Tensor], drawn: Callable[[int, int, Any], None] | None = None) -> list[Any]:
        """Values of `program.outputs` for these inputs."""
        env: dict[_Slot, Any] = {(value, ALL): inputs[at] for at, value in self._program.inputs.items()}
        self._drawn = drawn
        if not self._has_random:
            return self._walk(env, 0)
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        devices = {tensor.device for tensor in inputs.values() if tensor.device.type != "cpu"}
        with torch.random.fork_rng(devices=sorted(devices, key=str), enabled=True):
            return self._walk(env, seed)

    def _walk(self, env: dict[_Slot, Any], seed: int) -> list[Any]:
        self._seed = seed
        self._counts: dict[int, int] = {}
        with torch.no_grad():
            for step in self._steps:
                step(env)
        return [env[(value, ALL)] for value in self._program.outputs]

    # ---- one action as one closure

    def _prepare(self, action: Action) -> Callable[[dict[_Slot, Any]], None]:
        if action.do is Do.FREE:
            slot = (action.subject, action.microbatch)
            return lambda env: env.pop(slot, None)
        if action.do in (Do.OFFLOAD, Do.FETCH):
            slot = (action.subject, action.microbatch)
            move = _offload if action.do is Do.OFFLOAD else _fetch
            return lambda env: env.__setitem__(slot, move(env[slot]))
        task = self._program.by_id[action.subject]
        slots = [self._slot(value, action.microbatch) for value in task.inputs]
        if action.do is Do.GATHER:
            return self._gather(task, action.microbatch, slots[0])
        if action.do is Do.REDUCE:
            return self._reduce(task, action.microbatch, slots[0])
        if task.kind is Kind.SLICE:
            return self._slice(task, action.microbatch, slots[0])
        return self._run(task, action.microbatch, slots)

    def _slot(self, value: int, microbatch: int) -> _Slot:
        return (value, microbatch if self._local[value] else ALL)

    def _samples(self, microbatch: int) -> int:
        return self._program.batch if microbatch == ALL else self._schedule.samples[microbatch]

    def _run(self, task: Task, microbatch: int, slots: Sequence[_Slot]) -> Callable[[dict[_Slot, Any]], None]:
        call, samples = self._kernels[task.id], self._samples(microbatch)
        if task.single and not task.random:
            (value,) = task.outputs
            assert value is not None
            out = self._slot(value, microbatch)

            def run_one(env: dict[_Slot, Any]) -> None:
                env[out] = call(samples, *[env[slot] for slot in slots])

            return run_one
        outs = [None if value is None else self._slot(value, microbatch) for value in task.outputs]

        def run_many(env: dict[_Slot, Any]) -> None:
            if task.random:
                torch.manual_seed(_mixed(self._seed, task.id, microbatch))
            results = call(samples, *[env[slot] for slot in slots])
            if task.random and self._drawn is not None:
                self._drawn(task.id, microbatch, results)
            for out, result in zip(outs, (results,) if task.single else results, strict=False):
                if out is not None:
                    env[out] = result

        return run_many

    def _slice(self, task: Task, microbatch: int, source: _Slot) -> Callable[[dict[_Slot, Any]], None]:
        (value,) = task.outputs
        assert value is not None and task.layout is not None
        out, layout, batch = self._slot(value, microbatch), task.layout, self._program.batch
        begin, end = self._bounds[microbatch]

        def run(env: dict[_Slot, Any]) -> None:
            env[out] = cut(env[source], layout, begin, end, batch)

        return run

    def _gather(self, task: Task, microbatch: int, source: _Slot) -> Callable[[dict[_Slot, Any]], None]:
        (value,) = task.outputs
        assert value is not None and task.layout is not None
        out, layout, batch = (value, ALL), task.layout, self._program.batch
        begin, end = self._bounds[microbatch]
        shape = self._program.values[value].shape

        def run(env: dict[_Slot, Any]) -> None:
            part = env[source]
            if len(self._bounds) == 1:
                env[out] = part
                return
            if begin == 0:
                env[out] = part.new_empty(shape)
            paste(env[out], part, layout, begin, end, batch)

        return run

    def _reduce(self, task: Task, microbatch: int, source: _Slot) -> Callable[[dict[_Slot, Any]], None]:
        (value,) = task.outputs
        assert value is not None
        out, many = (value, ALL), len(self._bounds) > 1
        before, now = self._bounds[microbatch][0] * task.count, self._samples(microbatch) * task.count
        merge_moments = task.reduction is Reduction.MOMENTS

        def run(env: dict[_Slot, Any]) -> None:
            part = env[source]
            if microbatch == 0:
                env[out] = _own(part) if many else part
            elif merge_moments:
                add_moments(env[out], part, before, now)
            else:
                env[out].add_(part)

        return run


def _mixed(seed: int, task: int, microbatch: int) -> int:
    """A seed for each (step, task, microbatch): a multiplicative hash, so that neighbours share nothing."""
    return (seed ^ ((task + 1) * 0x9E3779B97F4A7C15 + (microbatch + 2) * 0xC2B2AE3D27D4EB4F)) & (2**63 - 1)


def _own(part: torch.Tensor) -> torch.Tensor:
    """`part` where it is safe to add into, else a copy: an expanded tensor, or a view of something larger."""
    return part if owns_dense_storage(part) else part.clone(memory_format=torch.contiguous_format)


def owns_dense_storage(tensor: torch.Tensor) -> bool:
    """Whether the tensor covers its storage exactly and is no view of another tensor."""
    return covers_storage(tensor) and not _torch.is_view(tensor)


def covers_storage(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements are its storage, each once."""
    exact = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return exact and has_dense_strides(tensor)


def cut(whole: torch.Tensor, layout: Layout, begin: int, end: int, batch: int) -> torch.Tensor:
    """Samples [begin, end) of `whole` by `layout`: a view where the batch is outermost in its dimension."""
    if (begin, end) == (0, batch):
        return whole
    if layout.outer == 1:
        part = whole.narrow(layout.dim, begin * layout.inner, (end - begin) * layout.inner)
    else:
        shape = whole.shape
        split = whole.reshape(*shape[: layout.dim], layout.outer, batch, layout.inner, *shape[layout.dim + 1 :])
        part = split.narrow(layout.dim + 1, begin, end - begin)
        part = part.reshape(*shape[: layout.dim], layout.per_sample * (end - begin), *shape[layout.dim + 1 :])
    # Kernels rely on it that what was contiguous is: torch's layer norm backward reads the saved mean and rstd
    # by position, whatever their strides.
    return part.contiguous() if whole.is_contiguous() else part


def paste(whole: torch.Tensor, part: torch.Tensor, layout: Layout, begin: int, end: int, batch: int) -> None:
    """Writes samples [begin, end) into `whole`, which is contiguous."""
    shape = whole.shape
    split = whole.view(*shape[: layout.dim], layout.outer, batch, layout.inner, *shape[layout.dim + 1 :])
    view = split.narrow(layout.dim + 1, begin, end - begin)
    view.copy_(part.reshape(view.shape))


def add_moments(total: torch.Tensor, part: torch.Tensor, before: int, now: int) -> None:
    """Merges [mean, centred sum of squares] of `now` elements into those of `before`.

    By counts (Chan, Golub and LeVeque 1979): sums of squares lose all digits where the mean is large.
    """
    count = before + now
    delta = part[0] - total[0]
    total[1].add_(part[1]).add_(delta.square(), alpha=before * now / count)
    total[0].add_(delta, alpha=now / count)


class _Stored:
    """A tensor off the device: in host memory for an accelerator, in a file for the CPU."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._meta = tensor.new_empty(0), tensor.shape, tensor.stride()
        self._device = tensor.device
        if tensor.device.type == "cpu":
            self._folder = tempfile.TemporaryDirectory(prefix="fullbatch-")
            self._path = Path(self._folder.name) / "value.pt"
            torch.save(tensor.contiguous(), self._path)
        else:
            self._host = tensor.cpu()

    def back(self) -> torch.Tensor:
        """The tensor on its device again."""
        _, shape, stride = self._meta
        source = torch.load(self._path) if self._device.type == "cpu" else self._host
        out = torch.empty_strided(shape, stride, dtype=source.dtype, device=self._device)
        return out.copy_(source)


def _offload(tensor: torch.Tensor) -> _Stored:
    return _Stored(tensor)


def _fetch(stored: _Stored) -> torch.Tensor:
    return stored.back()
