"""Any nest of tensors is a batch, of any size and shape."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BatchEncoding

import fullbatch
from behaviour.support import BATCH, agrees, captures, make, mlp, mse, pair

Named = collections.namedtuple("Named", "x y")


@dataclasses.dataclass
class Record:
    x: Tensor
    y: Tensor
    name: str = "record"


@dataclasses.dataclass(frozen=True)
class FrozenRecord:
    x: Tensor
    y: Tensor


X, Y = pair()
NESTS: dict[str, tuple[Any, Any]] = {
    "tuple": ((X, Y), lambda b: (b[0], b[1])),
    "list": ([X, Y], lambda b: (b[0], b[1])),
    "dict": ({"x": X, "y": Y}, lambda b: (b["x"], b["y"])),
    "namedtuple": (Named(X, Y), lambda b: (b.x, b.y)),
    "dataclass": (Record(X, Y), lambda b: (b.x, b.y)),
    "frozen dataclass": (FrozenRecord(X, Y), lambda b: (b.x, b.y)),
    "BatchEncoding": (BatchEncoding({"x": X, "y": Y}), lambda b: (b["x"], b.y)),
    "nested": ({"in": [{"x": X}], "out": (Y,)}, lambda b: (b["in"][0]["x"], b["out"][0])),
    "ordered dict": (collections.OrderedDict(x=X, y=Y), lambda b: (b["x"], b["y"])),
    "with other entries": (
        {"x": X, "y": Y, "names": ["a"] * BATCH, "none": None, "epoch": 3, "path": "train"}, lambda b: (b["x"], b["y"]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("nest", NESTS)
def test_batch_is_a(nest: str) -> None:
    batch, read = NESTS[nest]

    def loss_fn(model: Any, batch: Any) -> Tensor:
        return mse(model, read(batch))

    model = mlp()
    batch = fullbatch._tree.map_tensors(lambda t: t.double(), batch)
    step = make(loss_fn, model, batch)
    assert step.plan.microbatches == 2
    agrees(step, loss_fn, model, batch)


def test_batch_is_one_tensor() -> None:
    def loss_fn(model: Any, batch: Tensor) -> Tensor:
        return model(batch).pow(2).mean()

    model, (x, _) = mlp(), pair()
    agrees(make(loss_fn, model, x), loss_fn, model, x)


def _weighted(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], weight=batch[2])


def test_a_tensor_of_another_size_is_the_same_for_all_samples() -> None:
    model, (x, _) = mlp(), pair()
    batch = (x, torch.tensor([0, 1, 1, 0, 1, 0]), torch.tensor([0.3, 0.9]))
    step = make(_weighted, model, batch)
    assert step.plan.replicated == ("batch[2]",)
    agrees(step, _weighted, model, batch)


def test_a_tensor_that_has_the_size_of_the_batch_by_chance_can_be_said_to_be_shared() -> None:
    model, (x, _) = mlp(), pair(2)
    batch = (x, torch.tensor([0, 1]), torch.tensor([0.3, 0.9]))
    step = make(_weighted, model, batch, microbatch=1, batch_dims=(0, 0, None))
    assert step.plan.replicated == ("batch[2]",)
    agrees(step, _weighted, model, batch)


def test_a_scalar_tensor_in_the_batch_is_shared() -> None:
    def loss_fn(model: Any, batch: Any) -> Tensor:
        return mse(model, batch) * batch[2]

    model, (x, y) = mlp(), pair()
    step = make(loss_fn, model, (x, y, torch.tensor(0.3)))
    for weight in (0.3, 0.7):
        agrees(step, loss_fn, model, (x, y, torch.tensor(weight)))
    assert captures(step) == 1


@pytest.mark.parametrize("dims", [(1, 0), {"x": 1, "y": 0}, (-2, -2)], ids=["tuple", "dict", "negative"])
def test_batch_in_the_second_dimension_of_a_sequence(dims: Any) -> None:
    def loss_fn(model: Any, batch: Any) -> Tensor:
        x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        return F.mse_loss(model(x).mean(0), y)

    model, x, y = mlp(), torch.randn(5, BATCH, 3), torch.randn(BATCH, 2)
    batch: Any = {"x": x, "y": y} if isinstance(dims, dict) else (x, y)
    step = make(loss_fn, model, batch, batch_dims=dims)
    assert (step.plan.batch, step.plan.microbatches) == (BATCH, 2)
    agrees(step, loss_fn, model, batch)


def test_one_dimension_said_for_all_tensors() -> None:
    def loss_fn(model: Any, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    model, batch = mlp(), (torch.randn(5, BATCH, 3), torch.randn(5, BATCH, 2))
    agrees(make(loss_fn, model, batch, batch_dims=1), loss_fn, model, batch)


def test_one_tensor_twice_in_a_batch() -> None:
    def loss_fn(model: Any, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]), model(batch[1]) * 2)

    model, (x, _) = mlp(), pair()
    step = make(loss_fn, model, (x, x))
    agrees(step, loss_fn, model, (x, x))
    agrees(step, loss_fn, model, (x, x + 1))
    agrees(step, loss_fn, model, (x, x))


def test_views_of_one_tensor_in_a_batch() -> None:
    def loss_fn(model: Any, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]), model(batch[1]) * 2)

    model, whole = mlp(), torch.randn(BATCH, 6)
    batch = (whole[:, :3], whole[:, 3:])
    agrees(make(loss_fn, model, batch), loss_fn, model, batch)


# ---- sizes and shapes


def test_last_short_batches_and_back_again() -> None:
    model = mlp()
    step = make(mse, model)
    for size in (6, 5, 3, 1, 6, 5, 3, 1):
        agrees(step, mse, model, pair(size))
        assert step.plan.batch == size
    assert captures(step) == 4, "sizes seen before are remembered"


def test_larger_batch_than_the_example() -> None:
    model, batch = mlp(), (torch.randn(9, 3), torch.randn(9, 2))
    step = make(mse, model)
    agrees(step, mse, model, batch)
    assert (step.plan.batch, step.plan.microbatches) == (9, 3)


def test_a_batch_of_one() -> None:
    model = mlp()
    step = make(mse, model, pair(1), microbatch=1)
    agrees(step, mse, model, pair(1))
    agrees(step, mse, model, pair(4))


def test_short_batch_with_a_barrier_has_its_own_denominators() -> None:
    def loss_fn(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], ignore_index=-1)

    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    x, y = torch.randn(7, 3), torch.tensor([0, 1, -1, -1, -1, 2, 0])
    step = make(loss_fn, model, (x, y), microbatch=2)
    for size in (7, 5, 7):
        agrees(step, loss_fn, model, (x[:size], y[:size]))


def test_image_sizes_are_planned_on_first_use_and_remembered() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def loss_fn(model: Any, batch: Tensor) -> Tensor:
        return model(batch).pow(2).mean()

    step = make(loss_fn, model, torch.randn(BATCH, 1, 8, 8))
    for size in (8, 6, 8, 5, 6):
        agrees(step, loss_fn, model, torch.randn(BATCH, 1, size, size))
    assert captures(step) == 3


def test_sequence_lengths() -> None:
    model = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 11))

    def loss_fn(model: Any, batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    step = make(loss_fn, model, torch.randint(11, (BATCH, 5)))
    for length in (5, 3, 7, 5):
        agrees(step, loss_fn, model, torch.randint(11, (BATCH, length)))
    assert captures(step) == 3


def test_strides_of_the_batch() -> None:
    model, (x, y) = mlp(), pair()
    step = make(mse, model)
    agrees(step, mse, model, (x.t().contiguous().t(), y))
    agrees(step, mse, model, (x.repeat(1, 2)[:, ::2], y))
    agrees(step, mse, model, (x[:1].expand(BATCH, 3), y))


# ---- gradients of, and changes to, the batch


def test_a_batch_tensor_that_requires_a_gradient_gets_it() -> None:
    model, (x, y) = mlp(), pair()
    x = x.clone().requires_grad_()
    mse(model, (x, y)).backward()
    expected, x.grad = x.grad, None
    agrees(make(mse, model, (x, y)), mse, model, (x, y))
    torch.testing.assert_close(x.grad, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("change", [lambda x: x.mul_(2), lambda x: x.__setitem__(0, 0.0)], ids=["mul_", "setitem"])
def test_a_batch_tensor_changed_in_place_is_refused_by_name(change: Any) -> None:
    def loss_fn(model: Any, batch: Any) -> Tensor:
        change(batch[0])
        return mse(model, batch)

    batch = pair()
    before = batch[0].clone()
    with pytest.raises(fullbatch.ModelError, match="in place") as refused:
        make(loss_fn, batch=batch)
    assert "batch" in str(refused.value)
    assert "clone" in str(refused.value)
    assert torch.equal(batch[0], before)


def test_the_batch_is_left_as_it_was() -> None:
    batch = {"x": pair()[0], "y": pair()[1], "k": 3}
    before = {**batch, "x": batch["x"].clone(), "y": batch["y"].clone()}
    step = make(lambda model, batch: mse(model, (batch["x"], batch["y"])), batch=batch)
    step(batch)
    assert batch.keys() == before.keys()
    assert torch.equal(batch["x"], before["x"])
    assert not batch["x"].requires_grad
