"""Batch normalisation in all its forms: statistics over the batch, running buffers updated once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import Built, case


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def images(b: int = 8, size: int = 8, classes: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(b, 3, size, size), torch.randint(classes, (b,))


def conv_bn(cin: int, cout: int, **norm: object) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout, **norm), nn.ReLU(inplace=True)
    )


def bn_net(**norm: object) -> nn.Sequential:
    return nn.Sequential(
        conv_bn(3, 5, **norm), conv_bn(5, 6, **norm), nn.MaxPool2d(2), conv_bn(6, 6, **norm),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4),
    )  # fmt: skip


class Residual(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c)
        self.conv2, self.bn2 = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return F.relu(out)


@case()
def bn_conv_stack() -> Built:
    return classify, bn_net(), images()


@case()
def bn_conv_stack_odd_batch() -> Built:
    return classify, bn_net(momentum=0.3, eps=1e-2), images(7)


@case()
def bn_residual_blocks() -> Built:
    model = nn.Sequential(conv_bn(3, 4), Residual(4), Residual(4), nn.AvgPool2d(8), nn.Flatten(), nn.Linear(4, 4))
    return classify, model, images()


# The cumulative average reads the counter as a Python number, 1.0 / float(self.num_batches_tracked), which Dynamo alone
# cannot guard.
@case()
def bn_momentum_none() -> Built:
    return classify, bn_net(momentum=None), images()


@case()
def bn_affine_false() -> Built:
    return classify, bn_net(affine=False), images()


@case()
def bn_no_running_stats() -> Built:
    return classify, bn_net(track_running_stats=False), images()


@case()
def bn_no_running_stats_in_eval() -> Built:
    # Without running statistics even an eval-mode layer normalises by the batch.
    return classify, bn_net(track_running_stats=False).eval(), images()


@case()
def bn_trained_statistics() -> Built:
    """Continue from non-trivial running statistics and affine weights."""
    model = bn_net()
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            nn.init.normal_(m.weight), nn.init.normal_(m.bias)
            m.running_mean.normal_(), m.running_var.uniform_(0.5, 2.0), m.num_batches_tracked.fill_(41)
    return classify, model, images()


@case()
def bn_all_eval() -> Built:
    return classify, bn_net().eval(), images()


@case()
def bn_frozen_in_train_model() -> Built:
    model = bn_net().train()
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.eval()
            m.running_mean.normal_(), m.running_var.uniform_(0.5, 2.0)
            m.weight.requires_grad_(False), m.bias.requires_grad_(False)
    return classify, model, images()


@case()
def bn_half_frozen() -> Built:
    """A frozen first stage, the rest trains."""
    model = bn_net().train()
    model[0].eval().requires_grad_(False)
    return classify, model, images()


@case()
def bn1d_features() -> Built:
    model = nn.Sequential(
        nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Tanh(), nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
    )
    return classify, model, (torch.randn(8, 6), torch.randint(4, (8,)))


@case()
def bn1d_sequence() -> Built:
    model = nn.Sequential(
        nn.Conv1d(3, 6, 3, padding=1), nn.BatchNorm1d(6), nn.GELU(), nn.Conv1d(6, 5, 3, stride=2), nn.BatchNorm1d(5),
        nn.Flatten(), nn.Linear(20, 4),
    )  # fmt: skip
    return classify, model, (torch.randn(7, 3, 9), torch.randint(4, (7,)))


@case()
def bn3d_volume() -> Built:
    model = nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(4, 4, 1),
        nn.BatchNorm3d(4), nn.Flatten(), nn.Linear(32, 4),
    )  # fmt: skip
    return classify, model, (torch.randn(8, 2, 4, 4, 4), torch.randint(4, (8,)))


def large_mean() -> Built:
    """E[x^2] - E[x]^2 would lose seven digits here."""
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    return classify, model, (3000.0 + torch.randn(8, 5), torch.randint(4, (8,)))


# The gradient of the first weight multiplies rounding by the mean: plain PyTorch differs from itself by 1e-8 when the
# samples of the batch change places.
@case("ill-conditioned")
def bn_large_mean() -> Built:
    return large_mean()


@case()
def bn_large_mean_frozen_linear() -> Built:
    """Everything but that gradient, to full precision."""
    loss_fn, model, batch = large_mean()
    model[0].weight.requires_grad_(False)
    return loss_fn, model, batch


@case()
def bn_large_mean_input() -> Built:
    """BatchNorm straight on inputs of a large mean and different scales."""
    model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4))
    return classify, model, (3000.0 + torch.randn(8, 5) * torch.logspace(-1, 1, 5), torch.randint(4, (8,)))


@case()
def bn_called_twice() -> Built:
    """One layer sees two inputs in a step, so its buffers move twice, in order."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.bn, self.head = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.bn(self.fc(x)).relu()
            return self.head(self.bn(self.fc(h)))

    return classify, Twice(), (torch.randn(8, 6), torch.randint(4, (8,)))


@case()
def bn_functional() -> Built:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 5)
            self.register_buffer("mean", torch.zeros(5))
            self.register_buffer("var", torch.ones(5))
            self.scale = nn.Parameter(torch.rand(5))

        def forward(self, x: Tensor) -> Tensor:
            return F.batch_norm(self.fc(x), self.mean, self.var, self.scale, None, self.training, 0.2, 1e-3)

    return classify, Functional(), (torch.randn(8, 6), torch.randint(5, (8,)))


class HandBatchNorm(nn.Module):
    """What people write when they want to change something in BatchNorm."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.rand(1, c, 1, 1)), nn.Parameter(torch.zeros(1, c, 1, 1))
        self.register_buffer("mean", torch.zeros(1, c, 1, 1))
        self.register_buffer("var", torch.ones(1, c, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean((0, 2, 3), keepdim=True)
        var = x.var((0, 2, 3), unbiased=False, keepdim=True)
        with torch.no_grad():
            n = x.numel() / x.size(1)
            self.mean.lerp_(mean, 0.1)
            self.var.copy_(0.9 * self.var + 0.1 * var * n / (n - 1))
        return self.gamma * (x - mean) / torch.sqrt(var + 1e-5) + self.beta


@case()
def bn_by_hand() -> Built:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), HandBatchNorm(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))
    return classify, model, images()


@case()
def syncbn_train() -> Built:
    """Without a process group SyncBatchNorm is BatchNorm, on the CPU as well."""
    return classify, nn.SyncBatchNorm.convert_sync_batchnorm(bn_net()), images()


@case()
def syncbn_eval() -> Built:
    return classify, nn.SyncBatchNorm.convert_sync_batchnorm(bn_net()).eval(), images()


@case()
def bn_with_dropout_off() -> Built:
    model = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.0), nn.ReLU(), nn.Linear(8, 8), nn.Dropout(0.5),
        nn.Linear(8, 4),
    )  # fmt: skip
    model[5].eval()
    return classify, model, (torch.randn(8, 6), torch.randint(4, (8,)))
