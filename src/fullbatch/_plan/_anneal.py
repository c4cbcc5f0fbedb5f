"""The search for an order of a small step: simulated annealing (Kirkpatrick, Gelatt and Vecchi, 1983).

Between good orders lie worse ones: to hold another part of a chain several recomputes change at once. Where a descent
ends after a few steps, annealing goes on, with what exceeds the room as a price that rises. What helps where the room
is small does not where it is large, so that a few settings take turns. Places walked are counted, and not seconds, and
the dice have fixed seeds: the same step has the same plan.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, inf

from fullbatch._plan._grid import Again, Grid, bits
from fullbatch._plan._runs import Runs


@dataclass(frozen=True)
class Cooling:
    """One run of annealing: from and to. `heat`: as a share of the step's time; `price`: of the whole room exceeded."""

    heat: tuple[float, float]
    price: tuple[float, float]
    rounds: int  # of what is made again before each first run


_COOLINGS = (
    Cooling((0.04, 0.001), (1.0, 10.0), 1),
    Cooling((0.03, 0.0005), (1.0, 10.0), 2),
    Cooling((0.04, 0.001), (2.0, 20.0), 1),
    Cooling((0.03, 0.0005), (3.0, 30.0), 2),
)

# The same from what was found before.
_AFTER = Cooling((0.01, 0.0005), (3.0, 30.0), 2)

# Times that the settings take turns, and places that each run of annealing walks: so many for each place, and at most.
_TURNS, _EACH, _WALKS = 3, 1_000, 120_000


def find_orders(
    runs: Runs, room: int, launch: float, start: Iterable[int] | None, hurried: bool = False
) -> list[list[int]]:
    """Orders of runs whose peak is at most `room` bytes, each faster than the one before.

    `launch`: what starting a run costs besides; `start`: an order to begin at as well; `hurried`: with a tenth of the
    effort.
    """
    work = sum(run.cost + launch for run in runs.runs)
    least = inf
    orders: list[list[int]] = []

    def search(cooling: Cooling, begin: Iterable[int] | None, seed: int) -> None:
        nonlocal least
        grid = Grid(runs, room, cooling.rounds, launch)
        if begin is not None:
            grid.start(grid.choice_of(begin))
        found = anneal(grid, cooling, work, min(_WALKS, _EACH * grid.places), seed)
        if found is not None and found[0] < least - 1e-9:
            least = found[0]
            orders.append(grid.order(found[1]))

    if hurried:
        search(_COOLINGS[-1], None, 0)
        return orders
    for seed, cooling in enumerate(_COOLINGS * _TURNS):
        search(cooling, None, seed)
    if start is not None:
        search(_AFTER, start, 0)
    if orders:
        search(_AFTER, orders[-1], 1)
    return orders


def anneal(grid: Grid, cooling: Cooling, work: float, walks: int, seed: int) -> tuple[float, Again] | None:
    """The choice within the room with the least cost that is met, from the grid's own on; None where there is none.

    `work`: time of the step that runs nothing twice; `walks`: places to walk.
    """
    dice = random.Random(seed)
    best = None if grid.over else (grid.again, grid.choice)
    begin, count = grid.walked, 0
    heat, price = cooling.heat[0], cooling.price[0]
    while (done := (grid.walked - begin) / walks) < 1 and count < walks:
        if count % 64 == 0:
            heat = cooling.heat[0] * (cooling.heat[1] / cooling.heat[0]) ** done
            price = cooling.price[0] * (cooling.price[1] / cooling.price[0]) ** done
        count += 1
        changes = _change(grid, dice)
        if not changes:
            continue
        found, again, over = grid.tried(changes)
        worse = (again - grid.again) / work + price * (over - grid.over) / grid.room
        if worse <= 0 or dice.random() < exp(-worse / heat):
            grid.take(found, again, over)
            if not over and (best is None or again < best[0] - 1e-9):
                best = again, grid.choice
    return best


def _change(grid: Grid, dice: random.Random) -> dict[int, int]:
    """Other runs to try, by place."""
    luck = dice.random()
    if luck < 0.9:
        return _single(grid, dice, luck)
    return _single(grid, dice, 0.9 * dice.random()) | _single(grid, dice, 0.9 * dice.random())


def _single(grid: Grid, dice: random.Random, luck: float) -> dict[int, int]:
    """A change at one place, or of what moves from one to another near it."""
    place = int(dice.random() * grid.places)
    if luck < 0.35:
        return _dropped(grid, dice, place)
    runs = grid.runs_at(place)
    if not runs:
        return {}
    some = list(bits(runs))
    run = some[int(dice.random() * len(some))]
    below = runs & ((2 << run) - 1)
    kind = dice.random()
    if luck < 0.7:  # made again no more
        return {place: runs ^ (1 << run) if kind < 0.7 else runs ^ below if kind < 0.85 else 0}
    far = 1 + int(dice.random() * 3 * grid.rounds)
    other = place + (far if dice.random() < 0.5 else -far)
    if not 0 <= other < grid.places or run >= grid.limit[other]:
        return {}
    moved = 1 << run if kind < 0.6 else runs & ((1 << grid.limit[other]) - 1) if kind < 0.8 else below
    return {place: runs ^ moved, other: grid.runs_at(other) | moved}


def _dropped(grid: Grid, dice: random.Random, place: int) -> dict[int, int]:
    """Something that `place` reads made again there, with what that takes and is not there, or some of it held."""
    runs = grid.runs_at(place)
    readers = list(bits(runs)) + ([grid.first[place]] if grid.first[place] >= 0 else [])
    reads = grid.reads[readers[int(dice.random() * len(readers))]] if readers else []
    if not reads:
        return {}
    maker = reads[int(dice.random() * len(reads))][2]
    if runs >> maker & 1 or maker >= grid.limit[place]:
        return {}
    hold = 0.3 if dice.random() < 0.5 else 0.0
    live, stack = grid.live_before(place), [maker]
    while stack:
        run = stack.pop()
        if not runs >> run & 1:
            runs |= 1 << run
            stack += [of for bit, _, of in grid.reads[run] if not live & bit and (not hold or dice.random() > hold)]
    return {place: runs}
