"""A branch on whether numbers are finite goes, over the whole batch, the way it goes in plain PyTorch."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fullbatch
from behaviour.asserting import finite
from behaviour.support import BATCH, agrees, captures, clear, gradients, make
from fullbatch._captured import Captured
from fullbatch._found_call import Found

Batch = tuple[Tensor, Tensor]


def _batch(*places: int, value: float = torch.inf) -> Batch:
    """Features, and what is added behind a first layer: in `places` no finite number."""
    torch.manual_seed(2)
    x, offset = torch.randn(BATCH, 3), torch.randn(BATCH, 4)
    for place in places:
        offset[place, place % 4] = value
    return x, offset


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "isfinite.all": lambda x: not torch.isfinite(x).all(),
    "all of isfinite": lambda x: not torch.all(x.isfinite()),
    "isnan or isinf": lambda x: torch.isnan(x).any() or torch.isinf(x).any(),
    "either, as tensors": lambda x: (torch.isnan(x) | torch.isinf(x)).any(),
    "neither, as tensors": lambda x: not (~torch.isnan(x) & torch.isinf(x).logical_not()).all(),
    "item": lambda x: torch.isinf(x).any().item() or bool(x.isnan().any()),
    "some dimensions": lambda x: (~x.isfinite()).any(1).any(),
    "not": lambda x: (lambda fine: not fine)(torch.isfinite(x).all()),
}


class Repairing(nn.Module):
    """What is repaired is another number for every sample, whichever of them was not finite."""

    def __init__(self, found: Callable[[Tensor], Any] = FORMS["isfinite.all"], dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.dropout, self.found = nn.Dropout(dropout), found

    def forward(self, batch: Batch) -> Tensor:
        x = self.dropout(self.first(batch[0])) + batch[1]
        if self.found(x):
            x = torch.nan_to_num(x, posinf=2.0, neginf=-3.0) * 0.5
        return self.last(torch.tanh(self.norm(self.dropout(x))))


def _loss(model: Any, batch: Batch) -> Tensor:
    return model(batch).square().mean()


@pytest.mark.parametrize("microbatch", [1, 4, BATCH])
@pytest.mark.parametrize("form", FORMS, ids=list(FORMS))
def test_the_way_is_that_of_the_whole_batch(form: str, microbatch: int) -> None:
    model = Repairing(FORMS[form])
    step = make(_loss, model, _batch(), microbatch=microbatch)
    agrees(step, _loss, model, _batch())
    assert captures(step) == 1
    most = 3 if "isnan" in form or form == "item" else 2  # two conditions, where they stand one after another
    for places in ((5,), (0, 3), (), (5,), ()):
        for value in (torch.inf, torch.nan):
            agrees(step, _loss, model, _batch(*places, value=value))
    assert captures(step) <= most, "each way is captured once"


def test_the_plan_names_the_branch_and_gathers_nothing() -> None:
    step = make(_loss, Repairing(), _batch())
    (note,) = [note for note in step.plan.notes if "all finite" in note]
    assert "are all finite" in note and "test_finite_branches.py" in note and "isfinite(x).all()" in note
    assert not step.plan.full_batch_nodes and not any("run alone" in note for note in step.plan.notes)
    step(_batch(1))
    assert any("are not all finite" in note for note in step.plan.notes)


class Twice(nn.Module):
    """The second branch looks at what the first one made; a number of the batch is read besides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, batch: Any) -> Tensor:
        x = self.first(batch[0]) + batch[1]
        if torch.isinf(x).any():
            x = x.clamp(-5, 5) * 0.5
        if batch[2].any():
            x = x + 1
        if torch.isnan(x).any():
            x = torch.nan_to_num(x) * 0.25
        return self.last(x)


def test_branches_after_each_other_and_a_known_number() -> None:
    model = Twice()
    batches = [
        (*_batch(*places, value=value), torch.full((BATCH,), flag))
        for places, value in (((), 0.0), ((2,), torch.inf), ((4,), torch.nan))
        for flag in (False, True)
    ]
    mixed = (batches[2][0], torch.where(torch.arange(BATCH)[:, None] == 5, torch.nan, batches[2][1]), batches[0][2])
    step = make(_loss, model, batches[0])
    random.seed(4)
    for _ in range(3):
        for batch in random.sample([*batches, mixed], 7):
            agrees(step, _loss, model, batch)
    known = captures(step)
    for batch in random.sample([*batches, mixed], 7):
        agrees(step, _loss, model, batch)
    assert captures(step) == known <= 8


def _raising(model: Any, batch: Batch) -> Tensor:
    loss = _loss(model, batch)
    if torch.isnan(loss):
        raise FloatingPointError("the loss is NaN")
    return loss


def test_what_a_branch_raises_is_raised_when_it_is_taken() -> None:
    model = Repairing(lambda x: False)
    step = make(_raising, model, _batch())
    agrees(step, _raising, model, _batch())
    before, buffers = gradients(model), copy.deepcopy(dict(model.named_buffers()))
    for _ in range(2):
        with pytest.raises(fullbatch.CaptureError, match="FloatingPointError: the loss is NaN"):
            step(_batch(3))
        assert all(torch.equal(now, before[name]) for name, now in gradients(model).items())
        assert all(torch.equal(now, buffers[name]) for name, now in model.named_buffers())
    agrees(step, _raising, model, _batch())


def test_a_loss_that_is_not_captured_runs_once() -> None:
    """As a pair, and where it is found in loss_fn: the step stops before it, and not behind it."""
    runs: list[Tensor] = []

    def loss(outputs: Tensor, batch: Batch) -> Tensor:
        runs.append(outputs.detach().clone())
        return outputs[outputs > 0].mean()

    def whole(model: Any, batch: Batch) -> Tensor:
        return loss(model(batch), batch)

    for given in ((lambda model, batch: model(batch), loss), whole):
        model = Repairing()
        step = make(given, model, _batch())
        assert isinstance(step._split, Found) is (given is whole)
        for places in ((), (1,), (1, 5), ()):
            runs.clear()
            agrees(step, whole, model, _batch(*places))
            reference, ours = runs
            assert torch.allclose(reference, ours, rtol=0, atol=1e-12)


@pytest.mark.parametrize("microbatch", [4, BATCH])
def test_such_a_loss_waits_for_the_check(microbatch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Captured] = []
    prepare = Captured.prepare
    monkeypatch.setattr(Captured, "prepare", lambda self, *given: (made.append(self), prepare(self, *given))[1])
    make((lambda model, batch: model(batch), lambda found, batch: found.mean()), Repairing(), _batch())
    program = made[0].side(microbatch).program
    (waiting,) = [list(task.inputs) for task in program.tasks if task.eager]
    names = set()
    while waiting:
        task = program.producers.get(waiting.pop())
        if task is not None:
            waiting.extend(task.inputs)
            names.add(task.kernel.name if task.kernel is not None else "")
    assert "fullbatch.finite" in names


def test_draws_are_those_of_one_step() -> None:
    model, counted = Repairing(dropout=0.4), []

    def loss_fn(model: Any, batch: Batch) -> Tensor:
        return _loss(model, batch) * random.uniform(1.0, 2.0)

    step = make(loss_fn, model, _batch())
    for batch in (_batch(), _batch(2)):
        for _ in range(2):  # the second time nothing is begun again, and the same is drawn
            random.seed(5)
            torch.manual_seed(6)
            clear(model)
            loss = step(batch)
            counted.append((loss, random.random(), torch.rand(()), model.first.weight.grad.clone()))
    for one, two in (counted[:2], counted[2:]):
        assert one[1] == two[1] and all(torch.equal(a, b) for a, b in zip(one[::2], two[::2], strict=True))
        assert torch.equal(one[3], two[3])
    assert counted[0][1] == counted[2][1]
    plain = make(_loss, Repairing(dropout=0.4), _batch())
    assert plain.verify(_batch(2)).ok and plain.verify(_batch()).ok


def test_running_statistics_are_updated_once() -> None:
    model = Repairing()
    step = make(_loss, model, _batch())
    step(_batch(0, 5))
    assert model.norm.num_batches_tracked == 1


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, batch: Batch) -> Tensor:
        return checkpoint(self.inner, batch, use_reentrant=False)


class Chosen(nn.Module):
    """A branch that only repairs, as docs/errors.md writes it without one."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last, self.branches = nn.Linear(3, 4), nn.Linear(4, 2), branches

    def forward(self, batch: Batch) -> Tensor:
        x = self.first(batch[0]) + batch[1]
        if not self.branches:
            fine = torch.isfinite(x).all()
            x = torch.where(fine, x, x.clamp(-2, 2))
        elif not torch.isfinite(x).all():
            x = x.clamp(-2, 2)
        return self.last(x)


def test_within_a_checkpoint_it_is_refused_and_a_choice_is_exact() -> None:
    pair = (lambda model, batch: model(batch).square().mean(), lambda outputs, batch: outputs)
    with pytest.raises(fullbatch.CaptureError, match=r"torch\.where"):
        make(pair, Checkpointed(Chosen(branches=True)), _batch())
    model = Checkpointed(Chosen(branches=False))
    step = make(_loss, model, _batch())
    for places in ((), (3,)):
        agrees(step, _loss, model, _batch(*places))
        assert torch.equal(model(_batch(*places)), Chosen(branches=True)(_batch(*places)))
    assert captures(step) == 1 and not step.plan.full_batch_nodes


def test_an_assertion_gathers_nothing_and_is_not_run_to_be_measured() -> None:
    step = make(finite, Repairing(lambda x: False), _batch())
    assert not step.plan.full_batch_nodes and not any("run alone" in note for note in step.plan.notes)
    agrees(step, finite, step._model, _batch())
    with pytest.raises(RuntimeError):
        step(_batch(2))


def test_other_questions_stay_refused() -> None:
    def loss_fn(model: Any, batch: Batch) -> Tensor:
        x = model(batch)
        return F.relu(x).sum() if (x.isfinite() & (x > 0)).all() else x.sum()

    with pytest.raises(fullbatch.CaptureError):
        make((loss_fn, lambda outputs, batch: outputs), Repairing(), _batch())
