"""Indexing, masks, scatters and in-place writes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import Built, case
from .code_shapes import sequence, small


@case()
def arange_label_index() -> Built:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        log_p = m(b["x"]).log_softmax(dim=-1)
        return -log_p[torch.arange(b["x"].size(0)), b["y"]].mean()

    return small(loss)


@case()
def range_label_index() -> Built:
    return small(lambda m, b: -m(b["x"]).softmax(1)[range(len(b["y"])), b["y"]].log().mean(), b=7)


@case()
def last_token_by_length() -> Built:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        out = m(b["x"])
        last = out[torch.arange(out.shape[0]), b["length"] - 1]
        return (last - b["y"][:, 0]).pow(2).mean()

    loss_fn, model, batch = sequence(loss)
    return loss_fn, model, batch | {"length": torch.tensor([4, 1, 2, 3, 4, 2, 1, 3])}


@case()
def gather_per_sample_index() -> Built:
    """Q-learning: the value of the action taken, and a target from the maximum of the next state."""

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        q = m(b["x"]).gather(1, b["y"].unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            target = b["reward"] + 0.99 * (~b["done"]) * m(b["next"]).max(1)[0]
        return F.smooth_l1_loss(q, target)

    loss_fn, model, batch = small(loss)
    return loss_fn, model, batch | {
        "next": torch.randn(8, 6), "reward": torch.randn(8), "done": torch.rand(8) < 0.3
    }  # fmt: skip


@case()
def one_hot_target() -> Built:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        target = F.one_hot(b["y"], num_classes=5).float()
        return ((m(b["x"]).sigmoid() - target) ** 2).sum(1).mean()

    return small(loss)


@case()
def scatter_one_hot() -> Built:
    """Smoothed targets written with scatter_."""

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        log_p = m(b["x"]).log_softmax(1)
        target = torch.full_like(log_p, 0.1 / 4).scatter_(1, b["y"].unsqueeze(1), 0.9)
        return torch.mean(torch.sum(-target * log_p, dim=1))

    return small(loss)


@case()
def boolean_mask_assignment() -> Built:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        out = m(b["x"])
        error = (out - b["y"]) ** 2
        error[b["y"] > 1] = 0.0
        mask = b["y"][..., 0] < -0.5
        weight = torch.ones_like(error)
        weight[mask] = 0.5
        return (error * weight).mean()

    return sequence(loss)


@case()
def masked_fill_and_where() -> Built:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        out = m(b["x"])
        out = out.masked_fill(b["x"] > 1, -3.0)
        positive = torch.where(b["y"] > 0, out, torch.zeros_like(out))
        return torch.where(out.abs() < 1, out**2, out.abs()).mean() + positive.mean(dim=(1, 2)).exp().mean()

    return sequence(loss)


@case()
def in_place_chain() -> Built:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x).relu_()
            h = h + 1
            h.mul_(0.5).add_(x)
            h.masked_fill_(h > 2, 0.0)
            out = self.b(h)
            out += h
            out.clamp_(min=-1.5).div_(2.0)
            return out

    return sequence(lambda m, b: F.mse_loss(m(b["x"]), b["y"]), InPlace())


@case()
def in_place_slices() -> Built:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        h = m(b["x"])
        h[:, 0] = 0.0
        h[:, 1:3] *= 2
        h[:, -1, :2] = b["y"][:, 0, :2]
        buffer = torch.zeros(h.shape, dtype=h.dtype)
        buffer[..., ::2] = h[..., 1::2]
        buffer[:, 2] += h[:, 1]
        return (buffer - b["y"]).abs().mean() + h.sin().mean()

    return sequence(loss)


@case()
def in_place_on_batch_rows() -> Built:
    """Rows of the batch are addressed by number."""

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        h = m(b["x"])
        h[0] = h[1] * 2
        h[-1, 0].add_(1.0)
        h[2:4] = h[2:4].exp()
        return F.cross_entropy(h, b["y"])

    return small(loss)


@case()
def index_add_features() -> Built:
    """Groups of features are summed: graph-style message passing on a fixed graph."""

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        source, target = torch.tensor([0, 1, 2, 3, 0, 2]), torch.tensor([1, 2, 3, 0, 2, 2])
        h = m(b["x"])
        out = torch.zeros_like(h).index_add(1, target, h.index_select(1, source))
        return F.mse_loss(out, b["y"])

    return sequence(loss)


@case()
def scatter_add_per_sample() -> Built:
    """Pointer-generator: attention is added to the words at per-sample positions."""

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        attention = m(b["x"])[..., 0].softmax(-1)
        vocab = torch.zeros(attention.size(0), 7, dtype=attention.dtype).scatter_add_(1, b["ids"], attention)
        return -(vocab.gather(1, b["ids"][:, :1]) + 1e-3).log().mean()

    loss_fn, model, batch = sequence(loss)
    return loss_fn, model, batch | {"ids": torch.randint(7, (8, 4))}


@case()
def histogram_over_batch() -> Built:
    """Class frequencies of the batch weigh its loss (index_add over the batch)."""

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        counts = torch.zeros(5, dtype=torch.float64).index_add_(0, b["y"], torch.ones(len(b["y"]), dtype=torch.float64))
        weight = 1.0 / counts.clamp(min=1)
        return (F.cross_entropy(m(b["x"]), b["y"], reduction="none") * weight[b["y"]]).sum()

    return small(loss)


@case()
def segment_mean_over_batch() -> Built:
    """Samples belong to bags: the mean of each bag by scatter_add and by scatter_reduce, loss on bags."""

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        h, bag = m(b["x"]), b["bag"]
        total = torch.zeros(3, 5, dtype=h.dtype).scatter_add(0, bag[:, None].expand_as(h), h)
        count = torch.zeros(3, dtype=h.dtype).scatter_add(0, bag, torch.ones_like(bag, dtype=h.dtype))
        largest = torch.zeros(3, 5, dtype=h.dtype).scatter_reduce(0, bag[:, None].expand_as(h), h, "amax")
        return F.cross_entropy(total / count[:, None] + largest, torch.tensor([0, 3, 1]))

    loss_fn, model, batch = small(loss)
    return loss_fn, model, batch | {"bag": torch.tensor([0, 2, 1, 0, 1, 2, 2, 0])}


@case()
def graph_of_the_batch() -> Built:
    """Nodes are the batch; edges join any two of them (a graph network on one graph)."""

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        source, target = b["edges"]
        h = m(b["x"])
        messages = torch.zeros_like(h).index_add_(0, target, h[source])
        degree = torch.zeros(h.size(0), dtype=h.dtype).index_add_(0, target, torch.ones(target.size(0), dtype=h.dtype))
        return F.cross_entropy(h + messages / degree.clamp(min=1).unsqueeze(-1), b["y"])

    loss_fn, model, batch = small(loss)
    return loss_fn, model, batch | {"edges": torch.randint(8, (2, 13))}


@case()
def bincount_like_confusion() -> Built:
    """Aux counts over the batch by one-hot products."""

    def loss(m: nn.Module, b: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        logits = m(b["x"])
        predicted, actual = F.one_hot(logits.argmax(1), 5), F.one_hot(b["y"], 5)
        return F.cross_entropy(logits, b["y"]), {"confusion": actual.T.double() @ predicted.double()}

    return small(loss, b=7)


@case()
def roll_and_flip() -> Built:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        h = m(b["x"])
        shifted = torch.roll(h, shifts=1, dims=1) + torch.flip(h, dims=[1, 2])
        return F.mse_loss(shifted, b["y"])

    return sequence(loss)


@case()
def roll_over_batch() -> Built:
    """Negatives are the next sample of the batch."""

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        z = m(b["x"])
        negative = torch.roll(z, 1, 0)
        return F.relu(F.cosine_similarity(z, negative) - 0.2).mean() + F.cross_entropy(z, b["y"])

    return small(loss)


@case()
def sort_topk_cumsum_features() -> Built:
    """Nucleus-like reweighting: sort, cumulative sum, threshold, top-k."""

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        p, order = torch.sort(m(b["x"]).softmax(-1), dim=-1, descending=True)
        keep = p.cumsum(-1) - p < 0.9
        top, _ = m(b["x"]).topk(2, dim=-1)
        return -(p * keep).sum(-1).log().mean() + (top[:, 0] - top[:, 1]).mean() + p.gather(1, order).std()

    return small(loss)


@case()
def emd_cumsum() -> Built:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        cdf = torch.cumsum(m(b["x"]).softmax(-1), dim=-1)
        target = torch.cumsum(F.one_hot(b["y"], 5).double(), dim=-1)
        return torch.sqrt(((cdf - target) ** 2).mean(1) + 1e-9).mean()

    return small(loss)


@case()
def cumsum_over_batch() -> Built:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        running = m(b["x"]).cumsum(0) / torch.arange(1, len(b["x"]) + 1)[:, None]
        return F.cross_entropy(running, b["y"])

    return small(loss)


@case()
def embedding_bag_and_padding() -> Built:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 5, padding_idx=0)

        def forward(self, ids: Tensor) -> Tensor:
            mask = (ids != 0).unsqueeze(-1)
            return (self.table(ids) * mask).sum(1) / mask.sum(1).clamp(min=1)

    batch = {"ids": torch.randint(9, (8, 4)), "y": torch.randint(5, (8,))}
    return (lambda m, b: F.cross_entropy(m(b["ids"]), b["y"])), Bag(), batch


@case()
def advanced_index_grid() -> Built:
    """Corner features of each map at per-sample coordinates."""

    class Corner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 4, 3, padding=1)

        def forward(self, x: Tensor, ij: Tensor) -> Tensor:
            h = self.conv(x)
            rows = torch.arange(x.shape[0]).unsqueeze(1)
            return h[rows, :, ij[..., 0], ij[..., 1]].mean(1)

    batch = {"x": torch.randn(8, 2, 5, 5), "ij": torch.randint(5, (8, 3, 2)), "y": torch.randint(4, (8,))}
    return (lambda m, b: F.cross_entropy(m(b["x"], b["ij"]), b["y"])), Corner(), batch
