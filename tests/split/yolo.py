"""A YOLOv8 with its own task-aligned assigner, from `ultralytics`, against the plain step in float64. Run as a script.

The images are the two photographs that the package ships, with boxes drawn by hand around what is in them. It prints
the largest error over the loss, gradients and buffers for each microbatch and budget.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from split.aside import without_operators

without_operators()

import cv2  # noqa: E402
import ultralytics  # noqa: E402
from ultralytics.cfg import get_cfg  # noqa: E402
from ultralytics.nn.tasks import DetectionModel  # noqa: E402
from ultralytics.utils.loss import v8DetectionLoss  # noqa: E402

import fullbatch  # noqa: E402
from cases.reference import collect, compare, plain  # noqa: E402

BATCH, SIDE, CLASSES = 6, 96, 3
PERSON, BUS, TIE = range(CLASSES)

PHOTOGRAPHS: dict[str, tuple[tuple[int, int], list[tuple[int, int, int, int, int]]]] = {
    "bus.jpg": (
        (480, 640),
        [
            (BUS, 5, 135, 478, 435),
            (PERSON, 30, 235, 145, 535),
            (PERSON, 133, 240, 203, 510),
            (PERSON, 398, 232, 480, 522),
            (PERSON, 0, 325, 46, 520),
        ],
    ),
    "zidane.jpg": (
        (640, 360),
        [
            (PERSON, 60, 100, 576, 360),
            (PERSON, 375, 20, 570, 360),
            (TIE, 221, 218, 257, 360),
            (TIE, 490, 155, 530, 258),
        ],
    ),
}
"""Each photograph: the width and height in which the corners (left, top, right, bottom) of its boxes are given."""


def forward(model: Any, batch: Any) -> Any:
    """The captured part: predictions at three scales."""
    return model(batch["img"])


def own_loss(model: Any) -> Any:
    """The loss of the package, with its assigner."""
    criterion = v8DetectionLoss(model)

    def loss(predictions: Any, batch: Any) -> Any:
        parts, _ = criterion(predictions, batch)
        return parts.sum()

    return loss


def photographed(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """RGB [3, SIDE, SIDE] in 0..1, classes [boxes], boxes [boxes, 4] (middle and size, in shares of the image)."""
    pixels = cv2.imread(str(Path(ultralytics.__file__).parent / "assets" / name))
    assert pixels is not None, name
    small = cv2.resize(pixels, (SIDE, SIDE), interpolation=cv2.INTER_AREA)
    image = torch.from_numpy(small).movedim(2, 0).flip(0).double()  # OpenCV has blue first
    (width, height), objects = PHOTOGRAPHS[name]
    corners = torch.tensor([corners for _, *corners in objects]).double() / torch.tensor([width, height] * 2)
    low, high = corners[:, :2], corners[:, 2:]
    return (
        image / 255,
        torch.tensor([kind for kind, *_ in objects]).double(),
        torch.cat([(low + high) / 2, high - low], 1),
    )


def photographs() -> dict[str, Tensor]:
    """A batch: both as they are, mirrored, and upside down, so that images have four or five boxes."""
    images, kinds, boxes = [], [], []
    for name in PHOTOGRAPHS:
        image, classes, places = photographed(name)
        for axis in (None, 0, 1):  # of the boxes: x, y
            turned = places.clone()
            if axis is not None:
                turned[:, axis] = 1 - turned[:, axis]
            images.append(image if axis is None else image.flip(2 - axis))
            kinds.append(classes)
            boxes.append(turned)
    at = torch.arange(BATCH).repeat_interleave(torch.tensor([len(found) for found in kinds]))
    labels = {"batch_idx": at.double(), "cls": torch.cat(kinds)[:, None], "bboxes": torch.cat(boxes)}
    return {"img": torch.stack(images), **labels}


def build() -> tuple[Any, Any]:
    """(model, batch)"""
    torch.manual_seed(0)
    model = DetectionModel("yolov8n.yaml", ch=3, nc=CLASSES, verbose=False).double().train()
    model.args = get_cfg()
    return model, photographs()


def main() -> None:
    """Compares at four sizes and at the least budget."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    model, batch = build()
    print(f"{len(batch['img'])} photographs, {len(batch['cls'])} boxes")
    expected = plain(lambda twin, batch: own_loss(twin)(forward(twin, batch), batch), model, batch)
    options: list[dict[str, Any]] = [{"microbatch": size} for size in (1, 4, 3, BATCH)]
    try:
        fullbatch.Step((forward, own_loss(model)), model, batch, memory=model_bytes(model), batch_dims={"img": 0})
    except fullbatch.BudgetError as error:
        options.append({"memory": error.smallest})
    for option in options:
        twin = copy.deepcopy(model)
        step = fullbatch.Step((forward, own_loss(twin)), twin, batch, batch_dims={"img": 0}, **option)
        errors = compare(collect(step(batch), twin), expected)
        worst = max(errors.loss, errors.grads, errors.buffers)
        print(f"{option} {len(errors.mismatches)} mismatches, error {worst:.1e}, recomputed {step.plan.recomputed}")


def model_bytes(model: Any) -> int:
    """Bytes of the parameters, which is less than any step takes."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


if __name__ == "__main__":
    main()
