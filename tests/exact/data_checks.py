"""Steps with `assert` on data, in a module whose asserts pytest does not rewrite."""

from __future__ import annotations

from typing import Any

import torch


def asserted(m: Any, x: torch.Tensor) -> torch.Tensor:
    lengths = (x > 0).sum(1)
    assert lengths.max().item() <= x.shape[1]
    assert lengths.max().item() + lengths.min().item() < 100
    assert x.max().item() < 100
    return m(x).square().mean()


def asserted_and_used(m: Any, x: torch.Tensor) -> torch.Tensor:
    longest = (x > 0).sum(1).max().item()
    assert longest <= x.shape[1]
    return m(x[:, :longest] if longest < 3 else x).square().mean()
