"""Prints the optimum of every net and budget beside the planner's.

`PYTHONPATH=tests python -m optimal.table [NET ...]`
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

import fullbatch
from fullbatch._cost._costs import estimated
from fullbatch._plan._simulate import Simulated, simulate
from optimal.exact import Optimum, solve
from optimal.graph import Expansion, Graph, reduce_program, step_of
from optimal.nets import NETS, Net


@dataclass(frozen=True)
class Compared:
    """One net at one budget (bytes above what the step owns).

    `planned`: overhead of the planner's schedule, None where it says that nothing fits. `replayed`: the optimum's
    schedule by the planner's own walk, None where there is none.
    """

    net: str
    tasks: int
    graph: Graph
    share: float
    budget: int
    optimum: Optimum
    replayed: Simulated | None
    planned: float | None
    planned_peak: int
    bound: float


def compare(net: Net, seconds: float = 120.0, shares: tuple[float, ...] = ()) -> Iterator[Compared]:
    """The optimum and the plan of `net` at each budget (by default those of `NETS`)."""
    torch.manual_seed(0)
    loss_fn, model, batch = net()
    free = step_of(loss_fn, model, batch)
    program, cost = free.program, estimated(free.program)
    graph = reduce_program(program)
    plain = simulate(program, free.plan.schedule, cost)
    for share in shares or NETS[net]:
        budget = int(share * plain.peak)
        best = solve(graph, budget, seconds)
        replayed = None
        if best.order is not None:
            replayed = simulate(program, Expansion(program, graph, best.order).schedule, cost)
        try:
            plan = step_of(loss_fn, model, batch, budget).plan
        except fullbatch.BudgetError:
            planned, peak, bound = None, 0, 0.0
        else:
            walked = simulate(program, plan.schedule, cost)
            planned, peak, bound = walked.time / plain.time - 1, walked.peak, plan.bound
        yield Compared(
            net.__name__, len(program.tasks), graph, share, budget, best, replayed, planned, peak, bound
        )  # fmt: skip
    torch._dynamo.reset()


def main() -> None:
    """The table of the nets named on the command line, or of all."""
    names = sys.argv[1:]
    table = Table(title="extra time at a budget: the least possible, and the planner's", title_justify="left")
    for column in ("net", "tasks", "runs", "budget", "optimum", "proof", "seconds", "planner", "its bound"):
        table.add_column(column)
    for net in NETS:
        if names and net.__name__ not in names:
            continue
        for row in compare(net):
            best = row.optimum
            proof = ("nothing fits" if not best.feasible else "proven") if best.proven else f"at least {best.bound:.2%}"
            table.add_row(
                row.net, str(row.tasks), str(len(row.graph.runs)), f"{row.share:.0%}",
                f"{best.overhead:.2%}" if best.feasible else "-", proof, f"{best.seconds:.1f}",
                "does not fit" if row.planned is None else f"{row.planned:.2%}", f"{row.bound:.2%}",
            )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
