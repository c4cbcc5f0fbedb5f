"""An eager run that was stopped and is resumed from its checkpoint ends with the bits of one that was not."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fullbatch
from behaviour.test_after_errors import assert_same
from eager.support import Block, Net, token_loss, tokens

STEPS, LENGTH = 4, 64
Change = Callable[[dict[str, Any]], object]


class Drawing(Block):
    """Dropout, noise of NumPy's and Python's default generators and of generators of its own; counts samples."""

    def __init__(self, width: int) -> None:
        super().__init__(width, p=0.3)
        self.own, self.old = np.random.default_rng(3), np.random.RandomState(4)
        self.kept = {"python": random.Random(5), "torch": [torch.Generator().manual_seed(6)]}
        self.register_buffer("samples", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.samples += len(x)
        noise = np.random.rand() + self.own.random() + self.old.rand() + self.old.randn() + random.gauss(0.0, 1.0)
        noise += self.kept["python"].random() + torch.rand((), generator=self.kept["torch"][0]).item()
        return super().forward(x * (1 + 0.01 * noise))


class Run:
    """Model, optimizer and step, as a program builds them at its start."""

    def __init__(
        self, seed: int = 0, loss_fn: Any = token_loss, blocks: int = 4, block: Any = Drawing, length: int = LENGTH,
        **options: Any,
    ) -> None:  # fmt: skip
        torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)
        self.model = Net(blocks=blocks, block=block)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        example = tokens([length, 9, 1, 30], longest=length)
        self.step = fullbatch.eager.Step(loss_fn, self.model, example, optimizer=self.optimizer, **options)

    def train(self, first: int, last: int, longest: dict[int, int] | None = None) -> None:
        for at in range(first, last):
            length = (longest or {}).get(at, LENGTH)
            self.optimizer.zero_grad()
            self.step(tokens([length, 9, 1 + at, 30], longest=length, seed=at))
            self.optimizer.step()

    def save(self) -> bytes:
        parts = (self.model, self.optimizer, self.step)
        kept = io.BytesIO()
        torch.save([part.state_dict() for part in parts], kept)
        return kept.getvalue()

    def load(self, kept: bytes) -> None:
        parts = (self.model, self.optimizer, self.step)
        for part, state in zip(parts, torch.load(io.BytesIO(kept), weights_only=True), strict=True):
            part.load_state_dict(state)

    def same(self, other: Run) -> bool:
        mine, theirs = self.model.state_dict(), other.model.state_dict()
        return all(torch.equal(mine[name], theirs[name]) for name in mine)


def least(**options: Any) -> int:
    """The budget in which all is checkpointed."""
    with pytest.raises(fullbatch.BudgetError) as caught:
        Run(memory=1000, **options)
    return caught.value.smallest


def two() -> int:
    """The budget in which two samples are run at once."""
    return Run(microbatch=2).step.plan.predicted_peak


def resumed(stop: int, again: dict[str, Any], longest: dict[int, int] | None = None, **options: Any) -> tuple[Run, Run]:
    """A run that was not stopped, and one that was after `stop` steps, and resumed by a program with `again`."""
    whole = Run(**options)
    whole.train(0, STEPS, longest)
    killed = Run(**options)
    killed.train(0, stop, longest)
    kept = killed.save()
    killed.train(stop, stop + 1, longest)  # lost; it moves what has no place in the checkpoint
    other = Run(seed=99, **again)
    other.load(kept)
    assert other.step.state_dict()["steps"] == stop
    other.train(stop, STEPS, longest)
    return whole, other


@pytest.mark.parametrize("stop", range(STEPS + 1))
@pytest.mark.parametrize("squeeze", [False, True])
def test_resumed_after_any_step(stop: int, squeeze: bool) -> None:
    options: dict[str, Any] = {"memory": least()} if squeeze else {"microbatch": 2}
    whole, other = resumed(stop, options, **options)
    assert bool(other.step.plan.checkpointed) is squeeze
    assert other.same(whole)
    assert int(other.model.blocks[0].samples) == 4 * STEPS


GENERATORS: dict[str, Callable[[Run], object]] = {
    "torch": lambda run: torch.rand(1),
    "python": lambda run: random.random(),
    "numpy": lambda run: np.random.rand(),
    "a Generator": lambda run: run.model.blocks[1].own.random(),
    "a RandomState": lambda run: run.model.blocks[1].old.rand(),
    "a Random": lambda run: run.model.blocks[1].kept["python"].random(),
    "a torch.Generator": lambda run: torch.rand(1, generator=run.model.blocks[1].kept["torch"][0]),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_each_generator_is_what_makes_it_so(name: str) -> None:
    whole = Run(microbatch=2)
    whole.train(0, 2)
    killed = Run(microbatch=2)
    killed.train(0, 1)
    kept = killed.save()
    for draw, expected in ((False, True), (True, False)):
        other = Run(seed=99, microbatch=2)
        other.load(kept)
        if draw:
            GENERATORS[name](other)
        other.train(1, 2)
        assert other.same(whole) is expected


def test_a_generator_that_loss_fn_closes_over() -> None:
    def noisy(seed: int) -> Any:
        rng = np.random.Generator(np.random.Philox(seed))

        def loss_fn(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
            loss, count = token_loss(model, batch)
            return loss * (1 + rng.random()), count

        return loss_fn

    whole, other = resumed(2, {"loss_fn": noisy(1), "microbatch": 2}, loss_fn=noisy(0), microbatch=2)
    assert "loss_fn.rng" in other.step.state_dict()["generators"]
    assert not other.same(whole)  # `whole` and the killed run shared it
    fresh = Run(loss_fn=noisy(0), microbatch=2)
    fresh.train(0, STEPS)
    killed = Run(loss_fn=noisy(0), microbatch=2)
    killed.train(0, 2)
    kept = killed.save()
    other = Run(seed=99, loss_fn=noisy(1), microbatch=2)
    other.load(kept)
    other.train(2, STEPS)
    assert other.same(fresh)


def test_the_placement_of_the_checkpoint_holds_whatever_is_free() -> None:
    """Placed anew, the resumed step would take the whole batch at once, and draw other masks."""
    tight = least()
    whole, other = resumed(2, {}, memory=tight)
    assert Run().step.plan.microbatch == 4
    assert (other.step.plan.microbatch, other.step.plan.checkpointed) == (1, whole.step.plan.checkpointed)
    assert other.same(whole)
    assert any("of the checkpoint" in note for note in other.step.plan.notes)
    again = io.BytesIO(other.save())
    assert str(torch.load(again, weights_only=True)[2]).count("nothing was tried here") == 0
    # And it is the placement that makes it so.
    whole = Run(memory=tight)
    whole.train(0, 2)
    without = Run(microbatch=4)
    without.train(0, 2)
    assert not without.same(whole)


def test_with_less_memory_the_microbatch_stays_and_the_bits_with_it() -> None:
    whole, other = resumed(2, {"memory": least()}, microbatch=1)
    assert other.step.plan.checkpointed and not whole.step.plan.checkpointed
    assert other.step.plan.predicted_peak <= other.step.plan.budget
    assert other.same(whole)
    size = two()
    whole, other = resumed(2, {"memory": size - 1}, memory=size)
    assert other.step.plan.microbatch == whole.step.plan.microbatch == 2
    assert other.step.plan.checkpointed and not whole.step.plan.checkpointed
    assert Run(memory=size - 1).step.plan.microbatch == 1  # what it would have chosen
    assert other.same(whole)


def test_a_microbatch_that_was_asked_for_is_taken_over() -> None:
    whole, other = resumed(1, {}, microbatch=2)
    assert other.step.plan.microbatch == 2
    assert other.same(whole)
    assert other.step.state_dict()["asked"] == 2
    kept = io.BytesIO(other.save())
    Run(microbatch=2).step.load_state_dict(torch.load(kept, weights_only=True)[2])
    size = two() - 1
    whole, other = resumed(1, {}, longest={2: 2 * LENGTH}, microbatch=2, memory=size)
    assert (other.step.plan.microbatch, other.step.plan.budget) == (2, size)
    assert other.step.plan.checkpointed == whole.step.plan.checkpointed != ()
    assert other.same(whole)


def test_the_plan_is_the_checkpoint_s_once_it_is_loaded() -> None:
    killed, other = Run(microbatch=2), Run()
    assert other.step.plan.microbatch == 4
    other.step.load_state_dict(killed.step.state_dict())
    assert other.step.plan.microbatch == 2
    state = other.step.state_dict()
    other.step.load_state_dict(state)
    assert sum("nothing was tried here" in note for note in other.step.plan.notes) == 1


@pytest.mark.parametrize("stop", [1, 3])
def test_a_heavier_batch_is_placed_as_in_the_run_that_was_not_stopped(stop: int) -> None:
    size = two()
    whole, other = resumed(stop, {}, longest={2: 2 * LENGTH}, memory=size)
    assert (whole.step.plan.microbatch, whole.step.plan.batch) == (1, 4)
    assert other.step.plan.microbatch == 1
    assert other.same(whole)


def test_what_was_prepared_is_in_it() -> None:
    size, longest = two(), {1: 2 * LENGTH, 2: 2 * LENGTH}
    forms = [tokens([length] * 4, longest=length) for length in (LENGTH, 2 * LENGTH)]
    whole = Run(memory=size)
    whole.step.prepare(forms)
    whole.train(0, STEPS, longest)
    killed = Run(memory=size)
    killed.step.prepare(forms)
    killed.train(0, 2, longest)
    kept = killed.save()
    other = Run(seed=9, memory=10 * size)
    other.load(kept)
    other.train(2, 3, longest)
    assert other.step.plan.microbatch == 1
    other.train(3, 4, longest)
    assert other.step.plan.microbatch == 2  # one placement for both forms would have stayed with 1
    assert other.same(whole)


def test_what_a_buffer_follows_from_is_in_it() -> None:
    """A step of the whole batch at once compares nothing; the checkpoint says that the samples add up."""
    killed = Run(memory=two())
    rules = killed.step.state_dict()["shared"]["rules"]
    assert rules["blocks.0.samples"] == "the sum of the changes"
    broken = copy.deepcopy(killed.step.state_dict())
    broken["shared"]["rules"]["blocks.0.samples"] = "none"
    other = Run()
    other.step.load_state_dict(broken)
    with pytest.raises(fullbatch.ModelError, match=r"blocks\.0\.samples depends on how the batch is cut"):
        other.train(0, 1)


# ---- what is refused


def by_number(nest: Any) -> Any:
    """Lists as dicts, in which tensors can be compared."""
    items = enumerate(nest) if isinstance(nest, list) else nest.items() if isinstance(nest, dict) else None
    return nest if items is None else {key: by_number(item) for key, item in items}


def everything(run: Run) -> dict[str, Any]:
    return {
        "state": by_number(run.step.state_dict()),
        "plan": str(run.step.plan),
        "parameters": {name: value.clone() for name, value in run.model.state_dict().items()},
    }


def refused(run: Run, state: Any, faults: int, match: str) -> fullbatch.PlanError:
    before = everything(run)
    with pytest.raises(fullbatch.PlanError, match=match) as caught:
        run.step.load_state_dict(state)
    assert len(caught.value.faults) == faults, caught.value
    assert all(fault.got and fault.expected and fault.next for fault in caught.value.faults)
    assert_same(before, everything(run))
    return caught.value


@pytest.mark.parametrize("state", [None, {}, [1], {"format": 1, "steps": 0, "microbatches": {}, "generators": {}}])
def test_what_is_no_state(state: Any) -> None:
    refused(Run(microbatch=2), state, 1, r"no state of a fullbatch\.eager\.Step")


def test_a_captured_step_and_an_eager_one_refuse_each_other_s_state() -> None:
    model, x = nn.Linear(3, 1), torch.randn(4, 3)
    captured = fullbatch.Step(lambda m, x: m(x).square().mean(), model, x, microbatch=2)
    refused(Run(microbatch=2), captured.state_dict(), 1, "format 2")
    with pytest.raises(fullbatch.PlanError, match="format 'eager 2'"):
        captured.load_state_dict(Run(microbatch=2).step.state_dict())


DAMAGE: dict[str, tuple[int, str, Change]] = {
    "steps": (1, r"state\['steps'\]", lambda state: state.update(steps=-1)),
    "nothing else": (5, r"state\['shared'\]", lambda state: [state.pop(key) for key in [*state] if key != "format"]),
    "a placement": (2, r"\['shared'\]\['weight'\]", lambda s: s["shared"].update(weight="much", microbatch=0)),
    "a rule": (1, r"\['rules'\]", lambda state: state["shared"]["rules"].update(x="best")),
    "a prepared form": (1, r"\['prepared'\]\['form'\]", lambda state: state["prepared"].update(form=3)),
    "torch's generator": (1, "generator cpu", lambda s: s["generators"].update(cpu=torch.zeros(3))),
    "Python's": (1, "generator python", lambda s: s["generators"].update(python=[3, torch.zeros(2), None])),
    "NumPy's": (1, "generator numpy", lambda s: s["generators"].update(numpy={"bit_generator": "PCG64"})),
    "a module's": (1, r"model\.blocks\.0\.own", lambda s: s["generators"].update({"model.blocks.0.own": 3})),
    "one missing": (1, "no state of", lambda state: state["generators"].pop("model.blocks.0.own")),
    "one too many": (1, "the step has not", lambda state: state["generators"].update(more=torch.zeros(1))),
    "many": (
        4, "generator cpu",
        lambda s: [
            s.update(steps=None), s["shared"].pop("budget"), s["generators"].pop("python"),
            s["generators"].update(cpu=torch.zeros(3)),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_state_changes_nothing(case: str) -> None:
    faults, match, change = DAMAGE[case]
    killed = Run(microbatch=2)
    killed.train(0, 1)
    state = copy.deepcopy(killed.step.state_dict())
    other = Run(seed=1, microbatch=2)
    other.train(0, 2)
    change(state)
    refused(other, state, faults, match)
    other.step.load_state_dict(killed.step.state_dict())


def test_another_microbatch() -> None:
    asked, found = Run(microbatch=2), Run(memory=two())
    for killed in (asked, found):
        refused(Run(microbatch=3), killed.step.state_dict(), 1, "ran in microbatches of 2")
        Run(microbatch=2).step.load_state_dict(killed.step.state_dict())


def test_another_model() -> None:
    killed = Run(memory=least(block=Block), block=Block)
    error = refused(Run(blocks=1, block=Block), killed.step.state_dict(), 1, "another model")
    assert "blocks.2" in str(error)


def test_what_was_allowed_must_be_allowed() -> None:
    def coupled(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
        loss, count = token_loss(model, batch)
        return loss * len(batch[0]), count

    killed = Run(loss_fn=coupled, block=Block, microbatch=2, allow_inexact=True)
    refused(Run(block=Block, microbatch=2), killed.step.state_dict(), 1, "what couples samples")
    other = Run(block=Block, microbatch=2, allow_inexact=True)
    other.step.load_state_dict(killed.step.state_dict())
    assert other.step.plan.inexact == killed.step.plan.inexact != ()


def test_a_generator_without_a_state_is_left_alone() -> None:
    class System(Block):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.system = random.SystemRandom()

    run = Run(block=System, microbatch=2)
    assert not any("system" in name for name in run.step.state_dict()["generators"])
    run.train(0, 1)
