"""The example of mixed precision runs as a user starts it, splits its batch, and ends where the plain loop ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "mixed_precision.py"


def test_the_example() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--steps", "8"], capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    runs = re.findall(
        r"((?:weights in )?)torch\.(\w+): (\d+) microbatches, ([\d,]+) bytes, plain ([\d,]+)", done.stdout
    )
    assert [run[:2] for run in runs] == [("", "bfloat16"), ("", "float16"), ("weights in ", "bfloat16")]
    for _, _, microbatches, ours, plain in runs:
        assert int(microbatches) > 1
        assert int(ours.replace(",", "")) <= 0.6 * int(plain.replace(",", ""))
    losses = re.findall(r"loss ([\d.]+) -> ([\d.]+), .* at most (\S+) apart", done.stdout)
    assert len(losses) == 3
    for first, last, apart in losses:
        assert float(last) < float(first) - 1
        assert float(apart) <= 5e-3
    assert done.stdout.count("certificate: the same gradient") == 3
