"""Detectors of `transformers` that match inside of their own forward: split behind their body, exact to 1e-9."""

from __future__ import annotations

from typing import Any

import pytest

import fullbatch
from fullbatch._found_call import Found
from split.support import composed
from split.test_detr import BATCH, DIMS, _case, _detr, _yolos
from split.test_found import agrees


def _own_loss(model: Any, batch: Any) -> Any:
    found = model(pixel_values=batch["pixel_values"], labels=batch["labels"])
    return found.loss, found.loss_dict


@pytest.mark.slow
@pytest.mark.parametrize("build", [_detr, _yolos], ids=["detr", "yolos"])
def test_a_loss_within_the_forward(build: Any) -> None:
    _, _, model, batch = _case(build)
    for microbatch in (1, 3, BATCH):
        step = fullbatch.Step(_own_loss, model, batch, microbatch=microbatch, batch_dims=DIMS)
        assert isinstance(step._split, Found)
        assert step._split.place.title == ("model.model" if build is _detr else "model.vit")
        assert any("labels" in note or "loss" in note for note in step.plan.notes)
        _, parts = agrees(step, _own_loss, model, batch)
        assert {"loss_ce", "loss_bbox", "loss_giou"} <= parts.keys()
        model.zero_grad(set_to_none=True)
    assert step.verify().ok


@pytest.mark.parametrize("build", [_yolos], ids=["yolos"])
def test_a_loss_behind_the_call(build: Any) -> None:
    forward, loss, model, batch = _case(build)
    loss_fn = composed(forward, loss)
    step = fullbatch.Step(loss_fn, model, batch, microbatch=4, batch_dims=DIMS)
    assert isinstance(step._split, Found) and step._split.place.title == "model"
    agrees(step, loss_fn, model, batch)
