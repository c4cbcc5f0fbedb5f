"""Normalisation within a sample, and normalisation of weights with state updated in the forward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils import weight_norm as old_weight_norm

from . import Built, case
from .norms import classify, images


def conv_norm(norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 6, 3), norm, nn.SiLU(), nn.Conv2d(6, 6, 3), nn.Flatten(), nn.Linear(96, 4))


def sequence_norm(norm: nn.Module) -> Built:
    model = nn.Sequential(nn.Linear(5, 6), norm, nn.GELU(), nn.Flatten(), nn.Linear(24, 4))
    return classify, model, (torch.randn(8, 4, 5), torch.randint(4, (8,)))


@case()
def groupnorm() -> Built:
    return classify, conv_norm(nn.GroupNorm(3, 6)), images()


@case()
def groupnorm_one_group_no_affine() -> Built:
    return classify, conv_norm(nn.GroupNorm(1, 6, affine=False)), images(7)


@case()
def instancenorm() -> Built:
    return classify, conv_norm(nn.InstanceNorm2d(6)), images()


@case()
def instancenorm_affine() -> Built:
    norm = nn.InstanceNorm2d(6, affine=True)
    nn.init.normal_(norm.weight)
    return classify, conv_norm(norm), images()


@case()
def instancenorm_running_stats() -> Built:
    """The running statistics are the mean over the batch of the statistics of each sample."""
    return classify, conv_norm(nn.InstanceNorm2d(6, affine=True, track_running_stats=True)), images()


@case()
def instancenorm_running_stats_eval() -> Built:
    norm = nn.InstanceNorm2d(6, track_running_stats=True).eval()
    norm.running_mean.normal_(), norm.running_var.uniform_(0.5, 2.0)
    return classify, conv_norm(norm), images()


@case()
def instancenorm1d_running_stats() -> Built:
    model = nn.Sequential(
        nn.Conv1d(3, 5, 3), nn.InstanceNorm1d(5, track_running_stats=True), nn.Flatten(), nn.Linear(35, 4)
    )
    return classify, model, (torch.randn(7, 3, 9), torch.randint(4, (7,)))


@case()
def layernorm_last() -> Built:
    return sequence_norm(nn.LayerNorm(6))


@case()
def layernorm_two_dims() -> Built:
    return sequence_norm(nn.LayerNorm((4, 6), eps=1e-3))


@case()
def layernorm_no_affine() -> Built:
    return sequence_norm(nn.LayerNorm(6, elementwise_affine=False))


@case()
def rmsnorm() -> Built:
    return sequence_norm(nn.RMSNorm(6))


@case()
def local_response_norm() -> Built:
    return classify, conv_norm(nn.LocalResponseNorm(3)), images()


@case()
def layernorm_channels_first() -> Built:
    """ConvNeXt's LayerNorm2d: permute, normalise the channels, permute back."""

    class LayerNorm2d(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    return classify, conv_norm(LayerNorm2d(6)), images()


def weight_normed(wrap: Callable[[nn.Module], nn.Module]) -> nn.Sequential:
    # The old functions keep a computed, non-leaf weight on the module, which cannot be deep-copied unless it was made
    # without a graph.
    with torch.no_grad():
        return nn.Sequential(
            wrap(nn.Conv2d(3, 4, 3)), nn.LeakyReLU(0.2), wrap(nn.Conv2d(4, 4, 3, stride=2)), nn.LeakyReLU(0.2),
            nn.Flatten(), wrap(nn.Linear(16, 4)),
        )  # fmt: skip


@case()
def spectral_norm_old() -> Built:
    return classify, weight_normed(old_spectral_norm), images()


@case()
def spectral_norm_old_eval() -> Built:
    """With u and v found by a few training passes."""
    model = weight_normed(old_spectral_norm)
    with torch.no_grad():
        for _ in range(5):
            model(images()[0])
    return classify, model.eval(), images()


@case()
def spectral_norm_parametrization() -> Built:
    return classify, weight_normed(parametrizations.spectral_norm), images()


@case()
def spectral_norm_more_iterations() -> Built:
    return classify, weight_normed(lambda m: parametrizations.spectral_norm(m, n_power_iterations=3)), images()


@case()
def weight_norm_old() -> Built:
    return classify, weight_normed(old_weight_norm), images()


@case()
def weight_norm_parametrization() -> Built:
    return classify, weight_normed(parametrizations.weight_norm), images()


@case()
def spectral_norm_discriminator_called_twice() -> Built:
    """Two calls in a step are two power iterations; the second starts where the first ended."""
    model = weight_normed(parametrizations.spectral_norm)

    def hinge(d: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.relu(1 - d(batch["real"])).mean() + F.relu(1 + d(batch["fake"])).mean()

    return hinge, model, {"real": torch.randn(8, 3, 8, 8), "fake": torch.randn(8, 3, 8, 8)}


@case()
def weight_standardisation() -> Built:
    """Conv with standardised weights, as in BiT; the weight statistics do not see the batch."""

    class StdConv2d(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            var, mean = torch.var_mean(self.weight, dim=[1, 2, 3], keepdim=True, unbiased=False)
            weight = (self.weight - mean) / torch.sqrt(var + 1e-10)
            return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)

    model = nn.Sequential(
        StdConv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(216, 4)
    )
    return classify, model, images()
