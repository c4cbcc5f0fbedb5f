"""Orders found run by run: a change is walked as the whole is, and what comes out is a plan like any other."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullbatch
from fullbatch._plan._anneal import _change, find_orders
from fullbatch._plan._grid import Grid
from fullbatch._plan._runs import Run
from optimal.graph import Graph
from optimal.graph import Run as Plain


def _graph(seed: int) -> Graph:
    """A chain with skips and its backward: some runs make two values, some values are results."""
    draw = random.Random(seed)
    runs: list[Plain] = []
    sizes: list[int] = []

    def add(reads: set[int]) -> None:
        makes = tuple(range(len(sizes), len(sizes) + draw.choice((1, 1, 2))))
        sizes.extend(draw.randint(1, 9) for _ in makes)
        runs.append(Plain(len(runs), float(draw.randint(1, 9)), tuple(sorted(reads)), makes))

    for at in range(8):
        add({runs[-1].makes[0], draw.randrange(len(sizes))} if at else set())
    forward = list(runs)
    for run in reversed(forward):
        add({runs[-1].makes[0], run.makes[-1]})
    read = {storage for run in runs for storage in run.reads}
    results = tuple(storage not in read and draw.random() < 0.5 for storage in range(len(sizes)))
    return Graph(tuple(runs), tuple(sizes), results)


def _runs_of(graph: Graph) -> Any:
    runs = [Run(r.task, r.cost, sum(graph.sizes[s] for s in r.makes), r.reads, r.makes) for r in graph.runs]
    return SimpleNamespace(runs=runs, sizes=list(graph.sizes), results=list(graph.results))


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_change_is_walked_as_the_whole_is(rounds: int) -> None:
    changed = 0
    for seed in range(20):
        graph, dice = _graph(seed), random.Random(seed)
        grid = Grid(_runs_of(graph), 1, rounds, 0.0)  # room for nothing: every place exceeds it
        for _ in range(60):
            changes = _change(grid, dice)
            if not changes:
                continue
            grid.take(*grid.tried(changes))
            order = grid.order(grid.choice)
            anew = Grid(_runs_of(graph), 1, rounds, 0.0)
            anew.start(grid.choice)
            assert (anew.choice, anew.over) == (grid.choice, grid.over)
            assert grid.again == pytest.approx(graph.time(order) - graph.work)
            assert max(at.peak for at in grid._at) == graph.peak(order)
            changed += 1
    assert changed > 250


def test_orders_fit_get_faster_and_come_again() -> None:
    better = 0
    for seed in range(4):
        graph = _graph(seed)
        room = int(0.7 * graph.peak(range(len(graph.runs))))
        orders = find_orders(_runs_of(graph), room, 0.0, None, hurried=True)
        assert orders == find_orders(_runs_of(graph), room, 0.0, None, hurried=True)
        assert all(graph.peak(order) <= room for order in orders)
        times = [graph.time(order) for order in orders]
        assert times == sorted(times, reverse=True)
        better += len(orders)
    assert better >= 3


def _loss(model: Any, batch: Any) -> Tensor:
    return (model(batch[0]) - model(batch[1])).square().mean()


def _case() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(16, 2)).double()
    return model, (torch.randn(1, 4096, 16).double(), torch.randn(1, 4096, 16).double())


def test_a_step_at_two_fifths_of_its_memory_is_exact_and_its_plan_can_be_kept() -> None:
    """Before orders were searched for run by run there was no plan here."""
    model, batch = _case()
    loss = _loss(model, batch)
    loss.backward()
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    for p in model.parameters():
        p.grad = None
    free = fullbatch.Step(_loss, model, batch).plan
    budget = free.owned + int(0.42 * free.activations)
    step = fullbatch.Step(_loss, model, batch, memory=budget)
    found = step(batch)
    largest = max(float(grad.abs().max()) for grad in wanted)
    wrong = max(float((p.grad - g).abs().max()) for p, g in zip(model.parameters(), wanted, strict=True))
    assert wrong <= 1e-10 * largest
    assert float(found) == pytest.approx(float(loss.detach()), rel=1e-12)
    assert step.plan.predicted_peak <= budget
    assert step.plan.overhead < 0.6
    kept = fullbatch.Plan.from_json(step.plan.to_json())
    again = fullbatch.Step(_loss, model, batch, plan=kept)
    assert again.plan.schedule == step.plan.schedule
