"""Numbers of eight bits and fewer are refused in `eager.Step` by the name that `fullbatch.Step` gives them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullbatch

NARROW = torch.float8_e4m3fn


class Rounded(nn.Module):
    """A layer whose input goes through eight bits, where the data says so."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.isfinite().all():
            x = x.to(NARROW).to(x.dtype)
        return self.inner(x)


class Held(Rounded):
    """A buffer in eight bits, which the forward only widens."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(6).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.table.to(x.dtype))


def _summed(model: Any, batch: Tensor) -> tuple[Tensor, int]:
    return model(batch.double()).square().sum(), batch.shape[0]


def _mean(model: Any, batch: Tensor) -> Tensor:
    return model(batch.double()).square().mean()


CASES: dict[str, tuple[Any, Tensor, str]] = {
    "made in the forward": (Rounded, torch.randn(8, 6), "test_formats.py"),
    "a buffer": (lambda: Held(torch.float8_e5m2), torch.randn(8, 6), "table"),
    "the batch": (lambda: nn.Linear(6, 3), torch.randn(8, 6).to(NARROW), "batch"),
}


@pytest.mark.parametrize("microbatch", [2, 8, None])
@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_by_name_and_leaves_everything(case: str, microbatch: int | None) -> None:
    make, batch, place = CASES[case]
    model = make()
    drawn = torch.get_rng_state()
    with pytest.raises(fullbatch.CaptureError, match=r"The step uses torch\.float8_e\w+, which is not") as refused:
        fullbatch.eager.Step(_summed, model, batch, microbatch=microbatch, memory="1GiB")
    assert place in refused.value.faults[0].got
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_captured_step_says_the_same() -> None:
    def said(make: Any) -> str:
        with pytest.raises(fullbatch.CaptureError) as refused:
            make()
        fault = refused.value.faults[0]
        return f"{fault.what} {fault.expected} {fault.next}"

    model, batch = Held(NARROW), torch.randn(8, 6)
    planned = said(lambda: fullbatch.Step(_mean, model, batch, microbatch=2))
    assert planned == said(lambda: fullbatch.eager.Step(_summed, model, batch, microbatch=2))


def test_a_later_batch_in_eight_bits_is_refused_too() -> None:
    model, batch = nn.Linear(6, 3), torch.randn(8, 6)
    step = fullbatch.eager.Step(_summed, model, batch, microbatch=2)
    step(batch)
    before = model.weight.grad.clone()
    with pytest.raises(fullbatch.CaptureError, match="float8_e4m3fn"):
        step(batch.to(NARROW))
    assert torch.equal(model.weight.grad, before)


def test_a_model_that_torch_compiles_is_compiled_while_it_is_looked_at() -> None:
    """Under a mode of its own torch.compile captures nothing, and `fullgraph=True` raises."""
    calls: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(len(inputs))
        return graph.forward

    inner = nn.Linear(6, 3)
    compiled = torch.compile(inner, backend=backend, fullgraph=True)

    def loss_fn(model: Any, batch: Tensor) -> tuple[Tensor, int]:
        return compiled(batch).square().sum(), batch.shape[0]

    step = fullbatch.eager.Step(loss_fn, inner, torch.randn(8, 6), microbatch=8)
    step(torch.randn(8, 6))
    assert calls


def test_a_resumed_run_ends_with_the_same_bits() -> None:
    """There is no `state_dict`: the generator and the microbatch are what a run depends on besides its weights."""
    batch = torch.randn(8, 6)

    def run(steps: int, state: Any = None, microbatch: int | None = None) -> tuple[Any, int]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 3))
        step = fullbatch.eager.Step(_summed, model, batch, memory="1GiB", microbatch=microbatch)
        if state is not None:
            model.load_state_dict(state[0])
            torch.set_rng_state(state[1])
        for _ in range(steps):
            model.zero_grad()
            step(batch)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        return (kept, torch.get_rng_state()), step.plan.microbatch

    whole, _ = run(4)
    half, microbatch = run(2)
    resumed, _ = run(2, half, microbatch)
    assert all(torch.equal(resumed[0][name], value) for name, value in whole[0].items())
    assert not torch.equal(half[0]["0.weight"], whole[0]["0.weight"])
