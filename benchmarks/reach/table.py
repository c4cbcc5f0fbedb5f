"""Prints results of run.py as the table of the READMEs.

python benchmarks/reach/table.py FILE [FILE ...] [--out results.json]

The files are put together, the later one where two have the same model; --out writes one file of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WAYS = ("plain", "checkpoint", "accumulation", "fullbatch")
COLUMNS = ("step", "MB", *(f"{way}: batch" for way in WAYS), "fullbatch / plain", "seconds a sample", "bound by")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    contents = [json.loads(path.read_text(encoding="utf-8")) for path in options.files]
    results = {result["model"]: result for file in contents for result in file["results"]}
    if options.out:
        text = json.dumps({**contents[0], "results": list(results.values())}, indent=1)
        options.out.write_text(text + "\n", encoding="utf-8")
    print("\n".join(table(list(results.values()))))


def table(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line a model: the largest batch of each way."""
    lines = [_line(COLUMNS), "|" + "---|" * len(COLUMNS)]
    for result in results:
        rows = {row["way"]: row for row in result["rows"]}
        ours, plain = rows["fullbatch"], rows["plain"]
        lines.append(
            _line([
                f"`{result['model']}`", f"{result['cap'] / 1e6:,.0f}", *(_batch(rows.get(way)) for way in WAYS),
                f"{ours['batch'] / plain['batch']:.0f} x", f"{ours['slower']:.2f}", _bound(ours),
            ])
        )  # fmt: skip
    return lines


def _batch(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "another result"  # batch statistics or a loss over the batch: accumulation is not the same step
    return f"{row['batch']}" if "failed" in row else f"at least {row['batch']}"


def _bound(row: Mapping[str, Any]) -> str:
    if "failed" not in row:
        return "nothing that was tried"
    kind = "time" if row["bound"].startswith("time") else "memory"
    return f"{kind}, at {row['failed']}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
