"""Torch that is found through a link is torch all the same, and the line that is named is the user's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

import fullbatch

_USERS = """
import random
import torch, fullbatch

def drawn(model, batch):
    return model(batch).square().mean() * random.SystemRandom().random()

def rounded(model, batch):
    return model(batch.to(torch.float8_e4m3fn).float()).square().sum(), len(batch)

assert "linked" in torch.__file__ and "linked" in fullbatch.__file__
for make in (
    lambda model, batch: fullbatch.Step(drawn, model, batch),
    lambda model, batch: fullbatch.eager.Step(rounded, model, batch)(batch),
):
    try:
        make(torch.nn.Linear(4, 4), torch.randn(8, 4))
    except fullbatch.FullbatchError as error:
        print(error.faults[0].got)
    else:
        print("nothing was refused")
"""


def test_the_users_line_is_named(tmp_path: Path) -> None:
    folders = {Path(torch.__file__).parents[1], Path(fullbatch.__file__).parents[1]}
    links = []
    for at, folder in enumerate(sorted(folders)):
        link = tmp_path / f"linked{at}"
        link.symlink_to(folder.resolve(), target_is_directory=True)
        links.append(str(link))
    script = tmp_path / "of_the_user.py"
    script.write_text(_USERS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(links), "FULLBATCH_CACHE": "off"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "of_the_user.py:6 in drawn" in done.stdout
    assert "of_the_user.py:9 in rounded" in done.stdout
