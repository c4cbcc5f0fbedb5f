"""The example of a long vocabulary runs as a user starts it: the loss of the whole logits, in a part of the memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "long_vocabulary.py"


def test_the_example() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--steps", "4"], capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    runs = dict(re.findall(r"(whole|sliced): loss [\d.]+, ([\d,]+) bytes", done.stdout))
    losses = re.findall(r"(?:whole|sliced): loss ([\d.]+)", done.stdout)
    assert abs(float(losses[0]) - float(losses[1])) <= 2e-6
    whole, sliced = (int(runs[name].replace(",", "")) for name in ("whole", "sliced"))
    assert 5 * sliced <= whole
    trained = re.search(r"planned: loss ([\d.]+) -> ([\d.]+), ([\d,]+) bytes", done.stdout)
    assert trained is not None
    assert float(trained[2]) < float(trained[1]) - 0.2
    assert 4 * int(trained[3].replace(",", "")) <= whole
    half = re.search(r"bfloat16: ([\d.]+) in float64, sliced ([\d.]+), whole ([\d.]+)", done.stdout)
    assert half is not None
    truth, ours, plain = (float(value) for value in half.groups())
    assert abs(ours - truth) <= 1e-5 < 1e-3 < abs(plain - truth)
