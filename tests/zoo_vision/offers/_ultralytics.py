"""ultralytics: detection, segmentation, poses, turned boxes and classes of several generations, of the smallest scale.

Each is given with a plain loss over all outputs; and with the package's own loss, which assigns boxes to targets by the
data, as (forward, loss).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..models import BATCH, Inputs, Loss, Offer, images, outputs

CLASSES, BOXES, SIDE = 5, 11, 64
PLAIN = (
    "yolov3-tiny", "yolov5n", "yolov6n", "yolov8n", "yolov8n-cls", "yolov8n-ghost", "yolov8n-obb", "yolov8n-p2",
    "yolov8n-pose", "yolov8n-seg", "yolov8n-rtdetr", "yolov9t", "yolov10n", "yolo11n", "yolo11n-cls", "yolo11n-obb",
    "yolo11n-pose", "yolo11n-seg", "yolo12n", "yolo12n-seg", "yolo26n", "yolo26n-pose", "yolo26n-seg", "yolo26n-sem",
    "yolo26n-depth",
)  # fmt: skip
OWN = (
    "yolov5n", "yolov8n", "yolov8n-obb", "yolov8n-pose", "yolov8n-seg", "yolov10n", "yolo11n", "yolo11n-pose",
    "yolo11n-seg", "yolo12n", "yolo26n", "yolo26n-pose", "yolo26n-seg",
)  # fmt: skip
_OWN = "+own-loss"


def names() -> list[str]:
    """Models, and models with their own loss."""
    return [*PLAIN, *(f"{name}{_OWN}" for name in OWN)]


def offers(name: str) -> Iterator[Offer]:
    """On images of 64 x 64."""
    said = f"{SIDE}x{SIDE}"
    if name.endswith(_OWN):
        name = name.removesuffix(_OWN)
        options = {"batch_dims": {"image": 0}}
        yield Offer(said, partial(_model, name), partial(_labelled, name), _own_loss, of_model=True, options=options)
    else:
        yield Offer(said, partial(_model, name), partial(images, SIDE, SIDE))


def _model(name: str) -> nn.Module:
    from ultralytics.cfg import get_cfg
    from ultralytics.nn import tasks

    kinds = {"cls": "Classification", "obb": "OBB", "pose": "Pose", "seg": "Segmentation", "depth": "Depth",
             "sem": "SemanticSegmentation", "rtdetr": "RTDETRDetection"}  # fmt: skip
    kind = getattr(tasks, f"{kinds.get(name.rpartition('-')[2], 'Detection')}Model")
    model = kind(f"{name}.yaml", ch=3, nc=CLASSES, verbose=False)
    model.args = get_cfg()
    return model  # type: ignore[no-any-return]


def _labelled(name: str) -> Inputs:
    """Images with boxes, and what their kind adds."""
    batch = images(SIDE, SIDE)
    batch["batch_idx"] = torch.randint(0, BATCH, (BOXES,)).sort().values.double()
    batch["cls"] = torch.randint(0, CLASSES, (BOXES, 1)).double()
    batch["bboxes"] = torch.rand(BOXES, 4) * 0.4 + 0.3
    if name.endswith("-pose"):
        batch["keypoints"] = torch.cat([torch.rand(BOXES, 17, 2), torch.ones(BOXES, 17, 1)], dim=-1)
    if name.endswith("-seg"):
        batch["masks"] = torch.randint(0, 3, (BATCH, SIDE // 4, SIDE // 4)).double()
        batch["sem_masks"] = torch.randint(0, CLASSES, (BATCH, SIDE // 4, SIDE // 4))
    if name.endswith("-obb"):
        batch["bboxes"] = torch.cat([batch["bboxes"], torch.rand(BOXES, 1)], dim=1)
    return batch


def _own_loss(model: Any) -> Loss:
    criterion = model.init_criterion()

    def loss(predictions: Any, batch: Inputs) -> Tensor:
        parts, _ = criterion(predictions, batch)
        return parts.sum()  # type: ignore[no-any-return]

    return outputs, loss
