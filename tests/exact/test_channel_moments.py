"""The statistics of batch normalisation by rows: as near to the true ones as torch's own kernel."""

import pytest
import torch
from torch import nn

import fullbatch
from fullbatch._axis import _channels
from fullbatch._axis._channels import channel_moments

SHAPES = [(8, 64, 48, 48), (3, 7, 211, 113), (1, 16, 160, 160), (2, 8, 32, 32, 32), (2, 3, 100_000)]


def _true_moments(x: torch.Tensor) -> torch.Tensor:
    dims = [0, *range(2, x.dim())]
    var, mean = torch.var_mean(x.double(), dims, correction=0)
    return torch.stack([mean, var * (x.numel() // x.shape[1])])


def _error(found: torch.Tensor, x: torch.Tensor) -> float:
    true = _true_moments(x)
    return float(((found.double() - true).abs() / true.abs()).max())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "within"), [(torch.float32, 1e-6), (torch.float64, 1e-12), (torch.bfloat16, 1e-6)], ids=str
)
def test_moments_are_the_true_ones_to_rounding(shape: tuple[int, ...], dtype: torch.dtype, within: float) -> None:
    x = (torch.randn(shape) * 0.1 + 3).to(dtype)
    assert x.numel() >= _channels._FEW
    found = channel_moments(x)
    assert found.dtype == torch.float64
    assert _error(found, x) < within


def test_a_mean_far_above_the_deviation_cancels_nothing() -> None:
    x = torch.randn(8, 64, 48, 48, dtype=torch.float32) * 0.01 + 1000 * torch.arange(1.0, 65, dtype=torch.float32).view(
        1, -1, 1, 1
    )
    mean, var = torch.batch_norm_update_stats(x, None, None, 0.0)
    torchs = torch.stack([mean, var * (x.numel() // 64)])
    assert _error(channel_moments(x), x) <= 2 * _error(torchs, x) + 1e-6


@pytest.mark.parametrize("size", [1, 3])
def test_microbatches_keep_the_digits_of_a_variance(size: int) -> None:
    """A mean a thousand times the deviation: merged in float32 its variance was off by fifty times torch's error."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(8))
    batch = torch.randn(8, 8, 8, 8) + 1000
    step = fullbatch.Step(lambda model, batch: model(batch).square().mean(), model, batch, microbatch=size)
    step(batch)
    true = 0.9 + 0.1 * batch.double().var([0, 2, 3])
    assert float((model[0].running_var - true).abs().max()) < 5e-7


def test_one_sample_that_is_unlike_the_others_does_not_decide_about_what_is_subtracted() -> None:
    x = torch.randn(16, 16, 48, 48, dtype=torch.float32) + 500
    x[0] = 0
    assert _error(channel_moments(x), x) < 1e-5


def test_parts_may_be_uneven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_channels, "_PART", 5 * 48 * 48)
    x = torch.randn(8, 16, 48, 48, dtype=torch.float64) + 1
    assert _error(channel_moments(x), x) < 1e-12


@pytest.mark.parametrize("size", [1, 3, 4])
def test_a_step_with_large_maps_is_exact(size: int) -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 3))
    batch = torch.randn(8, 3, 112, 112)
    assert size * 16 * 110 * 110 >= _channels._FEW

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    step = fullbatch.Step(loss_fn, model, batch, memory=None, microbatch=size)
    certificate = step.verify()
    assert step.plan.microbatch == size
    assert max(certificate.gradient_error, certificate.loss_error, certificate.buffer_error) < 1e-10, certificate
