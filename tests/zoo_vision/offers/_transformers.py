"""transformers: detectors of the family of DETR, on a small ResNet of its own or of timm, which its zoo has not.

Each with the distance of its outputs, and with its own loss, which matches queries to boxes by the data. In train mode
their encoders look at whether all numbers are finite.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..models import BATCH, Inputs, Offer, images

CLASSES = 4
OWN = "+own-loss"

DETECTORS = ("ConditionalDetr", "DabDetr", "DeformableDetr", "Detr", "TableTransformer")
ON_TIMM = "Detr-on-timm-resnet10t"


def names() -> list[str]:
    """All models here."""
    return [f"{name}{loss}" for name in (*DETECTORS, ON_TIMM) for loss in ("", OWN)]


def offers(name: str) -> Iterator[Offer]:
    """One way: 64 x 64, a layer of the encoder and two of the decoder."""
    build = partial(_detector, name.removesuffix(OWN))
    if name.endswith(OWN):
        yield Offer("64x64", build, _with_boxes, _own_loss, options={"batch_dims": {"image": 0}})
    else:
        yield Offer("64x64", build, partial(images, 64, 64))


def _detector(name: str) -> nn.Module:
    import transformers

    kind, _, timm = name.partition("-on-timm-")
    options: dict[str, Any] = {
        "d_model": 32, "hidden_size": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_queries": 6,
        "num_labels": CLASSES, "auxiliary_loss": True, "dropout": 0.0, "attention_dropout": 0.0,
        "activation_dropout": 0.0,
    }  # fmt: skip
    if timm:
        options["backbone_config"] = transformers.TimmBackboneConfig(backbone=timm, out_indices=[4])
    else:
        options["backbone_config"] = transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], layer_type="basic",
            out_features=["stage2", "stage3", "stage4"] if kind == "DeformableDetr" else ["stage4"],
        )  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**options)
    return getattr(transformers, f"{kind}ForObjectDetection")(config)  # type: ignore[no-any-return]


def _with_boxes() -> Inputs:
    """Images with two, one, three and no boxes."""
    batch = images(64, 64)
    for sample, count in enumerate((2, 1, 3, 0)):
        batch[f"labels_{sample}"] = torch.randint(0, CLASSES, (count,))
        batch[f"boxes_{sample}"] = torch.rand(count, 4) * 0.4 + 0.3
    return batch


def _own_loss(model: Any, batch: Inputs) -> Tensor:
    labels = [{"class_labels": batch[f"labels_{at}"], "boxes": batch[f"boxes_{at}"]} for at in range(BATCH)]
    loss: Tensor = model(pixel_values=batch["image"], labels=labels).loss
    return loss
