"""A small network captured once, and a process that knows no costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from .small_programs import Captured, Fresh, captured_convolutions


@pytest.fixture(scope="session")
def network() -> Captured:
    return captured_convolutions()


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fresh:
    return Fresh(monkeypatch, tmp_path / "cache")
