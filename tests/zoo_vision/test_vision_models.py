"""Every model of the zoo of vision again, against plain PyTorch: `make test-all` installs the packages, aside."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zoo.compare import LIMIT
from zoo.table import counted

from .packages import HERE
from .table import results


@pytest.mark.slow
def test_all_are_exact_or_refused_as_before(tmp_path: Path) -> None:
    expected = results()
    names = [outcome["name"] for outcome in counted(expected.values())]
    wrong = [
        f"{name}: was {expected[name]['kind']}, now {found['kind']}: {found.get('error')} {found.get('detail')}"[:700]
        for name, found in _run(names, tmp_path / "all.json").items()
        if not _holds(expected[name]["kind"], found)
    ]
    assert not wrong, "\n".join(wrong)


def _holds(was: str, found: dict[str, Any]) -> bool:
    """One that was refused may be exact now; one that was exact must stay so."""
    exact = found["kind"] in ("exact", "random") and found["error"] <= LIMIT
    return exact or found["kind"] == was in ("refused", "too slow")


def _run(names: list[str], out: Path) -> dict[str, dict[str, Any]]:
    """In a process of its own: it reads the source of the packages in another way, and forks."""
    options = ["--jobs", "1", "--limit", "500", "--out", str(out)]  # one takes 200 seconds
    command = [sys.executable, "-m", "zoo_vision.run", *options, "--names", *names]
    done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, Any]] = json.loads(out.read_text())
    assert sorted(found) == sorted(names)
    return found
