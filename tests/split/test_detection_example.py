"""The example runs as it stands, splits the batch, is exact, and learns."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

_EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "detection.py"


def test_the_example_runs_and_learns() -> None:
    done = subprocess.run([sys.executable, str(_EXAMPLE)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("certificate: the same gradient") == 2  # of the pair, and of the split that is found
    assert re.search(r"found: loss_fn cannot be captured whole .*: the call model\(\.\.\.\) is captured", done.stdout)
    split = re.search(r"found: (\d+) microbatches, loss ([\d.]+), plain ([\d.]+)", done.stdout)
    assert split is not None and int(split[1]) > 1
    assert abs(float(split[2]) - float(split[3])) <= 1e-5 * float(split[3])
    assert re.search(r"microbatch +│ (\d+) samples x \d+", done.stdout)
    found = re.search(r"pixels off: ([\d.]+) at first, ([\d.]+) in the last", done.stdout)
    assert found is not None
    first, last = float(found[1]), float(found[2])
    assert last < 0.6 * first
