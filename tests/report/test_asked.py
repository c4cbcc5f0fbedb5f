"""Code that asks whether it is being compiled is told yes while it is captured; the plan says so before it runs.

transformers' PaliGemma computes another loss then, under `torch.compile` too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fullbatch


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if torch.compiler.is_compiling() else x


def _also_doubled(x: torch.Tensor) -> torch.Tensor:
    from torch.compiler import is_compiling

    return x * 2 if is_compiling() else x


@pytest.mark.parametrize("asks", [_doubled, _also_doubled])
def test_the_plan_names_who_asks(asks: Any) -> None:
    model, batch = nn.Linear(4, 2), torch.randn(6, 4)
    step = fullbatch.Step(lambda model, batch: asks(model(batch)).square().mean(), model, batch, microbatch=2)
    (note,) = [note for note in step.plan.notes if "being compiled" in note]
    assert f"{asks.__name__} (test_asked.py:{asks.__code__.co_firstlineno})" in note
    loss = step(batch)
    torch.testing.assert_close(loss, 4 * model(batch).square().mean().detach())
    assert not step.verify(batch).ok, "as the note says, it is another step"


def test_a_step_that_does_not_ask_has_no_such_note() -> None:
    model, batch = nn.Linear(4, 2), torch.randn(6, 4)
    step = fullbatch.Step(lambda model, batch: model(batch).square().mean(), model, batch, microbatch=2)
    assert not any("being compiled" in note for note in step.plan.notes)
