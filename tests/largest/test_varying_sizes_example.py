"""The example of texts of any length: shapes are prepared, one beyond them planned anew, all as in plain PyTorch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "varying_sizes.py"


def test_all_shapes_are_exact_within_half_of_the_memory() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    out = done.stdout
    title = re.search(r"prepared: 16 batches in (\d+) shapes", out)
    widths = {int(width) for width in re.findall(r"batch 32x(\d+) int64", out)}
    assert title is not None and int(title[1]) == len(widths) > 3
    assert re.search(r"│ +(?!32 )\d+ of 32 │", out), "none is split"
    worst = re.search(r"the worst takes ([\d,]+) bytes, plain ([\d,]+)", out)
    beyond = re.search(r"width (\d+) was planned anew: microbatch (\d+), ([\d,]+) bytes", out)
    assert worst is not None and beyond is not None
    budget = int(worst[2].replace(",", "")) // 2
    assert int(worst[1].replace(",", "")) <= budget
    assert int(beyond[1]) > max(widths) and int(beyond[2]) < 32 and int(beyond[3].replace(",", "")) <= budget
    found = re.search(r"loss ([\d.]+) -> ([\d.]+); losses and gradients at most (\S+) from", out)
    assert found is not None
    assert float(found[2]) < 0.6 * float(found[1])
    assert float(found[3]) < 1e-9
