"""Batches of one number of samples that differ in another size, under a budget: resumed after any call, the same bits.

What a call's microbatch follows from is the form of the batch, what is owned then, and what was planned before.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullbatch

BATCH, CALLS, LENGTHS = 12, 6, (4, 64, 64, 4, 64, 4)
MEMORY = 140_000


def _loss(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def _forward(model: Any, batch: Any) -> Tensor:
    return model(batch[0])


def _chosen(outputs: Tensor, batch: Any) -> Tensor:
    """Takes memory that is known once it has run."""
    kept = batch[1] > -0.5
    return ((outputs - batch[1])[kept][:, None] * torch.arange(16)).sin().exp().square().mean()


class Run:
    """A program as it builds its parts; `window` calls make one update."""

    def __init__(
        self, seed: int, lengths: Any = LENGTHS, dropout: float = 0.5, window: int = 1, given: Any = _loss,
        batch: int = BATCH, **settings: Any,
    ) -> None:  # fmt: skip
        torch.manual_seed(seed)
        last: nn.Module = nn.Dropout(dropout) if dropout else nn.Identity()
        self.model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), last, nn.Linear(64, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self._lengths, self._window, self._batch, self.microbatches = lengths, window, batch, list[int]()
        self.step = fullbatch.Step(given, self.model, self.batch(0), optimizer=self.optimizer, **settings)

    def batch(self, at: int) -> Any:
        draws, length = torch.Generator().manual_seed(at), self._lengths[at]
        shape = self._batch, length
        return torch.randn(*shape, 8, generator=draws), torch.randn(*shape, 1, generator=draws)

    def train(self, first: int, last: int) -> None:
        for at in range(first, last):
            if at % self._window == 0:
                self.optimizer.zero_grad()
            self.step(self.batch(at))
            self.microbatches.append(self.step.plan.microbatch)
            if (at + 1) % self._window == 0:
                self.optimizer.step()

    def save(self) -> Any:
        gradients = [None if p.grad is None else p.grad for p in self.model.parameters()]
        return copy.deepcopy([[part.state_dict() for part in (self.model, self.optimizer, self.step)], gradients])

    def load(self, saved: Any) -> None:
        parts, gradients = copy.deepcopy(saved)
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        for part, state in zip((self.model, self.optimizer, self.step), parts, strict=True):
            part.load_state_dict(state)

    def weights(self) -> Tensor:
        return torch.cat([value.flatten() for value in self.model.state_dict().values()])


def _check(stops: Any, resumed_with: dict[str, Any] | None = None, **settings: Any) -> Run:
    """Compares a run with those stopped after each of `stops` calls; returns the one that was not stopped."""
    whole, calls = Run(0, **settings), len(settings.get("lengths", LENGTHS))
    whole.train(0, calls)
    for stop in stops:
        killed = Run(0, **settings)
        killed.train(0, stop)
        saved = killed.save()
        resumed = Run(7, **(settings if resumed_with is None else resumed_with))
        resumed.load(saved)
        resumed.train(stop, calls)
        assert resumed.microbatches == whole.microbatches[stop:], stop
        assert torch.equal(resumed.weights(), whole.weights()), stop
    return whole


@pytest.mark.parametrize(("dropout", "longer"), [(0.5, 1), (0.0, 2)])
def test_two_lengths_under_a_budget(dropout: float, longer: int) -> None:
    """Of the shorter ones all fit at once."""
    whole = _check(range(CALLS + 1), dropout=dropout, memory=MEMORY)
    assert whole.microbatches == [12, longer, longer, 12, longer, 12]


def test_two_lengths_resumed_where_all_memory_is_free() -> None:
    """The checkpoint's budget decides, for a length that it has not seen too."""
    whole = _check((1, 3), resumed_with={}, memory=MEMORY)
    assert len(set(whole.microbatches)) == 2


WINDOW: dict[str, Any] = {"lengths": (32,) * 4, "window": 2, "batch": 32}


def test_accumulation_stopped_inside_a_window() -> None:
    """Gradients that are there leave less room: another microbatch, which the next window keeps to."""
    first = Run(0, microbatch=11, **WINDOW).step.plan.predicted_peak
    whole = _check((1, 2), memory=first, **WINDOW)
    assert whole.microbatches[0] == 11
    assert whole.microbatches[1] < 11


def test_a_step_that_saves_a_resumed_run_again() -> None:
    whole = Run(0, memory=MEMORY)
    whole.train(0, CALLS)
    at, saved = 0, Run(0, memory=MEMORY).save()
    for stop in (1, 3, 4, CALLS):
        part = Run(at + 5, memory=MEMORY)
        part.load(saved)
        part.train(at, stop)
        at, saved = stop, part.save()
    assert torch.equal(part.weights(), whole.weights())


def test_a_loss_that_is_not_captured_and_took_more_than_was_known() -> None:
    """What it took when it first ran is in the plans of the calls that follow, of a resumed run too."""
    settings: dict[str, Any] = {"given": (_forward, _chosen), "lengths": (64,) * 3}
    memory = Run(0, microbatch=BATCH, **settings).step.plan.predicted_peak
    whole = _check((1, 2), memory=memory, **settings)
    assert whole.microbatches[0] == BATCH
    assert whole.microbatches[1] < BATCH


def test_captures_that_were_dropped_are_planned_as_before() -> None:
    """Beyond a number of captures all are made anew; a run that is resumed has none of them."""

    def narrow(run: Run) -> Run:
        run.step._frontend.room = 0
        return run

    settings: dict[str, Any] = {**WINDOW, "lengths": (32, 32, 4, 32)}
    settings["memory"] = Run(0, microbatch=11, **settings).step.plan.predicted_peak
    whole = narrow(Run(0, **settings))
    whole.train(0, 4)
    assert whole.step._frontend.captures == 5
    assert whole.microbatches == [11, 8, 32, 8]
    killed = narrow(Run(0, **settings))
    killed.train(0, 2)
    saved = killed.save()
    resumed = Run(3, **settings)
    resumed.load(saved)
    resumed.train(2, 4)
    assert torch.equal(resumed.weights(), whole.weights())


def test_what_was_free_is_found_once_for_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its capture was dropped too: what is free moves with every step, and the budget decides the microbatch."""
    free = iter(range(9_000_000, 0, -100_000))
    monkeypatch.setattr("fullbatch._budget.free_bytes", lambda device: next(free))
    run, budgets = Run(0), []
    run.step._frontend.room = 0
    for at in range(4):
        run.step(run.batch(at))
        budgets.append(run.step.plan.budget)
    assert run.step._frontend.captures == 5
    assert budgets[0] == budgets[3]
    assert budgets[0] != budgets[1] == budgets[2]


def test_less_memory_than_the_checkpoint_s_microbatch_needs_is_refused() -> None:
    killed = Run(0, memory=MEMORY)
    killed.train(0, 2)
    resumed = Run(1, memory=60_000)
    resumed.load(killed.save())
    with pytest.raises(fullbatch.BudgetError) as caught:
        resumed.train(2, CALLS)
    assert "checkpoint" in "".join(caught.value.__notes__)


def test_the_microbatch_that_was_asked_for_is_taken_over() -> None:
    whole = _check((1, 3), resumed_with={}, microbatch=5)
    assert set(whole.microbatches) == {5}
    killed = Run(0, microbatch=5)
    with pytest.raises(fullbatch.PlanError, match="microbatches of 5"):
        Run(0, microbatch=4).load(killed.save())


def test_a_microbatch_other_than_those_a_budget_led_to_is_refused() -> None:
    killed = Run(0, memory=MEMORY)
    killed.train(0, 2)
    with pytest.raises(fullbatch.PlanError, match=r"microbatches of 1\.") as caught:
        Run(0, microbatch=12).load(killed.save())
    assert len(caught.value.faults) == 1


def test_a_plan_is_held_against_its_own_program_only() -> None:
    """Another length with as many samples has another microbatch, and that is no fault."""
    plan = Run(0, memory=MEMORY).step.plan
    assert plan.microbatch == BATCH
    whole = _check((1, 2), plan=plan, memory=MEMORY)
    assert len(set(whole.microbatches)) == 2
    killed = Run(0, memory=MEMORY)
    killed.train(0, 2)
    other = Run(0, microbatch=3).step.plan
    with pytest.raises(fullbatch.PlanError, match=f"microbatches of {BATCH}"):
        Run(0, plan=other, memory=MEMORY).load(killed.save())


def _old(run: Run, microbatches: dict[int, int]) -> Any:
    """A state as it was: by the number of samples alone."""
    parts, gradients = run.save()
    old = {"format": 1, "steps": 2, "microbatches": microbatches, "generators": {"cpu": torch.get_rng_state()}}
    return [[*parts[:2], old], gradients]


def test_an_old_state_loads_where_it_can() -> None:
    killed = Run(0, memory=MEMORY)
    killed.train(0, 2)
    resumed = Run(1, memory=MEMORY)
    resumed.load(_old(killed, {BATCH: 12}))
    resumed.train(2, CALLS)
    assert resumed.microbatches == [1, 12, 1, 12]  # 12 of the longer ones fit no budget of these
    resumed = Run(1, memory=MEMORY)
    resumed.load(_old(killed, {BATCH: 1}))
    resumed.train(2, 4)
    again = Run(2, memory=MEMORY)
    again.load(resumed.save())
    again.train(4, CALLS)
    assert resumed.microbatches + again.microbatches == [1, 1, 1, 1]
    with pytest.raises(fullbatch.PlanError, match="microbatches of 12"):
        Run(1, microbatch=5).load(_old(killed, {BATCH: 12}))
