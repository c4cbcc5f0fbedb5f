"""The gradients of a convolution, made apart: the bits of torch's own operator, and each made again alone."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn

from cases.reference import collect, compare, plain
from cases.watched import Watched

FORMS = {
    "plain": (nn.Conv2d(6, 8, 3, padding=1), (5, 6, 9, 9)),
    "strided, without a bias": (nn.Conv2d(6, 8, 3, stride=2, bias=False), (5, 6, 9, 9)),
    "one by one": (nn.Conv2d(6, 8, 1), (5, 6, 9, 9)),
    "depthwise": (nn.Conv2d(6, 6, 5, padding=2, groups=6), (5, 6, 9, 9)),
    "grouped and dilated": (nn.Conv2d(6, 8, 3, dilation=2, groups=2), (5, 6, 9, 9)),
    "transposed": (nn.ConvTranspose2d(6, 8, 3, stride=2, output_padding=1), (5, 6, 9, 9)),
    "over time": (nn.Conv1d(6, 8, 5, padding=2), (5, 6, 20)),
    "over volumes": (nn.Conv3d(6, 8, 3, padding=1), (5, 6, 5, 5, 5)),
}
aten = torch.ops.aten


def _backward(layer: Any, x: torch.Tensor, mask: list[bool]) -> list[torch.Tensor | None]:
    grad = torch.ones_like(layer(x).detach()).cumsum(-1).sin()
    return aten.convolution_backward.default(
        grad, x, layer.weight.detach(), [len(layer.bias)] if layer.bias is not None else None, layer.stride,
        layer.padding, layer.dilation, layer.transposed, getattr(layer, "output_padding", [0]), layer.groups, mask,
    )  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_torch_makes_each_alone_with_the_same_bits(form: str, dtype: torch.dtype) -> None:
    layer, shape = FORMS[form]
    layer = copy.deepcopy(layer).to(dtype)
    x = torch.linspace(-1, 1, steps=torch.Size(shape).numel(), dtype=dtype).cos().reshape(shape)
    bias = layer.bias is not None
    together = _backward(layer, x, [True, True, bias])
    apart = (_backward(layer, x, [True, False, False])[0], *_backward(layer, x, [False, True, bias])[1:])
    for one, other in zip(together, apart, strict=True):
        assert (one is None and other is None) or (one is not None and other is not None and torch.equal(one, other))


def _chain() -> nn.Sequential:
    layers = [(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*itertools.chain.from_iterable(layers))


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def _backwards(program: Any) -> list[Any]:
    return [task for task in program.tasks if "aten.convolution_backward" in str(task.origin)]


def test_a_program_makes_them_apart_and_the_parameters_first() -> None:
    model, batch = _chain().double(), torch.randn(6, 4, 8, 8, dtype=torch.float64)
    expected = plain(_loss, model, batch)
    step = Watched(_loss, model, batch, microbatch=2)
    assert compare(collect(step(batch), model), expected).within(1e-12)
    runs = [task for task in _backwards(step.captured.side(2).program) if task.kernel is not None]
    made = [tuple(out is not None for out in task.outputs) for task in runs]
    assert made == [(False, True, True), (True, False, False)] * 3 + [(False, True, True)]
