"""Loss scaling: what a step takes from a `torch.amp.GradScaler`, which is its scale and nothing else.

In float16 small gradients vanish unless the loss is multiplied by a large number before the backward. The number moves
from step to step, so it is an input of the captured step, as the batch is. All else (dividing it out, looking for
infinities, skipping the optimizer, growing) the scaler does with the whole batch's gradients, once a step.
"""

from __future__ import annotations

from typing import Any

import torch

from fullbatch._errors import ModelError

SOURCE = "gradient_scale"
"""The name of the input in plans."""


def check_scaler(scaler: Any) -> None:
    """Raises ModelError where `scaler` is given and is none."""
    if scaler is None or (callable(getattr(scaler, "scale", None)) and callable(getattr(scaler, "is_enabled", None))):
        return
    raise ModelError.of(
        "scaler= is no GradScaler.", got=f"{type(scaler).__name__}: {scaler!r:.80}",
        expected="a torch.amp.GradScaler, or None", next='scaler=torch.amp.GradScaler("cuda")',
    )  # fmt: skip


def scale_of(scaler: Any, device: torch.device) -> torch.Tensor | None:
    """The scale now, a float32 scalar on `device`; None without a scaler, or with one that is disabled."""
    check_scaler(scaler)
    if scaler is None or not scaler.is_enabled():
        return None
    with torch.inference_mode(False), torch.no_grad():
        scale: torch.Tensor = scaler.scale(torch.ones((), device=device, dtype=torch.float32))
    return scale


def scale_bytes(device: torch.device) -> int:
    """What the scale takes while a step runs: the least that the device's allocator gives."""
    return 4 if device.type == "cpu" else 512
