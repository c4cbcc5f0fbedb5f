"""The search over what is held keeps its limits, is the same each time, and finds the optimum where it is known."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from torch import nn

from cases.watched import Watched
from fullbatch._plan._polish import Polish
from fullbatch._plan._relaxed import HoldingProblem

TRIALS = 100_000


@cache
def _problem(blocks: int) -> HoldingProblem:
    """That of a chain of convolutions with BatchNorm, whose inputs shrink, in microbatches of one sample of eight."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for at in range(blocks):
        layers += [nn.Conv2d(3 if at == 0 else 8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
        if at % 3 == 2:
            layers.append(nn.AvgPool2d(2))
    batch = torch.randn(8, 3, 32, 32)
    watched = Watched(lambda m, b: m(b).square().mean(), nn.Sequential(*layers), batch, microbatch=1)
    return watched.captured.side(1).problem(1)


def _limits(problem: HoldingProblem, share: float) -> list[float]:
    """A share of what holding everything takes at its most, in each segment."""
    everything, _ = problem.reduced.follow(problem.everything())
    most = max(problem.weight(t, held, frozenset()) for t, held in enumerate(everything))
    return [share * most] * problem.reduced.segments


def _optimum(problem: HoldingProblem, limits: list[float]) -> float:
    """The least cost of what is run again, by HiGHS to the end."""
    rows = problem._memory + np.arange(problem.reduced.segments - 1)
    least = problem._least.copy()
    least[rows] = -np.array(limits[1:]) / problem._bytes
    matrix = problem._matrix + problem._again * problem._own_runs
    found = milp(
        problem._costs / problem._unit,
        constraints=LinearConstraint(matrix, least - 1e-9, np.inf),
        integrality=np.ones(len(problem._costs)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 1e-3, "time_limit": 300},
    )
    assert found.status == 0, found.message
    return float(found.fun) * problem._unit


def _start(problem: HoldingProblem, limits: list[float]) -> Polish:
    chosen = problem.choose(limits)
    assert chosen is not None
    polish = Polish(problem, chosen.held, limits)
    assert polish.within(limits)
    return polish


@pytest.mark.parametrize("share", [0.25, 0.2, 0.15])
def test_a_search_comes_to_the_optimum_of_the_integer_program(share: float) -> None:
    problem = _problem(8)
    limits = _limits(problem, share)
    polish = _start(problem, limits)
    rounded = polish.cost
    polish.improve(TRIALS)
    climbed = polish.cost
    polish.search(TRIALS)
    best = _optimum(problem, limits)
    assert best * 0.999 <= polish.cost <= climbed <= rounded
    assert polish.cost <= 1.002 * best, (polish.cost / best, climbed / best)


def test_what_a_search_finds_keeps_its_limits_and_is_the_same_each_time() -> None:
    problem = _problem(8)
    limits = _limits(problem, 0.3)
    found = []
    for _ in range(2):
        polish = _start(problem, limits)
        polish.search(TRIALS, seed=1)
        held, runs = problem.reduced.follow(polish.held)
        assert tuple(held) == polish.held, "all that it holds can be there"
        for t, (values, ran) in enumerate(zip(held, runs, strict=True)):
            assert problem.weight(t, values, ran) <= limits[t] * (1 + 1e-9)
        assert polish.cost == sum(problem.reduced.again(t, ran) for t, ran in enumerate(runs))
        found.append(polish.held)
    assert found[0] == found[1]
