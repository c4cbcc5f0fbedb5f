"""Prints results of run.py as the table of the READMEs.

python benchmarks/reach/table.py FILE [FILE ...] [--out results.json]

The files are put together, the later one where two have the same model and cap; --out writes one file of them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "frontier"))

from tables import head, line, read, together, write

WAYS = ("plain", "checkpoint", "accumulation", "fullbatch")
COLUMNS = ("step", "MB", *(f"{way}: batch" for way in WAYS), "fullbatch / plain", "seconds a sample", "bound by")


def main() -> None:
    contents, out = read(__doc__)
    results = together(contents, "reach")
    write(out, contents, results)
    print("\n".join(table(results)))


def table(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line a model: the largest batch of each way."""
    lines = head(COLUMNS)
    for result in results:
        rows = {row["way"]: row for row in result["rows"]}
        ours, plain = rows["fullbatch"], rows["plain"]
        lines.append(
            line([
                f"`{result['model']}`", f"{result['cap'] / 1e6:,.0f}", *(_batch(rows.get(way)) for way in WAYS),
                f"{ours['batch'] / plain['batch']:.3g} x", f"{ours['slower']:.2f}", _bound(ours),
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


if __name__ == "__main__":
    main()
