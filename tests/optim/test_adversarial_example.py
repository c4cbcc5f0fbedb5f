"""Two networks with two optimizers, clipping, groups and an average of weights end where the plain loop ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "adversarial.py"


def test_the_game_is_that_of_the_plain_loop() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    steps = re.findall(r"(\w+): (\d+) microbatches, ([\d,]+) bytes, plain ([\d,]+)", done.stdout)
    assert [name for name, *_ in steps] == ["judged", "fooled"]
    for _, microbatches, ours, plain in steps:
        assert int(microbatches) > 1
        assert int(ours.replace(",", "")) <= 0.6 * int(plain.replace(",", ""))
    apart = re.search(r"losses at most (\S+) apart, averaged weights (\S+)", done.stdout)
    assert apart is not None and float(apart[1]) < 1e-9 and float(apart[2]) < 1e-9
    radius = re.search(r"points: ([\d.]+) at first, ([\d.]+) now", done.stdout)
    assert radius is not None and abs(float(radius[2]) - 1) < 0.5 * abs(float(radius[1]) - 1)
