"""The loss head in a planned step: the gradient of the whole batch at any microbatch, in the memory of a tile."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullbatch
from cases.reference import collect, compare, plain

SAMPLES, LENGTH, WORDS = 6, 5, 50


class Model(nn.Module):
    """Words to features; `tied`: the head reads the embedding's weight."""

    def __init__(self, tied: bool = False, words: int = WORDS, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.layer = nn.Embedding(words, width), nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.layer(self.embedding(ids)))


def batch(samples: int = SAMPLES, length: int = LENGTH, words: int = WORDS) -> tuple[Tensor, Tensor]:
    """Valid targets differ in number between samples; one sample has none."""
    ids, target = torch.randint(words, (samples, length)), torch.randint(words, (samples, length))
    target[0, 1:], target[samples - 2] = -100, -100
    return ids, target


def head(model: Any, data: Any, **options: Any) -> Tensor:
    return fullbatch.linear_cross_entropy(model(data[0]), model.head.weight, data[1], model.head.bias, **options)


def logits(model: Any, data: Any, **options: Any) -> Tensor:
    return F.cross_entropy(model.head(model(data[0])).flatten(0, -2), data[1].flatten(), **options)


@pytest.mark.parametrize("microbatch", [1, 3, 4, 6])
def test_gradient_of_the_whole_batch(microbatch: int) -> None:
    for tied, reduction, smoothing in itertools.product((False, True), ("mean", "sum", "none"), (0.0, 0.1)):
        options = {"reduction": reduction, "label_smoothing": smoothing}
        model, data = Model(tied), batch()
        reference = plain(lambda m, b, o=options: logits(m, b, **o).square().sum(), model, data)
        step = fullbatch.Step(
            lambda m, b, o=options: head(m, b, **o).square().sum(), model, data, microbatch=microbatch
        )
        errors = compare(collect(step(data), model), reference)
        assert errors.within(1e-10), errors
        assert step.plan.full_batch_nodes == ()


def test_batch_in_another_dimension() -> None:
    model, data = Model(), tuple(tensor.t().contiguous() for tensor in batch())
    step = fullbatch.Step(head, model, data, microbatch=2, batch_dims=(1, 1))
    reference = plain(logits, model, data)
    errors = compare(collect(step(data), model), reference)
    assert errors.within(1e-10), errors
    assert step.plan.full_batch_nodes == ()


def test_certificate_and_barriers_name_the_users_line() -> None:
    model, data = Model(), batch()
    step = fullbatch.Step(head, model, data, microbatch=2)
    step(data)
    certificate = step.verify()
    assert certificate.ok
    assert [barrier.origin.source.split(":")[0] for barrier in step.plan.barriers] == ["test_head_in_a_step.py"]


def test_without_its_rule_it_runs_on_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    from fullbatch._axis._rules import RULES

    for name in ("fullbatch.token_losses", "fullbatch.token_losses_backward"):
        monkeypatch.delitem(RULES._rules, name)
    model, data = Model(), batch()
    step = fullbatch.Step(head, model, data, microbatch=2)
    assert "token_losses" in str(step.plan.full_batch_nodes)
    errors = compare(collect(step(data), model), plain(logits, model, data))
    assert errors.within(1e-10), errors


def test_under_autocast() -> None:
    torch.set_default_dtype(torch.float32)

    def cast(model: Any, data: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return head(model, data)

    model, data = Model().float(), batch()
    reference = plain(cast, model, data)
    step = fullbatch.Step(cast, model, data, microbatch=2)
    found = collect(step(data), model)
    assert found.loss.dtype == torch.float32
    errors = compare(found, reference)
    assert errors.within(2.0**-8), errors


def test_memory_far_below_the_logits() -> None:
    """Two samples a microbatch would hold 2 x 64 x 20,000 logits; the head's peak does not depend on them."""
    words, length = 20_000, 256
    model, data = Model(words=words, width=4), batch(8, length, words)
    step = fullbatch.Step(head, model, data, microbatch=8)
    measured = fullbatch.measure(lambda: step(data))
    weights = sum(parameter.numel() for parameter in model.parameters()) * 8
    assert 8 * length * words * 8 > 300 << 20
    assert measured.peak <= step.plan.activations <= 1.02 * measured.peak
    assert measured.peak <= 2 * weights + 3 * (8 << 20)


def test_a_target_that_is_no_word_leaves_everything_as_it_was() -> None:
    model, data = Model(), batch()
    step = fullbatch.Step(head, model, data, microbatch=2)
    data[1][5, 2] = WORDS
    with pytest.raises(IndexError, match=f"Target {WORDS} is out of bounds"):
        step(data)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_does_not_fit_is_said_before_the_step_runs() -> None:
    model, data = Model(), batch()
    with pytest.raises(fullbatch.CaptureError, match="The target is not of words"):
        fullbatch.Step(lambda m, b: head(m, (b[0], b[1].int())), model, data)
