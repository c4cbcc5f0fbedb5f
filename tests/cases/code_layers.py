"""Spatial layers: resampling, padding, pooling, transposed convolutions, sampling grids and Fourier transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import Built, case


class Around(nn.Module):
    """A convolution, some function of the maps, another convolution, and the mean of each channel."""

    def __init__(self, middle: Callable[[Tensor], Tensor], channels: int = 4, out: int | None = None) -> None:
        super().__init__()
        self.first, self.middle = nn.Conv2d(3, channels, 3, padding=1), middle
        self.last = nn.Conv2d(out or channels, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(torch.tanh(self.first(x)))).square().mean((2, 3))


def maps(middle: Callable[[Tensor], Tensor], b: int = 8, size: int = 6, **options: Any) -> Built:
    def loss(m: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(m(batch["image"]), batch["label"])

    return loss, Around(middle, **options), {"image": torch.randn(b, 3, size, size), "label": torch.randint(4, (b,))}


@case()
def avg_and_max_pool() -> Built:
    return maps(lambda h: F.avg_pool2d(h, 2) + F.max_pool2d(h, 3, 2, 1), 7)


@case()
def max_pool_ceil_and_dilation() -> Built:
    return maps(nn.Sequential(nn.MaxPool2d(2, ceil_mode=True, stride=1), nn.MaxPool2d(2, 1, dilation=2)))


@case()
def avg_pool_no_count_pad() -> Built:
    return maps(nn.AvgPool2d(3, 2, 1, count_include_pad=False))


@case()
def lp_pool() -> Built:
    return maps(lambda h: F.lp_pool2d(h.abs() + 0.1, 3, 2))


@case()
def adaptive_avg_pool() -> Built:
    return maps(nn.AdaptiveAvgPool2d((2, 3)))


@case()
def adaptive_max_pool() -> Built:
    return maps(nn.AdaptiveMaxPool2d(4))


@case()
def pool_1d_of_flattened() -> Built:
    def pools(h: Tensor) -> Tensor:
        h = h.flatten(2)
        return (F.adaptive_max_pool1d(h, 5) + F.avg_pool1d(h, 7, 7)).unsqueeze(-1)

    return maps(pools)


@case()
def conv_transpose() -> Built:
    return maps(nn.ConvTranspose2d(4, 4, 4, stride=2, padding=1, output_padding=1))


@case()
def conv_transpose_grouped_1d() -> Built:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose1d(4, 4, 3, stride=2, groups=2)

        def forward(self, h: Tensor) -> Tensor:
            return self.up(h.flatten(2)).unsqueeze(-1)

    return maps(Decoder())


@case()
def conv_grouped_dilated_strided() -> Built:
    return maps(nn.Sequential(nn.Conv2d(4, 4, 3, groups=4, padding="same"), nn.Conv2d(4, 4, 3, 2, 2, dilation=2)))


@case()
def conv_circular_padding() -> Built:
    return maps(nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"))


@case()
def interpolate_nearest() -> Built:
    return maps(lambda h: F.interpolate(h, scale_factor=2, mode="nearest"))


@case()
def interpolate_bilinear() -> Built:
    return maps(lambda h: F.interpolate(h, size=(9, 4), mode="bilinear", align_corners=False))


@case()
def interpolate_bilinear_down_antialias() -> Built:
    return maps(lambda h: F.interpolate(h, size=h.shape[-2] // 2, mode="bilinear", antialias=True))


@case()
def interpolate_bicubic() -> Built:
    return maps(lambda h: F.interpolate(h, scale_factor=1.5, mode="bicubic", align_corners=True), 7)


@case()
def pad_constant_and_reflect() -> Built:
    return maps(lambda h: F.pad(F.pad(h, (2, 1, 0, 2), mode="reflect"), (1, 1, 1, 1), value=0.5))


@case()
def pad_replicate_and_crop() -> Built:
    return maps(lambda h: F.pad(F.pad(h, (1, 2, 1, 0), mode="replicate"), (-1, -1, 0, -1)))


@case()
def pixel_shuffle() -> Built:
    return maps(nn.PixelShuffle(2), channels=8, out=2)


@case()
def pixel_unshuffle_and_channel_shuffle() -> Built:
    return maps(nn.Sequential(nn.PixelUnshuffle(2), nn.ChannelShuffle(4)), out=16)


@case()
def unfold_attention() -> Built:
    """Local attention over 3 x 3 neighbourhoods with F.unfold."""

    def local(h: Tensor) -> Tensor:
        b, c, height, width = h.shape
        around = F.unfold(h, 3, padding=1).view(b, c, 9, height * width)
        weight = (around * h.view(b, c, 1, -1)).sum(1, keepdim=True).softmax(2)
        return (around * weight).sum(2).view(b, c, height, width)

    return maps(local)


@case()
def unfold_fold_overlap() -> Built:
    def overlap(h: Tensor) -> Tensor:
        patches = F.unfold(h, kernel_size=2, stride=2, padding=0)
        patches = patches - patches.mean(1, keepdim=True)
        return F.fold(patches, h.shape[-2:], 2, stride=2) + F.fold(F.unfold(h, 3, stride=1), h.shape[-2:], 3)

    return maps(overlap)


@case()
def tensor_unfold_patches() -> Built:
    def patches(h: Tensor) -> Tensor:
        p = h.unfold(2, 2, 2).unfold(3, 2, 2)
        return p.permute(0, 2, 3, 1, 4, 5).reshape(h.size(0), 9, -1).transpose(1, 2).unsqueeze(-1)

    return maps(patches, out=16)


@case()
def spatial_transformer() -> Built:
    """affine_grid and grid_sample with parameters predicted for each sample."""

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.theta = nn.Linear(4, 6)
            nn.init.normal_(self.theta.weight, std=0.2)
            self.theta.bias.data = torch.tensor([1.0, 0, 0, 0, 1, 0])

        def forward(self, h: Tensor) -> Tensor:
            grid = F.affine_grid(self.theta(h.mean((2, 3))).view(-1, 2, 3), list(h.shape), align_corners=False)
            return F.grid_sample(h, grid, padding_mode="border", align_corners=False)

    return maps(Transformer())


@case()
def optical_flow_warp() -> Built:
    """A base grid from arange, expanded to the batch, plus a predicted flow."""

    class Warp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flow = nn.Conv2d(4, 2, 3, padding=1)

        def forward(self, h: Tensor) -> Tensor:
            b, _, height, width = h.shape
            xx = torch.arange(width).view(1, -1).repeat(height, 1).view(1, 1, height, width).repeat(b, 1, 1, 1)
            yy = torch.arange(height).view(-1, 1).repeat(1, width).view(1, 1, height, width).repeat(b, 1, 1, 1)
            grid = torch.cat((xx, yy), 1).to(h.dtype) + self.flow(h)
            grid = 2.0 * grid / torch.tensor([width - 1.0, height - 1.0], dtype=h.dtype).view(1, 2, 1, 1) - 1.0
            return F.grid_sample(h, grid.permute(0, 2, 3, 1), align_corners=True)

    return maps(Warp())


@case()
def fourier_mixing() -> Built:
    """FNet: the real part of a Fourier transform over tokens and channels."""
    return maps(lambda h: torch.fft.fft2(h, dim=(1, 2)).real / 4)


@case()
def fourier_neural_operator() -> Built:
    """A complex parameter multiplies the low frequencies."""

    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4, 3, 3, dtype=torch.complex128) / 4)

        def forward(self, h: Tensor) -> Tensor:
            ft = torch.fft.rfft2(h)
            out = torch.zeros(h.size(0), 4, h.size(-2), h.size(-1) // 2 + 1, dtype=torch.complex128)
            out[:, :, :3, :3] = torch.einsum("bixy,ioxy->boxy", ft[:, :, :3, :3], self.weight)
            return torch.fft.irfft2(out, s=(h.size(-2), h.size(-1)))

    return maps(Spectral())


@case()
def spectral_loss() -> Built:
    """Magnitude and phase of complex numbers, with a real-valued parameterised filter (view_as_complex)."""

    class Filter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 6, 4, 2))

        def forward(self, h: Tensor) -> Tensor:
            z = torch.fft.rfft2(h, norm="ortho") * torch.view_as_complex(self.weight)
            return torch.view_as_real(z)[..., 0] + (z.abs() + 1e-3).log() + z.conj().imag

    return maps(Filter())


@case()
def deep_activations() -> Built:
    return maps(
        nn.Sequential(
            nn.ELU(), nn.PReLU(4), nn.Softplus(), nn.Mish(), nn.Hardtanh(), nn.GLU(1), nn.Conv2d(2, 4, 1),
            nn.Softsign(), nn.SELU(), nn.CELU(), nn.LogSigmoid(), nn.Softmax2d(), nn.Tanhshrink(), nn.Hardswish(),
        )
    )  # fmt: skip
