"""Where `make test-all` installs what only some tests need; FULLBATCH_YOLO and FULLBATCH_VISION name other folders."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

ASIDE = Path(os.environ.get("FULLBATCH_YOLO", Path(sys.prefix) / "yolo"))
VISION = Path(os.environ.get("FULLBATCH_VISION", Path(sys.prefix) / "vision"))

_DEFINED: list[torch.library.Library] = []


def without_operators() -> None:
    """Lets torchvision be imported where its compiled operators do not load: beside many builds of torch.

    Its import names two of them; models in training use none.
    """
    if _DEFINED:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _DEFINED.append(library)  # a library that is collected takes its operators away
