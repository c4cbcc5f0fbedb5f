"""Prints results of run.py as the tables of the two READMEs.

python benchmarks/frontier/tables.py FILE [FILE ...] [--out results.json]

With --out the files are put together in one, the later one where two have the same model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LONG = (
    "step", "budget", "microbatch", "peak / plain", "time / plain", "operations", "overhead", "bound", "gap",
    "planned cold", "warm",
)  # fmt: skip
BUDGETS = (50, 25, 10)  # of the short table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    contents = [json.loads(path.read_text(encoding="utf-8")) for path in options.files]
    contents = [content for content in contents if content["kind"] == "frontier"]
    results = list({result["model"]: result for content in contents for result in content["results"]}.values())
    if options.out:
        options.out.write_text(json.dumps({**contents[0], "results": results}, indent=1) + "\n", encoding="utf-8")
    print("\n".join((*short(results), "", *long(results))))


def short(results: Sequence[dict[str, Any]]) -> list[str]:
    """A line a model: the time and the operations of the plain step at a few budgets."""
    lines = _head(("step", "batch", *(f"{budget} %: time" + ", operations" for budget in BUDGETS)))
    for result in results:
        rows = {row["budget"]: row for row in result["rows"]}
        cells = [_cell(rows.get(budget)) for budget in BUDGETS]
        lines.append(_line([f"`{result['model']}`", str(result["batch"]), *cells]))
    return lines


def _cell(row: dict[str, Any] | None) -> str:
    if row is None or ("least" not in row and "time" not in row):
        return ""
    if "least" in row:
        return f"least {row['least']:.1%}"
    return f"{row['time']:.2f}, {row['operations']:.3f}"


def long(results: Sequence[dict[str, Any]]) -> list[str]:
    """A line a model and budget, with all columns."""
    lines = _head(LONG)
    for result in results:
        name = f"`{result['model']}`"
        for row in result["rows"]:
            budget = f"{row['budget']:g} %"
            if "least" in row:
                lines.append(
                    _line([name, budget, f"least {row['least']:.1%}", *["-"] * 6, f"{row['cold']:.1f} s", "-"])
                )
            elif "time" in row:
                lines.append(_line([name, budget, *_measured(row)]))
    return lines


def _measured(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['microbatch']} x {row['microbatches']}", f"{row['peak_share']:.1%}", f"{row['time']:.2f}",
        f"{row['operations']:.3f}", f"+{row['overhead']:.1%}", f"+{row['bound']:.1%}", f"{row['gap']:.1%}",
        f"{row['cold']:.1f} s", f"{row['warm']:.1f} s",
    ]  # fmt: skip


def _head(columns: Sequence[str]) -> list[str]:
    return [_line(columns), "|" + "---|" * len(columns)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
