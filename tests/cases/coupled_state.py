"""Steps with state of their own: centres, codebooks, queues, target networks; and steps of several networks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import Built, case
from .coupled_contrastive import encoder


class DINOLoss(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("center", 0.1 * torch.randn(1, dim))

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        target = F.softmax((teacher - self.center) / 0.04, dim=-1).detach()
        loss = torch.sum(-target * F.log_softmax(student / 0.1, dim=-1), dim=-1).mean()
        self.update(teacher)
        return loss

    @torch.no_grad()
    def update(self, teacher: Tensor) -> None:
        self.center.mul_(0.9).add_(teacher.mean(dim=0, keepdim=True), alpha=0.1)


@case()
def dino_centre() -> Built:
    def loss(models: Any, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            teacher = models["teacher"](batch["b"])
        return models["loss"](models["student"](batch["a"]), teacher)

    models = {"student": encoder(), "teacher": encoder().requires_grad_(False), "loss": DINOLoss(5)}
    return loss, models, {"a": torch.randn(8, 6), "b": torch.randn(8, 6)}


@case()
def centre_updated_before_use() -> Built:
    """The loss reads the centre that this very batch has moved."""

    def loss(models: Any, batch: Tensor) -> Tensor:
        net, criterion = models
        z = net(batch)
        criterion.update(z.detach())
        return (z - criterion.center).pow(2).sum(1).sqrt().mean()

    return loss, (encoder(), DINOLoss(5)), torch.randn(8, 6)


class VectorQuantizerEMA(nn.Module):
    def __init__(self, codes: int = 6, dim: int = 4) -> None:
        super().__init__()
        self.register_buffer("embedding", torch.randn(codes, dim))
        self.register_buffer("cluster_size", torch.ones(codes))
        self.register_buffer("embed_avg", self.embedding.clone())

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat = z.reshape(-1, z.shape[-1])
        distance = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.embedding.t() + self.embedding.pow(2).sum(1)
        onehot = F.one_hot(distance.argmin(1), self.embedding.shape[0]).type(flat.dtype)
        quantized = (onehot @ self.embedding).view(z.shape)
        if self.training:
            self.cluster_size.data.mul_(0.9).add_(onehot.sum(0), alpha=0.1)
            self.embed_avg.data.mul_(0.9).add_(onehot.t() @ flat.detach(), alpha=0.1)
            n = self.cluster_size.sum()
            size = (self.cluster_size + 1e-5) / (n + 6 * 1e-5) * n
            self.embedding.data.copy_(self.embed_avg / size.unsqueeze(1))
        commitment = F.mse_loss(z, quantized.detach())
        usage = onehot.mean(0)
        perplexity = torch.exp(-(usage * torch.log(usage + 1e-10)).sum())
        return z + (quantized - z).detach(), commitment, perplexity


@case()
def vector_quantiser_ema() -> Built:
    def loss(models: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        encode, quantise, decode = models
        z, commitment, perplexity = quantise(encode(x))
        return F.mse_loss(decode(z), x) + 0.25 * commitment, perplexity

    return loss, (nn.Linear(5, 4), VectorQuantizerEMA(), nn.Linear(4, 5)), torch.randn(8, 3, 5)


@case()
def vector_quantiser_gradient() -> Built:
    """The codebook is a parameter: lookups scatter their gradient."""

    class Quantizer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Embedding(6, 4)

        def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
            index = torch.cdist(z, self.codes.weight).argmin(-1)
            q = self.codes(index)
            return z + (q - z).detach(), F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())

    def loss(models: Any, x: Tensor) -> Tensor:
        q, vq_loss = models[1](models[0](x))
        return F.mse_loss(models[2](q), x) + vq_loss

    return loss, (nn.Linear(5, 4), Quantizer(), nn.Linear(4, 5)), torch.randn(8, 5)


class MoCo(nn.Module):
    """The queue holds 12 keys; the step overwrites the oldest."""

    def __init__(self, by_pointer: bool) -> None:
        super().__init__()
        self.query, self.key = encoder(), encoder().requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(12, 5), dim=1))
        self.register_buffer("pointer", torch.tensor(10))
        self.by_pointer = by_pointer

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        if self.by_pointer:
            index = (self.pointer + torch.arange(len(keys))) % self.queue.size(0)
            self.queue[index] = keys
            self.pointer.copy_((self.pointer + len(keys)) % self.queue.size(0))
        else:
            self.queue.copy_(torch.cat([keys, self.queue[: -len(keys)]]))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        q = F.normalize(self.query(a), dim=1)
        with torch.no_grad():
            k = F.normalize(self.key(b), dim=1)
        positive = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        negative = torch.einsum("nc,kc->nk", q, self.queue.clone().detach())
        logits = torch.cat([positive, negative], dim=1) / 0.07
        self.enqueue(k)
        return F.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.long))


@case()
def moco_queue_shift() -> Built:
    return (lambda m, b: m(b["a"], b["b"])), MoCo(False), {"a": torch.randn(8, 6), "b": torch.randn(8, 6)}


@case()
def moco_queue_pointer() -> Built:
    return (lambda m, b: m(b["a"], b["b"])), MoCo(True), {"a": torch.randn(8, 6), "b": torch.randn(8, 6)}


@case()
def byol_frozen_target() -> Built:
    """The target network has no gradient, but its BatchNorm moves, once per view."""

    def regression(p: Tensor, z: Tensor) -> Tensor:
        return 2 - 2 * (F.normalize(p, dim=-1) * F.normalize(z, dim=-1)).sum(-1)

    def loss(models: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        online, predictor, target = models
        a, b = batch
        with torch.no_grad():
            ta, tb = target(a), target(b)
        return (regression(predictor(online(a)), tb) + regression(predictor(online(b)), ta)).mean()

    models = (encoder(), encoder(5), encoder().requires_grad_(False))
    return loss, models, (torch.randn(8, 6), torch.randn(8, 6))


@case()
def simsiam_stop_gradient() -> Built:
    def loss(models: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        z1, z2 = models[0](batch[0]), models[0](batch[1])
        p1, p2 = models[1](z1), models[1](z2)
        return -(F.cosine_similarity(p1, z2.detach()).mean() + F.cosine_similarity(p2, z1.detach()).mean()) * 0.5

    return loss, (encoder(), encoder(5)), (torch.randn(7, 6), torch.randn(7, 6))


@case()
def running_target_scale() -> Built:
    """Pop-art style: a running variance over the batch scales the loss; an integer counter counts samples."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = encoder(bn=False)
            self.register_buffer("var", torch.ones(5))
            self.register_buffer("seen", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            with torch.no_grad():
                self.var.lerp_(y.var(0), 0.05)
                self.seen += x.shape[0]
            return ((self.net(x) - y) ** 2 / self.var).mean()

    return (lambda m, b: m(*b)), Scaled(), (torch.randn(8, 6), torch.randn(8, 5))


def generator_discriminator() -> dict[str, nn.Module]:
    g = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
    d = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    return {"g": g, "d": d}


@case()
def gan_one_loss() -> Built:
    def loss(models: Any, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        fake = models["g"](batch["noise"])
        real_logits, fake_logits = models["d"](batch["real"]), models["d"](fake.detach())
        d_loss = F.binary_cross_entropy_with_logits(real_logits, torch.ones_like(real_logits))
        d_loss = d_loss + F.binary_cross_entropy_with_logits(fake_logits, torch.zeros_like(fake_logits))
        g_loss = F.softplus(-models["d"](fake)).mean()
        return d_loss + g_loss, {"d": d_loss.detach(), "g": g_loss.detach()}

    return loss, generator_discriminator(), {"real": torch.randn(8, 6), "noise": torch.randn(8, 4)}


@case()
def gan_functional_call() -> Built:
    """The generator's loss reaches the discriminator through detached parameters."""

    def loss(models: Any, batch: dict[str, Tensor]) -> Tensor:
        g, d = models["g"], models["d"]
        fake = g(batch["noise"])
        frozen = {name: p.detach() for name, p in d.named_parameters()}
        g_loss = -torch.func.functional_call(d, frozen, (fake,)).mean()
        d_loss = F.relu(1 - d(batch["real"])).mean() + F.relu(1 + d(fake.detach())).mean()
        return d_loss + g_loss

    return loss, generator_discriminator(), {"real": torch.randn(8, 6), "noise": torch.randn(8, 4)}


@case()
def mixup_by_permutation() -> Built:
    """The partner of a sample may be in another microbatch."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x, y, lam, perm = batch["x"], batch["y"], batch["lam"], batch["perm"]
        logits = model(lam * x + (1 - lam) * x[perm])
        return lam * F.cross_entropy(logits, y) + (1 - lam) * F.cross_entropy(logits, y[perm])

    batch = {"x": torch.randn(8, 6), "y": torch.randint(5, (8,)), "perm": torch.randperm(8), "lam": torch.tensor(0.3)}
    return loss, encoder(), batch


@case()
def mixup_hidden_flip() -> Built:
    """Manifold mixup with the reversed batch, in the middle of the network, one coefficient per sample."""

    def loss(models: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, y, lam = batch
        h = models[0](x)
        h = lam[:, None] * h + (1 - lam)[:, None] * h.flip(0)
        log_p = models[1](h).log_softmax(-1)
        return (lam * F.nll_loss(log_p, y, reduction="none")).mean() + F.nll_loss(log_p, y.flip(0)) / 2

    return loss, (encoder(), nn.Linear(5, 4)), (torch.randn(8, 6), torch.randint(4, (8,)), torch.rand(8))
