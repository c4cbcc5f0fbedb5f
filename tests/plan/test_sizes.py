"""Which microbatch is planned: sizes come in the order of what they promise, and few are solved or measured for it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from cases.watched import Watched
from fullbatch._cost._probe import Prober
from fullbatch._cost._proportion import in_proportion
from fullbatch._ir import Kind
from fullbatch._plan._relaxed import HoldingProblem
from fullbatch._plan._side import Side
from fullbatch._plan._sizes import by_outlook, microbatch_sizes

BATCH = 24
SIZES = [size for size in microbatch_sizes(BATCH) if size < BATCH]


def _watched(memory: int | None = None) -> Watched:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for at in range(6):
        layers += [nn.Conv2d(3 if at == 0 else 8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
        if at % 2 == 1:
            layers.append(nn.AvgPool2d(2))
    batch = torch.randn(BATCH, 3, 32, 32)
    how: dict[str, Any] = {"microbatch": 1} if memory is None else {"memory": memory}
    return Watched(lambda m, b: m(b).square().mean(), nn.Sequential(*layers), batch, **how)


def _side() -> Side:
    return _watched().captured.side(1)


def _taken_for(side: Side, size: int, room: int) -> float:
    problem, limits = side.problem(size), side.limits(size, room)
    return side.hold_all(size).time + (problem.bound(limits) + problem.outlook(limits)) / 2


@pytest.mark.parametrize("share", [0.9, 0.5, 0.3, 0.15])
def test_the_order_is_that_of_what_each_size_is_taken_for(share: float) -> None:
    room = int(share * _side().hold_all(SIZES[0]).peak)
    side = _side()
    order = list(by_outlook(side, SIZES, room))
    values = {size: _taken_for(side, size, room) for size in SIZES}
    assert sorted(order) == sorted(SIZES)
    assert [values[size] for size in order] == pytest.approx(sorted(values.values()))
    assert len(set(values.values())) > 3  # or there is no order to find


def test_the_first_is_known_before_all_are_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    side, solved = _side(), []
    solve = HoldingProblem._solve

    def counted(self: HoldingProblem, *args: Any, **options: Any) -> Any:
        solved.append(args)
        return solve(self, *args, **options)

    monkeypatch.setattr(HoldingProblem, "_solve", counted)
    first = next(by_outlook(side, SIZES, int(0.3 * side.hold_all(SIZES[0]).peak)))
    assert first in SIZES
    assert 2 <= len(solved) < 2 * len(SIZES) - 3  # each is solved twice to know all


def test_the_floor_is_below_every_optimum_and_at_those_that_were_solved() -> None:
    side = _side()
    size = SIZES[2]
    problem, most = side.problem(size), sum(side.reduced.sizes.values())
    dice = random.Random(0)
    rooms = [[dice.uniform(0.1, 0.6) * most for _ in range(side.segments.count)] for _ in range(6)]
    assert problem.floor(rooms[0]) == 0  # nothing is known yet
    bound, outlook = problem.bound(rooms[0]), problem.outlook(rooms[1])
    assert bound > 0
    assert problem.floor(rooms[0]) == pytest.approx(bound, rel=1e-5)
    assert problem.floor(rooms[1], bounding=False) == pytest.approx(outlook, rel=1e-5)
    above = 0
    for other in (size, SIZES[0], SIZES[-1]):  # prices of one size are good for all
        for room in rooms[2:]:
            for bounding in (True, False):
                floor = side.problem(other).floor(room, bounding)
                least = side.problem(other).bound(room) if bounding else side.problem(other).outlook(room)
                assert floor <= least * (1 + 1e-6) + 1e-6
                above += floor > 0.5 * least > 0
    assert above > 6  # and says something
    assert problem.floor([-1.0] * side.segments.count) == float("inf")


def test_costs_in_proportion_are_what_is_measured_where_bytes_grow_with_the_samples() -> None:
    """On layers with hardly a workspace a size that was not measured costs what it does when it is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 64))
    captured = Watched(lambda m, b: m(b).square().mean(), model, torch.randn(16, 64), microbatch=2).captured
    side = captured.side(2)
    grown, exact = in_proportion(side.program, side.costs(2, None), 2), side.costs(8, None)
    tasks = [task for task in side.program.runnable if task.kind is not Kind.ONCE]
    assert len(tasks) > 10
    same = 0
    for task in tasks:
        assert grown(task, 8).outs == exact(task, 8).outs, task.origin
        assert grown(task, 8).peak >= exact(task, 8).peak, task.origin  # what a sum has at work does not grow
        same += grown(task, 8).peak == exact(task, 8).peak
    assert same > 0.7 * len(tasks)
    once = [task for task in side.program.runnable if task.kind is Kind.ONCE]
    assert all(grown(task, 8) == exact(task, 8) for task in once)


def test_only_what_may_be_chosen_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest of three sizes, to compare them by, and those that may be the best; not all that are tried."""
    whole = _watched()
    peak, owned = whole.captured._planner.plain_peak(), whole.plan.owned
    asked: list[frozenset[int]] = []
    measure, tried, fit = Prober.costs, set(), Side.fit

    def costs(self: Prober, samples: frozenset[int]) -> Any:
        asked.append(samples)
        return measure(self, samples)

    def fitting(self: Side, size: int, *args: Any, **options: Any) -> Any:
        tried.add(size)
        return fit(self, size, *args, **options)

    monkeypatch.setattr(Prober, "costs", costs)
    monkeypatch.setattr(Side, "fit", fitting)
    plan = _watched(owned + int(0.3 * peak)).plan
    measured = frozenset().union(*asked)
    assert plan.exact
    assert plan.predicted_peak <= owned + int(0.3 * peak)
    assert plan.microbatch in measured
    assert len(tried) >= 3
    assert len(tried & measured) < len(tried)
