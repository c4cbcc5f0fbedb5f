"""Programs small enough to be written by hand or captured in a second, and a process that knows no costs yet."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fullbatch
from fullbatch._cost import _cache, _keys, _probe, _rates, _time
from fullbatch._cost._probe import Prober
from fullbatch._ir import Kernel, Kind, Layout, Origin, Program, Ref, Task, Value

Captured = tuple[Program, dict[int, torch.Tensor]]
SIZES = frozenset({2, 3, 6})


class _Watched(fullbatch.Step):
    def _run(self, captured: Any, inputs: Any) -> Any:
        self.captured, self.inputs = captured, inputs
        return super()._run(captured, inputs)


def convolutions() -> tuple[Any, nn.Module, Any]:
    """Convolution, batch normalisation, pooling, a loss that ignores labels: views, barriers, expansions, constants."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3), nn.GELU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(8 * 36, 5),
    )  # fmt: skip
    return _classify, model, (torch.randn(6, 3, 16, 16), torch.randint(0, 5, (6,)))


def _classify(model: Any, batch: Any) -> torch.Tensor:
    penalty = sum(p.square().sum() for p in model.parameters())
    return F.cross_entropy(model(batch[0]), batch[1], ignore_index=4) + 1e-4 * penalty


def captured_convolutions() -> Captured:
    """The program of `convolutions`, and its inputs."""
    step = _Watched(*convolutions(), microbatch=2)
    used = set(step.captured.program.inputs)
    return step.captured.program, {at: tensor for at, tensor in enumerate(step.inputs) if at in used}


def one_operator(fn: Any, args: Sequence[Any], tensors: Sequence[torch.Tensor]) -> Captured:
    """A program of one operator, run once, whose operands are the program's inputs."""
    values = [Value(at, f"x{at}", tuple(x.shape), x.element_size()) for at, x in enumerate(tensors)]
    out = Value(len(values), "out", tuple(tensors[0].shape), tensors[0].element_size())
    given = tuple(range(len(tensors)))
    task = Task(0, Kind.ONCE, given, (out.id,), Origin(str(fn)), Kernel(fn, tuple(args)))
    return Program(1, [*values, out], [task], {at: at for at in given}, [out.id]), dict(enumerate(tensors))


def products(*sides: int) -> Captured:
    """A program of independent square matrix products."""
    values, tasks = [], []
    tensors = [torch.ones(side, side) for side in sides]
    for at, side in enumerate(sides):
        values += [Value(2 * at, f"x{at}", (side, side), 4), Value(2 * at + 1, f"y{at}", (side, side), 4)]
        kernel = Kernel(torch.ops.aten.mm.default, (Ref(0), Ref(0)))
        tasks.append(Task(at, Kind.ONCE, (2 * at,), (2 * at + 1,), Origin("mm"), kernel, flops=2 * side**3))
    inputs = {at: 2 * at for at in range(len(sides))}
    return Program(1, values, tasks, inputs, [2 * at + 1 for at in inputs]), dict(enumerate(tensors))


def sharded(fn: Any, args: Sequence[Any], x: torch.Tensor) -> Captured:
    """A program of one operator that runs for each microbatch on its slice of `x`."""
    layout = Layout(0)
    values = [
        Value(0, "x", tuple(x.shape), x.element_size()),
        Value(1, "part", tuple(x.shape), x.element_size(), layout),
        Value(2, "y", tuple(x.shape), x.element_size(), layout),
        Value(3, "all", tuple(x.shape), x.element_size()),
    ]
    tasks = [
        Task(0, Kind.SLICE, (0,), (1,), Origin("slice"), layout=layout, view=True),
        Task(1, Kind.LOCAL, (1,), (2,), Origin(str(fn)), Kernel(fn, tuple(args))),
        Task(2, Kind.GATHER, (2,), (3,), Origin("gather"), layout=layout),
    ]
    return Program(x.shape[0], values, tasks, {0: 0}, [3]), {0: x}


class Fresh:
    """A process that knows no costs, with its cache in a folder. `sessions` counts what had to be measured."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path | str) -> None:
        self._patch = patch
        self.sessions = 0
        patch.setenv("FULLBATCH_CACHE", str(folder))
        measure: Callable[..., Any] = _probe.memory_events

        def counted(fn: Callable[[], Any]) -> Any:
            self.sessions += 1
            return measure(fn)

        patch.setattr(_probe, "memory_events", counted)
        self.forget()

    def forget(self) -> None:
        """As if the process began again."""
        self._patch.setattr(_probe, "_KNOWN", {})
        self._patch.setattr(_time, "_SECONDS", {})
        self._patch.setattr(_rates, "_MEASURED", {})
        self._patch.setattr(_cache, "_open", {})
        self._patch.setattr(_cache, "_warned", False)
        _keys._hardware.cache_clear()
        self.sessions = 0


def bytes_of(captured: Captured, sizes: frozenset[int] = SIZES) -> list[Any]:
    """What every task costs at every size, by a new prober."""
    program, inputs = captured
    cost = Prober(program, inputs).costs(sizes)
    assert cost is not None
    return [(task.id, size, cost(task, size)) for task in program.tasks for size in sorted(sizes)]


@contextmanager
def heard() -> Iterator[list[warnings.WarningMessage]]:
    """Every warning, in the order in which they came."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught
