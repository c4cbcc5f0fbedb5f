"""The exact peak of the device memory that a function allocates.

Limit that forced it: PyTorch counts allocations on CUDA but not on the CPU, and the resident set of a process is
neither exact (malloc keeps pages) nor limited to tensors. Shape of the answer: on the CPU the profiler's allocation
events are summed with their signs; on CUDA the caching allocator's own counters are read after a synchronise.

What is exact on the CPU: every tensor allocated and freed by the calling thread, and by autograd on its behalf, at the
requested size in bytes. What is not seen:

* the free of a tensor that existed before the start (the profiler does not know its size), so a function that
  releases an older tensor reads as if it had kept it: the peak is never below the truth, and is above it by at most
  the bytes of older tensors released before the peak;
* allocations by threads that the function starts, or by OpenMP workers inside a kernel;
* memory that does not come from c10: Python objects, numpy, the buffers inside MKL.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import reprlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch.autograd import profiler

from fullbatch import _torch
from fullbatch._errors import MeasureError
from fullbatch._printed import Printed
from fullbatch._size import format_bytes


@dataclass(frozen=True)
class Measurement(Printed):
    """What a function allocated, in bytes above the level at its start."""

    peak: int
    """The most bytes held at once during the call."""
    retained: int
    """Bytes still held at the end, the result's included."""
    result: Any = field(repr=False, compare=False)
    """What the function returned."""
    timeline: tuple[tuple[float, int], ...] = field(repr=False)
    """(seconds since the start, bytes held) after every allocation and free."""
    device: torch.device

    def __rich__(self) -> Table:
        table = Table(title=f"memory on {self.device}", show_header=False)
        table.add_row("peak", format_bytes(self.peak), f"{self.peak:,} bytes")
        table.add_row("retained", format_bytes(self.retained), f"{self.retained:,} bytes")
        table.add_row("events", f"{max(len(self.timeline) - 2, 0):,}", f"{self.timeline[-1][0]:.3f} s")
        table.add_row("result", "", reprlib.repr(self.result).splitlines()[0])
        return table


def measure(fn: Callable[[], Any], device: torch.device | str | None = None) -> Measurement:
    """Calls ``fn()`` once and returns the exact peak of the bytes it allocated on ``device``.

    ``device`` None is the current CUDA device where the process uses CUDA already, else the CPU.

    Raises :class:`fullbatch._errors.MeasureError` if ``fn`` is no function, or a profiler is already running. Errors
    of ``fn`` pass through.
    """
    if not callable(fn):
        raise MeasureError.of(
            "There is nothing to call.", got=f"{type(fn).__name__}: {fn!r:.80}",
            expected="a function of no arguments", next="fullbatch.measure(lambda: step(batch))",
        )  # fmt: skip
    if device is None:
        device = "cuda" if torch.cuda.is_initialized() else "cpu"
    where = torch.device(device)
    if where.type == "cuda":
        return _measure_cuda(fn, where)
    events, result, seconds = _traced(fn, where)
    peak, level, timeline = _sum(events, seconds)
    return Measurement(peak, level, result, timeline, where)


@dataclass
class Counted:
    """What was allocated while `counting` was entered, in bytes above the level at its start; known when it ends."""

    peak: int = 0
    retained: int = 0


@contextlib.contextmanager
def counting(device: torch.device) -> Iterator[Counted]:
    """`measure` for what is no function: it may be entered in one place and left in another, on the same thread."""
    counted = Counted()
    if device.type == "cuda":
        started = _cuda_started(device)
        yield counted
        counted.peak, counted.retained = _cuda_counted(device, started)
        return
    with _session(device) as events:
        yield counted
    counted.peak, counted.retained, _ = _sum(events, 0.0)


def trace_memory(fn: Callable[[], Any], device: torch.device | str = "cpu") -> list[tuple[float, int]]:
    """Calls ``fn()`` once; returns (microseconds since the start, bytes: positive allocated, negative freed) events.

    The call's result is dropped after the last event, so it reads as retained. Raises MeasureError if a profiler is
    already running.
    """
    return _traced(fn, torch.device(device))[0]


MemoryEvents = list[tuple[int, int]]


def memory_events(fn: Callable[[], Any]) -> MemoryEvents:
    """Calls ``fn()`` once; (time.time_ns(), bytes) of each allocation and free on the CPU, in order.

    For a caller that notes the time itself and asks what was allocated between two notes. Raises MeasureError if a
    profiler is already running.
    """
    events, _, _, began_ns = _raw(fn, torch.device("cpu"))
    return [(began_ns + round(at * 1e3), nbytes) for at, nbytes in events]


def _sum(events: list[tuple[float, int]], seconds: float) -> tuple[int, int, tuple[tuple[float, int], ...]]:
    peak = level = 0
    timeline = [(0.0, 0)]
    for at, delta in events:
        level += delta
        peak = max(peak, level)
        timeline.append((at / 1e6, level))
    timeline.append((max(seconds, timeline[-1][0]), level))
    return peak, level, tuple(timeline)


def _traced(fn: Callable[[], Any], device: torch.device) -> tuple[list[tuple[float, int]], Any, float]:
    events, result, seconds, _ = _raw(fn, device)
    return events, result, seconds


def _raw(fn: Callable[[], Any], device: torch.device) -> tuple[list[tuple[float, int]], Any, float, int]:
    with _session(device) as events:
        # Inside the session: entering it may take a millisecond, and is no part of the function's time.
        began_ns, began = time.time_ns(), time.perf_counter()
        result = fn()
        seconds = time.perf_counter() - began
    return [(at + (events.began_ns - began_ns) / 1e3, nbytes) for at, nbytes in events], result, seconds, began_ns


class _Events(list[tuple[float, int]]):
    """(microseconds since the start, bytes) of each allocation and free."""

    began_ns = 0


@contextlib.contextmanager
def _session(device: torch.device) -> Iterator[_Events]:
    """A session of the profiler; the events are there when it has ended."""
    events = _Events()
    # torch itself does not refuse: the inner profiler silently ends the outer one's session.
    if _torch.profiler_running():
        raise MeasureError.of(
            "A profiler is already running in this process; the memory of a function is measured with the profiler.",
            next="call measure() outside of torch.profiler.profile(...)",
        )
    with _quiet(), profiler.profile(profile_memory=True) as session:
        events.began_ns = time.time_ns()
        yield events
    found: list[tuple[int, int, int]] = []
    pending = list(session.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.name == "[memory]":
            at = event.typed[1]
            if at.device.type == device.type and (device.type == "cpu" or device.index in (None, at.device.index)):
                found.append((event.start_time_ns, at.ptr, at.alloc_size))
    found.sort(key=lambda one: one[0])
    events.extend(_own(found, events.began_ns, device))


def _own(found: list[tuple[int, int, int]], began_ns: int, device: torch.device) -> list[tuple[float, int]]:
    """Drops frees of blocks that were not allocated in this session.

    c10 remembers the size of a block that outlived an earlier session, and would report that size for whatever block
    is later freed at the same address. CUDA's allocator knows its blocks, so there every free is true.
    """
    mine: set[int] = set()
    events: list[tuple[float, int]] = []
    for at_ns, pointer, nbytes in found:
        if nbytes > 0:
            mine.add(pointer)
        elif device.type == "cpu":
            if pointer not in mine:
                continue
            mine.discard(pointer)
        events.append(((at_ns - began_ns) / 1e3, nbytes))
    return events


def _measure_cuda(fn: Callable[[], Any], device: torch.device) -> Measurement:
    """The caching allocator's counters; sizes are its blocks, so each tensor counts rounded up to 512 bytes.

    Unlike on the CPU, the free of an older tensor is seen and lowers the level.
    """
    start = _cuda_started(device)
    began = time.perf_counter()
    result = fn()
    torch.cuda.synchronize(device)
    seconds = time.perf_counter() - began
    peak, retained = _cuda_counted(device, start)
    # The counters keep no history: the start, the height and the end are what is known.
    timeline = ((0.0, 0), (seconds / 2, peak), (seconds, retained))
    return Measurement(peak, retained, result, timeline, device)


def _cuda_started(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _cuda_counted(device: torch.device, start: int) -> tuple[int, int]:
    """Peak and level above `start`."""
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - start, torch.cuda.memory_allocated(device) - start


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Holds back two notes that the profiler prints to stderr on every use.

    Kineto announces each start and stop, and c10 warns that the free of an older tensor is not counted, which is said
    in this module's docstring. Kineto reads its level once, at the first session of the process; a level set by the
    user is left alone.
    """
    kineto = "KINETO_LOG_LEVEL" not in os.environ
    if kineto:
        os.environ["KINETO_LOG_LEVEL"] = "99"
    level = _c10_log_level()
    before = level.value if level is not None else 0
    if level is not None:
        level.value = max(before, 2)  # errors only
    try:
        yield
    finally:
        if level is not None:
            level.value = before
        if kineto:
            os.environ.pop("KINETO_LOG_LEVEL", None)


def _c10_log_level() -> ctypes.c_int | None:
    for library in sorted(Path(torch.__file__).parent.glob("lib/libc10.*")):
        with contextlib.suppress(OSError, ValueError):
            return ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level")
    return None
