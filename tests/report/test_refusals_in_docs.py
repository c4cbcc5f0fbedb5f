"""The docs name each class of error, and each kind of refusal that the models of the zoo met."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fullbatch
from zoo.table import DOCS, RESULTS, kind_of

ERRORS = Path(__file__).resolve().parents[2] / "docs" / "errors.md"
CLASSES = [name for name in fullbatch.__all__ if name.endswith("Error") and name != "FullbatchError"]


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_of_error_has_a_row_that_says_when_and_what_to_do(name: str) -> None:
    (row,) = [line for line in ERRORS.read_text().splitlines() if line.startswith(f"| `{name}` |")]
    when, advice = (cell.strip() for cell in row.strip("|").split("|")[1:3])
    assert len(when) > 15
    assert advice == "see below" or len(advice) > 15


def test_each_refused_model_stands_under_its_kind() -> None:
    refused = [outcome for outcome in json.loads(RESULTS.read_text()).values() if outcome["kind"] == "refused"]
    written = DOCS.read_text().splitlines()
    assert refused
    for outcome in refused:
        kind, why = kind_of(outcome)
        (row,) = [line for line in written if line.startswith(f"| {kind} | {why} |")]
        assert outcome["name"] in row.split("|")[3]


@pytest.mark.parametrize(
    "kind",
    [
        "torch.Generator", "os.urandom", "secrets", "uuid", "torch.seed", "fork_rng", "random.uniform",
        "random.randint", "random.randrange", "multilabel_margin_loss", "share memory", "as_strided",
        "backward of the step cannot be traced", "sparse", "returns no gradient", "TorchDispatchMode",
    ],
)  # fmt: skip
def test_a_kind_of_refusal_is_named(kind: str) -> None:
    assert kind in ERRORS.read_text()
