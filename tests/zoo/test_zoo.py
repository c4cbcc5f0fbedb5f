"""Models of transformers that nobody here wrote are exact in float64, or refused by the name that they were refused by.

`results.json` holds what `python -m zoo.run` found. A model that was exact must stay exact. One that was refused may be
exact now, but must never differ from plain PyTorch, nor end in an exception that is no FullbatchError.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .compare import LIMIT
from .models import LORA
from .table import DOCS, RESULTS, counted, elsewhere, markdown

# Text, vision with BatchNorm, sound, two towers, image in text, encoder-decoder, experts, state space, time, LoRA.
FEW = ("bert", "clip", "gpt-sw3", "llava", "mamba", "mixtral", "patchtst", "resnet", "swinv2", "t5", "wav2vec2", LORA)


TESTS = Path(__file__).resolve().parents[1]


def _expected() -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text())
    return results


def _run(names: list[str], jobs: int, out: Path) -> dict[str, dict[str, Any]]:
    """In a process of its own: it reads the source of transformers in another way, and forks."""
    command = [sys.executable, "-m", "zoo.run", "--jobs", str(jobs), "--out", str(out), "--names", *names]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, Any]] = json.loads(out.read_text())
    return found


def _check(names: list[str], jobs: int, out: Path) -> None:
    expected = _expected()
    wrong = []
    for name, found in _run(names, jobs, out).items():
        was = expected[name]["kind"]
        exact = found["kind"] in ("exact", "random") and found["error"] <= LIMIT
        refused = found["kind"] == "refused" and was == "refused"
        if not exact and not refused and not (found["kind"] == was == "too slow"):
            wrong.append(
                f"{name}: was {was}, now {found['kind']}: {found.get('error')} {found.get('detail', '')[:500]}"
            )
    assert not wrong, "\n".join(wrong)


def test_a_few_are_exact(tmp_path: Path) -> None:
    assert all(_expected()[name]["kind"] == "exact" for name in FEW)
    _check(list(FEW), 1, tmp_path / "few.json")


@pytest.mark.slow
def test_all_are_exact_or_refused_as_before(tmp_path: Path) -> None:
    _check([outcome["name"] for outcome in counted(_expected().values())], 2, tmp_path / "all.json")


def test_nothing_differs_and_nineteen_in_twenty_are_exact() -> None:
    models = counted(_expected().values())
    exact = [outcome for outcome in models if outcome["kind"] in ("exact", "random")]
    wrong = [outcome["name"] for outcome in models if outcome["kind"] in ("different", "crashed")]
    assert not wrong
    assert all(outcome["error"] <= LIMIT for outcome in exact)
    assert len(exact) >= 300 and len(exact) >= 0.95 * len(models)


def test_the_table_says_what_was_found() -> None:
    """docs/zoo.md is generated: the counts in it are those of the results (versions may be others here)."""
    written = DOCS.read_text().splitlines()
    generated = markdown(_expected()).splitlines()
    assert [line for line in written if line.startswith("|")] == [line for line in generated if line.startswith("|")]


def test_what_is_not_counted_and_is_tested_elsewhere_is_said_so() -> None:
    names = elsewhere(_expected())
    assert {"conditional_detr", "dab-detr", "deformable_detr", "detr", "table-transformer"} <= {*names}
    paragraph = next(part for part in DOCS.read_text().split("\n\n") if "are not counted" in part)
    assert all(f"`{name}`" in paragraph for name in names)
    assert "(zoo-vision.md)" in paragraph
