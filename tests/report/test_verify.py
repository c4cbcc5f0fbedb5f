"""The certificate: it passes where the gradient is the same, fails where it is not, and changes nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fullbatch
from cases.reference import buffers_of, grads_of
from fullbatch._plan._schedule import Do, Phase, Schedule
from fullbatch._run._executor import Executor


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(4 * 36, 3)
    )


def _batch(size: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 2, 8, 8), torch.randint(0, 3, (size,))


def _loss(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def test_certificate_in_float64_on_realised_masks() -> None:
    model, batch = _net(), _batch()
    step = fullbatch.Step(_loss, model, batch, microbatch=3)
    step(batch)
    found = step.verify()
    assert found.ok
    assert found.realised_masks
    assert found.dtype == torch.float64
    assert max(found.loss_error, found.gradient_error, found.buffer_error) <= 1e-12
    assert set(found.parameters) == {name for name, _ in model.named_parameters()}
    assert "the same gradient" in str(found)


def test_it_changes_nothing_of_the_users() -> None:
    model, batch = _net(), _batch()
    step = fullbatch.Step(_loss, model, batch, microbatch=3)
    step(batch)
    calls: list[int] = []
    model[0].weight.register_hook(lambda grad: calls.append(1))
    other = _batch(5)
    before = grads_of(model), buffers_of(model), copy.deepcopy(model.state_dict()), torch.get_rng_state()
    plan = step.plan
    step.verify()
    step.verify(other, dtype=None)
    assert all(torch.equal(a, b) for a, b in zip(before[0].values(), grads_of(model).values(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before[1].values(), buffers_of(model).values(), strict=True))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before[2].items())
    assert torch.equal(before[3], torch.get_rng_state())
    assert step.plan is plan
    assert not calls


def test_a_wrong_gradient_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Summing a microbatch too little must show, with the parameter that differs most."""
    model, batch = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), (torch.randn(6, 4), torch.randn(6, 3))
    step = fullbatch.Step(lambda m, b: F.mse_loss(m(b[0]), b[1]), model, batch, microbatch=2)

    def forgets(program: Any, schedule: Schedule, **settings: Any) -> Executor:
        """The summands of the last microbatch are left out."""
        phases = [
            Phase(phase.once, phase.body, tuple(action for action in phase.last if action.do is not Do.REDUCE))
            for phase in schedule.phases
        ]
        return Executor(program, Schedule(tuple(phases), schedule.samples), **settings)

    monkeypatch.setattr("fullbatch._captured.Executor", forgets)
    found = step.verify(batch)
    assert not found.ok
    assert found.gradient_error > 1e-2
    assert found.parameters[found.worst_parameter] == found.gradient_error
    assert "NOT the same gradient" in str(found)


def test_without_a_batch_alive_it_asks_for_one() -> None:
    model = nn.Linear(4, 3)
    step = fullbatch.Step(lambda m, b: m(b).square().mean(), model, torch.randn(6, 4), microbatch=2)
    with pytest.raises(fullbatch.VerifyError, match=r"step\.verify\(batch\)"):
        step.verify()


def test_two_towers_and_a_scale_that_only_the_loss_reads() -> None:
    torch.manual_seed(0)
    towers = {"image": nn.Linear(6, 4), "text": nn.Linear(5, 4), "scale": nn.ParameterList([torch.tensor(1.0)])}

    def loss(model: Any, batch: Any) -> torch.Tensor:
        image, text = F.normalize(model["image"](batch[0])), F.normalize(model["text"](batch[1]))
        logits = model["scale"][0].exp() * image @ text.T
        labels = torch.arange(len(logits))
        return F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)

    batch = torch.randn(7, 6), torch.randn(7, 5)
    step = fullbatch.Step(loss, towers, batch, microbatch=2)
    step(batch)
    found = step.verify()
    assert found.ok
    assert any("scale" in name for name in found.parameters)
