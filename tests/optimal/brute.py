"""Every schedule of a graph of a few runs, by Dijkstra over all states, with no bound and no rule of what to keep.

Slow and plain on purpose: it is what the solver is checked against.
"""

from __future__ import annotations

import heapq
from itertools import combinations

from optimal.graph import Graph

State = tuple[frozenset[int], frozenset[int]]  # runs made at least once, storages alive


def cheapest(graph: Graph, budget: int, fixed_order: bool) -> float | None:
    """Time of the cheapest schedule within `budget` bytes, None where there is none.

    `fixed_order`: first runs are made in the order of the graph, otherwise in any that data allow.
    """
    start: State = (frozenset(), frozenset())
    best: dict[State, float] = {start: 0.0}
    queue: list[tuple[float, int, State]] = [(0.0, 0, start)]
    count = 0
    while queue:
        time, _, state = heapq.heappop(queue)
        done, live = state
        if time > best[state]:
            continue
        if len(done) == len(graph.runs):
            return time
        for at, run in enumerate(graph.runs):
            if fixed_order and at > len(done):
                break
            if not live.issuperset(run.reads):
                continue
            base = live - {storage for storage in run.makes if not graph.results[storage]}
            if sum(graph.sizes[s] for s in base) + sum(graph.sizes[s] for s in run.makes) > budget:
                continue
            for after in _kept(graph, base | set(run.makes)):
                following: State = (done | {at}, after)
                if time + run.cost < best.get(following, float("inf")):
                    best[following] = time + run.cost
                    count += 1
                    heapq.heappush(queue, (time + run.cost, count, following))
    return None


def _kept(graph: Graph, live: frozenset[int]) -> list[frozenset[int]]:
    """Every set of storages that may stay: the results and any of the others."""
    results = frozenset(storage for storage in live if graph.results[storage])
    others = sorted(live - results)
    return [results | set(kept) for size in range(len(others) + 1) for kept in combinations(others, size)]
