"""Budgets are kept when the step is measured, and the configuration is the fastest of those that fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullbatch
from eager.support import Block, Net, agrees, squeezed, token_loss, tokens


def measured(step: fullbatch.eager.Step, model: nn.Module, batch: Any) -> int:
    model.zero_grad(set_to_none=True)
    step(batch)  # what torch builds once is there afterwards
    model.zero_grad(set_to_none=True)
    return fullbatch.measure(lambda: step(batch)).peak


def whole_peak(model: nn.Module, batch: Any) -> int:
    return fullbatch.eager.Step(token_loss, model, batch, microbatch=len(batch[0])).plan.predicted_peak


@pytest.mark.parametrize("share", [1.0, 0.7, 0.4, 0.25])
def test_the_budget_is_kept(share: float) -> None:
    model, batch = Net(blocks=8), tokens([64] * 12, longest=64)
    budget = int(share * whole_peak(model, batch))
    step = fullbatch.eager.Step(token_loss, model, batch, memory=budget)
    plan = step.plan
    assert plan.predicted_peak <= budget
    assert (plan.microbatch == 12) is (share == 1.0)
    assert measured(step, model, batch) == plan.activations
    agrees(step, token_loss, model, batch)


def test_the_largest_microbatch_that_fits_comes_first() -> None:
    model, batch = Net(blocks=8), tokens([64] * 12, longest=64)
    peaks = {}
    for size in (1, 2, 3, 4, 6, 12):
        peaks[size] = fullbatch.eager.Step(token_loss, model, batch, microbatch=size).plan.predicted_peak
    assert sorted(peaks.values()) == list(peaks.values())
    for size, peak in peaks.items():
        plan = fullbatch.eager.Step(token_loss, model, batch, memory=peak).plan
        assert (plan.microbatch, plan.checkpointed) == (size, ())


def test_checkpoints_below_what_one_sample_needs_as_few_as_fit() -> None:
    model, batch = Net(blocks=8), tokens([64] * 4, longest=64)
    one = fullbatch.eager.Step(token_loss, model, batch, microbatch=1).plan.predicted_peak
    least = squeezed(token_loss, model, batch).plan
    counts = []
    for budget in (one - 1, (one + least.predicted_peak) // 2, least.predicted_peak):
        model.zero_grad()  # kept gradients would be owned besides
        step = fullbatch.eager.Step(token_loss, model, batch, memory=budget)
        assert step.plan.microbatch == 1
        assert step.plan.predicted_peak <= budget
        counts.append(len(step.plan.checkpointed))
        assert measured(step, model, batch) == step.plan.activations
        agrees(step, token_loss, model, batch)
    assert 0 < counts[0] <= counts[1] <= counts[2]
    assert counts[0] < counts[2]


def test_the_modules_that_hold_most_are_checkpointed_first() -> None:
    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(8) for _ in range(4))
            self.blocks[2].wide, self.blocks[2].back = nn.Linear(8, 512), nn.Linear(512, 8)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    model, x = Uneven(), torch.randn(2, 64, 8)

    def loss_fn(m: Any, x: Tensor) -> tuple[Tensor, int]:
        return (m(x) if x.sum() != 0 else x).square().sum(), x.numel()

    one = fullbatch.eager.Step(loss_fn, model, x, microbatch=1).plan
    step = fullbatch.eager.Step(loss_fn, model, x, memory=one.predicted_peak - 1)
    assert step.plan.checkpointed[0] == "blocks.2"


def test_a_budget_that_nothing_fits_names_the_least_that_works() -> None:
    model, batch = Net(blocks=8), tokens([64] * 4, longest=64)
    with pytest.raises(fullbatch.BudgetError) as caught:
        fullbatch.eager.Step(token_loss, model, batch, memory=10_000)
    smallest = caught.value.smallest
    assert f"memory={smallest}" in str(caught.value)
    step = fullbatch.eager.Step(token_loss, model, batch, memory=smallest)
    agrees(step, token_loss, model, batch)
    with pytest.raises(fullbatch.BudgetError):
        fullbatch.eager.Step(token_loss, model, batch, memory=smallest - 1)


def test_a_model_of_much_weight_and_little_activation_runs_at_once() -> None:
    """Microbatches gather gradients beside activations; the whole batch alone does not."""
    model, x = nn.Linear(200, 200), torch.randn(4, 200)

    def loss_fn(m: Any, x: Tensor) -> tuple[Tensor, int]:
        return m(x).square().sum(), len(x)

    whole = fullbatch.eager.Step(loss_fn, model, x, microbatch=4).plan.predicted_peak
    assert whole < fullbatch.eager.Step(loss_fn, model, x, microbatch=1).plan.predicted_peak
    assert fullbatch.eager.Step(loss_fn, model, x, memory=whole).plan.microbatch == 4


class Refusing(Net):
    """Memory runs out above so many samples."""

    most = 2

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most:
            raise torch.OutOfMemoryError("allocator")
        return super().forward(x)


def test_memory_that_runs_out_in_a_trial_is_a_size_that_does_not_fit() -> None:
    model, batch = Refusing(), tokens([32] * 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    step = fullbatch.eager.Step(token_loss, model, batch, memory="1GiB")
    assert step.plan.microbatch == 2
    assert any("out of memory" in str(trial) for trial in step.plan.trials)
    assert any("not compared" in note for note in step.plan.notes)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    step(batch)
    model.most = 0
    with pytest.raises(torch.OutOfMemoryError):
        fullbatch.eager.Step(token_loss, model, batch, memory="1GiB")


def test_a_microbatch_and_a_budget_together() -> None:
    model, batch = Net(blocks=8), tokens([64] * 6, longest=64)
    peak = fullbatch.eager.Step(token_loss, model, batch, microbatch=3).plan.predicted_peak
    step = fullbatch.eager.Step(token_loss, model, batch, microbatch=3, memory=peak - 1)
    assert step.plan.microbatch == 3
    assert step.plan.checkpointed
    agrees(step, token_loss, model, batch)


def test_longer_samples_are_planned_for_anew() -> None:
    model, batch = Net(blocks=8), tokens([32] * 12, longest=32)
    budget = int(0.6 * whole_peak(model, batch))
    step = fullbatch.eager.Step(token_loss, model, batch, memory=budget)
    first = step.plan
    longer = tokens([64] * 12, longest=64)
    agrees(step, token_loss, model, longer)
    assert step.plan.microbatch < first.microbatch
    assert step.plan.predicted_peak <= budget
    again = step.plan
    step(batch)
    assert step.plan.trials == again.trials  # shorter ones are served by the same plan


def test_gradients_that_are_kept_count() -> None:
    model, batch = Net(blocks=8, width=16), tokens([32] * 8, width=16)
    step = fullbatch.eager.Step(token_loss, model, batch, memory=whole_peak(model, batch))
    assert step.plan.microbatch == 8
    step(batch)
    step(batch)  # beside the gradients of the first
    assert step.plan.microbatch < 8
    assert step.plan.predicted_peak <= step.plan.budget


def test_a_plan_that_was_made_anew_on_short_samples_is_not_taken_for_long_ones() -> None:
    model, long, short = Net(blocks=8), tokens([64] * 8, longest=64), tokens([16] * 8, longest=16)
    step = fullbatch.eager.Step(token_loss, model, long, memory=int(0.5 * whole_peak(model, long)))
    first = step.plan
    more = first.budget - first.predicted_peak + sum(part.nbytes for part in long)
    model.register_buffer("more", torch.zeros(more // 8 + 1))  # more is owned than when the step was planned
    step(short)
    assert step.plan.microbatch > first.microbatch
    model.zero_grad(set_to_none=True)
    step(long)
    assert step.plan.predicted_peak <= step.plan.budget
    assert measured(step, model, long) == step.plan.activations


def test_a_microbatch_that_is_asked_for_is_kept_after_a_short_batch() -> None:
    model, batch = Net(), tokens([32] * 8)
    step = fullbatch.eager.Step(token_loss, model, batch, microbatch=4, memory="1GiB")
    step(tokens([64] * 2, longest=64))  # heavier, and planned anew for that
    assert step.plan.microbatch == 2
    step(tokens([32] * 3))  # fewer than asked for: not to be split, whatever may couple its samples
    assert step.plan.microbatch == 3
    step(batch)
    assert step.plan.microbatch == 4
