"""Detectors of `transformers` with their own Hungarian matching, exact to 1e-9 against the plain step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig, YolosConfig, YolosForObjectDetection
from transformers.loss.loss_for_object_detection import ForObjectDetectionLoss

import fullbatch
from split.support import agrees, step_of

BATCH = 6


def _labels(size: int) -> list[dict[str, Tensor]]:
    """Of each image its own number of boxes, one of none."""
    counts = [2, 1, 3, 0, 4, 1][:size]
    return [
        {"class_labels": torch.randint(0, 3, (count,)), "boxes": torch.rand(count, 4) * 0.4 + 0.3} for count in counts
    ]


def _detr(dropout: float = 0.0) -> nn.Module:
    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], layer_type="basic", out_features=["stage4"]
    )
    config = DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone, d_model=16,
        encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24,
        decoder_ffn_dim=24, num_queries=5, num_labels=3, dropout=dropout, attention_dropout=dropout,
        auxiliary_loss=True,
    )  # fmt: skip
    return DetrForObjectDetection(config)


def _yolos() -> nn.Module:
    config = YolosConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=[32, 32],
        patch_size=8, num_detection_tokens=5, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return YolosForObjectDetection(config)


def _case(build: Any) -> Any:
    torch.manual_seed(0)
    model = build().to(torch.float64).train()
    batch = {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": _labels(BATCH)}

    def forward(model: Any, batch: Any) -> Any:
        if not isinstance(model, DetrForObjectDetection):
            found = model(pixel_values=batch["pixel_values"])
            return found.logits, found.pred_boxes, None, None
        # The predictions of every decoder layer, for the auxiliary losses: the batch is their second dimension.
        states = model.model(pixel_values=batch["pixel_values"]).intermediate_hidden_states
        classes, boxes = model.class_labels_classifier(states), model.bbox_predictor(states).sigmoid()
        return classes[-1], boxes[-1], classes, boxes

    def loss(outputs: Any, batch: Any) -> Any:
        logits, boxes, *layers = outputs
        total, parts, _ = ForObjectDetectionLoss(logits, batch["labels"], logits.device, boxes, model.config, *layers)
        return total, parts

    return forward, loss, model, batch


# Which dimension carries the batch: boxes and classes do not, there is another number of them in each image.
DIMS = {"pixel_values": 0}


@pytest.mark.parametrize(("build", "sizes"), [(_detr, (4,)), (_yolos, (1, 4, BATCH))], ids=["detr", "yolos"])
def test_hungarian_matching_of_transformers(build: Any, sizes: tuple[int, ...]) -> None:
    _matches(build, sizes, (0.5,))


@pytest.mark.slow
@pytest.mark.parametrize("build", [_detr, _yolos], ids=["detr", "yolos"])
def test_at_more_microbatches_and_budgets(build: Any) -> None:
    _matches(build, (1, 3, BATCH), (0.7, 0.4))


def _matches(build: Any, sizes: tuple[int, ...], budgets: tuple[float, ...]) -> None:
    case = _case(build)
    for microbatch in sizes:
        step = step_of(case, microbatch=microbatch, batch_dims=DIMS)
        _, parts = agrees(step, case, tolerance=1e-9)
        assert {"loss_ce", "loss_bbox", "loss_giou"} <= parts.keys()
    owned, plain = step.plan.owned, step.plan.plain_peak
    case[2].zero_grad(set_to_none=True)
    for share in budgets:
        try:
            step = step_of(case, memory=int(owned + share * (plain - owned)), batch_dims=DIMS)
        except fullbatch.BudgetError as error:
            step = step_of(case, memory=error.smallest, batch_dims=DIMS)
        agrees(step, case, tolerance=1e-9)
        case[2].zero_grad(set_to_none=True)
    assert step.verify().ok


# What the encoder layers of DETR do in train mode: `if not torch.isfinite(hidden_states).all(): clamp`.
FINITE = "if not torch.isfinite(hidden_states).all():"


def test_the_branch_of_its_encoder_is_named() -> None:
    step = step_of(_case(_detr), microbatch=4, batch_dims=DIMS)
    assert any(FINITE in note and "are all finite" in note for note in step.plan.notes)


@pytest.mark.slow
def test_with_dropout_as_it_comes() -> None:
    case = _case(lambda: _detr(dropout=0.1))
    step = step_of(case, microbatch=2, batch_dims=DIMS)
    step(case[3])
    assert step.verify().ok


@pytest.mark.slow
def test_an_image_that_is_not_finite_does_what_it_does_in_plain_pytorch() -> None:
    """The loss raises; the encoder's other branch was taken before it, over the whole batch."""
    case = _case(_detr)
    forward, loss, model, batch = case
    step = step_of(case, microbatch=4, batch_dims=DIMS)
    bad = {**batch, "pixel_values": batch["pixel_values"].clone()}
    bad["pixel_values"][5, 0, 0, 0] = torch.nan
    messages = []
    for run in (lambda: loss(forward(copy.deepcopy(model), bad), bad), lambda: step(bad)):
        with pytest.raises(ValueError, match=r"nan|invalid numeric") as raised:
            run()
        messages.append(str(raised.value))
    assert messages[0][:40] == messages[1][:40]
    assert step._frontend.captures == 2, "the other branch is captured"
    assert all(parameter.grad is None for parameter in model.parameters())
    agrees(step, case, tolerance=1e-9)
