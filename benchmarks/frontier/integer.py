"""How much of a plan's gap is the bound's: the bound's program solved in whole values, which takes minutes.

    python benchmarks/frontier/integer.py unet --budgets 10 --seconds 400

`plan.bound` is a linear relaxation, which may hold a fraction of a value. Here HiGHS gets the same program, for
microbatches of the plan's size, with each value held or not, and says after so many seconds what it has proven: no
schedule whose microbatches all do the same takes less at that size. `solved` is what its own best solution would
take, before any walk over what else is alive.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
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
from fullbatch._plan._relaxed import HoldingProblem
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
    planners: list[Planner] = []  # the step's own: it is made even where the plan is remembered
    make = Planner.__init__

    def seen(self: Planner, *given: Any) -> None:
        planners.append(self)
        make(self, *given)

    room = int(share / 100 * plain.peak)
    with mock.patch.object(Planner, "__init__", seen):
        plan = fullbatch.Step(plain.loss_fn, plain.model, plain.batch, memory=plain.owned + room).plan
    planner = planners[-1]
    if plan.whole or not planner._split.across:
        raise SystemExit("only for steps with barriers, in microbatches: elsewhere the bound has rows besides these")
    times = _least_times(planner._split, plan.microbatch, room, seconds)
    proven, solved = (time / planner.plain_time - 1 for time in times)
    shares = (plan.overhead, plan.bound, plan.gap, proven, plan.overhead - proven, solved)
    return [f"{plan.microbatch} x {plan.microbatches}", *(f"{100 * value:.1f} %" for value in shares)]


def _least_times(side: Side, size: int, room: int, seconds: float) -> tuple[float, float]:
    """What any schedule takes at least, and what the solver's best one takes, in bytes moved."""
    (point,) = _bound._points(side, [size])
    limits = _bound._across(side, point, room, _bound._moments(side, size))
    proven, solved = in_whole_values(side.problem(size), limits, bounding=True, seconds=seconds)
    return point.fixed + proven, point.fixed + solved


def in_whole_values(
    problem: HoldingProblem, limits: Sequence[float], *, bounding: bool, seconds: float
) -> tuple[float, float]:
    """The least cost of what is run again, where each value is held or not: what is proven, and what was found.

    `bounding`: what is run again takes no room. nan where nothing was found within `seconds`.
    """
    costs, matrix, least = problem.program(limits, bounding)
    found = milp(
        costs,
        constraints=LinearConstraint(matrix, least - 1e-9, np.inf),
        integrality=np.ones(len(costs)),
        bounds=Bounds(0, 1),
        options={"time_limit": seconds},
    )
    proven, solved = (np.nan if cost is None else cost for cost in (found.mip_dual_bound, found.fun))
    return problem.unit * proven, problem.unit * solved


if __name__ == "__main__":
    main()
