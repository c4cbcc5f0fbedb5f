"""The counting allocator: exact counts, an exact cap, and what it does where it cannot be built.

Installing it concerns the whole process, so each test body that installs runs in a child process.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from fullbatch._memory._cap import available

needs_compiler = pytest.mark.skipif(available() is not None, reason=str(available()))


def in_child(body: Callable[[], None], **env: str) -> None:
    """Runs the function's source in a fresh interpreter; a failed assertion there fails here with its traceback."""
    source = textwrap.dedent(inspect.getsource(body)) + f"\n{body.__name__}()\n"
    command, env = [sys.executable, "-c", source], {**os.environ, **env}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr


def counts_to_the_byte() -> None:
    import torch

    from fullbatch._memory._cap import CountingAllocator

    before = torch.empty(1000)
    counter = CountingAllocator()
    assert not counter.installed
    assert counter.install().installed
    assert counter.live == 0
    del before  # never counted, and its own deleter frees it
    assert (counter.live, counter.peak) == (0, 0)
    one, two = torch.empty(7, dtype=torch.uint8), torch.empty(0)
    assert one.data_ptr() % 64 == 0
    assert two.numel() == 0
    three = torch.empty(10, dtype=torch.float64)
    assert (counter.live, counter.peak) == (87, 87)
    del three
    assert (counter.live, counter.peak) == (7, 87)
    counter.reset_peak()
    assert counter.peak == 7
    counter.uninstall()
    other = torch.empty(50)
    assert counter.live == 7
    assert other.numel() == 50
    del one  # made by the counter, so counted down even now
    assert counter.live == 0
    counter.install()
    assert torch.empty(2).numel() == 2
    assert counter.peak == 8


def cap_is_exact() -> None:
    import torch
    from torch import nn

    from fullbatch._memory._cap import CountingAllocator
    from fullbatch._memory._measure import measure

    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(10))
    images, labels = torch.randn(6, 3, 33, 33), torch.randint(0, 10, (6,))
    loss = nn.functional.cross_entropy(model(images), labels)
    want = torch.autograd.grad(loss, list(model.parameters()))

    def step() -> None:
        model.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(model(images), labels))

    counter = CountingAllocator().install()
    step()  # from here on the gradients are counted memory
    model.zero_grad()
    live = counter.live
    counter.reset_peak()
    step()
    peak = counter.peak
    assert peak > live
    for parameter, grad in zip(model.parameters(), want, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, grad)

    model.zero_grad()
    assert measure(step).peak == peak - live  # the profiler and the allocator agree to the byte
    model.zero_grad()
    assert counter.live == live

    counter.cap = peak
    assert counter.cap == peak
    step()
    model.zero_grad()
    counter.cap = peak - 1
    try:
        step()
    except torch.OutOfMemoryError as error:
        said = str(error)
    else:
        raise AssertionError("one byte under the peak must not pass")
    assert f"under a cap of {peak - 1} bytes" in said
    assert counter.refused > 0
    model.zero_grad()
    assert counter.live == live  # the failed step left nothing behind
    counter.cap = None
    assert counter.cap is None
    step()
    try:
        counter.cap = -5
    except ValueError:
        pass
    else:
        raise AssertionError("a negative cap must be refused")


def records_a_timeline() -> None:
    import torch

    from fullbatch._memory._cap import CountingAllocator

    counter = CountingAllocator().install()
    assert counter.timeline() == []
    counter.record()
    kept = torch.empty(4)
    torch.empty(100)
    points = counter.timeline()
    assert [live for _, live in points] == [0, 16, 416, 16]
    assert kept.numel() == 4
    assert [at for at, _ in points] == sorted(at for at, _ in points)
    counter.record(capacity=2)
    for _ in range(5):
        torch.empty(1)
    assert [live for _, live in counter.timeline()] == [16, 20, 16]  # what does not fit is dropped
    torch.empty(1)  # recording has stopped: nothing is written


def threads_add_up() -> None:
    from concurrent.futures import ThreadPoolExecutor

    import torch

    from fullbatch._memory._cap import CountingAllocator

    counter = CountingAllocator().install()
    counter.cap = 1 << 16  # a third of what one thread alone comes to, so that it refuses however threads are scheduled

    def work(seed: int) -> int:
        held, refused = [], 0
        for step in range(2000):
            try:
                held.append(torch.empty(1 + (seed * 31 + step * 17) % 4096, dtype=torch.uint8))
            except torch.OutOfMemoryError:
                refused += 1
                held.clear()
            if step % 97 == 0:
                held.clear()
        return refused

    with ThreadPoolExecutor(8) as pool:
        refused = sum(pool.map(work, range(8)))
    assert counter.live == 0
    assert counter.peak <= 1 << 16
    assert refused > 0


@needs_compiler
@pytest.mark.parametrize("body", [counts_to_the_byte, cap_is_exact, records_a_timeline, threads_add_up])
def test_in_child(body: Callable[[], None]) -> None:
    in_child(body)


def says_why_not() -> None:
    from fullbatch._errors import MeasureError
    from fullbatch._memory._cap import CountingAllocator, available

    reason = available()
    assert reason is not None
    assert "No C++ compiler" in reason
    assert "CXX" in reason
    try:
        CountingAllocator()
    except MeasureError as error:
        said = str(error)
    else:
        raise AssertionError("must not work without a compiler")
    assert said == reason


def test_no_compiler_is_said(tmp_path: Path) -> None:
    in_child(says_why_not, PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path), CXX="")


def failed_build_is_shown() -> None:
    from fullbatch._memory._cap import available

    assert "could not be built" in str(available())


def test_failing_compiler_is_quoted(tmp_path: Path) -> None:
    in_child(failed_build_is_shown, CXX="false", XDG_CACHE_HOME=str(tmp_path))


def loads() -> None:
    from fullbatch._memory._cap import available

    assert available() is None, available()


@needs_compiler
def test_built_once_and_cached(tmp_path: Path) -> None:
    in_child(loads, XDG_CACHE_HOME=str(tmp_path))
    (built,) = (tmp_path / "fullbatch").iterdir()
    first = built.stat().st_mtime_ns
    in_child(loads, XDG_CACHE_HOME=str(tmp_path))
    assert built.stat().st_mtime_ns == first


@needs_compiler
def test_cache_that_cannot_be_written_falls_back(tmp_path: Path) -> None:
    blocked = tmp_path / "cache"
    blocked.write_text("a file where the folder should be")
    in_child(loads, XDG_CACHE_HOME=str(blocked), TMPDIR=str(tmp_path))
    assert list(tmp_path.glob("fullbatch-*/cap-*.so"))
