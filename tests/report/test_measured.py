"""What README and the benchmark's page say was measured is what the benchmark wrote."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FRONTIER = ROOT / "benchmarks" / "frontier"
REACH = ROOT / "benchmarks" / "reach"


def _rows() -> list[dict[str, Any]]:
    results = json.loads((FRONTIER / "results.json").read_text(encoding="utf-8"))["results"]
    return [row for result in results for row in result["rows"] if "time" in row]


def _lines(path: Path) -> set[str]:
    return {line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("| `")}


def test_the_tables_are_those_of_the_results() -> None:
    files = [str(FRONTIER / name) for name in ("results.json", "peers.json")]
    command = [sys.executable, str(FRONTIER / "tables.py"), *files]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    short, long, peers = (
        {line for line in part.splitlines() if line.startswith("| `")} for part in printed.split("\n\n")
    )
    assert min(len(short), len(long), len(peers)) > 3
    assert short <= _lines(ROOT / "README.md")
    page = _lines(FRONTIER / "README.md")
    assert long | peers <= page
    names = tuple(line.split(" | ")[0] + " | " for line in short)
    assert {line for line in page if line.startswith(names)} == long | peers, "and no line of another run"


def test_every_budget_was_kept_as_predicted_with_the_same_bits() -> None:
    rows = _rows()
    assert len(rows) > 10
    assert all(100 * row["peak_share"] <= row["budget"] for row in rows)
    assert all(row["prediction_error"] == pytest.approx(0, abs=0.01) for row in rows)
    assert not [row for row in rows if row["same_bits"] is False]


def test_the_reach_is_that_of_its_results() -> None:
    results = json.loads((REACH / "results.json").read_text(encoding="utf-8"))["results"]
    command = [sys.executable, str(REACH / "table.py"), str(REACH / "results.json")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = {line for line in printed.splitlines() if line.startswith("| `")}
    assert len(lines) == len(results) >= 5
    assert lines == _lines(REACH / "README.md")
    assert lines <= _lines(ROOT / "README.md")
    for result in results:
        ours = next(row for row in result["rows"] if row["way"] == "fullbatch")
        assert ours["peak"] <= result["cap"] and ours["slower"] <= result["slowest"], result["model"]
