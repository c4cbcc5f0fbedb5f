"""The example of the largest batch runs as a user starts it, and takes a step that plain PyTorch could not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "largest_batch.py"


@pytest.mark.slow
def test_the_example() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--memory", "4MB"], capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(r"a step of (\d+) images: loss ([\d.]+), plain PyTorch can have (\d+)", done.stdout)
    assert found is not None, done.stdout
    assert int(found[1]) >= 3 * int(found[3])
    assert 1 < float(found[2]) < 5
    sizes = re.findall(r"│ (plain PyTorch|fullbatch)\s*│\s*(\d+) │", done.stdout)
    assert [name for name, _ in sizes] == ["plain PyTorch", "fullbatch"] * 2
    assert int(sizes[3][1]) > int(sizes[2][1])  # the image's side
