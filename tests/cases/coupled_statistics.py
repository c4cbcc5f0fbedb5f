"""Losses that are functions of statistics of the whole batch: overlap, ranking, kernels, routing."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import Built, LossFn, case


def segmenter(loss_fn: LossFn, classes: int = 3, b: int = 8) -> Built:
    model = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, classes, 1))
    return loss_fn, model, (torch.randn(b, 3, 6, 6), torch.randint(max(classes, 2), (b, 6, 6)))


@case()
def dice_global() -> Built:
    """One Dice coefficient over all pixels of the batch."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        p = torch.sigmoid(model(batch[0])).contiguous().view(-1)
        t = batch[1].to(p.dtype).view(-1)
        return 1 - (2.0 * (p * t).sum() + 1.0) / (p.sum() + t.sum() + 1.0)

    return segmenter(loss, classes=1)


@case()
def dice_per_class() -> Built:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        p = model(batch[0]).softmax(1)
        t = F.one_hot(batch[1], 3).permute(0, 3, 1, 2).to(p.dtype)
        intersection, cardinality = (p * t).sum((0, 2, 3)), (p + t).sum((0, 2, 3))
        return (1 - 2 * intersection / cardinality.clamp_min(1e-7)).mean()

    return segmenter(loss, b=7)


@case()
def dice_plus_cross_entropy() -> Built:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits, (_, t) = model(batch[0]), batch
        p, onehot = logits.softmax(1), F.one_hot(t, 3).movedim(-1, 1)
        iou = (p * onehot).sum((0, 2, 3)) / (p + onehot - p * onehot).sum((0, 2, 3))
        return F.cross_entropy(logits, t) + 1 - iou.mean()

    return segmenter(loss)


def multilabel(loss_fn: LossFn, b: int = 8) -> Built:
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    return loss_fn, model, {"x": torch.randn(b, 5), "y": torch.randint(2, (b, 3)).double()}


@case()
def soft_f1() -> Built:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        p, y = torch.sigmoid(model(batch["x"])), batch["y"]
        tp, fp, fn = (p * y).sum(0), (p * (1 - y)).sum(0), ((1 - p) * y).sum(0)
        return 1 - (2 * tp / (2 * tp + fn + fp + 1e-16)).mean()

    return multilabel(loss)


@case()
def soft_auc() -> Built:
    """Every positive against every negative of the batch."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        s, y = model(batch["x"])[:, 0], batch["y"][:, 0]
        pair = y[:, None] * (1 - y)[None, :]
        return (torch.sigmoid(s[None, :] - s[:, None]) * pair).sum() / pair.sum().clamp(min=1)

    return multilabel(loss)


@case()
def softmax_over_batch() -> Built:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        weight = model(batch["x"]).softmax(dim=0)
        return (weight * batch["y"]).sum(0).pow(2).sum() - 0.1 * (weight * weight.log()).sum()

    return multilabel(loss)


@case()
def listwise_ranking() -> Built:
    """ListNet: cross-entropy between distributions over the batch."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        scores = model(batch["x"]).mean(1)
        return -(F.softmax(batch["x"][:, 0], dim=0) * F.log_softmax(scores, dim=0)).sum()

    return multilabel(loss, 7)


@case()
def sort_over_batch() -> Built:
    """Sliced Wasserstein: sorted projections of two samples."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        a = torch.sort(model(batch["x"]), dim=0).values
        b, _ = batch["x"][:, :3].sort(dim=0)
        return ((a - b) ** 2).mean()

    return multilabel(loss)


@case()
def hardest_of_batch() -> Built:
    """OHEM: mean of the k largest losses of the batch."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        each = F.binary_cross_entropy_with_logits(model(batch["x"]), batch["y"], reduction="none").mean(1)
        return each.topk(3).values.mean()

    return multilabel(loss)


@case()
def cox_partial_likelihood() -> Built:
    """Sort by time, cumulative log-sum-exp over the batch."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        order = torch.argsort(batch["x"][:, 0], descending=True)
        risk, event = model(batch["x"])[:, 0][order], batch["y"][:, 0][order]
        return -((risk - torch.logcumsumexp(risk, dim=0)) * event).sum() / event.sum().clamp(min=1)

    return multilabel(loss)


def kernel(x: Tensor, y: Tensor) -> Tensor:
    return torch.exp(-torch.cdist(x, y).pow(2) / 2.0)


@case()
def mmd() -> Built:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        a, b = model(batch["x"]), batch["y"]
        return kernel(a, a).mean() + kernel(b, b).mean() - 2 * kernel(a, b).mean()

    return multilabel(loss)


@case()
def mmd_median_bandwidth() -> Built:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        z = torch.cat([model(batch["x"]), batch["y"]])
        d = (z[:, None] - z[None]).pow(2).sum(-1)
        k = torch.exp(-d / d.detach().median())
        n = len(batch["x"])
        return k[:n, :n].mean() + k[n:, n:].mean() - k[:n, n:].mean() - k[n:, :n].mean()

    return multilabel(loss)


@case()
def hsic() -> Built:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        z = model(batch["x"])
        n = z.size(0)
        centre = torch.eye(n, dtype=z.dtype) - 1.0 / n
        k, l = kernel(z, z), kernel(batch["x"], batch["x"])  # noqa: E741
        return -torch.trace(k @ centre @ l @ centre) / (n - 1) ** 2

    return multilabel(loss)


@case()
def coral() -> Built:
    """Covariances of source and target (torch.cov itself compares tensors in Python)."""

    def covariance(x: Tensor) -> Tensor:
        ones = torch.ones(1, x.size(0), dtype=x.dtype) @ x
        return (x.t() @ x - ones.t() @ ones / x.size(0)) / (x.size(0) - 1)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (covariance(model(batch["x"])) - covariance(batch["y"])).pow(2).sum() / 4

    return multilabel(loss)


@case()
def log_det_covariance() -> Built:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        z = model(batch["x"])
        z = z - z.mean(0, keepdim=True)
        return -torch.logdet(torch.eye(3, dtype=z.dtype) + z.T @ z / len(z)) + F.mse_loss(z, batch["y"])

    return multilabel(loss)


@case()
def minibatch_stddev() -> Built:
    """StyleGAN's discriminator layer: the deviation over the batch as one more feature of each sample."""

    class StdDev(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            s = torch.sqrt(x.var(0, unbiased=False) + 1e-8).mean()
            return torch.cat([x, s.expand(x.size(0), 1)], dim=1)

    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), StdDev(), nn.Linear(7, 3))
    return (lambda m, b: F.softplus(-m(b)).mean()), model, torch.randn(8, 5)


class MixtureOfExperts(nn.Module):
    """Dense dispatch; returns the output and the load-balancing loss of the batch."""

    def __init__(self, dim: int = 6, experts: int = 4, k: int = 2) -> None:
        super().__init__()
        self.k = k
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 8), nn.GELU(), nn.Linear(8, dim)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probs = self.router(x).softmax(-1)
        top, index = probs.topk(self.k, dim=-1)
        mask = F.one_hot(index, probs.size(-1)).to(x.dtype)
        gates = (top / top.sum(-1, keepdim=True)).unsqueeze(-1) * mask
        out = torch.einsum("...e,e...d->...d", gates.sum(-2), torch.stack([e(x) for e in self.experts]))
        lead = tuple(range(x.dim() - 1))
        balance = probs.size(-1) * (mask.sum(-2).mean(lead) * probs.mean(lead)).sum()
        return x + out, balance


@case()
def mixture_of_experts() -> Built:
    def loss(models: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        h, balance = models[0](batch[0])
        task = F.cross_entropy(models[1](h.mean(1)), batch[1])
        return task + 0.01 * balance, {"task": task.detach(), "balance": balance.detach()}

    return loss, (MixtureOfExperts(), nn.Linear(6, 3)), (torch.randn(8, 4, 6), torch.randint(3, (8,)))


@case()
def mixture_of_experts_capacity() -> Built:
    """Switch routing: an expert takes the first tokens of the batch, up to its capacity (cumsum over the batch)."""

    class Switch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(6, 3)
            self.w1, self.w2 = nn.Parameter(torch.randn(3, 6, 8) / 3), nn.Parameter(torch.randn(3, 8, 6) / 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            gates = self.router(x).softmax(-1)
            mask = F.one_hot(gates.argmax(-1), 3)
            position = torch.cumsum(mask, dim=0) * mask - 1
            capacity = 3
            dispatch = F.one_hot(position.clamp(0, capacity - 1), capacity) * mask[..., None]
            dispatch = (dispatch * (position < capacity)[..., None]).to(x.dtype)
            combine = gates[..., None] * dispatch
            expert_in = torch.einsum("bec,bd->ecd", dispatch, x)
            expert_out = F.relu(expert_in @ self.w1) @ self.w2
            balance = 3 * (mask.to(x.dtype).mean(0) * gates.mean(0)).sum()
            return torch.einsum("bec,ecd->bd", combine, expert_out), balance

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        out, balance = model(batch[0])
        return F.mse_loss(out, batch[1]) + 0.1 * balance

    return loss, Switch(), (torch.randn(8, 6), torch.randn(8, 6))
