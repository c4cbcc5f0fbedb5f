"""Where no place to split a step is found, it is refused, with the reason and the pair to type."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fullbatch
from fullbatch._found_call import Found
from split.support import BATCH, convnet, images

PAIR = "fullbatch.Step((forward, loss), model, batch)"


def masked(out: Tensor) -> Tensor:
    if out.max() < -1e9:
        raise ValueError("nothing to select from")
    return out[out > 0].mean()


class Inside(nn.Module):
    """Embeds in a small layer, and branches in a way that no graph can hold behind a large one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Conv2d(3, 3, 1), convnet()

    def forward(self, x: Tensor) -> Tensor:
        return masked(self.body(self.embed(x)))


class Shifted(nn.Module):
    """Its argument is made of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.body = nn.Parameter(torch.zeros(3, 1, 1)), convnet()


def _caught(model: Any, batch: Any) -> Tensor:
    """Takes exceptions that are not its own."""
    try:
        out = model(batch[0])
    except Exception:
        out = torch.zeros(1, requires_grad=True)
    return masked(out)


def _without_grad(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x)


def _frozen(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False)


AT_ONCE: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "no call": (convnet, lambda m, b: masked(torch.nn.functional.conv2d(b[0], m[0].weight)), "calls no module"),
    "small first": (Inside, lambda m, b: m(b[0]), r"model\.embed\(\.\.\.\): it holds 12 of the model's"),
    "two towers": (
        lambda: (convnet(), convnet()), lambda m, b: masked(m[0](b[0]) * m[1](b[0])), r"model\[0\]\(\.\.\.\): it holds",
    ),
    "recurrent dropout": (
        lambda: nn.LSTM(8, 5, 2, batch_first=True, dropout=0.3), lambda m, b: masked(m(b[1])[0]), r"dropout=0\.3",
    ),
    "no_grad": (convnet, lambda m, b: masked(_without_grad(m, b[0]) * m[0].weight.sum()), "under torch.no_grad"),
    "an argument with a gradient": (
        Shifted, lambda m, b: masked(m.body(b[0] + m.shift)), "an argument of it needs a gradient",
    ),
    "a batch that needs a gradient": (
        convnet, lambda m, b: masked(m(b[0].detach().clone().requires_grad_())), "an argument of it needs a gradient",
    ),
    "vmap": (convnet, lambda m, b: masked(torch.vmap(m.eval())(b[0][:, None])), "transform of torch.func"),
    "one sample": (convnet, lambda m, b: masked(m(b[0].mean(0, keepdim=True))), "carries the batch"),
    "in place in the model": (
        lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(3, 2, 1)), lambda m, b: masked(m(b[0])), "in place",
    ),
    "its own exception": (
        convnet, lambda m, b: masked(m(b[0] if b[0].sum().item() > 1e9 else {}["key"])), "raises KeyError before",
    ),
    "frozen": (
        lambda: (_frozen(convnet()), nn.Conv2d(4, 1, 1)), lambda m, b: masked(m[1](m[0](b[0]))), "needs a gradient",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AT_ONCE)
def test_at_once(name: str) -> None:
    build, loss_fn, why = AT_ONCE[name]
    model, batch = build(), images()
    parts = list(model) if isinstance(model, tuple) else [model]
    before = [{name: value.clone() for name, value in part.state_dict().items()} for part in parts]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    with pytest.raises(fullbatch.CaptureError, match=why) as caught:
        fullbatch.Step(loss_fn, model, batch, microbatch=3)
    first, second = caught.value.faults
    assert "captured" in first.what or "depends on the data" in first.what
    assert PAIR in second.next and ".py:" in first.got
    for part, state in zip(parts, before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in part.state_dict().items())
        assert not any("forward" in vars(module) for module in part.modules())
        assert all(parameter.grad is None for parameter in part.parameters())
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()


def _twice(model: Any, batch: Any) -> Tensor:
    return masked(model(batch[0])) + model(batch[0] * 2).mean()


def _changes_outputs(model: Any, batch: Any) -> Tensor:
    out = model(batch[0])
    out[out < 0] = 0
    return masked(out)


def _changes_outputs_unseen(model: Any, batch: Any) -> Tensor:
    out = model(batch[0])
    with torch.no_grad():
        out.clamp_(max=1.0)
    return masked(out)


def _changes_the_batch(model: Any, batch: Any) -> Tensor:
    out = model(batch[0])
    batch[0].mul_(1.0)
    return masked(out)


def _changes_arguments(model: Any, batch: Any) -> Tensor:
    made = batch[0] * 2
    out = model(made)
    made.zero_()
    return masked(out)


def _changes_weights(model: Any, batch: Any) -> Tensor:
    out = model(batch[0])
    with torch.no_grad():
        model[0].weight.mul_(1.0)
    return masked(out)


def _no_scalar(model: Any, batch: Any) -> Tensor:
    out = model(batch[0])
    return out[out > 0]


def _detached(model: Any, batch: Any) -> Tensor:
    return masked(model(batch[0]).detach())


def _reentrant(model: Any, batch: Any) -> Tensor:
    return masked(model(batch[0])) + masked(checkpoint(model, batch[0], use_reentrant=False))


AT_THE_FIRST_CALL: dict[str, tuple[Any, str]] = {
    "twice": (_twice, r"model\(\.\.\.\) more than once"),
    "twice, in a checkpoint": (_reentrant, r"model\(\.\.\.\) more than once"),
    "outputs": (_changes_outputs, r"one of the outputs of model\(\.\.\.\) in place"),
    "outputs, unseen by autograd": (_changes_outputs_unseen, "one of the outputs in place"),
    "batch": (_changes_the_batch, "in place"),
    "arguments": (_changes_arguments, "in place"),
    "weights": (_changes_weights, r"model\.0\.weight in place"),
    "no scalar": (_no_scalar, r"loss_fn did not return a loss"),
    "detached": (_detached, r"no output of the forward reaches"),
}


@pytest.mark.parametrize("name", AT_THE_FIRST_CALL)
def test_at_the_first_call(name: str) -> None:
    loss_fn, why = AT_THE_FIRST_CALL[name]
    model, batch = convnet(), images()
    step = fullbatch.Step(loss_fn, model, batch, microbatch=3)
    assert isinstance(step._split, Found)
    before, state = {name: value.clone() for name, value in model.named_buffers()}, torch.get_rng_state()
    with pytest.raises(fullbatch.LossError, match=why):
        step(batch)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    assert torch.equal(state, torch.get_rng_state()) and "forward" not in vars(model)


def test_a_call_that_is_left_out_or_caught() -> None:
    calls = [True]

    def sometimes(model: Any, batch: Any) -> Tensor:
        return masked(model(batch[0])) if calls[0] else model[0].weight.sum()

    model, batch = convnet(), images()
    step = fullbatch.Step(sometimes, model, batch, microbatch=3)
    step(batch)
    calls[0] = False
    with pytest.raises(fullbatch.LossError, match=r"model\(\.\.\.\) not at all, this time"):
        step(batch)
    step = fullbatch.Step(_caught, model, batch, microbatch=3)
    step(batch)
    with pytest.raises(fullbatch.FullbatchError):  # and not the zeros of `except Exception`
        step((batch[0][:, :2], batch[1]))
    assert len(batch[0]) == BATCH
    with pytest.raises(fullbatch.BudgetError):
        fullbatch.Step(_caught, model, batch, memory=step.plan.owned + 1)
