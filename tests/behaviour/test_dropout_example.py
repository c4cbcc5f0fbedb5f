"""The example of random layers: much is run again, a seed gives one step, and verify compares on the masks drawn."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "dropout.py"


def test_recomputed_masks_are_those_that_were_drawn() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    out = done.stdout
    sizes = re.search(r"(\d+) microbatches, ([\d,]+) bytes, plain ([\d,]+)", out)
    assert sizes is not None and int(sizes[1]) > 1
    assert int(sizes[2].replace(",", "")) <= 0.5 * int(sizes[3].replace(",", ""))
    again = re.search(r"operators run again: (\d+), with more memory: (\d+)", out)
    assert again is not None and int(again[1]) > 0 == int(again[2])
    assert "same seed, same gradient: True" in out
    # A recompute that drew a mask again would have another gradient than the step that recomputes nothing.
    assert "same seed, with more memory: True" in out
    assert "another seed, same gradient: False" in out
    assert "certificate: the same gradient" in out
    assert "compared on the masks that the planned step drew" in out
    losses = re.search(r"^loss ([\d.]+) -> ([\d.]+)", out, re.MULTILINE)
    assert losses is not None and float(losses[2]) < 0.3 * float(losses[1])
    assert "refused: loss_fn draws random numbers from NumPy (numpy.random)" in out
    assert "refused: loss_fn draws random numbers from a torch.Generator of its own" in out
    assert "torch.rand(shape, generator=g)" in out
