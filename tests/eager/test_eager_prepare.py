"""`eager.Step.prepare`: every form is placed before the first step, and what does not fit is said at once."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import fullbatch
from behaviour.test_after_errors import assert_same
from eager.support import Net, agrees, token_loss, tokens
from eager.test_state import Stateful, loss_fn, pair, state
from fullbatch.eager import _place


def lengths(*longest: int, samples: int = 12) -> list[Any]:
    return [tokens([length] * samples, longest=length, seed=length) for length in longest]


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one for each batch that is placed by trials."""
    made: list[int] = []
    choose = _place.Placer.choose

    def counted(self: _place.Placer, sizes: Any) -> Any:
        made.append(1)
        return choose(self, sizes)

    monkeypatch.setattr(_place.Placer, "choose", counted)
    return made


def budget(model: Net, share: float, length: int = 64) -> int:
    (batch,) = lengths(length)
    return int(share * fullbatch.eager.Step(token_loss, model, batch, microbatch=12).plan.predicted_peak)


def test_forms_run_in_their_own_placements_and_none_is_tried_again(searches: list[int]) -> None:
    model = Net(blocks=8)
    step = fullbatch.eager.Step(token_loss, model, lengths(16)[0], memory=budget(model, 0.5))
    before = str(step.plan)
    searches.clear()
    prepared = step.prepare([*lengths(16, 64, 32), *lengths(64)])
    assert len(searches) == 3
    assert str(step.plan) == before
    assert [shape.form.split(",")[0] for shape in prepared.shapes] == [
        f"[0] 12x{length}x8 float64" for length in (64, 32, 16)
    ]
    assert (prepared.worst.batches, prepared.batches) == (2, 4)
    assert math.isnan(prepared.worst.overhead)
    assert "4 batches in 3 shapes" in str(prepared) and "nan" not in str(prepared)
    chosen = {}
    for batch in lengths(64, 32, 16, 64):
        agrees(step, token_loss, model, batch)
        chosen[batch[0].shape[1]] = step.plan.microbatch
        assert step.plan.predicted_peak <= step.plan.budget
    assert chosen[64] < chosen[32] <= chosen[16] == 12
    assert len(searches) == 3
    step(lengths(64)[0])
    assert step.plan.microbatch == next(shape.microbatch for shape in prepared.shapes if "x64x" in shape.form)


def test_a_batch_beyond_them_is_planned_anew(searches: list[int]) -> None:
    model = Net(blocks=8)
    step = fullbatch.eager.Step(token_loss, model, lengths(16)[0], memory=budget(model, 0.5))
    step.prepare(lengths(32))
    searches.clear()
    (longer,) = lengths(64)
    agrees(step, token_loss, model, longer)
    assert len(searches) == 1
    peak = step.plan.predicted_peak
    assert peak <= step.plan.budget
    agrees(step, token_loss, model, lengths(32)[0])
    assert step.plan.predicted_peak < peak
    assert len(searches) == 1


def test_gradients_that_are_kept_make_a_form_be_planned_anew(searches: list[int]) -> None:
    model = Net(blocks=8, width=16)
    batch = tokens([32] * 8, width=16)
    whole = fullbatch.eager.Step(token_loss, model, batch, microbatch=8).plan.predicted_peak
    step = fullbatch.eager.Step(token_loss, model, batch, memory=whole)
    step.prepare([batch])
    searches.clear()
    step(batch)
    assert step.plan.microbatch == 8
    step(batch)
    assert step.plan.microbatch < 8 and step.plan.predicted_peak <= whole
    step(batch)
    assert len(searches) == 1


def test_all_that_does_not_fit_is_said_at_once(searches: list[int]) -> None:
    model = Net(blocks=8)
    step = fullbatch.eager.Step(token_loss, model, lengths(4)[0], memory=budget(model, 1.0, length=8))
    with pytest.raises(fullbatch.BudgetError) as caught:
        step.prepare(lengths(256, 4, 512))
    assert [fault.got.split(",")[0] for fault in caught.value.faults] == [
        "[0] 12x256x8 float64", "[0] 12x512x8 float64",
    ]  # fmt: skip
    fullbatch.eager.Step(token_loss, model, lengths(4)[0], memory=caught.value.smallest).prepare(lengths(512, 256))
    agrees(step, token_loss, model, lengths(4)[0])
    with pytest.raises(fullbatch.BudgetError):
        step(lengths(256)[0])


@pytest.mark.parametrize("gradients", [False, True])
def test_preparing_changes_nothing(gradients: bool) -> None:
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    model = Stateful()
    step = fullbatch.eager.Step(loss_fn, model, pair(), memory="1GiB", allow_inexact=True)
    if gradients:
        step(pair())
    data = [*zip(*pair(20), strict=True)]
    before, plan = state(model), str(step.plan)
    step.prepare(DataLoader(data, batch_size=6, shuffle=True))  # which draws a seed
    assert_same(before, state(model))
    assert str(step.plan) == plan

    class Broken(Exception):
        pass

    def failing(call: int) -> None:
        raise Broken

    model.failing = failing
    with pytest.raises(Broken):
        step.prepare(DataLoader(data, batch_size=7, shuffle=True))
    model.failing = before["failing"] = lambda call: None
    del before["failing"]
    assert_same(before, state(model))


def test_values_beside_the_tensors_make_no_form(searches: list[int]) -> None:
    def loss(model: Any, batch: Any) -> tuple[Tensor, int]:
        assert len(batch["names"]) == len(batch["x"]) == len(batch["array"])
        return model(batch["x"]).square().sum(), batch["x"].numel()

    def batch(samples: int, name: str, width: int = 2) -> Any:
        x = tokens([8] * samples, longest=8)[0]
        return {"x": x, "names": [name] * samples, "array": np.zeros((samples, width)), "at": name}

    step = fullbatch.eager.Step(loss, Net(), batch(4, "a"), microbatch=2)
    prepared = step.prepare([batch(4, "a"), batch(4, "b"), batch(3, "c"), batch(4, "d", width=5)])
    assert sorted(shape.batches for shape in prepared.shapes) == [1, 1, 2]


def test_lists_of_images_of_their_own_sizes() -> None:
    model = Net()

    def loss(m: Any, batch: Any) -> tuple[Tensor, int]:
        return sum(m(one[None]).square().sum() for one in batch), sum(one.numel() for one in batch)  # type: ignore[return-value]

    batches = [[torch.randn(length, 8) for length in sizes] for sizes in ((4, 9), (9, 4), (4, 9))]
    step = fullbatch.eager.Step(loss, model, batches[0], microbatch=1, batch_dims="list")
    assert len(step.prepare(batches).shapes) == 2
    agrees(step, loss, model, batches[1])


def test_a_loss_that_couples_samples_in_another_form_is_found() -> None:
    def loss(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
        total, count = token_loss(model, batch)
        return total * (len(batch[0]) if batch[0].shape[1] == 16 else 1), count

    step = fullbatch.eager.Step(loss, Net(), lengths(8)[0], microbatch=4)
    with pytest.raises(fullbatch.LossError, match="not the sum") as caught:
        step.prepare(lengths(8, 16))
    assert "12x16x8" in str(caught.value)


def test_bad_arguments() -> None:
    step = fullbatch.eager.Step(token_loss, Net(), lengths(8)[0], microbatch=4)
    for bad in ([], lengths(8)[0][0], {"batch": lengths(8)[0]}, 3, "batches"):
        with pytest.raises(fullbatch.BatchError, match="nothing to prepare for"):
            step.prepare(bad)  # type: ignore[arg-type]
    meta = [tuple(part.to("meta") for part in batch) for batch in lengths(8, 16)]
    with pytest.raises(fullbatch.BatchError, match="no values") as caught:
        step.prepare(meta)
    assert len(caught.value.faults) == 2
