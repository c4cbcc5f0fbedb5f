"""YOLOv8 with the task-aligned assigner of `ultralytics`, on photographs, exact to 1e-9 (`make test-all`; aside)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from split.aside import ASIDE


@pytest.mark.slow
def test_the_task_aligned_assigner_of_ultralytics(tmp_path: Path) -> None:
    script = Path(__file__).parent / "yolo.py"
    paths = os.pathsep.join([str(script.parent.parent), str(ASIDE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=1800,
        env={**os.environ, "PYTHONPATH": paths, "YOLO_CONFIG_DIR": str(tmp_path), "YOLO_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "6 photographs, 27 boxes" in done.stdout
    found = re.findall(r"\} (\d+) mismatches, error ([\d.e+-]+|nan), recomputed (\d+)", done.stdout)
    assert len(found) == 5, done.stdout
    for mismatches, error, _ in found:
        assert mismatches == "0" and float(error) <= 1e-9, done.stdout
    assert int(found[-1][2]) > 0  # at the least budget
