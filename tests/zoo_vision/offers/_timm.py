"""timm: the models that `timm.txt` lists, on small images where they take them, else on those of their own side."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from ..choose import LISTED
from ..models import Offer, images

CLASSES = 10
LARGEST = 35_000_000
SIDES = (64, 128)
SMALLER: tuple[dict[str, Any], ...] = (
    {"depth": 2},
    {},
    {"depth": 2, "embed_dim": 96, "num_heads": 3},
    {"mlp_ratio": 0.0625},  # vgg, whose head holds nearly all of it
)


def names() -> list[str]:
    """The models listed."""
    return LISTED.read_text().split()


def _size(name: str, options: dict[str, Any]) -> int:
    """Parameters, counted without storage; none where the model does not know the options."""
    import timm

    try:
        with torch.device("meta"):
            return sum(p.numel() for p in timm.create_model(name, num_classes=CLASSES, **options).parameters())
    except Exception:  # said by the offer itself
        return 0


def offers(name: str) -> Iterator[Offer]:
    """Few blocks where they are all alike, else all; on small images, told to the model or not, else on its own."""
    import timm

    own = timm.models.get_pretrained_cfg(name).input_size[-1]
    for smaller in SMALLER:
        if _size(name, smaller) > LARGEST:
            continue
        for side in (*SIDES, own):
            for told in ({"img_size": side}, {}):
                options = {**smaller, **told, "num_classes": CLASSES}
                said = ", ".join([f"{side}x{side}", *(f"{key}={value}" for key, value in smaller.items())])
                yield Offer(said, partial(timm.create_model, name, **options), partial(images, side, side))
