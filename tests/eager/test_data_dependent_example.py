"""The example runs as it stands, in less memory than the whole batch takes, and learns."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "data_dependent.py"


def test_the_example_runs_and_learns() -> None:
    done = subprocess.run([sys.executable, str(_EXAMPLE)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "no certificate is given" in " ".join(done.stdout.split())
    first, last = (
        float(word)
        for word in done.stdout.rsplit("loss:", 1)[1].splitlines()[0].split()
        if word[0].isdigit() and "." in word
    )
    assert last < 0.5 * first
    assert "refused: blocks.2.1 (BatchNorm1d) uses statistics of the batch" in done.stdout
    assert "allowed: exact False, ('statistics of microbatches in blocks.2.1" in done.stdout.replace('"', "'")
