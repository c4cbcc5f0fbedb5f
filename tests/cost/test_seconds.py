"""Seconds of operators and rates of the machine: positive, in order, kept, and within a limit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fullbatch._cost import _rates, _time
from fullbatch._cost._cache import cost_file
from fullbatch._cost._probe import Prober
from fullbatch._cost._rates import Rates, rates, seconds_of

from .small_programs import SIZES, Captured, Fresh, bytes_of, heard, products

CPU = torch.device("cpu")
ONE = frozenset({1})


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates that cost nothing to learn."""
    monkeypatch.setattr(_rates, "_measured", lambda device: Rates(1e9, 1e10, 1e-6))


@pytest.fixture
def timings(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is timed."""
    calls: list[Any] = []
    original = _time.seconds_of

    def counted(call: Any, *args: Any) -> float:
        calls.append(call)
        return original(call, *args)

    monkeypatch.setattr(_time, "seconds_of", counted)
    return calls


def test_seconds_are_positive_and_bytes_as_before(network: Captured, fresh: Fresh, quick: None) -> None:
    program, inputs = network
    prober = Prober(program, inputs)
    exact, timed = prober.costs(SIZES), prober.timed(SIZES, 20.0)
    assert exact is not None
    assert timed is not None
    for task in program.tasks:
        for size in SIZES:
            one, other = exact(task, size), timed(task, size)
            assert (one.peak, one.outs) == (other.peak, other.outs)
            joins = task.kind.value in ("gather", "reduce") and size == program.batch
            assert other.time == 0.0 if joins else 0.0 < other.time < 5.0, task


def test_a_product_of_more_work_takes_longer(fresh: Fresh) -> None:
    program, inputs = products(40, 900)
    timed = Prober(program, inputs).timed(ONE)
    assert timed is not None
    small, large = (timed(task, 1).time for task in program.tasks)
    assert 0 < 10 * small < large


def test_another_process_times_nothing(network: Captured, fresh: Fresh, quick: None, timings: list[Any]) -> None:
    program, inputs = network
    first = Prober(program, inputs).timed(SIZES, 20.0)
    assert timings
    timings.clear()
    fresh.forget()
    second = Prober(program, inputs).timed(SIZES, 20.0)
    assert first is not None
    assert second is not None
    assert fresh.sessions == 0
    constants = {task.id for task in program.tasks if task.view and not task.inputs}  # they have no name
    for task in program.tasks:
        if task.id not in constants:
            assert all(first(task, size) == second(task, size) for size in SIZES)
    assert len(timings) <= len(constants)


def test_those_that_take_most_are_timed_first(fresh: Fresh, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    program, inputs = products(8, 64, 256, 32)
    clock = [0.0]
    order: list[int] = []

    def slow(job: Any, *rest: Any) -> None:
        order.append(job.metas[0].shape[0])
        clock[0] += 1.0

    monkeypatch.setattr(_time, "_time", slow)
    monkeypatch.setattr(_time, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    assert Prober(program, inputs).timed(ONE, 2.5) is not None
    assert order == [256, 64, 32]


def test_what_the_limit_leaves_out_comes_from_the_rates(fresh: Fresh, quick: None, timings: list[Any]) -> None:
    program, inputs = products(50, 100)
    timed = Prober(program, inputs).timed(ONE, 0.0)
    assert timed is not None
    assert timings == []
    for task, side in zip(program.tasks, (50, 100), strict=True):
        assert timed(task, 1).time == pytest.approx(1e-6 + 2 * side * side * 4 / 1e9 + 2 * side**3 / 1e10)


def test_what_was_timed_corrects_the_same_operator_at_other_forms(
    fresh: Fresh, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, inputs = products(50, 100)
    monkeypatch.setattr(_time, "seconds_of", lambda *args: 7.0)
    clock = iter([0.0, 0.0])
    monkeypatch.setattr(_time, "time", SimpleNamespace(monotonic=lambda: next(clock, 9.0)))
    timed = Prober(program, inputs).timed(ONE, 1.0)
    assert timed is not None
    small, large = (timed(task, 1).time for task in program.tasks)
    by_rates = [1e-6 + 2 * side * side * 4 / 1e9 + 2 * side**3 / 1e10 for side in (50, 100)]
    assert large == 7.0
    assert small == pytest.approx(7.0 * by_rates[0] / by_rates[1])


def test_nothing_is_timed_where_nothing_is_measured(network: Captured, fresh: Fresh) -> None:
    with torch.profiler.profile():
        assert Prober(*network).timed(ONE) is None


def test_random_numbers_are_as_if_nothing_had_been_run(network: Captured, fresh: Fresh, quick: None) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    assert Prober(*network).timed(SIZES, 20.0) is not None
    assert torch.equal(torch.rand(4), expected)


def test_the_rates_of_this_machine(fresh: Fresh, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    found = rates("cpu", threads + 1)
    assert torch.get_num_threads() == threads
    assert min(found.bytes_per_second, found.flops_per_second, found.seconds_per_call) > 0
    assert found.seconds(1e6, 0) < found.seconds(1e9, 0)
    assert found.seconds(0, 1e6) < found.seconds(0, 1e9)
    fresh.forget()
    made: list[torch.device] = []
    monkeypatch.setattr(_rates, "_measured", lambda device: made.append(device) or Rates(1.0, 2.0, 3.0))
    assert rates("cpu", threads + 1) == found  # from the file
    assert made == []
    assert rates("cpu", threads + 2) == Rates(1.0, 2.0, 3.0)
    assert rates("cpu", threads + 2) == Rates(1.0, 2.0, 3.0)
    assert made == [CPU]


def test_rates_that_make_no_sense_are_measured_anew(fresh: Fresh, quick: None) -> None:
    rates("cpu")
    file = cost_file()
    assert file is not None
    for kept in ([0, 1, 1], ["x"], 3, [float("nan")] * 3, None):
        (key,) = file._entries or {}
        file.put(key, kept)
        file.flush()
        fresh.forget()
        assert rates("cpu") == Rates(1e9, 1e10, 1e-6)
        file = cost_file()
        assert file is not None


def test_one_slow_run_is_enough() -> None:
    calls: list[int] = []
    assert seconds_of(lambda: calls.append(1), CPU, 0.0, 5) > 0
    assert len(calls) == 1
    calls.clear()
    seconds_of(lambda: calls.append(1), CPU, 60.0, 5)
    assert len(calls) == 6


def test_seconds_that_make_no_sense_are_measured_anew(
    fresh: Fresh, quick: None, timings: list[Any], tmp_path: Path
) -> None:
    captured = products(30)
    assert Prober(*captured).timed(ONE) is not None
    for kept in (-1.0, "x", None, float("nan"), [2]):
        file = cost_file()
        assert file is not None
        (key,) = [key for key in file._entries or {} if key.endswith(" seconds")]
        file.put(key, kept)
        file.flush()
        fresh.forget()
        timings.clear()
        with heard() as warnings:
            timed = Prober(*captured).timed(ONE)
        assert timed is not None
        assert timed(captured[0].tasks[0], 1).time > 0
        assert len(timings) == 1
        assert warnings == []
    assert bytes_of(captured, ONE)


def test_an_operator_that_cannot_run_alone_is_guessed(fresh: Fresh, quick: None) -> None:
    program, inputs = products(30)
    broken = inputs | {0: torch.ones(30, 20)}
    prober = Prober(program, broken)
    timed = prober.timed(ONE)
    assert timed is not None
    assert prober.notes == ("workspace unknown (could not be run alone): mm",)
    assert timed(program.tasks[0], 1).time == pytest.approx(1e-6 + 2 * 3600 / 1e9 + 2 * 30**3 / 1e10)
