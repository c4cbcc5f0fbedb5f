"""Reductions and algebra, over features, over the batch and over everything."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import Built, case
from .code_shapes import sequence, small


@case()
def logsumexp_features_and_batch() -> Built:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        z = m(b["x"])
        return (torch.logsumexp(z, dim=1) - z.gather(1, b["y"][:, None])[:, 0]).mean() + 0.1 * z.logsumexp(dim=(0, 1))

    return small(loss)


@case()
def std_var_over_features() -> Built:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        z = m(b["x"])
        z = (z - z.mean(-1, keepdim=True)) / (z.std(-1, keepdim=True) + 1e-5)
        return F.cross_entropy(z, b["y"]) + z.var(dim=1, unbiased=False).mean()

    return small(loss)


@case()
def std_var_over_batch() -> Built:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        z = m(b["x"])
        return F.cross_entropy((z - z.mean(0)) / z.std(dim=0), b["y"]) + z.var(0, correction=0).log().mean() + z.std()

    return small(loss, b=7)


@case()
def norms_over_features_and_batch() -> Built:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        z = m(b["x"])
        per_sample = z.norm(p=2, dim=-1).mean() + torch.linalg.vector_norm(z, ord=1, dim=1).mean()
        return per_sample + z.norm() + torch.linalg.norm(z, "fro") + z.norm(p=3, dim=0).sum() + z.abs().max()

    return small(loss)


@case()
def normalize_and_cosine() -> Built:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        z = F.normalize(m(b["x"]), p=2, dim=-1)
        prototypes = F.normalize(m[2].weight, dim=0).T
        return F.cross_entropy(z @ z.new_ones(5, 5).tril() / 0.1, b["y"]) + (z @ prototypes.T).mean()

    return small(loss)


@case()
def arcface() -> Built:
    """Angular margin on the logit of the label."""

    class ArcFace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.weight = nn.Linear(6, 4), nn.Parameter(torch.randn(5, 4))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            cosine = F.linear(F.normalize(self.body(x)), F.normalize(self.weight))
            theta = torch.acos(cosine.clamp(-1 + 1e-7, 1 - 1e-7))
            one_hot = F.one_hot(y, 5)
            return 8.0 * torch.where(one_hot.bool(), torch.cos(theta + 0.3), cosine)

    loss_fn, _, batch = small(lambda m, b: F.cross_entropy(m(b["x"], b["y"]), b["y"]))
    return loss_fn, ArcFace(), batch


@case()
def cdist_to_prototypes() -> Built:
    class Prototypes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.prototypes = nn.Linear(6, 3), nn.Parameter(torch.randn(5, 3))

        def forward(self, x: Tensor) -> Tensor:
            return -torch.cdist(self.body(x), self.prototypes)

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        d = m(b["x"])
        # ProtoPNet's cluster cost of the prototypes: the nearest sample of the batch.
        return F.cross_entropy(d, b["y"]) - d.max(dim=0).values.mean()

    loss_fn, _, batch = small(loss)
    return loss_fn, Prototypes(), batch


@case()
def prototypical_episode() -> Built:
    """The first part of the batch is the support set, the rest are queries."""

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        z = m(b["x"])
        support, query = z[:3], z[3:]
        return F.cross_entropy(-torch.cdist(query, support).pow(2), b["y"][3:] % 3)

    return small(loss)


@case()
def temperature_parameter() -> Built:
    class Tempered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.log_t = nn.Linear(6, 5), nn.Parameter(torch.tensor(0.3))

        def forward(self, x: Tensor) -> Tensor:
            return F.log_softmax(self.fc(x) / self.log_t.exp(), dim=-1)

    loss_fn, _, batch = small(lambda m, b: F.nll_loss(m(b["x"]), b["y"]) + 0.01 * m.log_t**2)
    return loss_fn, Tempered(), batch


@case()
def uncertainty_weighted_tasks() -> Built:
    """Learned weights of several losses (Kendall)."""

    class Tasks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 5), nn.Linear(6, 1)
            self.log_vars = nn.Parameter(torch.zeros(2))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = F.relu(self.body(x))
            return self.a(h), self.b(h)

    def loss(m: nn.Module, b: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        logits, value = m(b["x"])
        losses = torch.stack([F.cross_entropy(logits, b["y"]), F.mse_loss(value, b["x"][:, :1])])
        return (torch.exp(-m.log_vars) * losses + m.log_vars).sum(), {"ce": losses[0], "mse": losses[1]}

    loss_fn, _, batch = small(loss)
    return loss_fn, Tasks(), batch


@case()
def prod_and_cumprod() -> Built:
    """Volume rendering: transmittance is a cumulative product along the ray."""

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        raw = m(b["x"])
        alpha = 1 - torch.exp(-F.softplus(raw[..., 0]))
        ones = torch.ones_like(alpha[:, :1])
        transmittance = torch.cumprod(torch.cat([ones, 1 - alpha + 1e-10], -1), -1)[:, :-1]
        rgb = ((alpha * transmittance)[..., None] * raw[..., 1:4].sigmoid()).sum(-2)
        return F.mse_loss(rgb, b["y"][:, 0, :3]) + (1 - alpha).prod(dim=-1).mean()

    return sequence(loss)


@case()
def product_over_batch() -> Built:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        p = m(b["x"]).softmax(-1)
        return 1 - p.prod(dim=0).sum() * 1e3 - p[:, 0].prod()

    return small(loss)


@case()
def maximum_minimum_clamp() -> Built:
    """PPO: clipped ratio, advantages normalised over the batch."""

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        log_p = torch.log_softmax(m(b["x"]), -1).gather(1, b["y"].unsqueeze(-1)).squeeze(-1)
        advantage = (b["advantage"] - b["advantage"].mean()) / (b["advantage"].std() + 1e-8)
        ratio = torch.exp(log_p - b["old"])
        clipped = torch.clamp(ratio, 1 - 0.2, 1 + 0.2)
        entropy = -(log_p.exp() * log_p).mean()
        return -torch.minimum(ratio * advantage, clipped * advantage).mean() - 0.01 * torch.maximum(entropy, log_p[0])

    loss_fn, model, batch = small(loss)
    return loss_fn, model, batch | {"advantage": torch.randn(8), "old": -1.6 + 0.2 * torch.randn(8)}


@case()
def iou_boxes() -> Built:
    """Generalised IoU by maximum and minimum of corners."""

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        p = m(b["x"]).sigmoid()
        p = torch.cat([p[:, :2], p[:, :2] + p[:, 2:4] + 0.1], 1)
        t = torch.cat([b["x"][:, :2].sigmoid(), b["x"][:, :2].sigmoid() + 0.5], 1)
        wh = (torch.min(p[:, 2:], t[:, 2:]) - torch.max(p[:, :2], t[:, :2])).clamp(min=0)
        inter = wh[:, 0] * wh[:, 1]
        area_p, area_t = (p[:, 2:] - p[:, :2]).prod(1), (t[:, 2:] - t[:, :2]).prod(1)
        hull = (torch.max(p[:, 2:], t[:, 2:]) - torch.min(p[:, :2], t[:, :2])).prod(1)
        union = area_p + area_t - inter
        return (1 - inter / union + (hull - union) / hull).mean()

    return small(loss)


@case()
def linalg_inverse_per_sample() -> Built:
    """Mahalanobis distance with a covariance predicted for each sample."""

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        a = m(b["x"])[:, :3, :3]
        cov = a @ a.mT + 2 * torch.eye(3, dtype=a.dtype)
        d = b["y"][:, 0, :3].unsqueeze(-1)
        return (d.mT @ torch.linalg.inv(cov) @ d).mean() + torch.logdet(cov).mean()

    return sequence(loss)


@case()
def linalg_solve_per_sample() -> Built:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        a = m(b["x"])[:, :3, :3] + 4 * torch.eye(3, dtype=torch.float64)
        return F.mse_loss(torch.linalg.solve(a, b["y"][:, :3, :2]), b["x"][:, :3, :2])

    return sequence(loss, b=7)


@case()
def linalg_cholesky_nll() -> Built:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        z = m(b["x"])
        tril = torch.tril(z[:, :3, :3], -1) + torch.diag_embed(F.softplus(torch.diagonal(z[:, :3, :3], dim1=1, dim2=2)))
        d = torch.linalg.solve_triangular(tril, b["y"][:, :3, :1], upper=False)
        return (0.5 * d.square().sum((1, 2)) + torch.diagonal(tril, dim1=-2, dim2=-1).log().sum(-1)).mean()

    return sequence(loss)


@case()
def ridge_solved_over_batch() -> Built:
    """A differentiable least-squares head: the normal equations sum over the batch."""

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        h, y = m(b["x"]), b["x"][:, :2]
        w = torch.linalg.solve(h.T @ h + 0.5 * torch.eye(5, dtype=h.dtype), h.T @ y)
        return F.mse_loss(h @ w, y)

    return small(loss)


@case()
def whitening_over_batch() -> Built:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        z = m(b["x"])
        z = z - z.mean(0)
        chol = torch.linalg.cholesky(z.T @ z / (len(z) - 1) + 0.1 * torch.eye(5, dtype=z.dtype))
        white = torch.linalg.solve_triangular(chol, z.T, upper=False).T
        return F.cross_entropy(white, b["y"])

    return small(loss)


@case()
def sinkhorn_over_batch() -> Built:
    """SwAV: assignments balanced over the batch, without gradient, on scores with gradient."""

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        scores = m(b["x"])
        with torch.no_grad():
            q = torch.exp(scores / 0.5).t()
            q /= q.sum()
            for _ in range(3):
                q /= q.sum(dim=1, keepdim=True) * q.shape[0]
                q /= q.sum(dim=0, keepdim=True) * q.shape[1]
            q = (q * q.shape[1]).t()
        return -(q * F.log_softmax(scores.flip(0) / 0.1, dim=1)).sum(1).mean()

    return small(loss)


@case()
def vae_elbo() -> Built:
    """Reparametrisation with noise from the batch."""

    class VAE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(6, 8), nn.Linear(4, 6)

        def forward(self, x: Tensor, eps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mu, logvar = self.encode(x).chunk(2, dim=-1)
            return self.decode(mu + eps * torch.exp(0.5 * logvar)), mu, logvar

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        out, mu, logvar = m(b["x"], b["eps"])
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        return F.binary_cross_entropy_with_logits(out, b["x"].sigmoid(), reduction="sum") + kld

    loss_fn, _, batch = small(loss)
    return loss_fn, VAE(), batch | {"eps": torch.randn(8, 4)}


@case()
def median_and_quantile() -> Built:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        z = m(b["x"])
        return (z.median(dim=1).values ** 2).mean() + z.kthvalue(2, dim=0).values.exp().mean() - z.amin(0).sum() * 0.1

    return small(loss)
