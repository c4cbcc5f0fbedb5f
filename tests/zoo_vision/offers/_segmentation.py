"""segmentation_models_pytorch: each decoder with Dice, each loss, and each family of encoders in a UNet with Dice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..models import BATCH, Inputs, Offer, images, outputs

CLASSES = 3
DECODERS = (
    "unet", "unetplusplus", "manet", "linknet", "fpn", "pspnet", "deeplabv3", "deeplabv3plus", "pan", "upernet",
    "segformer", "dpt",
)  # fmt: skip
ENCODERS = (
    "resnext50_32x4d", "dpn68", "vgg11_bn", "se_resnet50", "densenet121", "inceptionv4", "inceptionresnetv2",
    "efficientnet-b0", "mobilenet_v2", "xception", "timm-efficientnet-b0", "timm-tf_efficientnet_lite0",
    "timm-skresnet18", "mit_b0", "mobileone_s0", "tu-convnext_atto",
)  # fmt: skip
LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "jaccard": ("JaccardLoss", {"mode": "multiclass"}),
    "dice-per-image-label": ("DiceLoss", {"mode": "multilabel", "log_loss": True}),
    "dice-ignore": ("DiceLoss", {"mode": "multiclass", "ignore_index": 2}),
    "focal": ("FocalLoss", {"mode": "multiclass"}),
    "focal-normalized": ("FocalLoss", {"mode": "multiclass", "normalized": True, "ignore_index": 2}),
    "lovasz": ("LovaszLoss", {"mode": "multiclass"}),
    "lovasz-per-image": ("LovaszLoss", {"mode": "multiclass", "per_image": True}),
    "soft-bce": ("SoftBCEWithLogitsLoss", {"smooth_factor": 0.1, "mode": "multilabel"}),
    "soft-ce": ("SoftCrossEntropyLoss", {"smooth_factor": 0.1, "ignore_index": 2}),
    "tversky": ("TverskyLoss", {"mode": "multiclass", "alpha": 0.3, "beta": 0.7, "gamma": 1.3}),
    "mcc": ("MCCLoss", {}),
}


def names() -> list[str]:
    """Decoders, encoders of a UNet, losses of a UNet."""
    return [*DECODERS, *(f"unet+{encoder}" for encoder in ENCODERS), *(f"unet+{loss}" for loss in LOSSES)]


def offers(name: str) -> Iterator[Offer]:
    """On images of 64 x 64, or larger where the encoder wants so."""
    import segmentation_models_pytorch as smp

    decoder, _, part = name.partition("+")
    encoder = part if part in ENCODERS else "tu-test_vit" if decoder == "dpt" else "resnet18"
    narrow = {"decoder_intermediate_channels": (8,) * 4, "decoder_fusion_channels": 8} if decoder == "dpt" else {}
    kind, options = LOSSES.get(part, ("DiceLoss", {"mode": "multiclass"}))
    own = {key: value for key, value in options.items() if key != "mode" or not kind.startswith("Soft")}
    loss = getattr(smp.losses, kind)(**own)
    classes = 1 if kind == "MCCLoss" else CLASSES
    said = encoder if part in ENCODERS or not part else kind
    for side in (64, 160):
        build = partial(smp.create_model, decoder, encoder, None, classes=classes, **narrow)
        yield Offer(f"{side}x{side}, {said}", build, partial(_masked, side, classes, options), _against(loss))


def _masked(side: int, classes: int, options: dict[str, Any]) -> Inputs:
    batch, kind = images(side, side), options.get("mode", "multiclass")
    batch["mask"] = torch.randint(0, max(classes, 2), (BATCH, side, side))
    if classes == 1:
        batch["mask"] = batch["mask"][:, None]
    elif kind == "multilabel":
        batch["mask"] = torch.nn.functional.one_hot(batch["mask"], classes).movedim(-1, 1).double()
    return batch


def _against(loss: Any) -> Callable[[Any, Inputs], Tensor]:
    of_probabilities = type(loss).__name__ == "MCCLoss"

    def against(model: Any, batch: Inputs) -> Tensor:
        found = outputs(model, batch)
        return loss(found.sigmoid() if of_probabilities else found, batch["mask"])  # type: ignore[no-any-return]

    return against
