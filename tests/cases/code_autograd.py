"""Steps that talk to autograd: checkpointing, custom functions, detached values and blocks without gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from . import Built, case
from .code_shapes import small


class Checkpointed(nn.Module):
    def __init__(self, nested: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)) for _ in range(2))
        self.head, self.nested = nn.Linear(6, 5), nested

    def block(self, i: int, x: Tensor) -> Tensor:
        return x + self.blocks[i](x)

    def both(self, x: Tensor) -> Tensor:
        return self.block(1, checkpoint(self.block, 0, x, use_reentrant=False))

    def forward(self, x: Tensor) -> Tensor:
        if self.nested:
            return self.head(checkpoint(self.both, x, use_reentrant=False))
        for i in range(2):
            x = checkpoint(self.block, i, x, use_reentrant=False)
        return self.head(x)


@case()
def checkpointed_blocks() -> Built:
    loss_fn, _, batch = small(lambda m, b: F.cross_entropy(m(b["x"]), b["y"]))
    return loss_fn, Checkpointed(False), batch


@case()
def checkpoint_in_checkpoint() -> Built:
    loss_fn, _, batch = small(lambda m, b: F.cross_entropy(m(b["x"]), b["y"]))
    return loss_fn, Checkpointed(True), batch


class ReverseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: float) -> Tensor:
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.alpha * grad, None


@case()
def gradient_reversal() -> Built:
    """Domain-adversarial training: this gradient is that of no loss."""

    class DANN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.classes, self.domain = nn.Linear(6, 6), nn.Linear(6, 5), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(self.body(x))
            return self.classes(h), self.domain(ReverseGradient.apply(h, 0.3))

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        classes, domain = m(b["x"])
        return F.cross_entropy(classes, b["y"]) + F.cross_entropy(domain, b["y"] % 2)

    loss_fn, _, batch = small(loss)
    return loss_fn, DANN(), batch


class Binarize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.sign(x) @ torch.sign(weight).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad_x = (grad @ torch.sign(weight)) * (x.abs() <= 1)
        return grad_x, (grad.t() @ torch.sign(x)) * (weight.abs() <= 1)


@case()
def binarized_linear() -> Built:
    """A custom function that reduces over the batch itself, in its backward."""

    class Binary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.weight = nn.Linear(6, 7), nn.Parameter(torch.randn(5, 7))

        def forward(self, x: Tensor) -> Tensor:
            return Binarize.apply(self.first(x), self.weight)

    loss_fn, _, batch = small(lambda m, b: F.cross_entropy(m(b["x"]) / 3, b["y"]))
    return loss_fn, Binary(), batch


@case()
def detach_and_straight_through() -> Built:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        z = m(b["x"])
        hard = F.one_hot(z.argmax(-1), 5).to(z.dtype)
        soft = z.softmax(-1)
        picked = hard - soft.detach() + soft
        return (picked * b["x"][:, :5]).sum(1).mean() + F.mse_loss(z, (2 * z).round().detach() / 2)

    return small(loss)


@case()
def no_grad_pseudo_labels() -> Built:
    """FixMatch: confident pseudo-labels of one view teach the other."""

    def loss(m: nn.Module, b: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            confidence, pseudo = m(b["x"]).softmax(-1).max(-1)
            mask = confidence.ge(0.25).double()
        strong = m(b["x"] + 0.3 * b["noise"])
        return (F.cross_entropy(strong, pseudo, reduction="none") * mask).mean(), mask.mean()

    loss_fn, model, batch = small(loss)
    return loss_fn, model, batch | {"noise": torch.randn(8, 6)}


@case()
def batch_statistic_without_gradient() -> Built:
    """A detached mean over the batch is a baseline (REINFORCE)."""

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        log_p = m(b["x"]).log_softmax(-1)
        reward = (log_p.detach().exp() * b["x"][:, :5]).sum(1)
        return -((reward - reward.mean()) / (reward.std() + 1e-6) * log_p.gather(1, b["y"][:, None])[:, 0]).mean()

    return small(loss)
