"""Prints results of run.py and peers.py as the tables of the two READMEs.

python benchmarks/frontier/tables.py FILE [FILE ...] [--out results.json]

The files are put together, the later row where two are of the same model and budget, or remedy and setting; --out
writes one file of them (of one kind).
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
PEERS = (
    "step", "remedy", "setting", "its peak", "its time", "gradient off", "fullbatch: peak", "time",
    "fullbatch / remedy",
)  # fmt: skip
BUDGETS = (50, 25, 10)  # of the short table
ROW = {"frontier": ("budget",), "peers": ("peer", "setting")}
"""What a row is of, by kind of file. The rows of another kind (`reach`) belong together."""


def main() -> None:
    contents, out = read(__doc__)
    frontier, others = (together(contents, kind) for kind in ("frontier", "peers"))
    write(out, contents, frontier or others)
    print("\n\n".join("\n".join(table) for table in (short(frontier), long(frontier), peers(others))))


def read(words: str | None) -> tuple[list[dict[str, Any]], Path | None]:
    """What the files on the command line hold, and where --out says; `words` are the program's help."""
    parser = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    return [json.loads(path.read_text(encoding="utf-8")) for path in options.files], options.out


def write(out: Path | None, contents: Sequence[dict[str, Any]], results: Sequence[dict[str, Any]]) -> None:
    """One file of `results`, as the first of `contents` says they were made; none without a path."""
    if out is not None:
        out.write_text(json.dumps({**contents[0], "results": results}, indent=1) + "\n", encoding="utf-8")


def together(contents: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The results of all files of one kind, one for each model (and cap, of a reach), in the order first met."""
    found: dict[tuple[str, int | None], dict[str, Any]] = {}
    for file in contents:
        for result in file["results"] if file["kind"] == kind else ():
            key = result["model"], result.get("cap")
            found[key] = _joined(found.get(key), result, ROW.get(kind))
    return list(found.values())


def _joined(before: dict[str, Any] | None, result: dict[str, Any], row: tuple[str, ...] | None) -> dict[str, Any]:
    """`result`, with the rows of `before` that it does not have, where these stand for themselves."""
    if before is None or row is None:
        return result
    rows = {tuple(one[name] for name in row): one for one in (*before["rows"], *result["rows"])}
    return {**result, "rows": sorted(rows.values(), key=lambda one: -one.get("budget", 0))}  # remedies stay in order


def short(results: Sequence[dict[str, Any]]) -> list[str]:
    """A line a model: the time and the operations of the plain step at a few budgets."""
    lines = head(("step", "batch", *(f"{budget} %: time" + ", operations" for budget in BUDGETS)))
    for result in results:
        rows = {row["budget"]: row for row in result["rows"]}
        cells = [_cell(rows.get(budget)) for budget in BUDGETS]
        lines.append(line([f"`{result['model']}`", str(result["batch"]), *cells]))
    return lines


def _cell(row: dict[str, Any] | None) -> str:
    if row is None or ("least" not in row and "time" not in row):
        return ""
    if "least" in row:
        return f"least {row['least']:.1%}"
    return f"{row['time']:.2f}, {row['operations']:.3f}"


def long(results: Sequence[dict[str, Any]]) -> list[str]:
    """A line a model and budget, with all columns."""
    lines = head(LONG)
    for result in results:
        name = f"`{result['model']}`"
        for row in result["rows"]:
            budget = f"{row['budget']:g} %"
            if "least" in row:
                lines.append(line([name, budget, f"least {row['least']:.1%}", *["-"] * 6, f"{row['cold']:.1f} s", "-"]))
            elif "time" in row:
                lines.append(line([name, budget, *_measured(row)]))
    return lines


def _measured(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['microbatch']} x {row['microbatches']}", f"{row['peak_share']:.1%}", f"{row['time']:.2f}",
        f"{row['operations']:.3f}", f"+{row['overhead']:.1%}", f"+{row['bound']:.1%}", f"{row['gap']:.1%}",
        f"{row['cold']:.1f} s", f"{row['warm']:.1f} s",
    ]  # fmt: skip


def peers(results: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each point of each remedy."""
    lines = head(PEERS)
    for result in results:
        for row in result["rows"]:
            first = [
                f"`{result['model']}`",
                row["peer"],
                row["setting"],
                f"{row['peak_share']:.1%}",
                f"{row['time']:.2f}",
            ]
            ours = [f"least {row['least']:.1%}", "-", "-"] if "least" in row else [
                f"{row['ours_peak_share']:.1%}", f"{row['ours_time']:.2f}", f"{row['ours_over_peer']:.2f}"
            ]  # fmt: skip
            lines.append(line([*first, f"{row['gradient_off']:.0e}", *ours]))
    return lines


def head(columns: Sequence[str]) -> list[str]:
    """The first two lines of a table."""
    return [line(columns), "|" + "---|" * len(columns)]


def line(cells: Sequence[str]) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
