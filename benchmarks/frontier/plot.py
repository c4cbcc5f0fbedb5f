"""Draws memory against time, one small picture a model, from the JSON files of run.py and peers.py.

python benchmarks/frontier/plot.py results.json [peers.json ...] [--out frontier.png]
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

MARKS = {"checkpoint": "s", "checkpoint_sequential": "D", "transformers": "^", "compile": "v", "accumulation": "x"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("frontier.png"))
    options = parser.parse_args()
    files = [json.loads(path.read_text(encoding="utf-8")) for path in options.files]
    draw(files).savefig(options.out, dpi=130)
    print(options.out)


def draw(files: list[dict[str, Any]]) -> Figure:
    """Every model of the files; the horizontal axis is a share of the plain step's memory, the vertical of its time."""
    found: dict[str, dict[str, list[Any]]] = {}
    for file in files:
        for result in file["results"]:
            found.setdefault(result["model"], {}).setdefault(file["kind"], []).extend(result["rows"])
    if not found:
        raise SystemExit("There is no model in these files; run.py and peers.py write them with --out.")
    columns = min(3, len(found))
    lines = math.ceil(len(found) / columns)
    figure = Figure(figsize=(4 * columns, 3.2 * lines + 0.6), layout="constrained")
    for place, (model, kinds) in enumerate(found.items()):
        axes = figure.add_subplot(lines, columns, place + 1)
        axes.set(title=model, xlabel="peak / plain, %", ylabel="time / plain")
        _plans(axes, kinds.get("frontier", []))
        _peers(axes, kinds.get("peers", []))
        axes.axhline(1, color="lightgrey", linewidth=1, zorder=0)
    labels: dict[str, Any] = {}
    for axes in figure.axes:
        labels |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(list(labels.values()), list(labels), loc="outside lower center", ncols=4)
    return figure


def _plans(axes: Axes, rows: list[dict[str, Any]]) -> None:
    planned = sorted((row for row in rows if "warm" in row), key=lambda row: row["budget"])
    budgets = [row["budget"] for row in planned]
    axes.plot(budgets, [1 + row["bound"] for row in planned], "--", color="grey", label="least possible (predicted)")
    axes.plot(budgets, [1 + row["overhead"] for row in planned], ":", color="tab:blue", label="fullbatch (predicted)")
    ran = [row for row in planned if "time" in row]
    axes.plot(
        [100 * row["peak_share"] for row in ran], [row["time"] for row in ran], "o-", color="tab:blue",
        label="fullbatch (measured)",
    )  # fmt: skip


def _peers(axes: Axes, rows: list[dict[str, Any]]) -> None:
    for number, peer in enumerate(MARKS):
        mine = [row for row in rows if row["peer"] == peer]
        if mine:
            axes.plot(
                [100 * row["peak_share"] for row in mine], [row["time"] for row in mine], MARKS[peer],
                color=f"C{number + 1}", label=peer,
            )  # fmt: skip


if __name__ == "__main__":
    main()
