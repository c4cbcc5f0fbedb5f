"""The generated text: as long as the schedule's parts, whatever the batch; errors in it say where they come from."""

from __future__ import annotations

import gc
import linecache
import traceback
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fullbatch._ir import Kernel, Kind, Origin, Program, Ref, Task, Value
from fullbatch._plan._schedule import ALL, Action, Do, Phase, Schedule
from fullbatch._run._executor import Executor
from fullbatch._run._interpreter import Interpreter
from run.support import Built, build


def _chain(depth: int, batch: int = 6) -> Built:
    model = nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())])
    return build(lambda m, b: m(b).square().mean(), model, torch.randn(batch, 4), microbatch=2)


def _lines(found: Built) -> int:
    return len(Executor(found.program, found.schedule)._generated.text)


def test_the_text_grows_with_the_depth_linearly() -> None:
    two, four, six = (_lines(_chain(depth)) for depth in (2, 4, 6))
    assert six - four == four - two > 0


def test_the_text_does_not_grow_with_the_number_of_microbatches() -> None:
    assert _lines(_chain(2, batch=6)) == _lines(_chain(2, batch=40))


def test_no_line_is_longer_than_what_it_does() -> None:
    """At most a line an action, but for random operators, gathers and reductions, and one for each function."""
    found = _chain(4)
    text = Executor(found.program, found.schedule)._generated.text
    actions = [
        action for phase in found.schedule.phases for part in (phase.once, phase.body, phase.last) for action in part
    ]
    more = sum(1 for action in actions if action.do in (Do.GATHER, Do.REDUCE))
    assert len(text) <= len(actions) + more + 3 * len(found.schedule.phases)


def _by_hand(*kernels: Kernel) -> tuple[Program, Schedule]:
    """A chain of tasks that run once."""
    values = [Value(at, f"value{at}", (3,), 8) for at in range(len(kernels) + 1)]
    tasks = [
        Task(at, Kind.ONCE, (at,), (at + 1,), Origin(f"op{at}", "layer", f"model.py:{at}"), kernel)
        for at, kernel in enumerate(kernels)
    ]
    once = [action for at in range(len(kernels)) for action in (Action(Do.RUN, at), Action(Do.FREE, at))]
    program = Program(2, values, tasks, {0: 0}, [len(kernels)])
    return program, Schedule((Phase(tuple(action for action in once if action != (Do.FREE, 0, ALL))),), (2,))


def test_constants_never_enter_the_text() -> None:
    seen: list[Any] = []
    hostile = "'); raise SystemExit #"

    def fn(x: Any, *given: Any, **named: Any) -> Any:
        seen.append((given, named))
        return x + 1

    program, schedule = _by_hand(Kernel(fn, (Ref(0), hostile, -3, [True, None, 2.5]), {"dtype": torch.int8}))
    executor = Executor(program, schedule)
    (out,) = executor.run({0: torch.zeros(3)})
    assert torch.equal(out, torch.ones(3))
    assert seen == [((hostile, -3, [True, None, 2.5]), {"dtype": torch.int8})]
    assert "SystemExit" not in "".join(executor._generated.text)


def _breaks(x: Any) -> Any:
    raise ValueError("broken kernel")


@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_error_names_the_operator_that_raised(at: int) -> None:
    kernels = [Kernel(torch.sin, (Ref(0),)) for _ in range(3)]
    kernels[at] = Kernel(_breaks, (Ref(0),))
    executor = Executor(*_by_hand(*kernels))
    with pytest.raises(ValueError, match="broken kernel") as caught:
        executor.run({0: torch.zeros(3)})
    assert caught.value.__notes__ == [f"fullbatch: raised by op{at}, in layer, model.py:{at} (stage 0, once a step)"]
    shown = "".join(traceback.format_exception(caught.value))
    (line,) = [line for line in executor._generated.text if f"v{at + 1} = " in line or f"w[{at + 1}] = " in line]
    assert line.strip() in shown


def test_an_error_names_the_module_and_line_of_a_real_model_and_the_microbatch() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    found = build(lambda m, b: m(b).square().mean(), model, torch.randn(5, 4), microbatch=2)
    (tanh,) = [task for task in found.program.tasks if task.origin.op == "aten.tanh"]
    calls: list[int] = []

    def second(x: Any) -> Any:
        calls.append(1)
        return _breaks(x) if len(calls) == 2 else torch.tanh(x)

    tasks = [
        replace(task, kernel=replace(task.kernel, fn=second)) if task is tanh else task for task in found.program.tasks
    ]
    executor = Executor(replace(found.program, tasks=tasks), found.schedule)
    with pytest.raises(ValueError, match="broken kernel") as caught:
        executor.run(found.inputs)
    (note,) = caught.value.__notes__
    assert "aten.tanh" in note
    assert "in 1.1" in note
    assert "test_generated.py:" in note
    assert "microbatch 2 of 3" in note


def test_the_text_is_registered_as_long_as_it_is_in_use() -> None:
    executor = Executor(*_by_hand(Kernel(torch.sin, (Ref(0),))))
    name = executor._generated.filename
    assert linecache.getline(name, 1).startswith("def ")
    linecache.checkcache()
    assert linecache.getline(name, 1).startswith("def ")
    del executor
    gc.collect()
    assert linecache.getline(name, 1) == ""


def test_a_free_of_what_is_not_there_is_an_error() -> None:
    """A schedule that frees twice is wrong, and is not run as if it were right."""
    program, schedule = _by_hand(Kernel(torch.sin, (Ref(0),)))
    twice = Schedule((Phase((*schedule.phases[0].once, Action(Do.FREE, 0), Action(Do.FREE, 0))),), (2,))
    for runner in (Executor, Interpreter):
        with pytest.raises(KeyError):
            runner(program, twice).run({0: torch.zeros(3)})
