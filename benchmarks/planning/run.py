"""How long planning takes as networks grow deeper.

    python benchmarks/planning/run.py [NAME ...] [--budget 50] [--out planning.json] [--plot planning.png]

`resnet`: ResNet-26 to -152 with BatchNorm (about 5,000 operators). `gpt2`: 6 to 48 layers, one sequence, so that there
is nothing to split. Seconds are those of making a `fullbatch.Step`. README.md says what each column is.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

import fullbatch

sys.path.insert(0, str(Path(__file__).parents[1] / "frontier"))

from attention import gpt2
from built import Built
from convnets import resnet50
from measuring import Plain

RESNETS = {26: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
LAYERS = (6, 12, 24, 48)
NETWORKS: dict[str, dict[int, Callable[[], Built]]] = {
    "resnet": {deep: lambda d=depths: resnet50(32, 96, depths=d) for deep, depths in RESNETS.items()},
    "gpt2": {layers: lambda n=layers: gpt2(1, 512, layers=n) for layers in LAYERS},
}


class Counter(TorchDispatchMode):
    """Counts operators of forward and backward."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(NETWORKS), help=f"of {', '.join(NETWORKS)}")
    parser.add_argument("--deepest", type=int, default=10_000, help="leave out deeper networks")
    parser.add_argument("--budget", type=float, default=50, help="in percent of the plain step's")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", help="where to write the rows as JSON")
    parser.add_argument("--plot", help="where to draw them")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in NETWORKS]:
        parser.error(f"no network {', '.join(unknown)}; there are {', '.join(NETWORKS)}")
    torch.set_num_threads(options.threads)
    rows = list(_rows(options.names, options.deepest, options.budget))
    Console(width=100).print(show(rows))
    if options.out:
        Path(options.out).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    if options.plot:
        draw(rows, options.plot)


def _rows(names: list[str], deepest: int, share: float) -> Iterator[dict[str, Any]]:
    for name in names:
        for deep, make in NETWORKS[name].items():
            if deep <= deepest:
                yield {"network": name, "depth": deep, **planned(make, share)}


def planned(make: Callable[[], Built], share: float) -> dict[str, Any]:
    """Operators of the plain step, and seconds to make a step: with nothing known, without a budget, with all known."""
    torch.manual_seed(0)
    plain = Plain(*make())
    counter = Counter()
    with counter:
        plain.run()
    plain.model.zero_grad()
    gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FULLBATCH_CACHE"] = folder
        memory = plain.owned + int(share / 100 * plain.peak)
        seconds = []
        for budget in (memory, None, memory):
            began = time.perf_counter()
            plan = fullbatch.Step(plain.loss_fn, plain.model, plain.batch, memory=budget).plan
            seconds.append(time.perf_counter() - began)
    cold, capture, warm = seconds
    return {
        "operators": counter.count, "cold": cold, "capture": capture, "warm": warm, "overhead": plan.overhead,
        "bound": plan.bound,
    }  # fmt: skip


def show(rows: list[dict[str, Any]]) -> Table:
    """Seconds, and what they are for a thousand operators."""
    table = Table(title="planning")
    columns = ("network", "depth", "operators", "cold s", "capture s", "warm s", "cold s / 1000 operators", "overhead")
    for column in (*columns, "bound"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["network"], str(row["depth"]), f"{row['operators']:,}", f"{row['cold']:.1f}", f"{row['capture']:.1f}",
            f"{row['warm']:.1f}",
            f"{1000 * row['cold'] / row['operators']:.1f}", f"{row['overhead']:+.1%}", f"{row['bound']:+.1%}",
        )  # fmt: skip
    return table


def draw(rows: list[dict[str, Any]], path: str) -> None:
    """Seconds against operators."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(row["network"] for row in rows):
        mine = [row for row in rows if row["network"] == name]
        for kind, style in (("cold", "o-"), ("warm", "o:")):
            axes.plot([r["operators"] for r in mine], [r[kind] for r in mine], style, label=f"{name}, {kind}")
    axes.set(xlabel="operators of the plain step", ylabel="seconds to plan", xlim=(0, None), ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
