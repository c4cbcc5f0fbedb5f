"""How fast this machine moves bytes and multiplies, measured once.

An estimate of time from shapes needs to know how many operations take as long as one byte, and that differs by ten
times between machines, and between one thread and many. Three small operators say it in about a third of a second: a
streaming one, a matrix product and a convolution, each in float32 and each with its output in fresh memory, as a step
runs them. What is found is kept on disk beside the costs (`_cache`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fullbatch._cost._cache import cost_file
from fullbatch._cost._keys import digest, machine, settings

# Larger than what an allocator keeps for itself between two operators: 32 MiB with glibc.
_STREAM = 40 * 2**20
# The side of square matrices, and the number of images of 64 channels, 56 x 56.
_SIZES = {"cpu": (768, 4)}
_LARGE = (8192, 256)
_SECONDS_EACH = 0.07
_RUNS = 7


@dataclass(frozen=True)
class Rates:
    """Rates of one device at one thread count.

    `bytes_per_second`: read and written by a streaming operator. `flops_per_second`: of a convolution and a matrix
    product of equal work. `seconds_per_call`: of an operator on one element.
    """

    bytes_per_second: float
    flops_per_second: float
    seconds_per_call: float = 0.0

    def seconds(self, moved: float, flops: float) -> float:
        """Time of one operator that moves so many bytes and does so many operations."""
        return self.seconds_per_call + moved / self.bytes_per_second + flops / self.flops_per_second


_MEASURED: dict[str, Rates] = {}


def rates(device: torch.device | str = "cpu", threads: int | None = None) -> Rates:
    """The rates of `device`, measured on first use; `threads` None is torch's present number.

    Where `threads` differs from that number, it is set for the time of the measurement. The fastest of several runs
    counts, since another program that runs meanwhile can only slow them. What is measured is kept on disk:
    `FULLBATCH_CACHE=off` measures anew.
    """
    where, now = torch.device(device), torch.get_num_threads()
    count = now if threads is None else threads
    key = digest("rates", machine(where), settings(where, count))
    if key not in _MEASURED:
        file = cost_file()
        found = None if file is None else _read(file.get(key))
        if found is None:
            found = _at(where, count, now)
            if file is not None:
                file.put(key, [found.bytes_per_second, found.flops_per_second, found.seconds_per_call])
                file.flush()
        _MEASURED[key] = found
    return _MEASURED[key]


def _read(kept: Any) -> Rates | None:
    try:
        found = Rates(*map(float, kept))
    except (TypeError, ValueError):
        return None
    return found if min(found.bytes_per_second, found.flops_per_second, found.seconds_per_call) > 0 else None


def _at(device: torch.device, threads: int, now: int) -> Rates:
    if threads == now:
        return _measured(device)
    torch.set_num_threads(threads)
    try:
        return _measured(device)
    finally:
        torch.set_num_threads(now)


def _measured(device: torch.device) -> Rates:
    side, images = _SIZES.get(device.type, _LARGE)

    def seconds(fn: Callable[..., Any], *shapes: tuple[int, ...], runs: int = _RUNS) -> float:
        tensors = [torch.zeros(shape, dtype=torch.float32, device=device) for shape in shapes]
        return seconds_of(lambda: fn(*tensors), device, _SECONDS_EACH, runs, min)

    with torch.no_grad():
        stream = seconds(torch.neg, (_STREAM // 4,))
        product = seconds(torch.mm, (side, side), (side, side))
        convolution = seconds(torch.conv2d, (images, 64, 56, 56), (64, 64, 3, 3))
        call = seconds(torch.neg, (1,), runs=100)
    flops = 2 * side**3 / product, 2 * images * 54 * 54 * 64 * 64 * 9 / convolution
    return Rates(2 * _STREAM / stream, 2 / (1 / flops[0] + 1 / flops[1]), call)


def seconds_of(
    call: Callable[[], Any],
    device: torch.device,
    limit: float,
    runs: int,
    choose: Callable[[list[float]], float] = statistics.median,
) -> float:
    """Time of `call()` in seconds, after one run to warm up: of `runs`, or of fewer within `limit` seconds.

    Where the first run alone takes longer than the limit, its own time.
    """
    begin = time.perf_counter()
    first = _once(call, device)
    times: list[float] = []
    while len(times) < runs and time.perf_counter() - begin < limit:
        times.append(_once(call, device))
    return choose(times) if times else first


def _once(call: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - begin
    del result
    return max(seconds, 1e-9)  # a clock that did not move
