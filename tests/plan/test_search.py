"""The search over what is held keeps its limits, is the same each time, and finds the optimum where it is known."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cases.watched import Watched
from fullbatch._plan._needs import Needs
from fullbatch._plan._polish import Polish
from fullbatch._plan._relaxed import HoldingProblem

FRONTIER = Path(__file__).resolve().parents[2] / "benchmarks" / "frontier"
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


def _weight(problem: HoldingProblem, segment: int, held: frozenset[int], runs: frozenset[int] = frozenset()) -> float:
    return problem.weight(problem.reduced.nbytes(held), problem.reduced.made_again(segment, runs))


def _limits(problem: HoldingProblem, share: float) -> list[float]:
    """A share of what holding everything takes at its most, in each segment."""
    everything, _ = problem.reduced.follow(problem.everything())
    most = max(_weight(problem, t, held) for t, held in enumerate(everything))
    return [share * most] * problem.reduced.segments


@pytest.fixture(scope="module")
def integer() -> Iterator[Any]:
    """The benchmark that solves the program in whole values."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FRONTIER)
        yield importlib.import_module("integer")


def _start(problem: HoldingProblem, limits: list[float]) -> Polish:
    chosen = problem.choose(limits)
    assert chosen is not None
    polish = Polish(problem, chosen.held, limits)
    assert polish.within(limits)
    return polish


@pytest.mark.parametrize("share", [0.25, 0.2, 0.15])
def test_a_search_comes_to_the_optimum_of_the_integer_program(share: float, integer: Any) -> None:
    problem = _problem(8)
    limits = _limits(problem, share)
    polish = _start(problem, limits)
    rounded = polish.cost
    polish.improve(TRIALS)
    climbed = polish.cost
    polish.search(TRIALS)
    proven, best = integer.in_whole_values(problem, limits, bounding=False, seconds=300)
    assert proven >= best * 0.998, "the solver did not come to its end"
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
            assert _weight(problem, t, values, ran) <= limits[t] * (1 + 1e-9)
        assert polish.cost == sum(problem.reduced.again(t, ran) for t, ran in enumerate(runs))
        found.append(polish.held)
    assert found[0] == found[1]


def test_what_needs_no_walk_is_what_a_walk_finds() -> None:
    reduced = _problem(6).reduced
    dice = random.Random(0)
    shared = 0
    for _ in range(2000):
        segment = dice.randrange(1, reduced.segments)
        there = [value for value, maker in reduced.makers.items() if maker.segment < segment]
        held = frozenset(value for value in there if dice.random() < 0.5)
        needs = Needs(reduced, segment, held)
        dice.shuffle(there)
        changed = held ^ frozenset(there[: dice.choice([1, 2])])
        asked = {needs.lost(value) for value in held} | {needs.saved(value) for value in there}
        found, anew = needs.unless_read(changed), Needs(reduced, segment, changed)
        assert asked
        if found is None:
            continue
        shared += 1
        assert (found.runs, found.readers, found.again) == (anew.runs, anew.readers, anew.again)
        assert (found.here, found.made, sorted(found.wished)) == (anew.here, anew.made, sorted(anew.wished))
        for value in there:
            assert (found.lost(value), found.saved(value)) == (anew.lost(value), anew.saved(value))
    assert 200 < shared < 1800, "some changes are read and some are not"
