"""transformers: detectors of the family of DETR, on a small backbone of its own or of timm, which its zoo has not.

Each with the distance of its outputs, and with its own loss, which matches queries to boxes by the data. In train mode
the encoders of most look at whether all numbers are finite.
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

DETECTORS = (
    "ConditionalDetr", "DabDetr", "DeformableDetr", "Detr", "LwDetr", "RTDetr", "RTDetrV2", "TableTransformer",
)  # fmt: skip
ON_TIMM = "Detr-on-timm-resnet10t"

_RESNET: dict[str, Any] = {
    "embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "layer_type": "basic",
}  # fmt: skip


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
        "d_model": 32, "decoder_layers": 2, "decoder_ffn_dim": 48, "num_queries": 6, "num_labels": CLASSES,
        "auxiliary_loss": True, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
    }  # fmt: skip
    if kind == "LwDetr":
        options |= _of_lw_detr()
    elif kind.startswith("RTDetr"):
        options |= _of_rt_detr()
    else:
        options |= {
            "hidden_size": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
            "encoder_ffn_dim": 48,
        }  # fmt: skip
        options["backbone_config"] = _backbone(kind, timm)
    config = getattr(transformers, f"{kind}Config")(**options)
    return getattr(transformers, f"{kind}ForObjectDetection")(config)  # type: ignore[no-any-return]


def _backbone(kind: str, timm: str) -> Any:
    import transformers

    if timm:
        return transformers.TimmBackboneConfig(backbone=timm, out_indices=[4])
    return transformers.ResNetConfig(
        **_RESNET, out_features=["stage2", "stage3", "stage4"] if kind == "DeformableDetr" else ["stage4"]
    )


def _of_rt_detr() -> dict[str, Any]:
    """BatchNorm in train mode, and no denoising queries: their boxes are random."""
    import transformers

    return {
        "backbone_config": transformers.RTDetrResNetConfig(**_RESNET, out_features=["stage2", "stage3", "stage4"]),
        "freeze_backbone_batch_norms": False, "encoder_hidden_dim": 32, "encoder_in_channels": [16, 24, 32],
        "encoder_layers": 1, "encoder_ffn_dim": 48, "encoder_attention_heads": 2, "hidden_expansion": 1.0,
        "decoder_in_channels": [32, 32, 32], "decoder_attention_heads": 2, "num_denoising": 0,
    }  # fmt: skip


def _of_lw_detr() -> dict[str, Any]:
    """A ViT whose first and last layer attend within windows, and two groups of queries."""
    import transformers

    vit = transformers.LwDetrViTConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=48, image_size=64,
        pretrain_image_size=64, patch_size=16, num_windows=4, window_block_indices=[0, 2], out_indices=[1, 3],
    )  # fmt: skip
    return {
        "backbone_config": vit, "projector_scale_factors": [1.0], "hidden_expansion": 0.5, "group_detr": 2,
        "decoder_self_attention_heads": 2, "decoder_cross_attention_heads": 2,
    }  # fmt: skip


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
