"""The benchmarks run end to end on a tiny model, and what they write is what they claim to measure.

Each is a process of its own, as a user starts it, and one test: so that no two test processes run the same one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2] / "benchmarks"
TINY = ["--size", "tiny", "--threads", "1", "--repeats", "1"]


def _run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / script), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _result(script: str, out: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    printed = _run(script, "vit", *arguments, *TINY, "--out", str(out))
    written = json.loads(out.read_text(encoding="utf-8"))
    assert (written["threads"], written["size"]) == (1, "tiny")
    [result] = written["results"]
    assert result["model"] == "vit"
    return result, printed


def _check_plot(results: Path) -> None:
    picture = results.with_suffix(".png")
    _run("frontier/plot.py", str(results), "--out", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000


def test_frontier_has_a_row_for_each_budget(tmp_path: Path) -> None:
    out = tmp_path / "frontier.json"
    result, printed = _result("frontier/run.py", out, "--budgets", "130", "120", "75", "30", "1")
    planned = [row for row in result["rows"] if "least" not in row]
    assert [row["budget"] for row in planned] == [130, 120, 75, 30]
    for row in planned:
        assert result["owned"] + row["peak"] <= row["predicted_peak"] <= row["budget_bytes"]
        assert row["activations"] == row["predicted_peak"] - result["owned"]
        assert 0 <= row["prediction_error"] <= 0.02
        assert row["bound"] <= row["overhead"]
        assert min(row["time"], row["cold"], row["warm"]) > 0
    # Nothing is recomputed where there is room, and what is recomputed is counted.
    assert result["operations"] > 0
    assert planned[0]["operations"] == pytest.approx(1, abs=1e-3)
    assert all(0.999 <= row["operations"] < 3 for row in planned)
    # Gradients are compared to the bit with those of the first row of the same microbatch.
    sizes = [row["microbatch"] for row in planned]
    assert [row["same_bits"] for row in planned] == [True if n in sizes[:at] else None for at, n in enumerate(sizes)]
    assert sizes[0] == sizes[1] == result["batch"]
    [impossible] = [row for row in result["rows"] if row["budget"] == 1]
    assert 0.01 < impossible["least"] < 1
    assert f"least {impossible['least']:.1%}" in printed
    _check_plot(out)


def test_peers_are_exact_and_a_plan_takes_no_more_than_the_peer(tmp_path: Path) -> None:
    out = tmp_path / "peers.json"
    result, printed = _result("frontier/peers.py", out, "--backend", "aot_eager_decomp_partition")
    peers = [row["peer"] for row in result["rows"]]
    assert peers == ["checkpoint", "checkpoint_sequential", *["compile"] * 5, *["accumulation"] * 2]
    rows = dict(zip(peers, result["rows"], strict=True))
    assert all(rows[name]["peak"] < result["plain_peak"] for name in peers if name != "compile")
    assert all(0 <= row["gradient_off"] < 1e-4 for row in result["rows"])
    assert rows["checkpoint"]["gradient_off"] == 0
    assert rows["accumulation"]["setting"] == "4 microbatches"
    compared = [row for row in result["rows"] if "least" not in row]
    assert len(compared) > 5
    for row in compared:
        assert row["ours_peak"] <= row["peak"]
        assert min(row["time"], row["ours_time"], row["ours_over_peer"]) > 0
    assert all(name in printed for name in peers)
    _check_plot(out)


def test_reach_finds_the_largest_batches_within_the_cap(tmp_path: Path) -> None:
    result, printed = _result(
        "reach/run.py", tmp_path / "reach.json", "--most", "12", "--fits", "2", "--slowest", "1000"
    )
    rows = {row["way"]: row for row in result["rows"]}
    assert list(rows) == ["plain", "checkpoint", "accumulation", "fullbatch"]
    assert (rows["plain"]["batch"], rows["plain"]["failed"]) == (2, 3)
    assert all(row["peak"] <= result["cap"] and row["slower"] > 0 for row in rows.values())
    assert 2 <= rows["checkpoint"]["batch"] < rows["checkpoint"]["failed"] <= 12
    assert "memory: " in rows["checkpoint"]["bound"]
    assert 2 < rows["fullbatch"]["batch"] <= 12
    assert 2 < rows["accumulation"]["batch"] <= 12
    assert "what bounds it" in printed


def test_planning_times_networks_of_each_depth(tmp_path: Path) -> None:
    out, picture = tmp_path / "planning.json", tmp_path / "planning.png"
    printed = _run(
        "planning/run.py", "gpt2", "--deepest", "12", "--threads", "1", "--out", str(out), "--plot", str(picture)
    )
    rows = json.loads(out.read_text(encoding="utf-8"))
    assert [(row["network"], row["depth"]) for row in rows] == [("gpt2", 6), ("gpt2", 12)]
    assert rows[1]["operators"] > 1.5 * rows[0]["operators"], "layers have most of the operators"
    assert all(min(row["cold"], row["capture"], row["warm"]) > 0 for row in rows)
    assert all(0 <= row["bound"] <= row["overhead"] < 1 for row in rows)
    assert "capture s" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_an_unknown_model_is_named() -> None:
    command = [sys.executable, str(ROOT / "frontier/run.py"), "resnet5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no model resnet5; there are resnet50, yolo" in done.stderr
