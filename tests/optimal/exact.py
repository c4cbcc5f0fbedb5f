"""The cheapest schedule of a graph within a byte limit, with proof: what the planner is held to.

Setting: one microbatch, nothing to split. Runs may be repeated; a storage is dropped when it is not needed; results
stay once they are made; the peak counts all that is alive while a run makes its outputs. The order of *first* runs is
given (that of the captured graph, as in Checkmate and Moccasin); reruns stand anywhere, as often as they pay. Another
order of first runs could be cheaper than the optimum given here.

Method: a shortest path over states (first runs made, storages kept), in C++ (`search.cpp`). What makes it finish:

* Storages are dropped only where a run needs their room, in least sets.
* A lower bound from each state: what is wanted and not there must run again, and at each first run to come what is held
  for later must fit beside it, or the cheapest of it for its bytes runs again (a fractional knapsack).
* Limits that grow: all schedules below a limit are looked for, and where there are none the limit is a proven bound.

Tried before: mixed-integer programs over the same schedules (a stage for each first run, as in Checkmate), by HiGHS and
by CP-SAT. Near half the memory, where a solution holds half of everything and reruns half of everything, their
relaxations say little: a chain of eight layers had no proof in longer than the hardest net of `nets.py` takes here.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fullbatch._memory._cap import cache_folder
from optimal.graph import Graph

_SOURCE = Path(__file__).with_name("search.cpp")
ANY = 1 << 40  # a width that no layer reaches
_NEVER = (2**63 - 1) // 4
SCALE = 8  # costs are in eighths of a byte moved


@dataclass(frozen=True)
class Optimum:
    """`order`: runs of the best schedule found, None where none was.

    `overhead` and `bound` are shares of the step's time; `bound` is infinite where it is proven that no schedule fits.
    `seconds` are those of one core.
    """

    order: tuple[int, ...] | None
    overhead: float
    bound: float
    seconds: float
    states: int

    @property
    def proven(self) -> bool:
        """Whether nothing is better, or nothing fits."""
        return self.bound >= self.overhead or self.bound == float("inf")

    @property
    def feasible(self) -> bool:
        """Whether a schedule was found."""
        return self.order is not None


def solve(graph: Graph, budget: int, seconds: float = 60.0) -> Optimum:
    """The cheapest schedule with a peak of at most `budget` bytes, searched for at most `seconds` of one core."""
    return _Solver(graph, budget, seconds).solve()


@dataclass
class _Solver:
    graph: Graph
    budget: int
    seconds: float
    best: int = -1
    bound: int = 0
    order: tuple[int, ...] | None = None
    states: int = 0
    spent: float = 0.0
    total: int = field(init=False)

    def __post_init__(self) -> None:
        self.total = max(1, _whole(self.graph.work))

    def solve(self) -> Optimum:
        # A few narrow searches first: what they find keeps the exhaustive ones small. With less room than there is they
        # hold less, and so get stuck elsewhere.
        for width in (30, 300, 3000):
            for share in (1.0, 0.95, 0.9):
                self._try(width, self.best, lazy=True, seconds=0.01 * self.seconds, share=share)
        self.bound = max(self.bound, self._try(100, self.best, lazy=False, seconds=0.03 * self.seconds))
        while self.spent < self.seconds and self.bound < (self.best if self.best >= 0 else _NEVER):
            limit = max(self.bound * 11 // 10, self.bound + self.total // 400) + 1
            least = self._try(ANY, limit if self.best < 0 else min(limit, self.best), False, self.seconds - self.spent)
            self.bound = max(self.bound, least if self.best < 0 else min(least, self.best))
        overhead = self.best / self.total if self.best >= 0 else float("inf")
        bound = float("inf") if self.bound >= _NEVER else self.bound / self.total
        return Optimum(self.order, overhead, bound, self.spent, self.states)

    def _try(self, width: int, limit: int, lazy: bool, seconds: float, share: float = 1.0) -> int:
        """One search below `limit` (-1: none). Returns a bound on what it did not find, for what it looked at."""
        before = time.thread_time()
        found = search(self.graph, int(share * self.budget), width, seconds, limit, lazy)
        self.spent += time.thread_time() - before
        self.states += found.states
        if found.order is not None:
            cost = _whole(self.graph.time(found.order)) - self.total
            if self.best < 0 or cost < self.best:
                self.best, self.order = cost, found.order
        return found.bound


@dataclass(frozen=True)
class Found:
    """What one search gave; `bound` holds for every schedule only where `lazy` was not set."""

    order: tuple[int, ...] | None
    bound: int
    states: int


def search(graph: Graph, budget: int, width: int, seconds: float, limit: int, lazy: bool) -> Found:
    """One search; see `optimal_search` in search.cpp. Raises ValueError where the graph is too large for it."""
    runs = graph.runs
    kept = [storage for storage, result in enumerate(graph.results) if not result]
    index = {storage: at for at, storage in enumerate(kept)}
    made = [sum(graph.sizes[s] for s in run.makes) for run in runs]
    results = [sum(graph.sizes[s] for s in run.makes if graph.results[s]) for run in runs]
    pairs = [number for at, run in enumerate(runs) for s in run.reads if s in index for number in (at, index[s])]
    most = 100 * len(runs)
    order, numbers = (ctypes.c_int * most)(), (ctypes.c_int64 * 4)()
    wrong = _library().optimal_search(
        len(runs), len(kept), budget, _longs([_whole(run.cost) for run in runs]), _longs(made), _longs(results),
        _longs([graph.sizes[s] for s in kept]), _ints([graph.producers[s] for s in kept]), len(pairs) // 2,
        _ints(pairs), width, seconds, limit, int(lazy), most, order, numbers,
    )  # fmt: skip
    if wrong or numbers[3] > most:
        raise ValueError(f"{len(runs)} runs and {len(kept)} storages are more than the search can hold")
    found = tuple(order[: numbers[3]]) if numbers[0] >= 0 else None
    return Found(found, numbers[1], numbers[2])


def _whole(cost: float) -> int:
    scaled = cost * SCALE
    if abs(scaled - round(scaled)) > 1e-3:
        raise ValueError(f"a cost of {cost} is no multiple of 1/{SCALE}")
    return round(scaled)


def _longs(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * max(1, len(values)))(*values)


def _ints(values: Sequence[int]) -> ctypes.Array[ctypes.c_int]:
    return (ctypes.c_int * max(1, len(values)))(*values)


@functools.cache
def _library() -> ctypes.CDLL:
    """Compiles the search once a version of it, beside the allocator of the same folder."""
    flags = ["-std=c++17", "-O3", "-fPIC", "-shared"]
    key = hashlib.sha256("\0".join([_SOURCE.read_text(encoding="utf-8"), *flags]).encode()).hexdigest()[:20]
    path = cache_folder() / f"optimal-{key}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as work:
            output = Path(work) / path.name
            command = [os.environ.get("CXX", "c++"), *flags, str(_SOURCE), "-o", str(output)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            os.replace(output, path)
    library = ctypes.CDLL(str(path))
    long, number, real = ctypes.c_int64, ctypes.c_int, ctypes.c_double
    longs, numbers = ctypes.POINTER(long), ctypes.POINTER(number)
    library.optimal_search.argtypes = [
        number, number, long, longs, longs, longs, longs, numbers, number, numbers, long, real, long, number, number,
        numbers, longs,
    ]  # fmt: skip
    library.optimal_search.restype = number
    return library
