"""The solver itself: against every schedule of tiny graphs, and its schedules against the planner's own walk."""

from __future__ import annotations

import random

import pytest

from optimal.brute import cheapest
from optimal.exact import ANY, SCALE, search, solve
from optimal.graph import Graph, Run
from optimal.nets import group_norm_chain, transformer_pair
from optimal.table import compare


def _chain(layers: int) -> Graph:
    """A forward of equal layers and its backward: each gradient reads the one before it and what its layer read."""
    runs = [Run(at, 1.0, (at - 1,) if at else (), (at,)) for at in range(layers)]
    for at in range(layers):
        reads = (layers + at - 1, layers - 2 - at) if at < layers - 1 else (layers + at - 1,)
        runs.append(Run(layers + at, 1.0, reads, (layers + at,)))
    return Graph(tuple(runs), (1,) * (2 * layers), tuple(at == 2 * layers - 1 for at in range(2 * layers)))


def _random_graph(seed: int, depth: int = 0) -> Graph:
    """A forward of three or four runs (or `depth`), and a backward that reads what it made.

    With skips, runs of two outputs, and results on the way.
    """
    draw = random.Random(seed)
    runs: list[Run] = []
    sizes: list[int] = []

    def add(reads: set[int]) -> None:
        makes = tuple(range(len(sizes), len(sizes) + draw.choice((1, 1, 1, 2))))
        sizes.extend(draw.randint(1, 6) for _ in makes)
        runs.append(Run(len(runs), float(draw.randint(0, 9)), tuple(sorted(reads)), makes))

    for at in range(depth or draw.randint(3, 4)):
        skip = {draw.randrange(len(sizes))} if at > 1 and draw.random() < 0.4 else set()
        add({runs[-1].makes[0], *skip} if at else set())
    forward = list(runs)
    for _ in range(depth or (8 - len(forward) if draw.random() < 0.5 else 3)):
        add({runs[-1].makes[0], draw.choice(forward[: max(1, len(forward) - (len(runs) - len(forward)))]).makes[-1]})
    read = {storage for run in runs for storage in run.reads}
    results = tuple(storage not in read or draw.random() < 0.05 for storage in range(len(sizes)))
    return Graph(tuple(runs), tuple(sizes), results)


def test_the_solver_finds_what_the_search_of_all_schedules_finds() -> None:
    repeated = nothing = 0
    for seed in range(200):
        graph = _random_graph(seed)
        everything = graph.peak(range(len(graph.runs)))
        for budget in sorted({int(everything * share) for share in (1.0, 0.92, 0.84, 0.76, 0.68)}):
            best, plain = solve(graph, budget, seconds=10), cheapest(graph, budget, fixed_order=True)
            assert best.proven, (seed, budget)
            assert best.feasible == (plain is not None), (seed, budget)
            if best.order is None or plain is None:
                nothing += 1
                continue
            assert graph.time(best.order) == plain, (seed, budget)
            assert graph.peak(best.order) <= budget, (seed, budget)
            free = cheapest(graph, budget, fixed_order=False)
            assert free is not None and free <= plain, (seed, budget)
            repeated += len(best.order) > len(graph.runs)
    assert repeated >= 20
    assert nothing >= 20


def test_no_bound_cuts_the_optimum_off() -> None:
    """With a limit just above the optimum a bound that is too high anywhere on its way would lose it."""
    judged = 0
    for seed in range(200):
        graph = _random_graph(seed, depth=4 + seed % 4)
        everything = graph.peak(range(len(graph.runs)))
        for share in (0.9, 0.8, 0.7):
            budget = int(everything * share)
            unbounded = search(graph, budget, ANY, 2.0, limit=-1, lazy=False)  # without a limit no bound is used
            if unbounded.order is None or len(unbounded.order) == len(graph.runs):
                continue
            least = graph.time(unbounded.order)
            extra = round((least - graph.work) * SCALE)
            above = search(graph, budget, ANY, 2.0, limit=extra + 1, lazy=False)
            assert above.order is not None and graph.time(above.order) == least, (seed, share)
            below = search(graph, budget, ANY, 2.0, limit=extra, lazy=False)
            assert below.order is None and below.bound >= extra, (seed, share)
            assert search(graph, budget, 1, 2.0, limit=-1, lazy=False).bound <= extra, (seed, share)
            judged += 1
    assert judged >= 50


@pytest.mark.parametrize("layers", [3, 4])
def test_chains_at_every_budget(layers: int) -> None:
    graph = _chain(layers)
    everything = graph.peak(range(len(graph.runs)))
    times = []
    for budget in range(everything, 1, -1):
        best, plain = solve(graph, budget, seconds=10), cheapest(graph, budget, fixed_order=True)
        assert best.proven
        assert (graph.time(best.order) if best.order is not None else None) == plain
        times.append(plain)
    assert times[0] == len(graph.runs)
    assert any(time is not None and time > len(graph.runs) for time in times)
    assert times[-1] is None


def test_peak_refuses_what_cannot_run() -> None:
    graph = _chain(3)
    with pytest.raises(ValueError, match="not there"):
        graph.peak([1])
    with pytest.raises(ValueError, match="not every result"):
        graph.peak([0, 1])


@pytest.mark.parametrize(("net", "share"), [(group_norm_chain, 0.5), (transformer_pair, 0.75)])
def test_the_planners_own_walk_agrees_with_the_solver(net: object, share: float) -> None:
    (row,) = compare(net, shares=(share,))  # type: ignore[arg-type]
    best, graph = row.optimum, row.graph
    assert best.order is not None and row.replayed is not None
    assert best.proven and best.overhead > 0
    assert row.replayed.peak == graph.peak(best.order) <= row.budget
    assert row.replayed.time == pytest.approx(graph.time(best.order), rel=1e-9)
    assert row.replayed.time == pytest.approx(graph.work * (1 + best.overhead), rel=1e-6)
