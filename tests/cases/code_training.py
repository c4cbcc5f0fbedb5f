"""Who gets a gradient and where values come from: freezing, sharing, eval mode, buffers, closures."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import Built, case
from .code_shapes import sequence, small

TEMPERATURE = 0.7
CLASS_PRIOR = torch.tensor([0.1, 0.2, 0.3, 0.2, 0.2], dtype=torch.float64)


@case()
def frozen_parameters() -> Built:
    loss_fn, model, batch = small(lambda m, b: F.cross_entropy(m(b["x"]), b["y"]))
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return loss_fn, model, batch


@case()
def frozen_last_layer() -> Built:
    """The gradient passes through frozen layers to the first one."""
    loss_fn, model, batch = small(lambda m, b: F.cross_entropy(m(b["x"]), b["y"]))
    model[2].requires_grad_(False)
    return loss_fn, model, batch


@case()
def unused_parameters() -> Built:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.never, self.scale = nn.Linear(6, 5), nn.Linear(6, 5), nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)

    loss_fn, _, batch = small(lambda m, b: F.cross_entropy(m(b["x"]), b["y"]))
    return loss_fn, Unused(), batch


@case()
def used_but_without_gradient() -> Built:
    """A head that only sees detached features gets a gradient; a scale that is only used detached gets None."""

    class Probe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.probe, self.scale = nn.Linear(6, 5), nn.Linear(5, 5), nn.Parameter(torch.rand(5))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.fc(x) * self.scale.detach()
            return h, self.probe(h.detach())

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        return sum(F.cross_entropy(z, b["y"]) for z in m(b["x"]))

    loss_fn, _, batch = small(loss)
    return loss_fn, Probe(), batch


@case()
def zero_gradient_is_not_none() -> Built:
    """A parameter that is multiplied by zero has a gradient of zeros."""

    class Zero(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.extra = nn.Linear(6, 5), nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) + 0.0 * self.extra(x)

    loss_fn, _, batch = small(lambda m, b: F.cross_entropy(m(b["x"]), b["y"]))
    return loss_fn, Zero(), batch


@case()
def shared_module_called_several_times() -> Built:
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())
            self.head = nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = x + self.block(x)
            return self.head(x)

    loss_fn, _, batch = small(lambda m, b: F.cross_entropy(m(b["x"]), b["y"]))
    return loss_fn, Recursive(), batch


@case()
def tied_weights() -> Built:
    """An autoencoder whose decoder is the transposed encoder."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(6, 4)
            self.bias = nn.Parameter(torch.zeros(6))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(torch.tanh(self.encoder(x)), self.encoder.weight.t(), self.bias)

    loss_fn, _, batch = small(lambda m, b: F.mse_loss(m(b["x"]), b["x"]))
    return loss_fn, Tied(), batch


@case()
def tied_embeddings() -> Built:
    class LM(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body, self.head = nn.Embedding(10, 6), nn.Linear(6, 6), nn.Linear(6, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(torch.tanh(self.body(self.embed(ids)).cumsum(1)))

    ids = torch.randint(10, (8, 5))
    return (lambda m, x: F.cross_entropy(m(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())), LM(), ids


@case()
def tied_across_modules() -> Built:
    """Two modules of a tuple hold the same parameter."""
    a, c = nn.Linear(6, 6), nn.Linear(6, 6)
    c.weight = a.weight
    return (lambda m, b: F.mse_loss(m[1](m[0](b["x"]).relu()), b["y"])), (a, c), sequence(lambda m, b: None)[2]


@case()
def eval_submodule_with_gradient() -> Built:
    """A perceptual network in eval mode: its BatchNorm and dropout are off, its frozen weights pass gradients."""

    class Perceptual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Sigmoid())
            features = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4))
            self.features = features.eval().requires_grad_(False)

        def train(self, mode: bool = True) -> Perceptual:
            super().train(mode)
            self.features.eval()
            return self

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        out = m.net(b["x"])
        return F.l1_loss(m.features(out), m.features(b["x"])) + F.mse_loss(out, b["x"])

    loss_fn, _, batch = small(loss)
    return loss_fn, Perceptual(), batch


@case()
def eval_dropout_whole_model() -> Built:
    """Fine-tuning in eval mode, where dropout is off but gradients flow."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 5)).eval()
    loss_fn, _, batch = small(lambda m, b: F.cross_entropy(m(b["x"]), b["y"]))
    return loss_fn, model, batch


@case()
def integer_and_boolean_buffers() -> Built:
    class Buffers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 5)
            self.register_buffer("order", torch.tensor([3, 0, 5, 1, 4, 2]))
            self.register_buffer("keep", torch.tensor([True, True, False, True, True]))
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))
            self.register_buffer("class_counts", torch.zeros(5, dtype=torch.long))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            self.steps += 1
            self.class_counts += F.one_hot(y, 5).sum(0)
            return self.fc(x[:, self.order]) * self.keep

    loss_fn, _, batch = small(lambda m, b: F.cross_entropy(m(b["x"], b["y"]), b["y"]))
    return loss_fn, Buffers(), batch


@case()
def constants_closures_and_globals() -> Built:
    """Tensors and numbers reached through a closure, a module-level name and a default argument."""
    prior, scale = CLASS_PRIOR.log(), 0.5

    def loss(m: nn.Module, b: dict[str, Tensor], margin: float = 0.1) -> Tensor:
        logits = m(b["x"]) / TEMPERATURE + scale * prior
        return F.cross_entropy(logits, b["y"]) + margin * (logits.softmax(-1) - CLASS_PRIOR).square().sum(-1).mean()

    return small(loss)


@case()
def partial_and_callable_loss() -> Built:
    def loss(m: nn.Module, b: dict[str, Tensor], *, smoothing: float, weight: Tensor) -> Tensor:
        return F.cross_entropy(m(b["x"]), b["y"], weight, label_smoothing=smoothing)

    return small(partial(loss, smoothing=0.1, weight=CLASS_PRIOR * 5))


@case()
def length_of_batch_as_divisor() -> Built:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(m(b["x"]), b["y"], reduction="sum") / len(b["x"])

    return small(loss, b=7)


@case()
def shape0_as_divisor_and_power() -> Built:
    """The batch size as a number in arithmetic of all kinds."""

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        n = b["x"].shape[0]
        z = m(b["x"])
        total = ((z - b["x"][:, :5]) ** 2).sum() / n
        return total + (z.sum(0) / (n - 1)).pow(2).sum() * n**0.5 + (z.mean(1) * torch.ones(n).double() / n).sum()

    return small(loss)


@case()
def loss_is_module_with_parameters() -> Built:
    """The criterion has trainable parameters and the loss function is a bound method's lambda."""

    class Criterion(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log_sigma = nn.Parameter(torch.zeros(5))
            self.register_buffer("total", torch.zeros(()))

        def forward(self, z: Tensor, y: Tensor) -> Tensor:
            value = F.cross_entropy(z * torch.exp(-self.log_sigma), y) + self.log_sigma.mean()
            self.total += value.detach()
            return value

    loss_fn, model, batch = small(lambda m, b: m["criterion"](m["net"](b["x"]), b["y"]))
    return loss_fn, {"net": model, "criterion": Criterion()}, batch


@case()
def forward_hooks_and_features() -> Built:
    """Features are collected with a forward hook and enter the loss."""
    features: dict[str, Tensor] = {}
    loss_fn, model, batch = small(lambda m, b: F.cross_entropy(m(b["x"]), b["y"]) + 0.1 * features["h"].pow(2).mean())
    model[1].register_forward_hook(lambda module, args, out: features.__setitem__("h", out))
    return loss_fn, model, batch


@case()
def parameters_list_and_dict() -> Built:
    """Low-rank adapters in a ParameterDict over a frozen layer, and a learned mix of layers."""

    class LoRA(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(6, 5).requires_grad_(False)
            self.lora = nn.ParameterDict({"a": 0.3 * torch.randn(2, 6), "b": 0.3 * torch.randn(5, 2)})
            self.mix = nn.ParameterList([torch.zeros(()), torch.ones(())])

        def forward(self, x: Tensor) -> Tensor:
            w = torch.softmax(torch.stack(list(self.mix)), 0)
            return w[0] * self.base(x) + w[1] * 2.0 * (x @ self.lora["a"].T @ self.lora["b"].T)

    loss_fn, _, batch = small(lambda m, b: F.cross_entropy(m(b["x"]), b["y"]))
    return loss_fn, LoRA(), batch
