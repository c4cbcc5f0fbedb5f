"""Assertions about values, in a module whose bytecode pytest leaves as it is."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


def both(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch[0])
    assert out.isnan().sum() == 0 and out.max() < 50, "too large"
    return F.mse_loss(out, batch[1])


def neither(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch[0])
    assert not (out.isnan().any() or out.max() > 50)
    return F.mse_loss(out, batch[1])


def negated(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch[0])
    assert not (out.max() > 50)
    return F.mse_loss(out, batch[1])


def finite(model: Any, batch: Any) -> Tensor:
    out: Tensor = model(batch)
    assert out.isfinite().all()
    return out.square().mean()
