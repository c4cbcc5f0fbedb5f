"""The example of the proposals runs as a user starts it: what it takes of them fits, and is the same loss."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "proposals.py"


@pytest.mark.slow
def test_the_example() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--memory", "3.5MB"], capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("No plan fits the memory budget.")
    assert "memory=3500000)" in done.stdout.splitlines()[3]
    assert "the same mathematics, and fits: the loss without logits\n" in done.stdout
    rows = re.findall(r"│ ([\w ]+?) +│ +(yes|no) │.*│ +(yes|no) │", done.stdout)
    assert ("the loss without logits", "yes", "yes") in rows
    assert ("weights in bfloat16", "no", "yes") in rows
    assert ("autocast to bfloat16", "no", "no") in rows
    found = re.search(r"loss ([\d.]+) \(with logits ([\d.]+)\), ([\d,]+) of 3,500,000 bytes", done.stdout)
    assert found is not None, done.stdout
    assert abs(float(found[1]) - float(found[2])) < 2e-4
    assert int(found[3].replace(",", "")) <= 3_500_000
    assert "images of 32 x 32 fit: F.interpolate(batch[0], size=(32, 32))" in done.stdout
    smaller = re.search(r"loss [\d.]+, ([\d,]+) of 400,000 bytes, least before ([\d,]+)", done.stdout)
    assert smaller is not None, done.stdout
    now, before = (int(number.replace(",", "")) for number in smaller.groups())
    assert now <= 400_000 < before
