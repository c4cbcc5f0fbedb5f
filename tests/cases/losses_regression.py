"""Regression, embedding and mask losses, and losses that are functions of batch means."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import Built, LossFn, case


def regressor(loss_fn: LossFn, b: int = 8) -> Built:
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    return loss_fn, model, {"x": torch.randn(b, 5), "y": torch.randn(b, 3)}


def apply(model: nn.Module, batch: dict[str, Tensor], loss: Any, **options: Any) -> Tensor:
    return loss(model(batch["x"]), batch["y"], **options)


for _loss in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss):
    for _reduction in ("mean", "sum"):

        @case(name=f"{_loss.__name__}_{_reduction}")
        def pointwise(loss: Any = _loss, reduction: str = _reduction) -> Built:
            return regressor(partial(apply, loss=loss, reduction=reduction))


@case()
def mse_none_then_mean() -> Built:
    return regressor(lambda m, b: F.mse_loss(m(b["x"]), b["y"], reduction="none").sum(-1).mean())


@case()
def smooth_l1_beta_huber_delta() -> Built:
    return regressor(
        lambda m, b: F.smooth_l1_loss(m(b["x"]), b["y"], beta=0.3) + F.huber_loss(m(b["x"]), b["y"], delta=0.4), 7
    )


@case()
def mse_weighted_by_sample() -> Built:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        error = ((m(b["x"]) - b["y"]) ** 2).mean(1)
        return (b["w"] * error).sum() / b["w"].sum()

    loss_fn, model, batch = regressor(loss)
    return loss_fn, model, batch | {"w": torch.rand(8)}


@case()
def kl_div_batchmean() -> Built:
    return regressor(lambda m, b: F.kl_div(m(b["x"]).log_softmax(-1), b["y"].softmax(-1), reduction="batchmean"))


@case()
def kl_div_batchmean_log_target() -> Built:
    """Distillation with a temperature."""

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        student, teacher = F.log_softmax(m(b["x"]) / 4, -1), F.log_softmax(b["y"] / 4, -1)
        return F.kl_div(student, teacher, reduction="batchmean", log_target=True) * 4**2

    return regressor(loss, 7)


@case()
def kl_div_mean() -> Built:
    return regressor(lambda m, b: nn.KLDivLoss(reduction="mean")(m(b["x"]).log_softmax(-1), b["y"].softmax(-1)))


# F.gaussian_nll_loss asks `torch.any(var < 0)` in Python, which no fullgraph capture can follow: the step is split.
@case("dynamo-no")
def gaussian_nll() -> Built:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        mean = m(b["x"])
        return F.gaussian_nll_loss(mean, b["y"], F.softplus(mean) + 0.1)

    return regressor(loss)


@case()
def gaussian_nll_by_hand() -> Built:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        mean, log_var = m(b["x"]), m(b["x"] * 0.5)
        return 0.5 * (log_var + (b["y"] - mean) ** 2 * torch.exp(-log_var)).mean()

    return regressor(loss)


@case()
def poisson_nll() -> Built:
    return regressor(lambda m, b: F.poisson_nll_loss(m(b["x"]), b["y"].abs().round()))


@case()
def poisson_nll_full() -> Built:
    return regressor(lambda m, b: F.poisson_nll_loss(m(b["x"]), (3 * b["y"]).abs().round(), full=True))


@case()
def cosine_embedding() -> Built:
    loss, model, batch = regressor(lambda m, b: F.cosine_embedding_loss(m(b["x"]), b["y"], b["sign"], margin=0.1))
    return loss, model, batch | {"sign": 2 * torch.randint(2, (8,)) - 1}


@case()
def triplet_margin() -> Built:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        return F.triplet_margin_loss(m(b["x"]), m(b["p"]), m(b["n"]), margin=0.5)

    loss_fn, model, batch = regressor(loss)
    return loss_fn, model, batch | {"p": torch.randn(8, 5), "n": torch.randn(8, 5)}


@case()
def margin_ranking() -> Built:
    loss, model, batch = regressor(lambda m, b: F.margin_ranking_loss(m(b["x"]), b["y"], b["sign"], margin=0.2))
    return loss, model, batch | {"sign": 2.0 * torch.randint(2, (8, 3)) - 1}


@case()
def hinge_embedding() -> Built:
    loss, model, batch = regressor(lambda m, b: F.hinge_embedding_loss((m(b["x"]) - b["y"]).abs(), b["sign"]))
    return loss, model, batch | {"sign": 2.0 * torch.randint(2, (8, 3)) - 1}


@case()
def quantile() -> Built:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        q = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
        error = b["y"] - m(b["x"])
        return torch.max((q - 1) * error, q * error).sum(1).mean()

    return regressor(loss)


def masked(loss_fn: LossFn) -> Built:
    """A regression at each time step, of samples with 1 to 6 valid steps."""
    model = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 1))
    lengths = torch.tensor([6, 1, 2, 1, 5, 3, 1, 4])
    mask = torch.arange(6)[None] < lengths[:, None]
    return loss_fn, model, {"x": torch.randn(8, 6, 4), "y": torch.randn(8, 6), "mask": mask}


@case()
def masked_mean() -> Built:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        error = (m(b["x"]).squeeze(-1) - b["y"]) ** 2
        return (error * b["mask"]).sum() / b["mask"].sum()

    return masked(loss)


@case()
def masked_mean_per_sample() -> Built:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        error, mask = (m(b["x"]).squeeze(-1) - b["y"]) ** 2, b["mask"].to(b["x"].dtype)
        return ((error * mask).sum(1) / mask.sum(1)).mean()

    return masked(loss)


@case()
def masked_fill_mean() -> Built:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        error = (m(b["x"])[..., 0] - b["y"]).abs().masked_fill(~b["mask"], 0.0)
        return error.sum() / b["mask"].float().sum()

    return masked(loss)


@case()
def nanmean_loss() -> Built:
    """Missing targets are nan."""

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        missing = torch.isnan(b["y"])
        error = m(b["x"]).squeeze(-1) - torch.where(missing, 0.0, b["y"])
        return torch.where(missing, torch.nan, error**2).nanmean()

    loss_fn, model, batch = masked(loss)
    batch["y"] = batch["y"].masked_fill(~batch["mask"], float("nan"))
    return loss_fn, model, batch


@case()
def weight_decay_in_loss() -> Built:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(m(b["x"]), b["y"]) + 0.01 * sum(p.pow(2).sum() for p in m.parameters())

    return regressor(loss)


@case()
def weight_l1_and_norm_in_loss() -> Built:
    """Added to a sum: the penalty counts once, not once per microbatch or per sample."""

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        penalty = m[0].weight.abs().sum() + torch.norm(m[2].weight)
        return ((m(b["x"]) - b["y"]) ** 2).sum() + 0.1 * penalty

    return regressor(loss, 7)


@case()
def r_squared() -> Built:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        residual = ((b["y"] - m(b["x"])) ** 2).sum()
        total = ((b["y"] - b["y"].mean(0)) ** 2).sum()
        return residual / total

    return regressor(loss)


@case()
def explained_by_prediction() -> Built:
    """A ratio of sums with parameters in both."""

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        p = m(b["x"])
        return 1 - 2 * (p * b["y"]).sum() / (p.pow(2).sum() + b["y"].pow(2).sum())

    return regressor(loss)


@case()
def rmse() -> Built:
    return regressor(lambda m, b: torch.sqrt(F.mse_loss(m(b["x"]), b["y"])))


@case()
def log_of_mean() -> Built:
    return regressor(lambda m, b: torch.log((m(b["x"]) - b["y"]).exp().mean()))


@case()
def pearson() -> Built:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        p, y = m(b["x"]), b["y"]
        p, y = p - p.mean(0), y - y.mean(0)
        r = (p * y).sum(0) / (p.norm(dim=0) * y.norm(dim=0) + 1e-8)
        return 1 - r.mean()

    return regressor(loss)


@case()
def concordance() -> Built:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        p, y = m(b["x"])[:, 0], b["y"][:, 0]
        cov = ((p - p.mean()) * (y - y.mean())).mean()
        return 1 - 2 * cov / (p.var(unbiased=False) + y.var(unbiased=False) + (p.mean() - y.mean()) ** 2)

    return regressor(loss)


@case()
def loss_with_aux() -> Built:
    """Aux is a nest of a per-sample tensor, a count and scalar metrics."""

    def loss(m: nn.Module, b: dict[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
        logits = m(b["x"])
        labels = b["y"].argmax(-1)
        value = F.cross_entropy(logits, labels)
        correct = (logits.argmax(-1) == labels).sum()
        metrics = {"loss": value.detach(), "accuracy": correct.double() / len(labels)}
        return value, {"logits": logits, "correct": correct, "metrics": metrics}

    return regressor(loss)


@case()
def loss_with_aux_tensor() -> Built:
    """Aux is one tensor: the loss of each sample."""

    def loss(m: nn.Module, b: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        each = F.mse_loss(m(b["x"]), b["y"], reduction="none").mean(1)
        return each.mean(), each.detach()

    return regressor(loss, 7)
