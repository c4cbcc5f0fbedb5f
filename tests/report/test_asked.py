"""Code that asks whether it is being compiled is told no, as in the plain step, wherever it can be captured so.

transformers' PaliGemma computes another loss where it is told yes, under `torch.compile` too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fullbatch
from cases.reference import collect, compare, plain
from fullbatch._folders import OURS


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if torch.compiler.is_compiling() else x


def _also_doubled(x: torch.Tensor) -> torch.Tensor:
    from torch.compiler import is_compiling

    return x * 2 if is_compiling() else x


def _compiling() -> bool:
    return torch.compiler.is_compiling()


def _checked(x: torch.Tensor) -> torch.Tensor:
    """A check that cannot be captured; what it computes is the same."""
    if not _compiling() and x.abs().sum() < 0:
        raise ValueError
    return x


def _checked_and_doubled(x: torch.Tensor) -> torch.Tensor:
    if not _compiling() and x.abs().sum() < 0:
        raise ValueError
    return x * 2 if _compiling() else x


def _another(x: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return x * 2
    if x.abs().sum() < 0:
        raise ValueError
    return x


def _step(asks: Any) -> tuple[fullbatch.Step, Any, nn.Module, torch.Tensor]:
    model, batch = nn.Linear(4, 2).double(), torch.randn(6, 4, dtype=torch.float64)

    def loss_fn(model: Any, batch: Any) -> Any:
        return asks(model(batch)).square().mean()

    return fullbatch.Step(loss_fn, model, batch, microbatch=2), loss_fn, model, batch


def _notes(step: fullbatch.Step) -> list[str]:
    return [note for note in step.plan.notes if "being compiled" in note]


@pytest.mark.parametrize("asks", [_doubled, _also_doubled, lambda x: _also_doubled(_doubled(x))])
def test_the_step_is_the_plain_one(asks: Any) -> None:
    step, loss_fn, model, batch = _step(asks)
    assert not _notes(step)
    reference = plain(loss_fn, model, batch)
    model.zero_grad()
    assert compare(collect(step(batch), model), reference).within(1e-10)


def test_only_code_that_cannot_be_captured_otherwise_is_told_yes() -> None:
    step, _, model, batch = _step(lambda x: _doubled(_checked(x)))
    (note,) = _notes(step)
    assert f"_compiling (test_asked.py:{_compiling.__code__.co_firstlineno})" in note
    assert f"for _checked (test_asked.py:{_checked.__code__.co_firstlineno})" in note
    assert "_doubled" not in note
    torch.testing.assert_close(step(batch), model(batch).square().mean().detach())
    assert step.verify(batch).ok


def test_where_it_then_computes_something_else_the_plan_says_so() -> None:
    step, _, model, batch = _step(_another)
    (note,) = _notes(step)
    assert f"_another (test_asked.py:{_another.__code__.co_firstlineno})" in note
    torch.testing.assert_close(step(batch), 4 * model(batch).square().mean().detach())
    assert not step.verify(batch).ok, "as the note says, it is another step"


def test_a_refusal_that_no_answer_changes_is_the_refusal() -> None:
    def refused(x: torch.Tensor) -> torch.Tensor:
        x = _doubled(_also_doubled(_checked(x)))
        return x[x > 0]

    model, batch = nn.Linear(4, 2), torch.randn(6, 4)
    pair = (lambda model, batch: refused(model(batch)).square().mean()), (lambda outputs, batch: outputs)
    with pytest.raises(fullbatch.CaptureError, match=r"replace x\[mask\]|depends on the data|data-dependent"):
        fullbatch.Step(pair, model, batch, microbatch=2)


def test_a_step_that_does_not_ask_has_no_such_note() -> None:
    assert not _notes(_step(lambda x: x)[0])


def test_code_of_torch_and_of_fullbatch_itself_is_answered_as_dynamo_answers() -> None:
    assert all(file.startswith(OURS) for file in (fullbatch.__file__, fullbatch.lr.__file__, torch.compiler.__file__))
    assert not __file__.startswith(OURS)
