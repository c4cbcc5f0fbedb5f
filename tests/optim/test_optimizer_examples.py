"""Each example runs, and does what it says."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples"


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"examples_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # TorchDynamo imports the module of what it captures
    spec.loader.exec_module(module)
    return module


def test_large_batch_learns_within_half_of_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert _load("large_batch").train() > 0.9
    assert "same mathematics" in capsys.readouterr().out


def test_second_order_gets_far_in_few_steps() -> None:
    losses = _load("second_order").train()
    assert all(after < before for before, after in zip(losses, losses[1:], strict=False))
    assert losses[-1] < 0.05 * losses[0]


def test_resume_ends_with_the_same_bits() -> None:
    assert _load("resume").compare()
