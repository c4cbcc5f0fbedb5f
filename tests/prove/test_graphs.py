"""Every value of every case, split in microbatches of three, against the same value on the whole batch.

Twice: as a step is built, and with every whole value cut again wherever an operator allows it, however small; of the
latter the gradients are compared with plain PyTorch too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cases import GROUPS, Case, all_cases
from cases.reference import collect, compare, plain
from fullbatch._axis._node import Strategy
from fullbatch._axis._rules import RULES
from prove.harness import ProvedStep

# What cannot be captured is refused, which tests/exact asserts.
CASES = [
    pytest.param(case, id=f"{group}-{case.name}")
    for group in GROUPS
    for case in all_cases(group)
    if "dynamo-no" not in case.tags
]


@pytest.fixture(autouse=True)
def _light() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()


@pytest.mark.parametrize("case", CASES)
def test_every_value(case: Case) -> None:
    loss_fn, model, batch = case.build()
    reference = plain(loss_fn, model, batch)
    fresh = copy.deepcopy(model)
    step = ProvedStep(loss_fn, fresh, batch, tolerance=max(1e-9, case.tolerance))
    out = step(copy.deepcopy(batch))
    assert step.programs == 2
    assert not step.found, "\n".join(step.found[:10])
    errors = compare(collect(out, fresh), reference)
    assert errors.within(case.tolerance), errors


def test_a_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof is worth something: a softmax over the batch that is called local is named where it stands."""

    def local(view: Any) -> Any:
        source = view.operands[0]
        return source.layout and Strategy({0: source.layout}, (source.layout,))

    monkeypatch.setitem(RULES._rules, "aten._softmax", local)
    model = torch.nn.Linear(3, 2, dtype=torch.float64)
    batch = torch.randn(7, 3, dtype=torch.float64)
    step = ProvedStep(lambda model, x: model(x).softmax(0).square().sum(), model, batch)
    step(batch)
    assert any("softmax" in line for line in step.found)
