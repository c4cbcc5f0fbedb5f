"""Costs from one process to the next."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fullbatch
from fullbatch._cost import _cache

HERE = Path(__file__).parent


def in_a_process(cache: Path | str, **variables: str) -> Any:
    done = subprocess.run(
        [sys.executable, str(HERE / "one_process.py")], capture_output=True, text=True, check=True,
        env={**os.environ, "FULLBATCH_CACHE": str(cache), **variables},
    )  # fmt: skip
    return json.loads(done.stdout)


def test_another_process_finds_the_same_bytes_and_runs_nothing(tmp_path: Path) -> None:
    first = in_a_process(tmp_path, PYTHONHASHSEED="1")
    second = in_a_process(tmp_path, PYTHONHASHSEED="2")
    assert first["sessions"] > 0
    assert second["sessions"] == 0
    assert second["found"] == first["found"]
    assert second["keys"] == first["keys"]
    assert first["warnings"] == second["warnings"] == []


_WRITER = """
import importlib.util, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("cache", sys.argv[1])
cache = importlib.util.module_from_spec(spec)
sys.modules["cache"] = cache
spec.loader.exec_module(cache)
for at in range(40):
    file = cache.CostFile(Path(sys.argv[2]))
    file.put(f"{sys.argv[3]} {at}", [at, sys.argv[3] * 200])
    file.flush()
"""


def test_writers_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    path, source = tmp_path / _cache.NAME, Path(fullbatch.__file__).parent / "_cost" / "_cache.py"
    names = ["a", "b", "c", "d"]
    writers = [
        subprocess.Popen([sys.executable, "-W", "error", "-c", _WRITER, str(source), str(path), name]) for name in names
    ]
    reads = 0
    while any(writer.poll() is None for writer in writers):
        if path.exists():  # a reader sees a whole file at any time
            assert json.loads(path.read_text())["version"] == _cache.VERSION
            reads += 1
    assert [writer.returncode for writer in writers] == [0, 0, 0, 0]
    assert reads > 0
    file = _cache.CostFile(path)
    assert all(file.get(f"{name} {at}") == [at, name * 200] for name in names for at in range(40))
    assert sorted(item.name for item in tmp_path.iterdir()) == [path.name, path.with_suffix(".lock").name]
