"""What loss_fn returns besides the loss comes back as from the whole batch, detached."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from transformers.modeling_outputs import BaseModelOutput

from behaviour.support import agrees, make, mlp, mse, pair


def rich(model: Any, batch: Any) -> Any:
    x, y = batch
    out = model(x)
    errors = (out - y).pow(2).mean(1)
    return errors.mean(), {
        "per sample": out, "sum": out.sum(), "errors": [errors, (errors > 1, out.argmax(1))], "max": errors.max(),
        "sorted": errors.sort().values, "count": len(x), "none": None, "name": "rich", "flag": True, "number": 0.5,
        "target": y, "first": out[0], "weight": model[0].weight, "constant": torch.ones(3), "pairs": out @ out.t(),
    }  # fmt: skip


@pytest.mark.parametrize("microbatch", [1, 4, 6])
def test_a_nest_of_everything_equals_plain(microbatch: int) -> None:
    model, batch = mlp(), pair()
    _, aux = agrees(make(rich, model, batch, microbatch=microbatch), rich, model, batch)
    leaves, spec = tree_flatten(aux)
    expected, expected_spec = tree_flatten(rich(model, batch)[1])
    assert spec == expected_spec
    for value, wanted in zip(leaves, expected, strict=True):
        if isinstance(wanted, Tensor):
            torch.testing.assert_close(value, wanted.detach(), rtol=1e-10, atol=1e-12)
            assert value.stride() == wanted.stride()
            assert not value.requires_grad
            assert value.grad_fn is None
        else:
            assert value == wanted
            assert type(value) is type(wanted)


@dataclasses.dataclass
class Outputs:
    out: Tensor
    target: Tensor
    name: str


Pair = collections.namedtuple("Pair", "out target")
FORMS = {
    "dataclass": lambda out, y: Outputs(out, y, "n"),
    "namedtuple": Pair,
    "transformers output": lambda out, y: BaseModelOutput(last_hidden_state=out, hidden_states=(y,)),
    "list": lambda out, y: [out, y],
    "tensor": lambda out, y: out,
    "empty dict": lambda out, y: {},
    "None": lambda out, y: None,
    "string": lambda out, y: "done",
}


@pytest.mark.parametrize("form", FORMS)
def test_aux_is_a(form: str) -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        out = model(batch[0])
        return (out - batch[1]).pow(2).mean(), FORMS[form](out, batch[1])

    model, batch = mlp(), pair()
    result = make(loss_fn, model, batch)(batch)
    assert isinstance(result, tuple)
    aux, expected = result[1], loss_fn(model, batch)[1]
    assert type(aux) is type(expected)
    tensors = [(aux, expected)] if form == "tensor" else []
    if form in ("dataclass", "namedtuple"):
        tensors = [(aux.out, expected.out), (aux.target, expected.target)]
    elif form == "transformers output":
        tensors = [(aux.last_hidden_state, expected.last_hidden_state), (aux.hidden_states[0], batch[1])]
    elif form == "list":
        tensors = list(zip(aux, expected, strict=True))
    elif form != "tensor":
        assert aux == expected
    for value, wanted in tensors:
        torch.testing.assert_close(value, wanted.detach())
        assert not value.requires_grad


def test_the_loss_itself_as_aux() -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        loss = mse(model, batch)
        return loss, {"loss": loss, "twice": loss * 2}

    batch = pair()
    loss, aux = make(loss_fn, batch=batch)(batch)
    assert torch.equal(aux["loss"], loss)
    torch.testing.assert_close(aux["twice"], 2 * loss)
    assert not aux["loss"].requires_grad


def test_a_bare_parameter_as_aux_is_detached() -> None:
    model, batch = mlp(), pair()
    _, aux = make(lambda model, batch: (mse(model, batch), [model[0].weight]), model, batch)(batch)
    assert not aux[0].requires_grad
    assert model[0].weight.requires_grad
    assert torch.equal(aux[0], model[0].weight)


def test_a_buffer_before_and_after_its_update() -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        before = model[1].running_mean.clone()
        loss = mse(model, batch)
        return loss, (before, model[1].running_mean.clone())

    model, batch = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), pair()
    step = make(loss_fn, model, batch)
    for _ in range(2):
        agrees(step, loss_fn, model, batch)


def test_aux_of_earlier_calls_is_not_overwritten() -> None:
    model, batch = mlp(), pair()
    step = make(lambda model, batch: (mse(model, batch), model(batch[0])), model, batch)
    _, first = step(batch)
    kept = first.clone()
    step((batch[0] * 2, batch[1]))
    assert torch.equal(first, kept)


def test_a_tensor_appended_to_a_list_outside() -> None:
    seen: list[Tensor] = []

    def loss_fn(model: Any, batch: Any) -> Tensor:
        out = model(batch[0])
        seen.append(out.detach())
        return (out - batch[1]).pow(2).mean()

    model, batch = mlp(), pair()
    step = make(loss_fn, model, batch)
    assert not seen
    step(batch)
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], model(batch[0]).detach())
