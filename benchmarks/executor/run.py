"""What running a schedule costs besides its operators, and what compile=True saves.

    python benchmarks/executor/run.py gpt2 batchnorm tiny [--repeats 15]

Times are ratios: two ways of running the same step in turn, in an order that alternates, and the median of the ratios.
The same comparison of a way with itself says how far a ratio can be trusted. Peaks are bytes that the step allocates.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from steps import STEPS

import fullbatch
from fullbatch._run._interpreter import Interpreter

Way = Callable[[], Any]


class Watched(fullbatch.Step):
    """A step that tells which executor it runs, on what."""

    def _run(self, captured: Any, inputs: Any) -> Any:
        self.inputs = dict(enumerate(inputs))
        return super()._run(captured, inputs)

    def _plan_for(self, captured: Any, call: Any) -> Any:
        plan, self.executor = super()._plan_for(captured, call)
        return plan, self.executor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", default=list(STEPS), help=f"of {', '.join(STEPS)}")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    for name in options.steps:
        Console(width=110).print(compare(name, options.repeats))


def compare(name: str, repeats: int) -> Table:
    """One row a way of running the step."""
    torch.manual_seed(0)
    loss_fn, model, batch, microbatch = STEPS[name]()
    generated = Watched(loss_fn, model, batch, microbatch=microbatch)
    compiled = Watched(loss_fn, model, batch, microbatch=microbatch, compile=True)
    began = time.perf_counter()
    compiled(batch)
    first = time.perf_counter() - began
    executor, inputs = generated.executor, generated.inputs
    reference = Interpreter(executor.program, executor.schedule)
    ways: dict[str, tuple[Way, Way]] = {
        "generated code / itself": (lambda: generated(batch), lambda: generated(batch)),
        "generated code / plain PyTorch": (lambda: generated(batch), lambda: loss_fn(model, batch).backward()),
        "interpreter / generated code": (lambda: reference.run(inputs), lambda: executor.run(inputs)),
        "compiled / generated code": (lambda: compiled(batch), lambda: generated(batch)),
    }
    title = f"{name}: {microbatch} x {generated.plan.microbatches}, {torch.get_num_threads()} threads; "
    table = Table(title=title + f"the first compiled step took {first:.0f} s", title_justify="left")
    for column in ("ways", "time", "quartiles", "peaks"):
        table.add_column(column, justify="left" if column == "ways" else "right")
    for label, (above, below) in ways.items():
        low, middle, high = statistics.quantiles(ratios(above, below, model, repeats))
        peaks = " / ".join(f"{_peak(way, model):,}" for way in (above, below))
        table.add_row(label, f"{middle:.2f}", f"{low:.2f} to {high:.2f}", peaks)
    return table


def ratios(above: Way, below: Way, model: Any, repeats: int) -> list[float]:
    """Seconds of one way over those of the other, side by side."""
    for way in (above, below):
        _seconds(way, model)
    found = []
    for number in range(repeats):
        if number % 2:
            second, first = _seconds(below, model), _seconds(above, model)
        else:
            first, second = _seconds(above, model), _seconds(below, model)
        found.append(first / second)
    return found


def _seconds(way: Way, model: Any) -> float:
    model.zero_grad()
    began = time.perf_counter()
    way()
    return time.perf_counter() - began


def _peak(way: Way, model: Any) -> int:
    model.zero_grad()
    return fullbatch.measure(way).peak


if __name__ == "__main__":
    main()
