"""The peak that a plan predicts is the peak that is measured, to within two percent and never below it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fullbatch
from cases import Case, all_cases
from cases.reference import modules

MODELS = [case for case in all_cases("models") if "dynamo-no" not in case.tags]


def _measured(step: fullbatch.Step, model: Any, batch: Any) -> int:
    """Bytes above the start, once whatever the first calls build is there (a model may set its own attributes)."""
    for _ in range(2):
        step(batch)
        for module in modules(model).values():
            module.zero_grad()
    return fullbatch.measure(lambda: step(batch)).peak


@pytest.mark.parametrize("case", MODELS, ids=str)
@pytest.mark.parametrize("microbatch", [2, 3])
def test_predicted_peak_is_the_measured_one(case: Case, microbatch: int) -> None:
    loss_fn, model, batch = case.build()
    step = fullbatch.Step(loss_fn, model, batch, microbatch=microbatch)
    measured = _measured(step, model, batch)
    plan = step.plan
    assert plan.exact
    assert measured <= plan.activations
    assert plan.predicted_peak <= 1.02 * (plan.owned + measured)


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
@pytest.mark.parametrize("name", ["resnet50", "unet_bilinear", "gpt2_no_padding"])
def test_a_budget_is_kept(name: str, share: float) -> None:
    loss_fn, model, batch = next(case for case in MODELS if case.name == name).build()
    free = fullbatch.Step(loss_fn, model, batch, microbatch=7)
    budget = int(free.plan.owned + share * free.plan.activations)
    step = fullbatch.Step(loss_fn, model, batch, memory=budget)
    measured = _measured(step, model, batch)
    assert step.plan.owned + measured <= step.plan.predicted_peak <= budget


def _group_norm_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip


def _images(size: int) -> Any:
    return torch.randn(size, 3, 24, 24), torch.randint(0, 10, (size,))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    size = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 400, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**size, **off, bos_token_id=0, eos_token_id=0))


def _tokens(size: int) -> Any:
    return torch.randint(0, 400, (size, 64))


def _language_loss(model: Any, ids: Any) -> Any:
    return F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), ignore_index=3)


def _image_loss(model: Any, batch: Any) -> Any:
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize(
    ("make", "data", "loss_fn"),
    [(_group_norm_net, _images, _image_loss), (_gpt2, _tokens, _language_loss)],
    ids=["group-norm", "gpt2"],
)
def test_without_barriers_the_peak_does_not_grow_with_the_batch(make: Any, data: Any, loss_fn: Any) -> None:
    model = make()
    peaks = {}
    for size in (8, 64):
        batch = data(size)
        step = fullbatch.Step(loss_fn, model, batch, microbatch=2)
        peaks[size] = _measured(step, model, batch)
    assert peaks[64] <= 1.01 * peaks[8]


def test_offload_and_fetch_change_no_bit_and_lower_the_peak() -> None:
    """The schedule's actions for a value that leaves the device, which no planner chooses yet."""
    from fullbatch._plan._simulate import simulate
    from fullbatch._run._executor import Executor

    loss_fn, model, batch = next(case for case in MODELS if case.name == "unet_bilinear").build()
    seen: dict[str, Any] = {}

    class Watched(fullbatch.Step):
        def _run(self, captured: Any, inputs: Any) -> Any:
            seen.update(captured=captured, inputs=inputs)
            return super()._run(captured, inputs)

    step = Watched(loss_fn, model, batch, microbatch=2)
    captured, inputs = seen["captured"], seen["inputs"]
    program, schedule = captured.program, step.plan.schedule
    given = {at: inputs[at].detach() for at in program.inputs}
    reference = Executor(program, schedule).run(given)
    cost = captured.measured(2)
    before = simulate(program, schedule, lambda task, n: cost(task, 2 if n != program.batch else n))
    held = sorted(
        (value for value in program.values if value.layout is not None),
        key=lambda value: -value.nbytes(None, program.batch),
    )[:6]
    for value in held:
        schedule = schedule.with_offload(value.id, program)
    after = simulate(program, schedule, lambda task, n: cost(task, 2 if n != program.batch else n))
    moved = Executor(program, schedule).run(given)
    assert after.peak < before.peak
    assert all(torch.equal(a, b) for a, b in zip(reference, moved, strict=True))
