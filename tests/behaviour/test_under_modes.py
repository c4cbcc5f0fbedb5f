"""A dispatch mode of the user's around a call: nothing can be captured under one, and that is said by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import fullbatch
from behaviour.support import make, mlp, mse, pair


class Watcher(TorchDispatchMode):
    """Sees operators and changes none."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "Step": lambda model, batch: make(mse, model, batch),
    "pair": lambda model, batch: make(
        (lambda m, b: m(b[0]), lambda out, b: (out - b[1]).square().mean()), model, batch
    ),
    "explain": lambda model, batch: fullbatch.explain(mse, model, batch),
    "propose": lambda model, batch: fullbatch.propose(mse, model, batch),
    "largest": lambda model, batch: fullbatch.largest(mse, model, batch, most=8),
}


@pytest.mark.parametrize("mode", [Watcher, lambda: FlopCounterMode(display=False)], ids=["own", "FlopCounterMode"])
@pytest.mark.parametrize("call", CALLS)
def test_it_is_refused_by_name(call: str, mode: Callable[[], Any]) -> None:
    model, batch = mlp(), pair()
    with pytest.raises(fullbatch.CaptureError, match="under a dispatch mode") as refused, mode():
        CALLS[call](model, batch)
    fault, *_ = refused.value.faults  # FlopCounterMode has hooks on every module besides, which are named too
    assert fault.got.endswith(("Watcher", "FlopCounterMode")), "the mode is named"
    assert fault.expected
    assert "leave the mode" in fault.next


def test_a_step_that_is_captured_is_refused_too_and_goes_on_after() -> None:
    model, batch = mlp(), pair()
    step = make(mse, model, batch, microbatch=2)
    drawn = torch.get_rng_state()
    with pytest.raises(fullbatch.CaptureError), Watcher():
        step(batch)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert float(step(batch)) == pytest.approx(float(mse(model, batch).detach()), rel=1e-12)


def test_the_eager_step_runs_under_one() -> None:
    """Nothing is captured there, so that a mode sees what plain PyTorch would show it."""
    model, batch, watcher = mlp(), pair(), Watcher()

    def loss_fn(model: Any, batch: Any) -> Any:
        losses = (model(batch[0]) - batch[1]).square()
        return losses.sum(), losses.numel()

    step = fullbatch.eager.Step(loss_fn, model, batch, microbatch=2)
    with watcher:
        loss = step(batch)
    assert watcher.count > 10
    assert float(loss) == pytest.approx(float(mse(model, batch).detach()), rel=1e-12)
