"""The ledger of the plain step, against what the plain step is measured to take."""

from __future__ import annotations

import pytest
import torch

import fullbatch
from cases import all_cases
from cases.reference import modules


@pytest.mark.parametrize("name", ["mlp", "unet_bilinear", "hf_vit", "gpt2_no_padding", "hf_convnext", "nano_gpt"])
def test_peak_is_that_of_the_plain_step(name: str) -> None:
    loss_fn, model, batch = next(case for case in all_cases("models") if case.name == name).build()
    ledger = fullbatch.explain(loss_fn, model, batch)

    def plain() -> None:
        out = loss_fn(model, batch)
        (out[0] if isinstance(out, tuple) else out).backward()

    plain()
    for module in modules(model).values():
        module.zero_grad()
    measured = fullbatch.measure(plain).peak
    predicted = ledger.peak - ledger.owned.total
    # A prediction for eager PyTorch, whose frees follow Python's references: close, not equal.
    assert abs(predicted - measured) <= 0.1 * measured


def test_rows_by_kind_and_module() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    batch = torch.randn(100, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    ledger = fullbatch.explain(lambda m, b: m(b).square().mean(), model, batch, optimizer)
    count = sum(p.numel() for p in model.parameters())
    assert ledger.owned.parameters == 4 * count
    assert ledger.owned.batch == 4 * batch.numel()
    # Adam keeps two values a parameter and one step count a tensor.
    assert ledger.owned.optimizer == 2 * 4 * count + 4 * len(list(model.parameters()))
    assert ledger.modules["1"] == 4 * 100 * 64  # tanh keeps its output
    assert ledger.peak == ledger.owned.total + ledger.gradients + ledger.activations + ledger.working
    text = str(ledger)
    assert "activations kept for the backward" in text
    assert "the peak is at" in text


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.AdamW(p),
    lambda p: torch.optim.Adagrad(p),
    lambda p: torch.optim.RMSprop(p, momentum=0.5), lambda p: torch.optim.Adafactor(p), lambda p: torch.optim.Adamax(p),
    lambda p: torch.optim.NAdam(p), lambda p: torch.optim.SGD(p, lr=0.1),
])  # fmt: skip
def test_optimizer_state_is_known_before_it_exists(make: object) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1))
    batch = torch.randn(10, 8)
    optimizer = make(model.parameters())  # type: ignore[operator]

    def loss(m: torch.nn.Module, b: torch.Tensor) -> torch.Tensor:
        return m(b).square().mean()

    predicted = fullbatch.explain(loss, model, batch, optimizer).owned.optimizer
    loss(model, batch).backward()
    optimizer.step()
    assert fullbatch.explain(loss, model, batch, optimizer).owned.optimizer == predicted
