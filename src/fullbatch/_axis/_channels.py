"""Mean and centred sum of squares of each channel of a slice.

torch's CPU kernel for the statistics of a contiguous tensor (`batch_norm_update_stats`, as the forward of its own batch
normalisation) goes through memory element by element: several times longer than it takes to read them. Here sums are
taken of rows, by the vectorised kernels, of parts small enough to stay in a cache between their mean and their squares.
Rows are added up in float64. The variance is as near to the true one as that of torch's kernel, which sums in float64;
the mean is so relative to the deviation of what was averaged.
"""

from __future__ import annotations

import torch

from fullbatch._axis._wide import statistics_dtype

# Elements of a part. Smaller ones would stay in a nearer cache, but many short kernels wait for each other's threads.
_PART = 1 << 20

# Below this many elements starting the kernels takes longer than they do.
_FEW = 1 << 17


def channel_moments(x: torch.Tensor) -> torch.Tensor:
    """[2, channels], float64: mean and centred sum of squares of each channel of x [samples, channels, ...].

    In float64, since means of microbatches are subtracted from each other where they are merged: rounded to float32
    that would cost the variance its digits where a channel's mean is far above its deviation.
    """
    dtype = statistics_dtype(x.dtype)
    if x.device.type != "cpu":
        var, mean = torch.var_mean(x.to(dtype), [0, *range(2, x.dim())], correction=0)
    elif x.dim() > 2 and x.is_contiguous() and x.numel() >= _FEW:
        return _moments_of_rows(x.reshape(x.shape[0] * x.shape[1], -1), x.shape[1], dtype)
    else:
        exact = torch.float64 if x.numel() < _FEW else dtype
        mean, var = torch.batch_norm_update_stats(x.to(exact), None, None, 0.0)
    return torch.stack([mean, var * (x.numel() // x.shape[1])]).to(torch.float64)


def _moments_of_rows(rows: torch.Tensor, channels: int, dtype: torch.dtype) -> torch.Tensor:
    """Of rows [samples * channels, elements]: about a first mean, so that squares of what is left cancel nothing."""
    count = rows.numel() // channels
    centre = _by_channel(rows.sum(1, dtype=dtype), channels).div_(count).to(dtype)
    shift, squares = _sums_about(rows, centre.repeat(rows.shape[0] // channels).unsqueeze(1), channels)
    mean = torch.where(centre.isinf(), centre, centre + shift / count)  # an infinity has no distance from itself
    return torch.stack([mean, squares - shift * shift / count])


def _sums_about(rows: torch.Tensor, centre: torch.Tensor, channels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """By channel, the sum of distances from `centre` [rows, 1] and that of their squares, in float64."""
    step = max(1, _PART // rows.shape[1])
    sums = []
    for part, middle in zip(rows.split(step), centre.split(step), strict=True):
        distance = part - middle
        sums.append(torch.stack([distance.sum(1), distance.square_().sum(1)]))
    shift, squares = torch.cat(sums, 1)
    return _by_channel(shift, channels), _by_channel(squares, channels)


def _by_channel(of_rows: torch.Tensor, channels: int) -> torch.Tensor:
    return of_rows.view(-1, channels).sum(0, dtype=torch.float64)
