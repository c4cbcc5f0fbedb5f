"""Each example is run by a test: what it shows is so."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
EXAMPLES = sorted(path.stem for path in (TESTS.parent / "examples").glob("*.py"))
RUNNERS = sorted(TESTS.glob("*/test_*example*.py"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_has_a_test_that_runs_it(name: str) -> None:
    texts = [path.read_text() for path in RUNNERS]
    assert any(f'"{name}.py"' in text or f'_load("{name}")' in text or f"examples.{name}" in text for text in texts)
