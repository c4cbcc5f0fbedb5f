"""Randomness that a captured step would freeze is refused by name, from wherever it comes; and none of it is drawn."""

from __future__ import annotations

import os
import random
import secrets
import uuid
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fullbatch
from behaviour.support import make, mlp, mse, pair

OWN = torch.Generator()
ROWS = torch.Generator()

SYSTEM = r"the operating system \(os\.urandom, secrets\)"
GENERATOR = r"a torch\.Generator of its own"
SEEDS = "seeds torch's generators, or reads their state"
NUMPY = r"NumPy \(numpy\.random\)"
PYTHON = "Python's random"


def _forked(out: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return torch.rand_like(out)


def _shuffled() -> float:
    values = [1.0, 2.0, 3.0]
    random.shuffle(values)
    return values[0]


SOURCES: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "os.urandom": (SYSTEM, lambda out: float(os.urandom(1)[0])),
    "secrets": (SYSTEM, lambda out: float(secrets.randbelow(9))),
    "secrets.token_bytes": (SYSTEM, lambda out: float(secrets.token_bytes(1)[0])),
    "uuid": (SYSTEM, lambda out: float(uuid.uuid4().int % 9)),
    "SystemRandom": (SYSTEM, lambda out: random.SystemRandom().random()),
    "torch.seed": (SEEDS, lambda out: torch.seed() and 1.0),
    "fork_rng": (SEEDS, _forked),
    "a state put back": (SEEDS, lambda out: torch.set_rng_state(torch.get_rng_state()) or 1.0),
    "bernoulli_ of a generator": (GENERATOR, lambda out: torch.empty_like(out).bernoulli_(0.5, generator=OWN)),
    "normal_ of a generator": (GENERATOR, lambda out: torch.empty_like(out).normal_(generator=OWN)),
    "multinomial of a generator": (GENERATOR, lambda out: torch.multinomial(torch.ones(6, 2), 1, generator=OWN)),
    "randperm of a generator": (GENERATOR, lambda out: torch.randperm(6, generator=ROWS)[:, None]),
    "a generator made inside": (GENERATOR, lambda out: torch.rand(6, 1, generator=torch.Generator().manual_seed(3))),
    "numpy permutation": (NUMPY, lambda out: torch.from_numpy(np.random.permutation(6))[:, None]),
    "numpy Generator made inside": (NUMPY, lambda out: np.random.default_rng().random()),
    "numpy RandomState": (NUMPY, lambda out: np.random.RandomState(0).rand()),
    "random.shuffle": (PYTHON, lambda out: _shuffled()),
    "random.gauss": (PYTHON, lambda out: random.gauss(0.0, 1.0)),
}


@pytest.mark.parametrize("source", SOURCES)
def test_it_is_refused_by_name_and_nothing_is_drawn(source: str) -> None:
    (name, draw), model, example = SOURCES[source], mlp(), pair()
    states = torch.get_rng_state(), OWN.get_state(), random.getstate(), np.random.get_state()[1].copy()

    def loss_fn(model: Any, batch: Any) -> Tensor:
        out = model(batch[0])
        return (out * draw(out) - batch[1]).square().mean()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(fullbatch.CaptureError, match=name) as refused:
            make(loss_fn, model, example)
    assert "test_refused_sources.py" in refused.value.faults[0].got, "the line is named, and is the user's"
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(OWN.get_state(), states[1])
    assert random.getstate() == states[2]
    assert (np.random.get_state()[1] == states[3]).all()


@pytest.mark.parametrize("how", ["whole", "uneven", "least memory"])
def test_a_step_moves_each_default_generator_by_its_own_draws_alone(how: str) -> None:
    """torch's by one number, Python's by what loss_fn draws from it, NumPy's not at all; whatever the plan."""

    def loss_fn(model: Any, batch: Any) -> Tensor:
        kept = torch.nn.functional.dropout(model[0](batch[0]), 0.5)
        return mse(model[1:], (kept, batch[1])) * random.uniform(1, 9)

    model, batch = mlp(), pair()
    if how == "least memory":
        with pytest.raises(fullbatch.BudgetError) as least:
            make(loss_fn, model, batch, memory=10)
        step = make(loss_fn, model, batch, memory=least.value.smallest)
    else:
        step = make(loss_fn, model, batch, microbatch=6 if how == "whole" else 4)
    torch.manual_seed(3)
    random.seed(3)
    torch.empty((), dtype=torch.int64).random_()
    random.uniform(1, 9)
    expected, drawn = torch.get_rng_state(), random.getstate()
    numpy_state = np.random.get_state()[1].copy()
    torch.manual_seed(3)
    random.seed(3)
    step(batch)
    assert torch.equal(torch.get_rng_state(), expected)
    assert random.getstate() == drawn
    assert (np.random.get_state()[1] == numpy_state).all()


@pytest.mark.parametrize(
    "draw",
    [lambda: random.uniform(1, 9), lambda: random.randint(1, 99), lambda: random.randrange(1, 99)],
    ids=["uniform", "randint", "randrange"],
)
def test_three_draws_of_python_are_live(draw: Callable[[], float]) -> None:
    """As docs/errors.md says: each call draws anew, once, what plain PyTorch would draw."""
    model, batch = mlp(), pair()
    step = make(lambda model, batch: mse(model, batch) * draw(), model, batch, microbatch=2)
    plain = float(mse(model, batch).detach())
    random.seed(5)
    expected, state = [plain * draw() for _ in range(3)], random.getstate()
    random.seed(5)
    assert [float(step(batch)) for _ in range(3)] == pytest.approx(expected, rel=1e-12)
    assert random.getstate() == state
    assert len(set(expected)) > 1
