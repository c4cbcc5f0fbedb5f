"""What people do around a step, with a planned one, ends where plain PyTorch ends: in float64 to rounding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

import fullbatch

SIZE = 10


def _model() -> nn.Module:
    """No bias before BatchNorm: its gradient is zero but for rounding, which LARS and Adafactor scale up."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 12, bias=False), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)
    ).double()


def _batches(count: int = 4) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(SIZE, 6, generator=generator, dtype=torch.float64),
            torch.randint(0, 3, (SIZE,), generator=generator),
        )
        for _ in range(count)
    ]


def _loss(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _plain(model: Any, batch: Any) -> torch.Tensor:
    loss = _loss(model, batch)
    loss.backward()
    return loss.detach()


def _same(one: nn.Module, other: nn.Module) -> None:
    for name, value in one.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value, rtol=1e-9, atol=1e-10, msg=name)


def _both(train: Callable[[Any, Callable[[Any], Any]], Any]) -> tuple[Any, Any]:
    """`train(model, step)` with the plain step and with a planned one of uneven microbatches."""
    plain = _model()
    planned = copy.deepcopy(plain)
    step = fullbatch.Step(_loss, planned, _batches()[0], microbatch=4)
    a = train(plain, lambda batch: _plain(plain, batch))
    b = train(planned, step)
    _same(plain, planned)
    return a, b


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    first, *rest = model.parameters()
    return [{"params": [first], "lr": 0.02, "weight_decay": 0.1}, {"params": rest}]


MAKES: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "adamw groups": lambda m: torch.optim.AdamW(_groups(m), lr=0.01),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
    "radam foreach": lambda m: torch.optim.RAdam(m.parameters(), foreach=True),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3, eps=1e-3),
    "lamb": lambda m: fullbatch.optim.LAMB(fullbatch.optim.param_groups(m, 0.01), lr=0.02),
    "lars": lambda m: fullbatch.optim.LARS(m.parameters(), lr=0.02),
}


@pytest.mark.parametrize("name", MAKES)
def test_optimizers(name: str) -> None:
    def train(model: Any, step: Any) -> None:
        optimizer = MAKES[name](model)
        for batch in _batches():
            optimizer.zero_grad()
            step(batch)
            optimizer.step()

    _both(train)


@pytest.mark.parametrize("clip", [
    lambda p: nn.utils.clip_grad_norm_(p, 0.1), lambda p: nn.utils.clip_grad_value_(p, 0.01),
])  # fmt: skip
def test_clipping(clip: Any) -> None:
    def train(model: Any, step: Any) -> Any:
        optimizer, norms = torch.optim.SGD(model.parameters(), lr=0.5), []
        for batch in _batches():
            optimizer.zero_grad()
            step(batch)
            norms.append(clip(model.parameters()))
            optimizer.step()
        return norms

    plain, planned = _both(train)
    if plain[0] is not None:
        assert max(plain) > 0.1  # it did clip
        torch.testing.assert_close(planned, plain, rtol=1e-9, atol=0)


def test_average_of_weights_and_its_statistics() -> None:
    def train(model: Any, step: Any) -> Any:
        optimizer, rates = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), []
        schedule = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2, anneal_strategy="linear")
        averages = [AveragedModel(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))]
        for batch in _batches():
            optimizer.zero_grad()
            step(batch)
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
            for average in averages:
                average.update_parameters(model)
        for average in averages:
            update_bn([images for images, _ in _batches()], average)  # forwards alone: no gradients, no step needed
        assert rates == pytest.approx([0.3, 0.175, 0.05, 0.05])
        return averages

    for plain, planned in zip(*_both(train), strict=True):
        _same(plain, planned)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_by_closure(search: Any) -> None:
    """Smooth and without statistics that every evaluation moves: the iterations of both are the same."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    planned, batch = copy.deepcopy(plain), _batches()[0]
    settings: dict[str, Any] = {"lr": 0.5, "max_iter": 6, "history_size": 4, "line_search_fn": search}
    reference = torch.optim.LBFGS(plain.parameters(), **settings)
    optimizer = torch.optim.LBFGS(planned.parameters(), **settings)
    step = fullbatch.Step(_loss, planned, batch, microbatch=3, optimizer=optimizer)

    def closure() -> torch.Tensor:
        reference.zero_grad()
        loss = _loss(plain, batch)
        loss.backward()
        return loss

    for _ in range(3):
        expected = reference.step(closure)
        found = optimizer.step(step.closure(batch))
        torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-10)
    for one, other in zip(plain.parameters(), planned.parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-7, atol=1e-9)


def test_a_closure_clears_gradients_and_returns_the_loss_alone() -> None:
    model, batch = nn.Linear(6, 3).double(), _batches()[0]
    step = fullbatch.Step(lambda m, b: (_loss(m, b), m(b[0])), model, batch, microbatch=5)
    expected, _ = step(batch)
    once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    evaluate = step.closure(batch)
    for _ in range(2):
        assert torch.equal(evaluate(), expected)
    for parameter, gradient in zip(model.parameters(), once, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)


# ---- the budget


def _wide() -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 8))
    return model, (torch.randn(8, 64), torch.randint(0, 8, (8,)))


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
def test_the_budget_covers_the_optimizer_s_step(options: Any) -> None:
    """What `smallest` says is enough to the bytes of a number, and one byte less is refused."""
    model, batch = _wide()
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    with pytest.raises(fullbatch.BudgetError) as caught:
        fullbatch.Step(_loss, model, batch, memory=2000, optimizer=optimizer)
    smallest = caught.value.smallest
    with pytest.raises(fullbatch.BudgetError):
        fullbatch.Step(_loss, model, batch, memory=smallest - 1, optimizer=optimizer)
    step = fullbatch.Step(_loss, model, batch, memory=smallest, optimizer=optimizer)
    owned = sum(4 * p.numel() for p in model.parameters()) + sum(t.numel() * t.element_size() for t in batch)
    peaks = []
    for _ in range(3):
        optimizer.zero_grad()

        def both() -> None:
            step(batch)
            optimizer.step()

        before = sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values())
        peaks.append(owned + before + fullbatch.measure(both).peak)
    assert max(peaks) <= smallest
    alone = any("optimizer.step() sets the peak" in note for note in step.plan.notes)
    assert alone == ("foreach" in options)
    if alone:
        assert "optimizer's step does not fit" in str(caught.value)
        assert smallest <= max(peaks) + 16 + 8


def test_a_low_bit_optimizer_with_its_schedule() -> None:
    import torchao.optim

    torch.manual_seed(0)
    model, batch = _wide()
    optimizer = torchao.optim.AdamW8bit(model.parameters(), lr=0.01)
    schedule = fullbatch.lr.warmup(optimizer, 2, start=0.5)
    step = fullbatch.Step(_loss, model, batch, microbatch=4, optimizer=optimizer)
    owned, losses = step.plan.owned, []
    full = fullbatch.Step(_loss, model, batch, microbatch=4, optimizer=torch.optim.AdamW(model.parameters()))
    assert full.plan.owned - owned > 5.5 * sum(p.numel() for p in model.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        losses.append(step(batch).item())
        optimizer.step()
        schedule.step()
        assert step.plan.owned == owned
    assert optimizer.param_groups[0]["lr"].item() == pytest.approx(0.01)
    assert losses[-1] < losses[0]


def test_explain_shows_the_optimizer_s_step() -> None:
    model, batch = _wide()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    ledger = fullbatch.explain(_loss, model, batch, optimizer)
    count = sum(4 * p.numel() for p in model.parameters())
    assert ledger.after.gradients == count
    assert ledger.optimizer_peak == ledger.owned.total + count + ledger.after.working
    assert 0 <= ledger.after.working - count <= 16 + 4 * 6  # foreach: the root of all second moments at once
    assert "optimizer step: all at its peak" in str(ledger)
    assert "optimizer step" not in str(fullbatch.explain(_loss, model, batch))


def test_a_gradient_that_is_there_gets_a_second_buffer() -> None:
    """The planned step makes the new gradient beside it; autograd makes one tensor's at a time and adds it."""
    model, batch = _wide()
    fresh = fullbatch.explain(_loss, model, batch)
    step = fullbatch.Step(_loss, model, batch, microbatch=4)
    step(batch)
    count = sum(4 * p.numel() for p in model.parameters())
    measured = fullbatch.measure(lambda: step(batch)).peak
    assert step.plan.owned >= count * 2
    assert measured <= step.plan.activations <= measured + 0.02 * (step.plan.owned + measured)
    added = fullbatch.explain(_loss, model, batch)
    assert added.owned.gradients == count
    plain = fullbatch.measure(lambda: _loss(model, batch).backward()).peak
    assert abs(added.peak - added.owned.total - plain) <= 0.1 * plain
    assert added.peak - added.owned.total < fresh.peak - fresh.owned.total


def test_lbfgs_is_counted_while_its_closure_runs() -> None:
    model, batch = _wide()
    optimizer = torch.optim.LBFGS(model.parameters(), history_size=3)
    step = fullbatch.Step(_loss, model, batch, microbatch=4, optimizer=optimizer)
    count = sum(4 * p.numel() for p in model.parameters())
    # Three pairs, the last direction and gradient; and during a closure a gradient, a direction and what leads to it.
    assert step.plan.owned >= count * (1 + 2 * 3 + 2 + 3)
    for _ in range(4):
        optimizer.step(step.closure(batch))
    owned = count + sum(t.numel() * t.element_size() for t in batch)
    state = sum(
        t.numel() * t.element_size()
        for value in optimizer.state[next(model.parameters())].values()
        for t in (value if isinstance(value, list) else [value])
        if isinstance(t, torch.Tensor)
    )
    measured = fullbatch.measure(lambda: optimizer.step(step.closure(batch))).peak
    assert owned + state + measured <= step.plan.predicted_peak + 4 * count
    assert owned + state <= step.plan.owned
