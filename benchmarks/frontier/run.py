"""Memory against time: plans one step for falling budgets, and runs each plan beside the plain step.

    python benchmarks/frontier/run.py [NAME ...] [--budgets 100 50 25] [--repeats 5] [--plan-only] [--out results.json]

A budget is a share of what the plain step allocates while it runs. Times are ratios of interleaved runs in the same
process. README.md says what each column is.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import fullbatch
from measuring import CountedStep, Plain, gradient_digest, interleaved, operations, operations_of, peak, ratio, save
from models import MODELS, add_options, check_names

SHARES = (100, 75, 50, 35, 33, 25, 15, 10)
"""Budgets in percent of what the plain step allocates."""
COLUMNS = (
    "budget", "microbatch", "peak / plain", "predicted", "time / plain", "operations", "overhead", "bound", "gap",
    "planned cold", "warm", "same bits",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--budgets", type=float, nargs="+", default=SHARES, help="in percent of the plain step's")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved pairs a row")
    parser.add_argument("--plan-only", action="store_true", help="do not run the plans")
    options = parser.parse_args()
    check_names(parser, options.models)
    torch.set_num_threads(options.threads)
    results = []
    for name in options.models:
        results.append(frontier(name, options.size, options.budgets, 0 if options.plan_only else options.repeats))
        Console(width=140).print(show(results[-1]))
        save(options.out, "frontier", options.size, options.repeats, results)  # after each: a long run may be ended


def frontier(name: str, size: str, budgets: Sequence[float], repeats: int) -> dict[str, Any]:
    """One row a budget; `repeats` 0 plans only. Bytes and seconds."""
    plain = Plain(*MODELS[name].make(size))
    count = operations(plain) if repeats else None
    digests: dict[int, str] = {}
    rows = [_row(plain, share, repeats, count, digests) for share in budgets]
    return {
        "model": name, "batch": plain.samples, "owned": plain.owned, "plain_peak": plain.peak, "operations": count,
        "rows": rows,
    }  # fmt: skip


def _row(plain: Plain, share: float, repeats: int, count: int | None, digests: dict[int, str]) -> dict[str, Any]:
    budget = plain.owned + int(share / 100 * plain.peak)
    row: dict[str, Any] = {"budget": share, "budget_bytes": budget}
    began = time.perf_counter()
    try:
        step = CountedStep(plain.loss_fn, plain.model, plain.batch, memory=budget)
    except fullbatch.BudgetError as error:
        seconds = time.perf_counter() - began
        return {**row, "cold": seconds, "least": (error.smallest - plain.owned) / plain.peak, "why": str(error)}
    row["cold"] = time.perf_counter() - began
    began = time.perf_counter()
    fullbatch.Step(plain.loss_fn, plain.model, plain.batch, memory=budget)
    row["warm"] = time.perf_counter() - began
    plan = step.plan
    row |= {
        "microbatch": plan.microbatch, "microbatches": plan.microbatches, "predicted_peak": plan.predicted_peak,
        "activations": plan.activations, "predicted_share": plan.activations / plain.peak,
        "overhead": plan.overhead, "bound": plan.bound, "gap": plan.gap,
    }  # fmt: skip
    return row | (_run(plain, step, repeats, count, digests) if repeats else {})


def _run(plain: Plain, step: CountedStep, repeats: int, count: int | None, digests: dict[int, str]) -> dict[str, Any]:
    model, plan = plain.model, step.plan

    def planned() -> object:
        return step(plain.batch)

    measured = peak(planned, model)
    digest = gradient_digest(planned, model)
    same = digests.get(plan.microbatch)
    digests.setdefault(plan.microbatch, digest)
    rounds = interleaved([(plain.run, model), (planned, model)], repeats)
    return {
        "peak": measured,
        "peak_share": measured / plain.peak,
        "prediction_error": plan.activations / measured - 1,
        "time": ratio(rounds, 1, 0),
        "seconds": rounds,
        "operations": operations_of(step, plain) / count if count else None,
        "same_bits": None if same is None else same == digest,  # None: the first with its microbatch
    }


def show(result: dict[str, Any]) -> Table:
    """The rows of one model as a table."""
    title = f"{result['model']}, batch {result['batch']}: the plain step allocates {result['plain_peak']:,} bytes"
    table = Table(title=f"{title} beside {result['owned']:,} that it owns, {torch.get_num_threads()} threads")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for row in result["rows"]:
        first = (f"{row['budget']:g} %", f"{row['microbatch']} x {row['microbatches']}" if "warm" in row else "none")
        if "least" in row:
            table.add_row(*first, f"least {row['least']:.1%}", *["-"] * 6, f"{row['cold']:.1f} s", "-", "-")
            continue
        ran = ["-"] * 4
        bits = "-"
        if "time" in row:
            bits = {None: "first", True: "yes", False: "NO"}[row["same_bits"]]
            ran = [
                f"{row['peak_share']:.1%}", f"{row['prediction_error']:+.2%}", f"{row['time']:.2f}",
                f"{row['operations']:.3f}",
            ]  # fmt: skip
        table.add_row(
            *first, *ran, f"+{row['overhead']:.1%}", f"+{row['bound']:.1%}", f"{row['gap']:.1%}",
            f"{row['cold']:.1f} s", f"{row['warm']:.1f} s", bits,
        )  # fmt: skip
    return table


if __name__ == "__main__":
    main()
