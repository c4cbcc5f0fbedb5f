"""What was found in models of vision that nobody here wrote: exact, or refused by a name that the page explains."""

from __future__ import annotations

from collections import Counter

from zoo.compare import LIMIT
from zoo.table import counted, kind_of, markdown

from .table import DOCS, page, results


def test_nothing_differs_and_nearly_all_are_exact() -> None:
    models = counted(results().values())
    exact = [outcome for outcome in models if outcome["kind"] in ("exact", "random")]
    assert [outcome["name"] for outcome in models if outcome["kind"] in ("different", "crashed")] == []
    assert all(outcome["error"] <= LIMIT for outcome in exact)
    assert len(exact) >= 0.95 * len(models)


def test_each_package_is_there_with_barriers() -> None:
    """BatchNorm in train mode is what is tested here: most models meet more than once a step."""
    models = [outcome for outcome in counted(results().values()) if outcome["kind"] in ("exact", "random")]
    packages = Counter(outcome["name"].split("/")[0] for outcome in models)
    least = {
        "timm": 170, "torchvision": 40, "segmentation_models_pytorch": 38, "monai": 44, "ultralytics": 38,
        "transformers": 18,
    }  # fmt: skip
    assert all(packages[name] >= count for name, count in least.items()), packages
    assert sum(outcome["stages"] > 5 for outcome in models) >= 0.5 * len(models)


def test_the_page_says_what_was_found() -> None:
    """docs/zoo-vision.md is generated, and every refusal is in it by its kind (versions may be others here)."""
    written = DOCS.read_text().splitlines()
    generated = markdown(results(), page()).splitlines()
    assert [line for line in written if line.startswith("|")] == [line for line in generated if line.startswith("|")]
    for outcome in results().values():
        if outcome["kind"] == "refused":
            kind, why = kind_of(outcome)
            assert any(line.startswith(f"| {kind} | {why} |") and outcome["name"] in line for line in written)
