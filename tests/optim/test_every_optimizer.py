"""Every optimizer of torch, one alone or several, ends after planned steps where it ends after plain ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullbatch

# All of torch.optim, so that one that a later torch adds is tried too. SparseAdam takes sparse gradients alone, which a
# planned step refuses by name: tests/exact/test_changed_in_place.py.
EVERY = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    if name not in ("Optimizer", "SparseAdam")
)
SIZE = 10


def _model() -> nn.Module:
    """Matrices alone, which Muon needs."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 12, bias=False), nn.Tanh(), nn.Linear(12, 3, bias=False)]
    return nn.Sequential(*layers).double()


def _batches() -> list[Any]:
    draws = torch.Generator().manual_seed(1)
    return [
        (torch.randn(SIZE, 6, generator=draws, dtype=torch.float64), torch.randint(0, 3, (SIZE,), generator=draws))
        for _ in range(3)
    ]


def _loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _apart(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(((p - q).abs().max() / q.abs().max()).item() for p, q in pairs)


def test_it_is_every_one() -> None:
    assert {"Adadelta", "Adafactor", "AdamW", "LBFGS", "Muon", "NAdam", "Rprop", "SGD"} <= set(EVERY)


@pytest.mark.parametrize("name", EVERY)
def test_an_optimizer_of_torch(name: str) -> None:
    plain = _model()
    planned = copy.deepcopy(plain)
    reference, optimizer = (getattr(torch.optim, name)(model.parameters(), lr=0.01) for model in (plain, planned))
    step = fullbatch.Step(_loss, planned, _batches()[0], microbatch=4, optimizer=optimizer)
    assert step.plan.microbatches == 3

    def closure(batch: Any) -> Callable[[], Tensor]:
        def evaluate() -> Tensor:
            reference.zero_grad()
            loss = _loss(plain, batch)
            loss.backward()
            return loss

        return evaluate

    for batch in _batches():
        reference.step(closure(batch))
        optimizer.step(step.closure(batch))
    assert _apart(planned, plain) <= 1e-9
    assert _apart(planned, _model()) > 1e-5, "it moved"


def test_an_optimizer_for_each_layer() -> None:
    """One loss, two optimizers with a rate of their own: each steps on its part of the gradient."""
    plain = _model()
    planned = copy.deepcopy(plain)
    step = fullbatch.Step(_loss, planned, _batches()[0], microbatch=4)
    for model, run in ((plain, lambda batch: _loss(plain, batch).backward()), (planned, step)):
        first = torch.optim.AdamW(model[0].parameters(), lr=0.02)  # type: ignore[index]
        second = torch.optim.SGD(model[2].parameters(), lr=0.3, momentum=0.9)  # type: ignore[index]
        for batch in _batches():
            first.zero_grad()
            second.zero_grad()
            run(batch)
            first.step()
            second.step()
    assert _apart(planned, plain) <= 1e-9
    assert _apart(planned, _model()) > 1e-2


class Pair(nn.Module):
    """A generator and a discriminator with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(), nn.Linear(8, 1))
        self.double()


def _judge(model: Any, batch: Any) -> Tensor:
    real, noise = batch
    false = model.discriminator(model.generator(noise).detach())
    return F.softplus(false).mean() + F.softplus(-model.discriminator(real)).mean()


def _fool(model: Any, batch: Any) -> Tensor:
    return F.softplus(-model.discriminator(model.generator(batch[1]))).mean()


def test_two_losses_in_turn_each_with_its_optimizer() -> None:
    """As in a GAN: the generator's loss leaves gradients in the discriminator too, which are dropped."""
    draws = torch.Generator().manual_seed(2)
    batches = [
        tuple(torch.randn(SIZE, width, generator=draws, dtype=torch.float64) for width in (6, 4)) for _ in range(3)
    ]
    plain = Pair()
    planned = copy.deepcopy(plain)

    def train(model: Pair, judge: Any, fool: Any) -> None:
        turns = [
            (judge, torch.optim.Adam(model.discriminator.parameters(), lr=0.02)),
            (fool, torch.optim.Adam(model.generator.parameters(), lr=0.02)),
        ]
        for batch in batches:
            for run, optimizer in turns:
                model.zero_grad()
                run(batch)
                optimizer.step()

    train(plain, lambda batch: _judge(plain, batch).backward(), lambda batch: _fool(plain, batch).backward())
    train(planned, *(fullbatch.Step(loss, planned, batches[0], microbatch=4) for loss in (_judge, _fool)))
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(planned.state_dict()[name], value, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize(("options", "least", "most"), [
    ({"fused": True}, 12.0, 12.01), ({"foreach": False}, 12.5, 15.5), ({"foreach": True}, 16.0, 16.01),
], ids=["fused", "for-loop", "foreach"])  # fmt: skip
def test_bytes_a_parameter_of_adamw(options: Any, least: float, most: float) -> None:
    """Gradients (4) and two moments (8), and what the step works on: nothing, a few copies of the largest tensor, or a
    copy of all. The ledger says what a real step is measured at."""
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6)))
    batch = torch.randn(2, 128)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    parameters = list(model.parameters())
    count = sum(p.numel() for p in parameters)
    ledger = fullbatch.explain(lambda m, b: m(b).square().mean(), model, batch, optimizer)
    buffers_and_batch = ledger.owned.total - ledger.owned.optimizer - 4 * count
    predicted = (ledger.optimizer_peak - 4 * count - buffers_and_batch) / count
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    state = sum(value.nbytes for kept in optimizer.state.values() for value in kept.values())
    measured = (4 * count + state + fullbatch.measure(optimizer.step).peak) / count
    assert least <= measured <= most
    assert measured <= predicted <= measured + 16 / count
