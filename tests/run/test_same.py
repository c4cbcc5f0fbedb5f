"""Generated code and the interpreter: the same bits, the same peak to the byte, the same draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fullbatch
from fullbatch._plan._schedule import Do
from fullbatch._run import _source
from fullbatch._run._executor import Executor
from fullbatch._run._interpreter import Interpreter
from run.support import Built, build, build_case

CASES = [
    "resnet50", "unet_bilinear", "yolo", "diffusion_step", "lstm_batch_first", "gru_cell_loop", "rnn_relu",
    "transformer_seq2seq_time_first", "siamese_shared_weights", "batch_encoding", "gpt2_padded", "nano_gpt",
    "bert_classification_own_loss", "llama_tied",
]  # fmt: skip


def _ran(runner: Any, found: Built) -> tuple[list[Any], list[Any]]:
    """The results, and what random operators drew."""
    drawn: list[Any] = []

    def note(task: int, microbatch: int, results: Any) -> None:
        drawn.append((task, microbatch, results))

    torch.manual_seed(3)
    return runner.run(found.inputs, note), drawn


def _same_bits(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same_bits, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def _assert_same(found: Built) -> None:
    executor, interpreter = Executor(found.program, found.schedule), Interpreter(found.program, found.schedule)
    results, drawn = _ran(executor, found)
    expected, expected_drawn = _ran(interpreter, found)
    assert _same_bits(results, expected)
    assert _same_bits(drawn, expected_drawn)
    peaks = {
        fullbatch.measure(lambda runner=runner: runner.run(found.inputs)).peak for runner in (executor, interpreter)
    }
    assert len(peaks) == 1, peaks


@pytest.mark.parametrize("name", CASES)
def test_models(name: str) -> None:
    _assert_same(build_case(name, 2))


def _dropout() -> tuple[Any, Any, Any]:
    model = nn.Sequential(
        nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 16), nn.Dropout(0.5),
        nn.Linear(16, 3),
    )  # fmt: skip
    return lambda m, b: F.cross_entropy(m(b[0]), b[1]), model, (torch.randn(7, 5), torch.randint(0, 3, (7,)))


@pytest.mark.parametrize("microbatch", [1, 3, 7])
def test_random_operators_draw_the_same(microbatch: int) -> None:
    found = build(*_dropout(), microbatch=microbatch)
    assert _ran(Executor(found.program, found.schedule), found)[1]
    _assert_same(found)


def test_recomputation() -> None:
    model = nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(32, 32), nn.Dropout(0.2), nn.Tanh())])
    batch = torch.randn(4, 50, 32)
    loss = lambda m, b: m(b).square().mean()  # noqa: E731
    free = fullbatch.Step(loss, model, batch, microbatch=1).plan
    found = build(loss, model, batch, memory=free.predicted_peak - free.activations // 8, microbatch=1)
    runs = [action.subject for action in found.schedule.walk() if action.do is Do.RUN and action.microbatch == 0]
    assert len(set(runs)) < len(runs)
    _assert_same(found)


def test_values_off_the_device() -> None:
    found = build_case("unet_bilinear", 2)
    largest = sorted(found.program.values, key=lambda value: -value.nbytes(None, 7) * (value.layout is not None))[:4]
    for value in largest:
        found.schedule = found.schedule.with_offload(value.id, found.program)
    assert found.schedule.count(Do.OFFLOAD) == found.schedule.count(Do.FETCH) > 0
    _assert_same(found)


@pytest.mark.parametrize("longest", [1, 7, 50])
def test_a_stage_of_many_functions(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that live from one function to the next."""
    found = build(*_dropout(), microbatch=2)
    whole = Executor(found.program, found.schedule)
    monkeypatch.setattr(_source, "LONGEST", longest)
    cut = Executor(found.program, found.schedule)
    assert len(cut._generated.text) > len(whole._generated.text)
    assert _same_bits(_ran(cut, found)[0], _ran(whole, found)[0])
    _assert_same(found)


def test_runs_leave_nothing_behind() -> None:
    """The same executor again, on the same inputs: the same bits."""
    found = build_case("gpt2_padded", 3)
    executor = Executor(found.program, found.schedule)
    first, second = _ran(executor, found)[0], _ran(executor, found)[0]
    assert _same_bits(first, second)
