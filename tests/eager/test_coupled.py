"""What couples samples is refused by name, or named; what does not is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullbatch
from eager.support import Net, agrees, token_loss, tokens

NORMS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(4),
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(4),
    "no running statistics": lambda: nn.BatchNorm1d(4, track_running_stats=False),
    "InstanceNorm1d": lambda: nn.InstanceNorm1d(4, track_running_stats=True),
}


class Frozen(nn.Module):
    """As torchvision's FrozenBatchNorm2d: running statistics that are never moved, in a module that says it trains."""

    def __init__(self, moves: bool = False) -> None:
        super().__init__()
        self.moves = moves
        self.register_buffer("running_mean", torch.ones(4))
        self.register_buffer("running_var", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean((0, 2)) if self.moves else self.running_mean
        if self.moves:
            self.running_mean.lerp_(mean.detach(), 0.1)
        return (x - mean[:, None]) / self.running_var[:, None].sqrt()


def test_frozen_statistics_are_no_coupling_and_those_of_another_library_are() -> None:
    model, x = nn.Sequential(nn.Conv1d(3, 4, 1), Frozen(), nn.Conv1d(4, 2, 1)), torch.randn(4, 3, 5)
    agrees(fullbatch.eager.Step(mean_square, model, x, microbatch=2), mean_square, model, x)
    model[1] = Frozen(moves=True)
    with pytest.raises(fullbatch.ModelError, match=r"1 \(Frozen\) uses statistics of the batch"):
        fullbatch.eager.Step(mean_square, model, x, microbatch=2)


def mean_square(model: Any, x: Tensor) -> tuple[Tensor, int]:
    return model(x).square().sum(), len(x)


@pytest.mark.parametrize("norm", NORMS)
def test_batch_norm_is_refused_by_name(norm: str) -> None:
    model = nn.Sequential(nn.Conv1d(3, 4, 1), NORMS[norm](), nn.Conv1d(4, 2, 1))
    with pytest.raises(fullbatch.ModelError, match=r"1 \(\w+Norm1?d?\) uses statistics of the batch"):
        fullbatch.eager.Step(mean_square, model, torch.randn(4, 3, 5), microbatch=2)


def test_batch_norm_is_named_where_it_is_allowed() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    step = fullbatch.eager.Step(mean_square, model, torch.randn(6, 3), microbatch=2, allow_inexact=True)
    assert not step.plan.exact
    assert "statistics of microbatches in 1 (BatchNorm1d)" in step.plan.inexact[0]
    assert "no: see below" in str(step.plan)


def test_batch_norm_in_eval_mode_is_exact_and_refused_when_it_trains() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model.eval()
    x = torch.randn(6, 3)
    step = fullbatch.eager.Step(mean_square, model, x, microbatch=2)
    agrees(step, mean_square, model, x)
    model.train()
    with pytest.raises(fullbatch.ModelError, match="uses statistics"):
        step(x)


def test_the_whole_batch_at_once_is_exact_whatever_couples_it() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    x = torch.randn(6, 3)
    step = fullbatch.eager.Step(mean_square, model, x, microbatch=6)
    assert step.plan.exact
    agrees(step, mean_square, model, x)
    with pytest.raises(fullbatch.ModelError, match="uses statistics"):
        step(torch.randn(9, 3))


def contrastive(model: Any, x: Tensor) -> tuple[Tensor, int]:
    z = F.normalize(model(x), dim=1)
    return F.cross_entropy(z @ z.T * 5, torch.arange(len(x)), reduction="sum"), len(x)


def branches_on_the_batch(model: Any, x: Tensor) -> tuple[Tensor, int]:
    out = model(x)
    return (out.square() if x.sum() > 0 else out.sin()).sum(), len(x)


def mean_not_sum(model: Any, x: Tensor) -> tuple[Tensor, int]:
    return model(x).square().mean(), len(x)


def penalty(model: Any, x: Tensor) -> tuple[Tensor, int]:
    return model(x).square().sum() + sum(p.square().sum() for p in model.parameters()), len(x)


def mixed_up(model: Any, x: Tensor) -> tuple[Tensor, int]:
    return (model(x) * model(x[torch.randperm(len(x))])).sum(), len(x)


def zero_here(model: Any, x: Tensor) -> tuple[Tensor, int]:
    """The term that couples is zero, and its gradient is not."""
    out = model(x)
    centre = out.mean(0)
    return out.square().sum() + (centre - centre.detach()).sum(), len(x)


def hardest(model: Any, x: Tensor) -> tuple[Tensor, int]:
    out = model(x).square().sum(1)
    return out.topk(min(3, len(out))).values.sum(), min(3, len(out))


@pytest.mark.parametrize("size", [2, 3, 1])
@pytest.mark.parametrize(
    ("loss_fn", "found"),
    [(contrastive, "couples samples"), (mean_not_sum, "looks like a mean"), (mixed_up, "couples samples"),
     (penalty, "belongs to none"), (zero_here, "samples are coupled"), (hardest, "count of 6 samples")],
)  # fmt: skip
def test_a_loss_that_couples_samples_is_refused(loss_fn: Any, found: str, size: int) -> None:
    model = nn.Linear(3, 4)
    x = torch.randn(6, 3)
    with pytest.raises(fullbatch.LossError, match=found):
        fullbatch.eager.Step(loss_fn, model, x, microbatch=size)
    with pytest.raises(fullbatch.LossError, match=found):
        fullbatch.eager.Step(loss_fn, model, x)
    step = fullbatch.eager.Step(loss_fn, model, x, microbatch=size, allow_inexact=True)
    assert step.plan.inexact and found in step.plan.inexact[0]
    step(x)


def test_a_branch_on_the_whole_batch_is_refused_where_the_example_shows_it() -> None:
    x = torch.tensor([[3.0, 1.0, 1.0], [-1.0, -1.0, -1.0]])
    with pytest.raises(fullbatch.LossError, match="couples samples"):
        fullbatch.eager.Step(branches_on_the_batch, nn.Linear(3, 4), x, microbatch=1)


class Random(nn.Module):
    """All sources of random numbers that a forward has, none of which couples samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 2)
        self.drop = nn.Dropout(0.5)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.drop(self.first(x)), 0.3, training=True)
        h = h + 0.1 * torch.randn_like(h) + torch.rand(h.shape) + torch.empty_like(h).normal_(0, 0.1)
        h = h * torch.bernoulli(torch.full((len(h), 1), 0.9)) + torch.normal(0.0, 0.1, h.shape)
        h = h + self.attention(h[:, None], h[:, None], h[:, None])[0][:, 0]
        return self.second(F.alpha_dropout(F.gumbel_softmax(h), 0.2, training=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_random_numbers_are_no_coupling(size: int, dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    x = torch.randn(7, 3)
    step = fullbatch.eager.Step(mean_square, Random(), x, microbatch=size)
    assert step.plan.exact
    assert not any("not compared" in note for note in step.plan.notes)
    step(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_no_coupling(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))))
    model = model.to(dtype)
    x = torch.randn(33, 64, dtype=dtype)
    step = fullbatch.eager.Step(lambda m, x: (m(x).float().square().sum(), len(x)), model, x, microbatch=5)
    assert step.plan.exact


def test_numpy_noise_is_said_to_hide_the_comparison() -> None:
    def loss_fn(model: Any, x: Tensor) -> tuple[Tensor, int]:
        return (model(x) * torch.from_numpy(np.random.rand(len(x), 1))).square().sum(), len(x)

    step = fullbatch.eager.Step(loss_fn, nn.Linear(3, 2), torch.randn(6, 3), microbatch=2)
    assert any("NumPy or Python" in note for note in step.plan.notes)


class Buffers(nn.Module):
    """Buffers of each kind that microbatches can bring together, and one that they cannot."""

    def __init__(self, bad: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.bad = bad
        for name in ("seen", "calls"):
            self.register_buffer(name, torch.zeros((), dtype=torch.long))
        for name in ("total", "centre", "largest"):
            self.register_buffer(name, torch.zeros(2))
        self.register_buffer("table", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        with torch.no_grad():
            self.seen += len(x)
            self.calls += 1
            self.total += out.sum(0)
            self.centre = 0.9 * self.centre + 0.1 * out.mean(0)  # bound anew
            if self.bad:
                self.largest.copy_(torch.maximum(self.largest, out.amax(0)))
            if len(self.table) < x.shape[1]:
                self.table = torch.arange(x.shape[1], dtype=x.dtype)
        return out * (1 + self.calls)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_buffers_come_to_what_the_whole_batch_leaves(size: int) -> None:
    model, x = Buffers(), torch.randn(6, 3)
    step = fullbatch.eager.Step(mean_square, model, x, microbatch=size)
    for _ in range(3):
        agrees(step, mean_square, model, torch.randn(6, 3))


def test_a_buffer_that_depends_on_how_the_batch_is_cut_is_refused_by_name() -> None:
    model, x = Buffers(bad=True), torch.randn(6, 3)
    before = copy.deepcopy(model.state_dict())
    step = fullbatch.eager.Step(mean_square, model, x, microbatch=2)
    with pytest.raises(fullbatch.ModelError, match="The buffer largest depends on how the batch is cut"):
        step(x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.linear.weight.grad is None
    allowed = fullbatch.eager.Step(mean_square, model, x, microbatch=2, allow_inexact=True)
    allowed(x)


def test_it_is_there_after_import_fullbatch() -> None:
    assert fullbatch.eager.__all__ == ["Plan", "Step", "Trial"]
    assert not issubclass(fullbatch.eager.Plan, fullbatch.Plan)  # it can be neither saved nor compared


def test_no_certificate_is_given_and_the_plan_says_so() -> None:
    step = fullbatch.eager.Step(token_loss, Net(), tokens([4, 2]), microbatch=1)
    assert any("no certificate is given" in note for note in step.plan.notes)
    assert not hasattr(step, "verify")
