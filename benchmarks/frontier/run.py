"""Memory against time: plans one step for falling budgets, and runs each beside the plain step.

    python benchmarks/frontier/run.py resnet50 gpt2 [--repeats 5] [--plan-only]

A budget is a share of what the plain step allocates while it runs. Time is the median of interleaved runs, as a ratio
to the plain step's in the same process. `predicted` is the plan's own estimate of its extra time, `bound` the least
that any schedule could take at that budget, by the same estimate.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import fullbatch
from models import MODELS

SHARES = (1.0, 0.75, 0.5, 0.35, 0.25, 0.15)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--plan-only", action="store_true", help="do not run the plans")
    options = parser.parse_args()
    for name in options.models:
        Console(width=110).print(frontier(name, options.repeats, options.plan_only))


def frontier(name: str, repeats: int, plan_only: bool) -> Table:
    """One row a budget."""
    torch.manual_seed(0)
    loss_fn, model, batch = MODELS[name]()

    def plain() -> None:
        loss_fn(model, batch).backward()

    plain()
    model.zero_grad()
    full = fullbatch.measure(plain).peak
    model.zero_grad()
    table = Table(title=f"{name}: the plain step allocates {full:,} bytes, {torch.get_num_threads()} threads")
    for column in ("budget", "microbatch", "peak / plain", "time / plain", "predicted", "bound", "planned in"):
        table.add_column(column, justify="right")
    owned = fullbatch.Step(loss_fn, model, batch, microbatch=1).plan.owned
    for share in SHARES:
        model.zero_grad()
        began = time.perf_counter()
        try:
            step = fullbatch.Step(loss_fn, model, batch, memory=owned + int(share * full))
        except fullbatch.BudgetError as error:
            least = (error.smallest - owned) / full
            table.add_row(f"{share:.0%}", "-", f"least {least:.0%}", "-", "-", "-", _seconds(began))
            continue
        planned, plan = _seconds(began), step.plan
        peak, ratio = "-", "-"
        if not plan_only:
            model.zero_grad()
            step(batch)
            model.zero_grad()
            peak = f"{fullbatch.measure(lambda step=step: step(batch)).peak / full:.1%}"
            ratio = f"{_ratio(plain, lambda step=step: step(batch), model, repeats):.2f}"
        table.add_row(
            f"{share:.0%}", f"{plan.microbatch} x {plan.microbatches}", peak, ratio, f"+{plan.overhead:.1%}",
            f"+{plan.bound:.1%}", planned,
        )  # fmt: skip
    return table


def _ratio(plain: Any, planned: Any, model: Any, repeats: int) -> float:
    ratios = []
    for _ in range(repeats):
        times = []
        for fn in (plain, planned):
            model.zero_grad()
            began = time.perf_counter()
            fn()
            times.append(time.perf_counter() - began)
        ratios.append(times[1] / times[0])
    return statistics.median(ratios)


def _seconds(began: float) -> str:
    return f"{time.perf_counter() - began:.1f} s"


if __name__ == "__main__":
    main()
