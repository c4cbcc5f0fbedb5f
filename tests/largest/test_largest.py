"""The largest size that fits: it was run, it is within the memory, and the next size is not."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullbatch
from fullbatch._run._executor import RANDOM_BYTES
from fullbatch._trial import Trial
from fullbatch._undone import undone


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 5))


def example(samples: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 8), torch.randint(5, (samples,))


def loss_fn(net: Any, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch[0]), batch[1])


def measured(net: nn.Module, batch: Any, loss: Any = loss_fn) -> int:
    """All that a plain step on `batch` owns and allocates, found without the code under test."""
    tensors = [*net.parameters(), *net.buffers(), *batch]
    owned = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    net = copy.deepcopy(net)
    return owned + fullbatch.measure(lambda: loss(net, batch).backward()).peak


def test_batch() -> None:
    net, memory = model(), 120_000
    found = fullbatch.largest(loss_fn, net, example(), memory=memory, most=300)
    assert found.plain is not None
    size = found.plain.size
    assert measured(net, example(size)) == found.plain.measured <= memory
    assert measured(net, example(size + 1)) > memory
    assert found.fullbatch.measured <= memory
    room = 0.02 * found.fullbatch.measured + RANDOM_BYTES  # the state of the generator that dropout draws from
    assert 0 <= found.fullbatch.predicted - found.fullbatch.measured <= room
    assert found.fullbatch.size >= 1.5 * size
    plan = found.fullbatch.plan
    assert plan is not None
    assert plan.batch == found.fullbatch.size
    for fit in (found.plain, found.fullbatch):
        assert fit.size in [run.size for run in fit.tried]
    with pytest.raises(fullbatch.BudgetError):
        fullbatch.Step(loss_fn, net, example(found.fullbatch.size + 1), memory=memory)
    again = fullbatch.largest(loss_fn, net, example(7), memory=memory, most=300)
    assert (again.plain.size, again.fullbatch.size) == (size, found.fullbatch.size)  # type: ignore[union-attr]
    text = str(found)
    assert "plain PyTorch" in text
    assert f"{plan.microbatches} microbatches of {plan.microbatch} samples" in text


class Attention(nn.Module):
    """Memory grows with the square of the length."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inward, self.outward = nn.Linear(4, 12), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inward(x).chunk(3, -1)
        return self.outward(torch.softmax(q @ k.transpose(1, 2), -1) @ v)


def attended(net: Any, batch: Any) -> Tensor:
    return net(batch[0]).square().mean()


@pytest.mark.slow
def test_length_where_a_line_runs_out() -> None:
    """A line through the memory of lengths 4 and 12 chooses a length that takes four times as much as there is."""
    net, memory = Attention(), 200_000

    def of(length: int) -> tuple[Tensor]:
        return (torch.randn(4, length, 4),)

    (a, b) = (measured(net, of(length), attended) for length in (4, 12))
    line = 4 + int((memory - a) * 8 / (b - a))
    assert measured(net, of(line), attended) > 4 * memory
    found = fullbatch.largest(attended, net, of(16), memory=memory, axis=of, multiple_of=16, most=96)
    assert found.plain is not None
    assert measured(net, of(found.plain.size), attended) == found.plain.measured <= memory
    assert measured(net, of(found.plain.size + 16), attended) > memory
    assert found.fullbatch.size >= 1.5 * found.plain.size
    assert found.fullbatch.measured <= memory
    assert found.axis == "size"


@pytest.mark.parametrize("error", [0.8, 1.25])
def test_a_wrong_prediction_is_mended_by_the_run(error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is returned fits, and is the largest, though every predicted peak is a fifth too small or too large."""
    net, memory, right = model(), 60_000, Trial._predicted
    monkeypatch.setattr(Trial, "_predicted", lambda self, size: int(error * right(self, size)))
    monkeypatch.setattr(Trial, "planned", lambda self: fullbatch._trial.Fit(1, 1, 1, (), ()))  # type: ignore[attr-defined]
    fit = fullbatch.largest(loss_fn, net, example(), memory=memory, most=200).plain
    assert fit is not None
    assert len(fit.tried) > 1
    assert fit.measured <= memory < measured(net, example(fit.size + 1))


def test_out_of_memory_is_a_size_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(net: Any, batch: Any) -> Tensor:
        if not torch.compiler.is_compiling() and len(batch[0]) > 20:
            raise torch.OutOfMemoryError("of the device")
        return loss_fn(net, batch)

    monkeypatch.setattr(Trial, "planned", lambda self: fullbatch._trial.Fit(1, 1, 1, (), ()))  # type: ignore[attr-defined]
    found = fullbatch.largest(dies, model(), example(), memory=80_000, most=200)
    assert found.plain is not None
    assert 15 <= found.plain.size <= 20
    assert found.plain.tried[0].measured is None
    assert "(ran out)" in str(found)


def test_optimizer_is_counted() -> None:
    net = model()
    parameters = sum(parameter.numel() * 8 for parameter in net.parameters())
    memory = 60_000 + 2 * parameters
    trials = [None, torch.optim.Adam(net.parameters())]
    options = {"memory": memory, "most": 100}
    bare, adam = (fullbatch.largest(loss_fn, net, example(), optimizer=it, **options).plain for it in trials)
    assert bare is not None
    assert adam is not None
    assert adam.size < bare.size
    assert adam.measured <= memory


def test_nothing_is_left_of_the_runs() -> None:
    net = model()
    net[0].weight.grad = torch.randn(64, 8)
    seen: list[Tensor] = []
    data = example()
    net[0].weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter))
    grad, before = net[0].weight.grad, copy.deepcopy(net.state_dict())
    value, drawn, python = grad.clone(), torch.get_rng_state(), random.getstate()
    fullbatch.largest(loss_fn, net, data, memory=60_000, most=40)
    assert net[0].weight.grad is grad
    assert torch.equal(grad, value)
    assert all(parameter.grad is None for parameter in net.parameters() if parameter is not net[0].weight)
    assert all(torch.equal(now, before[name]) for name, now in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert random.getstate() == python
    assert not seen
    loss_fn(net, example()).backward()
    assert len(seen) == 1  # the hook is there again


def test_a_run_that_raises_leaves_nothing_either() -> None:
    net = model()
    before = copy.deepcopy(net.state_dict())

    def run() -> None:
        with undone(net, torch.device("cpu")):
            loss_fn(net, example()).backward()
            net[1].running_mean = torch.ones(64)  # put another in its place
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert all(torch.equal(now, before[name]) for name, now in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())


def test_nothing_fits() -> None:
    net = model()
    with pytest.raises(fullbatch.BudgetError, match="No batch fits the memory, not even 2") as caught:
        fullbatch.largest(loss_fn, net, example(), memory=2000, multiple_of=2)
    need = caught.value.smallest
    found = fullbatch.largest(loss_fn, net, example(), memory=need, multiple_of=2, most=8)
    assert found.fullbatch.size == 2


def test_plain_may_fit_nowhere() -> None:
    """Where even one sample is too much for plain PyTorch, the planned step's size still comes back."""
    net, data = Attention(), (torch.randn(8, 32, 4),)
    need = measured(net, data, attended) // 4

    def of(length: int) -> tuple[Tensor]:
        return (torch.randn(8, length, 4),)

    found = fullbatch.largest(attended, net, data, memory=need, axis=of, multiple_of=32, most=64)
    assert found.plain is None
    assert found.fullbatch.size == 32
    assert "none fits" in str(found)


def test_bad_arguments() -> None:
    net, data = model(), example()
    with pytest.raises(fullbatch.BatchError) as caught:
        fullbatch.largest(loss_fn, net, data, axis="side", multiple_of=0, most=0)  # type: ignore[arg-type]
    assert [fault.what for fault in caught.value.faults] == ["There is no such axis.", "multiple_of= is no size."]
    with pytest.raises(fullbatch.BatchError, match="There is no size to try"):
        fullbatch.largest(loss_fn, net, data, multiple_of=32, most=16)
    with pytest.raises(fullbatch.LossError, match="not a function"):
        fullbatch.largest(3, net, data)  # type: ignore[arg-type]
    with pytest.raises(fullbatch.BatchError, match=r"axis\(1\) is no batch"):
        fullbatch.largest(loss_fn, net, data, axis=lambda size: "a batch", memory=60_000)
    with pytest.raises(fullbatch.BatchError, match=r"axis\(1\) and axis\(2\) are of one shape"):
        fullbatch.largest(loss_fn, net, data, axis=lambda size: data, memory=10**6)
    with pytest.raises(fullbatch.BatchError, match=r"axis\(1\) raises ZeroDivisionError"):
        fullbatch.largest(loss_fn, net, data, axis=lambda size: 1 / 0, memory=60_000)
    with pytest.raises(fullbatch.CaptureError) as refused:
        fullbatch.largest(loss_fn, net, data, axis=lambda size: (torch.randn(4, size), data[1]), memory=60_000)
    assert "at size 1" in "".join(refused.value.__notes__)
