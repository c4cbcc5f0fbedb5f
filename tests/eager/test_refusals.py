"""What is wrong is said: what was got, what was expected, what to type next."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fullbatch

X = torch.ones(4, 3, dtype=torch.float64)

RETURNED: dict[str, tuple[Any, str, str]] = {
    "a scalar": (lambda out: out.sum(), "returned the loss alone", r"tensor of shape \(\)"),
    "losses": (lambda out: out, "returned the loss alone", r"\(\d, 1\)"),
    "nothing": (lambda out: None, "did not return a loss and a count", "NoneType"),
    "three": (lambda out: (out.sum(), 1, 2), "did not return a loss and a count", "tuple of 3"),
    "a float": (lambda out: (1.0, 2), "loss_sum is not a tensor", "float"),
    "a vector": (lambda out: (out[:, 0], 2), "loss_sum is not a scalar", r"shape \(\d,\)"),
    "complex": (lambda out: (out.sum() * 1j, 2), "not a real number", "complex"),
    "nan count": (lambda out: (out.sum(), float("nan")), "count is not a number to divide by", "nan"),
    "infinite count": (lambda out: (out.sum(), torch.tensor(np.inf)), "count is not a number to divide by", "inf"),
    "negative count": (lambda out: (out.sum(), -1), "count is not a number to divide by", "-1"),
    "counts": (lambda out: (out.sum(), torch.ones(2)), "count is not a number to divide by", r"\(2,\)"),
    "text": (lambda out: (out.sum(), "4"), "count is not a number to divide by", "str"),
    "count with gradient": (lambda out: (out.sum(), out.sum()), "count has a gradient", "parameter"),
    "zero counts": (lambda out: (out.sum(), 0), "add up to zero", "count 0 over 4 samples"),
    "detached": (lambda out: (out.sum().detach(), 1), "No parameter reaches the loss", "without a gradient"),
}


@pytest.mark.parametrize("case", RETURNED)
@pytest.mark.parametrize("microbatch", [2, 4, None])
def test_what_loss_fn_returns(case: str, microbatch: int | None) -> None:
    returned, what, got = RETURNED[case]
    with pytest.raises(fullbatch.LossError, match=what) as caught:
        fullbatch.eager.Step(lambda m, x: returned(m(x)), nn.Linear(3, 1), X, microbatch=microbatch)
    assert caught.value.faults[0].expected and caught.value.faults[0].next
    assert re.search(got, caught.value.faults[0].got), caught.value.faults[0].got


@pytest.mark.parametrize("count", [2, 2.0, np.int64(2), np.float32(2), torch.tensor(2), torch.tensor([2.0]), True])
def test_counts_of_any_kind(count: Any) -> None:
    model, x = nn.Linear(3, 1), X[:2]
    step = fullbatch.eager.Step(lambda m, x: (m(x).sum(), count), model, x, microbatch=2)
    step(x)
    torch.testing.assert_close(model.bias.grad, torch.full((1,), 2.0) / float(count))


def loss_fn(model: Any, x: Tensor) -> tuple[Tensor, int]:
    return model(x).square().sum(), len(x)


def test_all_faults_of_the_arguments_at_once() -> None:
    with pytest.raises(fullbatch.FullbatchError) as caught:
        fullbatch.eager.Step("loss", nn.Linear(3, 1), X, memory="much", microbatch=5)  # type: ignore[arg-type]
    assert len(caught.value.faults) == 3


@pytest.mark.parametrize("microbatch", [0, -1, 5, 1.5, True])
def test_a_microbatch_out_of_range(microbatch: Any) -> None:
    with pytest.raises(fullbatch.BatchError, match="microbatch"):
        fullbatch.eager.Step(loss_fn, nn.Linear(3, 1), X, microbatch=microbatch)


@pytest.mark.parametrize("batch", [(), torch.zeros(0, 3), (torch.ones(4, 3), torch.ones(3))])
def test_a_batch_that_cannot_be_cut(batch: Any) -> None:
    with pytest.raises(fullbatch.BatchError):
        fullbatch.eager.Step(loss_fn, nn.Linear(3, 1), batch)


def test_lists_of_different_lengths() -> None:
    with pytest.raises(fullbatch.BatchError, match="different batch sizes"):
        fullbatch.eager.Step(loss_fn, nn.Linear(3, 1), ([X, X], [1]), batch_dims="list")
    with pytest.raises(fullbatch.BatchError, match="'list' for"):
        fullbatch.eager.Step(loss_fn, nn.Linear(3, 1), (X, [X]), batch_dims=("list", "list"))


def test_a_backward_hook_would_see_microbatches() -> None:
    model = nn.Linear(3, 1)
    model.register_full_backward_hook(lambda *_: None)
    with pytest.raises(fullbatch.ModelError, match="backward hook"):
        fullbatch.eager.Step(loss_fn, model, X)


def test_a_lazy_model_and_sparse_gradients() -> None:
    with pytest.raises(fullbatch.ModelError, match="no shape yet"):
        fullbatch.eager.Step(loss_fn, nn.LazyLinear(2), X)
    table = nn.Embedding(5, 2, sparse=True)
    with pytest.raises(fullbatch.ModelError, match="gradient of weight is not dense"):
        fullbatch.eager.Step(loss_fn, table, torch.tensor([0, 1, 2]))


@pytest.mark.parametrize("microbatch", [2, 4])
def test_a_step_that_changes_its_batch(microbatch: int) -> None:
    def in_place(model: Any, batch: Any) -> tuple[Tensor, int]:
        return model(batch["x"].mul_(2)).sum(), 1

    x = X.clone()
    with pytest.raises(fullbatch.ModelError, match=r"changes its batch or a parameter") as caught:
        fullbatch.eager.Step(in_place, nn.Linear(3, 1), {"x": x}, microbatch=microbatch)
    assert "batch['x']" in str(caught.value)
    assert torch.equal(x, X)


def test_a_step_that_changes_a_parameter() -> None:
    """A momentum encoder that is updated inside of loss_fn would be updated once a microbatch."""

    def momentum(model: Any, x: Tensor) -> tuple[Tensor, int]:
        with torch.no_grad():
            model["teacher"].weight.lerp_(model["student"].weight, 0.1)
        return (model["student"](x) - model["teacher"](x)).square().sum(), len(x)

    model = nn.ModuleDict({"student": nn.Linear(3, 2), "teacher": nn.Linear(3, 2)})
    with pytest.raises(fullbatch.ModelError, match=r"a parameter in place") as caught:
        fullbatch.eager.Step(momentum, model, X, microbatch=2)
    assert "teacher.weight" in str(caught.value)


def test_a_step_that_begins_to_change_its_batch() -> None:
    doubled = [False]

    def sometimes(model: Any, x: Tensor) -> tuple[Tensor, int]:
        return model(x.mul_(2) if doubled[0] else x).sum(), len(x)

    model = nn.Linear(3, 1)
    step = fullbatch.eager.Step(sometimes, model, X, microbatch=2)
    doubled[0] = True
    with pytest.raises(fullbatch.ModelError, match=r"changes its batch or a parameter"):
        step(X.clone())
    assert model.weight.grad is None


def test_an_error_of_the_model_comes_through_as_it_is() -> None:
    def broken(model: Any, x: Tensor) -> Any:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        fullbatch.eager.Step(broken, nn.Linear(3, 1), X)
