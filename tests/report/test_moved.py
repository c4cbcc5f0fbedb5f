"""A batch on another device than the model is moved a microbatch at a time.

Without an accelerator the other device is torch's `meta`, which has shapes and no values: enough to see what moves.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fullbatch
from fullbatch._ir import Kind


def test_the_batch_is_moved_in_microbatches() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).to("meta")
    batch: Any = {"x": torch.randn(8, 4), "y": torch.randn(8, 3)}
    seen: dict[str, Any] = {}

    class Watched(fullbatch.Step):
        def _run(self, captured: Any, inputs: Any) -> Any:
            seen.update(captured=captured)
            return super()._run(captured, inputs)

    step = Watched(lambda m, b: F.mse_loss(m(b["x"]), b["y"]), model, batch, microbatch=2)
    program = seen["captured"].program
    moves = [task for task in program.tasks if task.origin.op == "aten._to_copy"]
    assert len(moves) == 2
    assert all(task.kind is Kind.LOCAL for task in moves)
    # The batch is not on the model's device, so the step does not own it there; one microbatch at a time it does.
    assert step.plan.owned == sum(p.numel() * 4 for p in model.parameters())
