"""A run that is stopped after any step and resumed from its checkpoint ends with the bits of one that was not.

`examples/resume.py`, which is tested too, kills a process in earnest.
"""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fullbatch

STEPS = 5


def _loss(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _batch(at: int, size: int = 10) -> Any:
    generator = torch.Generator().manual_seed(at)
    return torch.randn(size, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator)


class Run:
    """Model, optimizer, schedule and step, as a program builds them at its start."""

    def __init__(self, seed: int = 0, size: int = 10, **settings: Any) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3), nn.Dropout(0.1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.schedule = fullbatch.lr.warmup(self.optimizer, 3)
        self.step = fullbatch.Step(_loss, self.model, _batch(0, size), optimizer=self.optimizer, **settings)

    def train(self, first: int, last: int, sizes: dict[int, int] | None = None) -> None:
        for at in range(first, last):
            self.optimizer.zero_grad()
            self.step(_batch(at, (sizes or {}).get(at, 10)))
            self.optimizer.step()
            self.schedule.step()

    @property
    def parts(self) -> dict[str, Any]:
        names = ("model", "optimizer", "schedule", "step")
        return {name: getattr(self, name) for name in names}

    def save(self) -> bytes:
        kept = io.BytesIO()
        torch.save({name: part.state_dict() for name, part in self.parts.items()}, kept)
        return kept.getvalue()

    def load(self, kept: bytes) -> None:
        saved = torch.load(io.BytesIO(kept), weights_only=True)
        for name, part in self.parts.items():
            part.load_state_dict(saved[name])

    def same(self, other: Run) -> bool:
        mine, theirs = self.model.state_dict(), other.model.state_dict()
        return all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("stop", range(STEPS + 1))
def test_resumed_after_any_step(stop: int) -> None:
    whole = Run(microbatch=4)
    whole.train(0, STEPS)
    killed = Run(microbatch=4)
    killed.train(0, stop)
    kept = killed.save()
    torch.rand(7)  # a process that goes on elsewhere
    resumed = Run(seed=99, microbatch=4)
    resumed.load(kept)
    assert resumed.step.state_dict()["steps"] == stop
    resumed.train(stop, STEPS)
    assert resumed.same(whole)


def test_the_generator_is_what_makes_it_so() -> None:
    whole = Run(microbatch=4)
    whole.train(0, STEPS)
    killed = Run(microbatch=4)
    killed.train(0, 2)
    kept = killed.save()
    resumed = Run(seed=99, microbatch=4)
    resumed.load(kept)
    torch.manual_seed(1)
    resumed.train(2, STEPS)
    assert not resumed.same(whole)


def test_the_checkpoint_s_microbatches_hold_where_none_is_given() -> None:
    """Without them the resumed step would take all that is free now, draw other masks, and round otherwise."""
    sizes = {at: 150 if at in (2, 4) else 200 for at in range(STEPS)}  # some batches are short
    whole_batch = Run(size=200, microbatch=200).step.plan.predicted_peak
    with pytest.raises(fullbatch.BudgetError) as caught:
        Run(size=200, memory=1)
    tight = (caught.value.smallest + whole_batch) // 2
    whole = Run(size=200, memory=tight)
    assert whole.step.plan.microbatch < 200
    whole.train(0, STEPS, sizes)
    killed = Run(size=200, memory=tight)
    killed.train(0, 3, sizes)
    kept = killed.save()
    resumed = Run(seed=5, size=200)
    assert resumed.step.plan.microbatch == 200
    resumed.load(kept)
    resumed.train(3, STEPS, sizes)
    assert resumed.same(whole)
    assert resumed.step.state_dict()["programs"] == whole.step.state_dict()["programs"]


def test_another_microbatch_is_refused_and_changes_nothing() -> None:
    killed = Run(microbatch=4)
    killed.train(0, 2)
    kept = killed.step.state_dict()
    other = Run(microbatch=5)
    before = torch.get_rng_state()
    with pytest.raises(fullbatch.PlanError, match="microbatches of 4") as caught:
        other.step.load_state_dict(kept)
    assert "microbatch=4" in str(caught.value)
    assert torch.equal(torch.get_rng_state(), before)
    assert other.step.state_dict()["steps"] == 0


STATE: dict[str, Any] = {
    "format": 2, "steps": 1, "microbatch": None, "memory": None, "by_size": {}, "programs": {},
    "generators": {"cpu": torch.get_rng_state()},
}  # fmt: skip


def test_the_least_that_is_a_state() -> None:
    step = Run(microbatch=4).step
    step.load_state_dict(STATE)
    assert step.state_dict()["steps"] == 1


@pytest.mark.parametrize(
    "broken",
    [
        None,
        {},
        {"format": 0, "steps": 1, "microbatches": {}, "generators": {}},
        {"format": 1, "steps": 1, "microbatches": 3, "generators": {"cpu": torch.get_rng_state()}},
        {"format": 1, "steps": None, "microbatches": {}, "generators": {"cpu": torch.get_rng_state()}},
        {"format": 1, "steps": 1, "microbatches": {}, "generators": 3},
        {"format": 2, "steps": 1, "microbatches": {}, "generators": {"cpu": torch.get_rng_state()}},
        {**STATE, "memory": 0.5},
        {**STATE, "microbatch": 0},
        {**STATE, "by_size": None},
        {**STATE, "programs": {"a": {"batch": 4, "budget": 100, "loss": None, "decisions": [{"room": 3}]}}},
        {**STATE, "programs": {"a": {"batch": 4, "budget": 100, "loss": [1], "decisions": []}}},
        {**STATE, "programs": {3: {"batch": 4, "budget": 100, "loss": None, "decisions": []}}},
    ],
)
def test_what_is_no_state_is_refused(broken: Any) -> None:
    with pytest.raises(fullbatch.PlanError, match="no state of a step"):
        Run(microbatch=4).step.load_state_dict(broken)


def test_a_generator_s_state_that_cannot_be_set_is_named_with_all_else() -> None:
    killed = Run(microbatch=4)
    killed.train(0, 2)
    kept = {**killed.step.state_dict(), "generators": {"cpu": torch.zeros(3)}}
    other, before = Run(microbatch=5), torch.get_rng_state()
    with pytest.raises(fullbatch.PlanError, match="generator cpu cannot be set") as caught:
        other.step.load_state_dict(kept)
    assert len(caught.value.faults) == 2
    assert torch.equal(torch.get_rng_state(), before)
    assert other.step.state_dict()["steps"] == 0
