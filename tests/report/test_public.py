"""The public names are exactly those meant, and everything a user reads prints."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import fullbatch


def test_public_names() -> None:
    assert sorted(fullbatch.__all__) == [
        "BatchError", "BudgetError", "CaptureError", "Certificate", "CompileError", "Fault", "Frontier",
        "FullbatchError", "Largest", "Ledger", "LossError", "MeasureError", "Measurement", "MemorySizeError",
        "ModelError", "OptimizerError", "Plan", "PlanDiff", "PlanError", "Prepared", "Proposals", "Step", "VerifyError",
        "eager", "explain", "largest", "linear_cross_entropy", "lr", "measure", "optim", "propose",
    ]  # fmt: skip
    assert all(hasattr(fullbatch, name) for name in fullbatch.__all__)


def test_every_error_is_of_one_tree() -> None:
    names = [name for name in fullbatch.__all__ if name.endswith("Error")]
    assert all(issubclass(getattr(fullbatch, name), fullbatch.FullbatchError) for name in names)


def test_an_error_says_what_was_got_what_was_expected_and_what_to_type() -> None:
    error = fullbatch.FullbatchError.of("It is wrong.", got="1", expected="2", next="f(2)")
    assert str(error) == "It is wrong.\n  got:      1\n  expected: 2\n  next:     f(2)"
    both = fullbatch.FullbatchError(fullbatch.Fault("one"), fullbatch.Fault("two"))
    assert str(both) == "one\ntwo"
    assert len(both.faults) == 2


def test_plan_names_what_couples_the_batch() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    batch = torch.randn(6, 4), torch.randint(0, 3, (6,))
    step = fullbatch.Step(lambda m, b: F.cross_entropy(m(b[0]), b[1]), model, batch, microbatch=2)
    plan = step.plan
    assert (plan.microbatch, plan.microbatches, plan.batch, plan.stages) == (2, 3, 6, 3)
    norm = [barrier for barrier in plan.barriers if "batch norm" in barrier.why]
    assert norm
    assert all(barrier.origin.module == "1" for barrier in norm)
    assert all(barrier.origin.source.startswith("test_public.py:") for barrier in norm)
    assert plan.full_batch_nodes == ()
    text = str(plan)
    assert "6 samples" in text
    assert "batch normalisation" in text
    assert "predicted" in text


def test_plan_names_what_runs_on_the_whole_batch() -> None:
    model = nn.Linear(4, 3)
    batch = torch.randn(6, 4)
    step = fullbatch.Step(lambda m, b: m(b).sort(0).values.std(), model, batch, microbatch=2)
    assert any("aten.sort" in str(node) for node in step.plan.full_batch_nodes)
    assert "aten.sort" in str(step.plan)


def test_plan_says_where_the_plain_step_updates_statistics_twice() -> None:
    """Known as pytorch/pytorch#96136: a recompute under checkpoint() moves running statistics again."""
    from torch.utils.checkpoint import checkpoint

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    step = fullbatch.Step(
        lambda m, b: checkpoint(m, b, use_reentrant=False).square().mean(), model, torch.randn(6, 4), microbatch=2
    )
    assert any("once a step here" in note for note in step.plan.notes)
    step(torch.randn(6, 4))
    assert int(model[1].num_batches_tracked) == 1
    plain = fullbatch.Step(lambda m, b: m(b).square().mean(), model, torch.randn(6, 4), microbatch=2)
    assert not any("once a step here" in note for note in plain.plan.notes)
