"""What a proposal says is what the user finds: each change is made by hand, predicted and measured."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import fullbatch
from fullbatch._propose._now import Proposal
from propose.proposed import BY_HAND, CASES, MEMORY


@cache
def _proposed(name: str) -> fullbatch.Proposals:
    return CASES[name]().propose(MEMORY[name])


def _row(name: str, what: str) -> Proposal:
    rows = {row.what: row for row in _proposed(name).rows}
    assert what in rows, list(rows)
    return rows[what]


@pytest.mark.parametrize(("name", "what"), BY_HAND, ids=str)
def test_the_bytes_of_a_proposal_are_those_of_the_step_after_it(name: str, what: str) -> None:
    row, found = _row(name, what), _proposed(name)
    changed = BY_HAND[name, what](CASES[name]())
    assert row.peak == changed.peak(found.microbatch)
    assert row.least == changed.least()
    assert (row.saved, row.saved_least) == (found.peak - row.peak, found.least - row.least)
    assert row.fits == (row.least <= found.budget)
    measured = changed.measured(found.microbatch)
    assert measured <= row.peak <= 1.02 * measured


@pytest.mark.parametrize("name", CASES)
def test_the_present_step_is_what_step_predicts(name: str) -> None:
    found, case = _proposed(name), CASES[name]()
    plan = case.step(memory=MEMORY[name]).plan
    assert (found.budget, found.microbatch) == (plan.budget, plan.microbatch)
    assert found.plan is not None
    assert found.plan.order == plan.order
    assert found.peak == case.peak(found.microbatch)
    assert found.planned == max(plan.predicted_peak, fullbatch.explain(*case.parts()).optimizer_peak) <= found.budget
    assert found.least == case.least()


@pytest.mark.parametrize("name", CASES)
def test_the_same_step_with_less_memory(name: str) -> None:
    """Lines for `Step` itself: what they say is the plan that they give, and a gradient that is the same."""
    found = _proposed(name)
    own = [row for row in found.rows if row.line.startswith(("memory=", "microbatch="))]
    for row in own:
        option, value = row.line.split("=")
        case = CASES[name]()
        step = case.step(**{option: int(value)})
        assert row.same
        assert row.peak == max(step.plan.predicted_peak, fullbatch.explain(*case.parts()).optimizer_peak)
        assert row.saved == found.planned - row.peak > 0
        assert row.time is not None
        assert row.time >= 1 or option == "microbatch"
    assert bool(own) == (name != "wide"), "its peak is the optimizer's"


@pytest.mark.parametrize("name", CASES)
def test_all_that_is_proposed_is_made_by_hand_here(name: str) -> None:
    rows = [row for row in _proposed(name).rows if not row.line.startswith(("memory=", "microbatch="))]
    unknown = {row.what for row in rows if row.peak is None}
    assert unknown == ({"optimizer state in 8 bits"} if name == "words" else set()), "torchao has no SGD"
    assert {row.what for row in rows} - unknown == {what for case, what in BY_HAND if case == name}


@pytest.mark.parametrize("name", CASES)
def test_what_changes_the_mathematics_is_said(name: str) -> None:
    rows = _proposed(name).rows
    same = {row.what for row in rows if row.same}
    assert same <= {
        "a smaller budget", "a smaller microbatch", "the loss without logits", "no gradients before the step",
        "optimizer.step() a tensor at a time", "optimizer.step() in one kernel",
    }  # fmt: skip
    assert [row.same for row in rows] == sorted((row.same for row in rows), reverse=True)


def test_the_table() -> None:
    text = str(_proposed("images"))
    for what in ("autocast to bfloat16", "optimizer state in 8 bits", "images of 16 x 16", "weights in bfloat16"):
        (line,) = [line for line in text.splitlines() if what in line]
        assert [cell.strip() for cell in line.split("│")][2] == "no"
    (line,) = [line for line in text.splitlines() if "a smaller budget" in line][:1]
    assert [cell.strip() for cell in line.split("│")][2] == "yes"
    joined = "".join(line.split("│")[1].strip() for line in text.splitlines() if line.count("│") > 3)
    assert "torchao.optim.AdamW8bit(model.parameters(), lr=0.0003, weight_decay=0.1)" in joined.replace(
        "(), lr", "(), lr"
    )
    assert "predicted" in text
    assert "refused: 15 x 15" in text
    assert "the present plan" in text


def test_the_line_of_a_vocabulary_names_the_weights() -> None:
    line = _row("words", "the loss without logits").line
    assert line == "fullbatch.linear_cross_entropy(hidden, model[2].weight, target, model[2].bias)"


def test_times_are_ratios_to_the_present_plan() -> None:
    assert _row("wide", "optimizer state in 8 bits").time == 1.0
    shorter = _row("words", "sequences of 16").time
    assert shorter is not None
    assert 0.3 < shorter < 1
    images = _row("images", "images of 10 x 10").time
    assert images is not None
    assert 0.1 < images < 0.9


def test_where_nothing_fits_the_error_names_the_call_and_the_call_works() -> None:
    case = CASES["images"]()
    least = _proposed("images").least
    with pytest.raises(fullbatch.BudgetError) as caught:
        case.step(memory=least - 1)
    assert f"fullbatch.propose(loss_fn, model, batch, memory={least - 1})" in caught.value.faults[0].next
    found = case.propose(least - 1)
    assert found.plan is None
    assert (found.budget, found.microbatch, found.least) == (least - 1, 1, least)
    rows = {row.what: row for row in found.rows}
    assert rows["a larger budget"].line == f"memory={least}"
    assert not rows["a larger budget"].fits
    assert rows["autocast to bfloat16"].fits
    assert any(row.fits is False and row.plan is None for row in found.rows)
    assert all((row.time or 0) > 0 for row in found.rows if row.peak is not None)
    late = [row for row in found.rows if row.fits is False and row.plan is None]
    assert all("time: at its least budget" in row.reason for row in late)
    plan = rows["autocast to bfloat16"].plan
    assert plan is not None
    assert plan.predicted_peak <= least - 1
    assert "the plain step" in str(found)
    assert "now: no plan fits" in str(found)


def test_a_step_that_does_fit_after_a_proposal_trains() -> None:
    """The plan that comes with a proposal is one that `Step` takes, where the code is the same."""
    changed = BY_HAND["images", "images of 10 x 10"](CASES["images"]())
    step = changed.step(memory=MEMORY["images"], plan=_row("images", "images of 10 x 10").plan)
    assert step.plan.loaded
    loss = step(changed.batch)
    assert torch.allclose(loss, changed.loss_fn(changed.model, changed.batch), rtol=1e-5)


def test_the_loss_without_logits_is_the_same() -> None:
    """What the row calls the same mathematics is, in float64."""
    case = CASES["words"]()
    case.model.double()
    plain = case.loss_fn(case.model, case.batch)
    changed = BY_HAND["words", "the loss without logits"](case)
    assert torch.allclose(changed.loss_fn(case.model, case.batch), plain, rtol=1e-12)
