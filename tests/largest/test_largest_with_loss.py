"""The largest size of a step whose loss is not captured: its memory counts, though it is known only once it has run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fullbatch
from largest.test_largest import example, measured, model


def forward(net: Any, batch: Any) -> Tensor:
    return net(batch[0])


def loss(outputs: Tensor, batch: Any) -> Tensor:
    """Takes several times the memory of its outputs, which no plan can know before."""
    apart = (outputs[:, None] - outputs[None, :].detach()).square()
    chosen = apart[apart > apart.mean().item()]
    return chosen.mean() + outputs[batch[1] > 2].square().sum()


def composed(net: Any, batch: Any) -> Tensor:
    return loss(forward(net, batch), batch)


@pytest.mark.parametrize("given", [(forward, loss), composed], ids=["a pair", "a split that is found"])
def test_batch(given: Any) -> None:
    net, memory, batch = model(), 150_000, example()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    state = torch.get_rng_state()
    found = fullbatch.largest(given, net, batch, memory=memory, most=300)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    size = found.fullbatch.size
    assert found.fullbatch.measured <= memory and found.plain is not None
    assert found.plain.measured <= memory and size >= found.plain.size
    plan = found.fullbatch.plan
    assert plan is not None and plan.batch == size
    assert found.fullbatch.measured <= 1.02 * found.fullbatch.predicted
    assert size + 1 < 300 and size in [run.size for run in found.fullbatch.tried]
    assert found.plain.measured == measured(net, example(found.plain.size), composed)
    # The next size does not fit, with the loss that takes what it takes there.
    step = fullbatch.Step(given, net, example(size + 1), microbatch=1)
    step(example(size + 1))
    net.zero_grad(set_to_none=True)
    step._microbatch, step._memory = None, memory
    with pytest.raises(fullbatch.BudgetError):
        step._prepare(example(size + 1))


def test_no_pair_and_nothing_that_fits() -> None:
    with pytest.raises(fullbatch.LossError, match="no pair of functions"):
        fullbatch.largest((forward, 3), model(), example())  # type: ignore[arg-type]
    with pytest.raises(fullbatch.BudgetError) as refused:
        fullbatch.largest((forward, loss), model(), example(), memory=4_000, multiple_of=2)
    assert refused.value.smallest > 4_000
