"""Losses in which every sample meets every other: contrastive and metric learning."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import Built, LossFn, case


def encoder(dim: int = 6, out: int = 5, bn: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(dim, 8), nn.BatchNorm1d(8) if bn else nn.Identity(), nn.ReLU(), nn.Linear(8, out))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))


def clip_loss(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    image, text = F.normalize(image, dim=-1), F.normalize(text, dim=-1)
    logits = scale * image @ text.t()
    labels = torch.arange(logits.shape[0], device=logits.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


def pairs(b: int = 8) -> dict[str, Tensor]:
    return {"image": torch.randn(b, 6), "text": torch.randn(b, 4)}


@case()
def clip_tuple_of_towers() -> Built:
    def loss(models: Any, batch: dict[str, Tensor]) -> Tensor:
        vision, language, scale = models
        return clip_loss(vision(batch["image"]), language(batch["text"]), scale.logit_scale.exp())

    return loss, (encoder(), encoder(4, bn=False), Scale()), pairs()


@case()
def clip_dict_of_towers() -> Built:
    """Only the loss reads the learned scale; no forward is called on its module."""

    def loss(models: Any, batch: dict[str, Tensor]) -> Tensor:
        scale = models["scale"].logit_scale.exp().clamp(max=100)
        return clip_loss(models["vision"](batch["image"]), models["language"](batch["text"]), scale)

    return loss, {"vision": encoder(bn=False), "language": encoder(4), "scale": Scale()}, pairs(7)


@case()
def clip_one_module() -> Built:
    class CLIP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vision, self.language = encoder(bn=False), encoder(4, bn=False)
            self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))

        def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
            image, text = self.vision(image), self.language(text)
            image = image / image.norm(dim=1, keepdim=True)
            text = text / text.norm(dim=1, keepdim=True)
            logits = self.logit_scale.exp() * image @ text.t()
            return logits, logits.t()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        per_image, per_text = model(**batch)
        labels = torch.arange(len(per_image))
        return 0.5 * F.cross_entropy(per_image, labels) + 0.5 * F.cross_entropy(per_text, labels)

    return loss, CLIP(), pairs()


@case()
def siglip() -> Built:
    def loss(models: Any, batch: dict[str, Tensor]) -> Tensor:
        zi, zt = F.normalize(models[0](batch["image"])), F.normalize(models[1](batch["text"]))
        logits = zi @ zt.T * models[2].logit_scale.exp() - 10
        n = logits.size(0)
        labels = 2 * torch.eye(n, dtype=logits.dtype) - 1
        return -F.logsigmoid(labels * logits).sum() / n

    return loss, (encoder(), encoder(4), Scale()), pairs()


def views(loss_fn: LossFn, b: int = 8, classes: int = 3) -> Built:
    batch = {"a": torch.randn(b, 6), "b": torch.randn(b, 6), "label": torch.arange(b) % classes}
    return loss_fn, encoder(), batch


@case()
def simclr_concat_views() -> Built:
    """Both views go through the BatchNorm encoder as one batch of 2B."""

    def nt_xent(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        z = F.normalize(model(torch.cat([batch["a"], batch["b"]])), dim=1)
        sim = z @ z.T / 0.5
        sim = sim.masked_fill(torch.eye(sim.size(0), dtype=torch.bool), float("-inf"))
        n = sim.size(0) // 2
        target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
        return F.cross_entropy(sim, target)

    return views(nt_xent)


@case()
def simclr_chunk_views() -> Built:
    def info_nce(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        za, zb = model(torch.cat([batch["a"], batch["b"]], dim=0)).chunk(2)
        logits = F.cosine_similarity(za[:, None], zb[None], dim=-1) / 0.2
        return F.cross_entropy(logits, torch.arange(za.size(0)))

    return views(info_nce, 7)


@case()
def supcon() -> Built:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        features = torch.stack([F.normalize(model(batch["a"])), F.normalize(model(batch["b"]))], dim=1)
        b, n_views = features.shape[:2]
        contrast = torch.cat(torch.unbind(features, dim=1), dim=0)
        logits = contrast @ contrast.T / 0.1
        logits = logits - logits.max(dim=1, keepdim=True).values.detach()
        labels = batch["label"].view(-1, 1)
        mask = torch.eq(labels, labels.T).double().repeat(n_views, n_views)
        others = 1 - torch.eye(b * n_views, dtype=torch.float64)
        mask = mask * others
        log_prob = logits - torch.log((logits.exp() * others).sum(1, keepdim=True))
        return -((mask * log_prob).sum(1) / mask.sum(1)).view(n_views, b).mean()

    return views(loss)


@case()
def batch_hard_triplet_cdist() -> Built:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        z = model(batch["a"])
        d = torch.cdist(z, z)
        same = batch["label"][:, None] == batch["label"][None]
        hardest_positive = (d * same).max(dim=1).values
        hardest_negative = d.masked_fill(same, float("inf")).min(dim=1).values
        return F.relu(hardest_positive - hardest_negative + 0.3).mean()

    return views(loss)


@case()
def batch_hard_triplet_matmul() -> Built:
    """Squared distances by hand, soft margin."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        z = model(batch["a"])
        sq = (z * z).sum(1)
        d = (sq[:, None] - 2 * z @ z.t() + sq[None]).clamp(min=1e-12).sqrt()
        same = torch.eq(batch["label"].unsqueeze(0), batch["label"].unsqueeze(1))
        positive = torch.where(same & ~torch.eye(len(z), dtype=torch.bool), d, -1e9).amax(1)
        negative = torch.where(same, 1e9, d).amin(1)
        return F.softplus(positive - negative).mean()

    return views(loss)


@case()
def batch_all_triplet() -> Built:
    """Every triplet of the batch, averaged over those that still violate the margin."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        z, label = model(batch["a"]), batch["label"]
        d = (z.unsqueeze(0) - z.unsqueeze(1)).pow(2).sum(-1)
        same, eye = label[:, None] == label[None], torch.eye(len(z), dtype=torch.bool)
        valid = (same & ~eye)[:, :, None] & (~same)[:, None, :]
        triplets = F.relu(d[:, :, None] - d[:, None, :] + 0.2) * valid
        return triplets.sum() / ((triplets > 1e-16).sum() + 1e-16)

    return views(loss, 7)


@case()
def barlow_twins() -> Built:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        za, zb = model(batch["a"]), model(batch["b"])
        za, zb = (za - za.mean(0)) / za.std(0), (zb - zb.mean(0)) / zb.std(0)
        c = za.T @ zb / za.shape[0]
        on_diagonal = torch.diagonal(c).add(-1).pow(2).sum()
        off_diagonal = (c - torch.diag_embed(torch.diagonal(c))).pow(2).sum()
        return on_diagonal + 0.005 * off_diagonal

    return views(loss)


@case()
def barlow_twins_bn_and_flat_off_diagonal() -> Built:
    """As in the paper's code: BatchNorm without affine, and the off-diagonal by reshaping."""

    def off_diagonal(x: Tensor) -> Tensor:
        n = x.shape[0]
        return x.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten()

    def loss(models: Any, batch: dict[str, Tensor]) -> Tensor:
        net, bn = models
        c = bn(net(batch["a"])).T @ bn(net(batch["b"]))
        c.div_(batch["a"].size(0))
        return torch.diagonal(c).add_(-1).pow_(2).sum() + 0.0051 * off_diagonal(c).pow_(2).sum()

    loss_fn, net, batch = views(loss)
    return loss_fn, (net, nn.BatchNorm1d(5, affine=False)), batch


@case()
def vicreg() -> Built:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x, y = model(batch["a"]), model(batch["b"])
        repr_loss = F.mse_loss(x, y)
        x, y = x - x.mean(dim=0), y - y.mean(dim=0)
        std_x, std_y = torch.sqrt(x.var(dim=0) + 0.0001), torch.sqrt(y.var(dim=0) + 0.0001)
        std_loss = F.relu(1 - std_x).mean() / 2 + F.relu(1 - std_y).mean() / 2
        n, d = x.shape
        off = 1 - torch.eye(d, dtype=x.dtype)
        cov_loss = sum((((z.T @ z) / (n - 1)) * off).pow(2).sum() / d for z in (x, y))
        return 25.0 * repr_loss + 25.0 * std_loss + cov_loss

    return views(loss)


@case()
def n_pair_multiple_positives() -> Built:
    """Soft targets made from the labels of the batch."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["a"]) @ model(batch["b"]).T
        same = (batch["label"][:, None] == batch["label"][None]).to(logits.dtype)
        return F.cross_entropy(logits, same / same.sum(1, keepdim=True))

    return views(loss)


@case()
def alignment_uniformity() -> Built:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x, y = F.normalize(model(batch["a"])), F.normalize(model(batch["b"]))
        align = (x - y).norm(p=2, dim=1).pow(2).mean()
        uniform = torch.pdist(x, p=2).pow(2).mul(-2).exp().mean().log()
        return align + uniform

    return views(loss)


@case()
def center_loss() -> Built:
    """Class centres are means over the batch, found with one-hot matmuls."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        z, onehot = model(batch["a"]), F.one_hot(batch["label"], 3).double()
        centres = onehot.T @ z / onehot.sum(0)[:, None].clamp(min=1)
        within = (z - centres[batch["label"]]).pow(2).sum(1).mean()
        return within - 0.1 * torch.cdist(centres, centres).mean()

    return views(loss)
