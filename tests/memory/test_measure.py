"""measure() on sequences whose bytes are known, and at the edges of what the profiler sees."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fullbatch._errors import FullbatchError, MeasureError
from fullbatch._memory._measure import Measurement, measure, trace_memory


def known_sequence() -> torch.Tensor:
    first = torch.empty(100)  # 400 bytes
    torch.empty(0)
    second = torch.empty(7, dtype=torch.uint8)
    del first
    torch.empty(3)  # 12 bytes, freed at once
    return second


def test_known_sequence_to_the_byte() -> None:
    measured = measure(known_sequence)
    assert (measured.peak, measured.retained) == (407, 7)
    assert measured.result.shape == (7,)
    assert [level for _, level in measured.timeline] == [0, 400, 407, 7, 19, 7, 7]
    times = [at for at, _ in measured.timeline]
    assert times == sorted(times)
    assert times[0] == 0.0


def test_trace_gives_signed_bytes_in_order() -> None:
    events = trace_memory(known_sequence)
    # The result is dropped only after the call, outside of what is traced.
    assert [delta for _, delta in events] == [400, 7, -400, 12, -12]
    assert all(at >= 0 for at, _ in events)


def test_backward_is_counted() -> None:
    weight = torch.ones(1000, requires_grad=True)

    def step() -> None:
        torch.autograd.backward(weight.exp().sum())

    measured = measure(step)
    assert measured.retained == 4000  # weight.grad
    assert measured.peak >= 8000


def test_free_of_an_older_tensor_is_not_seen() -> None:
    held = [torch.empty(5000)]
    measured = measure(held.clear)
    assert (measured.peak, measured.retained) == (0, 0)


def test_free_at_an_address_of_an_earlier_session_is_not_taken_for_ours() -> None:
    # c10 keeps the size of a block that outlives a session; malloc gives the same address out again.
    held = [measure(lambda: torch.empty(5000)).result]
    held.clear()
    gc.collect()
    held.append(torch.empty(5000))
    assert trace_memory(held.clear) == []


def test_running_profiler_is_refused_and_survives() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as outer:
        with pytest.raises(MeasureError, match="already running") as caught:
            measure(known_sequence)
        torch.ones(3).add(1)
    assert isinstance(caught.value, FullbatchError)
    assert any(event.key == "aten::add" for event in outer.key_averages())


def test_errors_of_the_function_pass_and_leave_no_profiler() -> None:
    def broken() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        measure(broken)
    assert measure(known_sequence).peak == 407


def test_prints_as_a_table() -> None:
    measured = measure(known_sequence)
    text = str(measured)
    assert "peak" in text
    assert "407 bytes" in text
    assert "retained" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "timeline" not in repr(measured)
    assert Measurement.__dataclass_params__.frozen  # type: ignore[attr-defined]


def test_writes_nothing_to_stderr() -> None:
    code = (
        "import torch; from fullbatch._memory._measure import measure\n"
        "held = [torch.empty(1000)]\nmeasure(held.clear)\nmeasure(lambda: None)"
    )
    env = {key: value for key, value in os.environ.items() if key != "KINETO_LOG_LEVEL"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert done.stderr == ""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_counts_blocks() -> None:
    measured = measure(lambda: torch.empty(128, device="cuda") + torch.empty(128, device="cuda"), "cuda")
    assert (measured.peak, measured.retained) == (3 * 512, 512)
