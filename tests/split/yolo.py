"""A YOLOv8 with its own task-aligned assigner, from `ultralytics`, against the plain step in float64. Run as a script.

It prints the largest error over the loss, gradients and buffers for each microbatch and budget.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from split.aside import without_operators

without_operators()

from ultralytics.cfg import get_cfg  # noqa: E402
from ultralytics.nn.tasks import DetectionModel  # noqa: E402
from ultralytics.utils.loss import v8DetectionLoss  # noqa: E402

import fullbatch  # noqa: E402
from cases.reference import collect, compare, plain  # noqa: E402

BATCH, BOXES, CLASSES = 6, 15, 5


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


def build() -> tuple[Any, Any]:
    """(model, batch)"""
    torch.manual_seed(0)
    model = DetectionModel("yolov8n.yaml", ch=3, nc=CLASSES, verbose=False).double().train()
    model.args = get_cfg()
    batch = {
        "img": torch.rand(BATCH, 3, 96, 96),
        "batch_idx": torch.randint(0, BATCH, (BOXES,)).sort().values.double(),
        "cls": torch.randint(0, CLASSES, (BOXES, 1)).double(),
        "bboxes": torch.rand(BOXES, 4) * 0.4 + 0.3,
    }
    return model, batch


def main() -> None:
    """Compares at four sizes and at the least budget."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    model, batch = build()
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
