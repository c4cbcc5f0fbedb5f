"""Batches that a line through probes gets wrong, too large or below zero: `largest` finds the one that fits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullbatch
from fullbatch._trial import Trial
from largest.test_largest import measured

# Two probes, and what a line through them says of `memory`.
Probes = tuple[int, int]


def _towers() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(4, 4)


def contrastive(net: Any, batch: Any) -> Tensor:
    """Compares all samples: memory grows with the square of their number."""
    ours, theirs = F.normalize(net(batch[0]), dim=1), F.normalize(batch[1], dim=1)
    return F.cross_entropy(ours @ theirs.t() * 9, torch.arange(len(ours)))


def pairs(size: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 4), torch.randn(size, 4)


def _line(probes: Probes, nbytes: Any, memory: int) -> int:
    (a, b), (at_a, at_b) = probes, (nbytes(probe) for probe in probes)
    return a + int((memory - at_a) * (b - a) / (at_b - at_a))


@pytest.fixture
def plain_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No planned step is searched for."""
    nothing = fullbatch._trial.Fit(1, 1, 1, (), ())  # type: ignore[attr-defined]
    monkeypatch.setattr(Trial, "planned", lambda self: nothing)


@pytest.mark.usefixtures("plain_alone")
def test_a_line_that_runs_out() -> None:
    net, memory = _towers(), 60_000
    line = _line((4, 8), lambda size: measured(net, pairs(size), contrastive), memory)
    assert measured(net, pairs(line), contrastive) > 2 * memory, "what a line chooses runs out"
    found = fullbatch.largest(contrastive, net, pairs(), memory=memory, most=400).plain
    assert found is not None
    assert measured(net, pairs(found.size), contrastive) == found.measured <= memory
    assert measured(net, pairs(found.size + 1), contrastive) > memory
    assert found.size in [run.size for run in found.tried if run.measured is not None], "it was run"


class Jumping(nn.Module):
    """An operator that takes another algorithm, and more memory, for few samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inward = nn.Linear(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        out = self.inward(x)
        return out + x.new_zeros(5000).sum() if len(x) <= 8 else out


def _squares(net: Any, batch: Any) -> Tensor:
    return net(batch[0]).square().mean()


def _rows(size: int = 4) -> tuple[Tensor]:
    return (torch.randn(size, 4),)


@pytest.mark.usefixtures("plain_alone")
def test_a_line_that_comes_out_below_zero() -> None:
    """Both probes take more than there is; larger batches do not."""
    net, memory = Jumping(), 20_000
    assert _line((4, 8), lambda size: measured(net, _rows(size), _squares), memory) < 0
    found = fullbatch.largest(_squares, net, _rows(16), memory=memory, most=400).plain
    assert found is not None
    assert found.size != 16, "no constant"
    assert measured(net, _rows(found.size), _squares) == found.measured <= memory
    assert measured(net, _rows(found.size + 1), _squares) > memory


def test_it_is_the_same_each_time() -> None:
    """Sizes, bytes and what was tried, whatever the generators hold; for the planned step too, which was run."""
    found = []
    for seed in (0, 1):
        net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
        torch.manual_seed(seed)
        found.append(fullbatch.largest(_squares, net, _rows(), memory=8000, most=12))
    for one, other in ((found[0].plain, found[1].plain), (found[0].fullbatch, found[1].fullbatch)):
        assert one is not None and other is not None
        assert (one.size, one.predicted, one.measured) == (other.size, other.predicted, other.measured)
        assert one.tried == other.tried and one.looked_at == other.looked_at
        assert one.size in [run.size for run in one.tried if run.measured is not None]
