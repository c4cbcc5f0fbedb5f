"""Code that plain PyTorch runs and TorchDynamo alone refuses, though nothing in it depends on the data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from behaviour.support import agrees, make, pair


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        ctx.save_for_backward(a, b, c)
        return a * b + 2 * c

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, Tensor]:
        a, b, _ = ctx.saved_tensors
        return grads[0] * b, grads[0] * a, 2 * grads[0]


def _one_tensor_twice(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    result: Tensor = _Product.apply(out, out, out)
    return result


def _created_with_requires_grad(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out + torch.zeros_like(out, requires_grad=model.training)


def _set_on_what_was_created(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out + torch.ones_like(out).requires_grad_()


def _cudnn_flags(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=False):
        scale = model(x).abs() + 1
    return scale * model(x)


class _Moving(nn.Linear):
    """A buffer that the forward brings to its input's precision, as older models do."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.encoding = nn.Buffer(torch.linspace(1, 2, 2, dtype=torch.float32), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        self.encoding = self.encoding.to(device=input.device, dtype=input.dtype)
        return super().forward(input) * self.encoding


def _run(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out


@pytest.mark.parametrize(
    "code",
    [_one_tensor_twice, _created_with_requires_grad, _set_on_what_was_created, _cudnn_flags, _run],
)
def test_it_is_captured_and_exact(code: Any) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(code(model, batch[0]), batch[1])

    model = _Moving() if code is _run else nn.Linear(3, 2)
    step = make(loss_fn, model)
    agrees(step, loss_fn, model, pair())
    if code is _run:
        assert model.encoding.dtype == torch.float64 and "encoding" in dict(model.named_buffers())
        agrees(step, loss_fn, model, pair())


def test_dynamo_is_left_as_it_was() -> None:
    from torch._dynamo import symbolic_convert, variables
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    def state() -> list[Any]:
        table = list(symbolic_convert.InstructionTranslator.dispatch_table)
        handlers = dict(TorchInGraphFunctionVariable._get_handlers())
        return [table, handlers, variables.TensorVariable.method_item, TorchInGraphFunctionVariable.call_function]

    before = state()
    loss_fn = lambda model, batch: F.mse_loss(model(batch[0]), batch[1])  # noqa: E731
    make(loss_fn, nn.Linear(3, 2))(pair())
    assert state() == before
    assert torch.compile(lambda x: x + 1 if torch.compiler.is_compiling() else x, backend="eager")(torch.zeros(1)) == 1
