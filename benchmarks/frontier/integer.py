"""How much of a plan's gap is the bound's: the bound's program solved in whole values, which takes minutes.

    python benchmarks/frontier/integer.py unet --budgets 10 --seconds 400

`plan.bound` is a linear relaxation, which may hold a fraction of a value. Here HiGHS gets the same program, for
microbatches of the plan's size, with each value held or not, and says after so many seconds what it has proven: no
schedule whose microbatches all do the same takes less at that size. `solved` is what its own best solution would
take, before any walk over what else is alive.
"""

from __future__ import annotations

import argparse
from typing import Any
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from scipy.optimize import Bounds, LinearConstraint, milp

import fullbatch
from fullbatch._plan import _bound
from fullbatch._plan._planner import Planner
from fullbatch._plan._side import Side
from measuring import Plain
from models import MODELS, add_options, check_names

COLUMNS = ("step", "budget", "microbatch", "overhead", "bound", "gap", "in whole values", "gap", "solved")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, ["unet"])
    parser.add_argument("--budgets", type=float, nargs="+", default=[10], help="in percent of the plain step's")
    parser.add_argument("--seconds", type=float, default=400, help="of the solver, a budget")
    options = parser.parse_args()
    check_names(parser, options.models)
    torch.set_num_threads(options.threads)
    table = Table(*COLUMNS)
    for name in options.models:
        plain = Plain(*MODELS[name].make(options.size))
        for share in options.budgets:
            table.add_row(name, f"{share:g} %", *_row(plain, share, options.seconds))
    Console(width=140).print(table)


def _row(plain: Plain, share: float, seconds: float) -> list[str]:
    planners: list[Planner] = []
    choose = Planner.choose

    def seen(self: Planner, *given: Any) -> Any:
        planners.append(self)
        return choose(self, *given)

    room = int(share / 100 * plain.peak)
    with mock.patch.object(Planner, "choose", seen):
        plan = fullbatch.Step(plain.loss_fn, plain.model, plain.batch, memory=plain.owned + room).plan
    planner = planners[-1]
    side = planner._whole if plan.whole else planner._split
    proven, solved = (share / planner.plain_time - 1 for share in _integer(side, plan.microbatch, room, seconds))
    shares = (plan.overhead, plan.bound, plan.gap, proven, plan.overhead - proven, solved)
    return [f"{plan.microbatch} x {plan.microbatches}", *(f"{100 * value:.1f} %" for value in shares)]


def _integer(side: Side, size: int, room: int, seconds: float) -> tuple[float, float]:
    """What any schedule takes at least, and what the solver's best one takes, in bytes moved."""
    (point,) = _bound._points(side, [size])
    problem = side.problem(size)
    given: list[Any] = []
    with mock.patch.object(type(problem), "bound", lambda self, *args: given.append(args) or 0.0):
        _bound._again(side, point, room)
    (limits, *moments) = given[0]
    if moments and moments[0]:
        raise SystemExit("only for steps with barriers: elsewhere the bound has rows that are not read here")
    rows = problem._memory + np.arange(problem.reduced.segments - 1)
    least = problem._least.copy()
    least[rows] = -np.minimum(limits[1:], 2 * problem._bytes) / problem._bytes
    found = milp(
        problem._costs / side.work,
        constraints=LinearConstraint(problem._matrix, least - 1e-9, np.inf),
        integrality=np.ones(len(problem._costs)),
        bounds=Bounds(0, 1),
        options={"time_limit": seconds},
    )
    solved = float("nan") if found.fun is None else found.fun
    return point.fixed + found.mip_dual_bound * side.work, point.fixed + solved * side.work


if __name__ == "__main__":
    main()
