"""Slices and summands of whole tensors: cutting, writing back, adding up.

A microbatch owns a range of the batch, and the batch may be folded with other dimensions (`Layout`). Everything that
moves data between a whole value and a microbatch's part of it is here.
"""

from __future__ import annotations

import torch

from fullbatch import _torch
from fullbatch._axis._strides import has_dense_strides
from fullbatch._ir import Layout, Reduction


def cut(whole: torch.Tensor, layout: Layout, begin: int, end: int, batch: int) -> torch.Tensor:
    """Samples [begin, end) of `whole` by `layout`: a view where the batch is outermost in its dimension."""
    if (begin, end) == (0, batch):
        return whole
    if layout.outer == 1:
        part = whole.narrow(layout.dim, begin * layout.inner, (end - begin) * layout.inner)
    else:
        shape = whole.shape
        split = whole.reshape(*shape[: layout.dim], layout.outer, batch, layout.inner, *shape[layout.dim + 1 :])
        part = split.narrow(layout.dim + 1, begin, end - begin)
        part = part.reshape(*shape[: layout.dim], layout.per_sample * (end - begin), *shape[layout.dim + 1 :])
    # Kernels rely on it that what was contiguous is: torch's layer norm backward reads the saved mean and rstd
    # by position, whatever their strides.
    return part.contiguous() if whole.is_contiguous() else part


def paste(whole: torch.Tensor, part: torch.Tensor, layout: Layout, begin: int, end: int, batch: int) -> None:
    """Writes samples [begin, end) into `whole`, which is contiguous."""
    shape = whole.shape
    split = whole.view(*shape[: layout.dim], layout.outer, batch, layout.inner, *shape[layout.dim + 1 :])
    view = split.narrow(layout.dim + 1, begin, end - begin)
    view.copy_(part.reshape(view.shape))


def first_summand(part: torch.Tensor) -> torch.Tensor:
    """`part` where it is safe to add into, else a copy: an expanded tensor, or a view of something larger."""
    return part if owns_dense_storage(part) else part.clone(memory_format=torch.contiguous_format)


def add_summand(
    total: torch.Tensor, part: torch.Tensor, reduction: Reduction, count: int, begin: int, samples: int
) -> None:
    """Adds the summand of a microbatch that begins at sample `begin`; `count` elements a sample are behind a mean."""
    if reduction is Reduction.MOMENTS:
        add_moments(total, part, begin * count, samples * count)
    else:
        total.add_(part)


def add_moments(total: torch.Tensor, part: torch.Tensor, before: int, now: int) -> None:
    """Merges [mean, centred sum of squares] of `now` elements into those of `before`.

    By counts (Chan, Golub and LeVeque 1979): sums of squares lose all digits where the mean is large.
    """
    count = before + now
    delta = part[0] - total[0]
    total[1].add_(part[1]).add_(delta.square(), alpha=before * now / count)
    # A mean that is infinite stays so, where the difference from it would make NaN of it.
    total[0].add_(torch.where(total[0].isinf(), part[0], delta), alpha=now / count)


def owns_dense_storage(tensor: torch.Tensor) -> bool:
    """Whether the tensor covers its storage exactly and is no view of another tensor."""
    return covers_storage(tensor) and not _torch.is_view(tensor)


def covers_storage(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements are its storage, each once."""
    exact = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return exact and has_dense_strides(tensor)
