"""LARS and the AdamW of eight bits, each in half of the plain step's memory, with the losses of the plain loop."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "optimizers.py"
WITHOUT = (
    "import sys; sys.modules['torchao'] = None; sys.argv = [p, '--steps', '2']; runpy.run_path(p, run_name='__main__')"
)


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_both_optimizers_go_as_in_the_plain_loop() -> None:
    out = run(str(EXAMPLE))
    found = re.findall(
        r"(\w+): (\d+) microbatches, ([\d,]+) bytes, plain ([\d,]+)\n"
        r"  loss ([\d.]+) -> ([\d.]+), at most (\S+) from",
        out,
    )
    assert [name for name, *_ in found] == ["LARS", "AdamW8bit"], out
    for name, microbatches, ours, plain, first, last, apart in found:
        assert int(microbatches) > 1
        assert int(ours.replace(",", "")) <= int(plain.replace(",", "")) // 2
        assert float(last) < 0.5 * float(first)
        # A code of eight bits may fall to the other side of its boundary by one rounding.
        assert float(apart) < (1e-5 if name == "LARS" else 1e-2)


def test_without_torchao_it_says_what_to_install() -> None:
    out = run("-c", f"import runpy; p = {str(EXAMPLE)!r}; {WITHOUT}")
    assert "LARS:" in out
    assert "AdamW8bit needs torchao: pip install 'fullbatch[lowbit]'" in out
