"""A step lives beside everything else that a program does with its model."""

from __future__ import annotations

import copy
import io
import os
import pickle
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullbatch
from behaviour.support import agrees, captures, make, mlp, mse, pair


def _normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 2))


def test_the_model_can_be_pickled_and_copied_after_a_step() -> None:
    model, batch = _normed(), pair()
    step = make(mse, model, batch)
    step(batch)
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        agrees(make(mse, twin, batch), mse, twin, batch)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = _normed()
    fresh.load_state_dict(torch.load(file))
    assert all(torch.equal(a, b) for a, b in zip(fresh.state_dict().values(), model.state_dict().values(), strict=True))


def test_the_model_runs_in_plain_pytorch_between_steps() -> None:
    model, batch = _normed(), pair()
    step = make(mse, model, batch)
    for _ in range(2):
        agrees(step, mse, model, batch)
        model.eval()
        with torch.no_grad():
            model(batch[0])
        model.train()
        mse(model, batch).backward()
    assert captures(step) == 1


def test_loading_a_state_dict_between_steps() -> None:
    model, batch = _normed(), pair()
    step = make(mse, model, batch)
    step(batch)
    model.load_state_dict(_normed().state_dict())
    agrees(step, mse, model, batch)
    model.load_state_dict(_normed().state_dict(), assign=True)
    model.requires_grad_()
    agrees(step, mse, model, batch)


def test_after_a_reset_of_dynamo() -> None:
    model, batch = mlp(), pair()
    step = make(mse, model, batch)
    step(batch)
    torch._dynamo.reset()
    agrees(step, mse, model, batch)
    agrees(step, mse, model, batch)


def test_a_step_made_in_a_function_called_many_times() -> None:
    def train(weight: float) -> Tensor:
        model, batch = mlp(), pair()

        def loss_fn(model: Any, batch: Any) -> Tensor:
            return mse(model, batch) * weight

        return agrees(make(loss_fn, model, batch), loss_fn, model, batch)

    losses = [train(weight) for weight in (1.0, 2.0, 3.0, 1.0)]
    assert torch.equal(losses[0], losses[3])
    torch.testing.assert_close(losses[1], 2 * losses[0])


def test_two_steps_of_one_function_on_two_models() -> None:
    first, second, batch = mlp(), nn.Sequential(nn.Linear(3, 2)), pair()
    steps = [(make(mse, model, batch), model) for model in (first, second)]
    for _ in range(2):
        for step, model in steps:
            agrees(step, mse, model, batch)
    assert [captures(step) for step, _ in steps] == [1, 1]


def test_a_compiled_model() -> None:
    model, batch = torch.compile(mlp()), pair()
    agrees(make(mse, model, batch), mse, model, batch)


def test_other_compiled_code_of_the_program_is_undisturbed() -> None:
    compiled = torch.compile(lambda x: x * 2, backend="eager")
    x = torch.randn(3)
    compiled(x)
    before = torch._dynamo.config.recompile_limit
    model = mlp()
    step = make(mse, model)
    step(pair())
    assert torch._dynamo.config.recompile_limit == before
    torch._dynamo.config.error_on_recompile, kept = True, torch._dynamo.config.error_on_recompile
    try:
        assert torch.equal(compiled(x), x * 2)
    finally:
        torch._dynamo.config.error_on_recompile = kept


@pytest.mark.parametrize("stance", ["force_eager", "fail_on_recompile", "eager_on_recompile"])
def test_a_stance_towards_compilation_is_not_about_the_step(stance: str) -> None:
    model = mlp()
    step = make(mse, model)
    with torch.compiler.set_stance(stance):
        for size in (6, 3):
            agrees(step, mse, model, pair(size))
            assert step.plan.batch == size


def test_measuring_a_step_needs_no_new_capture() -> None:
    def loss_fn(model: Any, batch: Any) -> Tensor:
        return mse(model, batch) * (2.0 if os.environ.get("FB_MISSING") else 1.0)

    model, batch = mlp(), pair()
    step = make(loss_fn, model, batch)
    step(batch)
    assert fullbatch.measure(lambda: step(batch)).peak > 0
    assert captures(step) == 1


def test_a_program_that_disables_torch_compile() -> None:
    model, batch = mlp(), pair()
    with torch._dynamo.config.patch(disable=True):
        agrees(make(mse, model, batch), mse, model, batch)


@pytest.mark.parametrize(
    "context",
    [
        lambda: torch.device("cpu"),
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t),
        lambda: torch.autograd.detect_anomaly(check_nan=False),
    ],
    ids=["device", "saved tensors hooks", "anomaly mode"],
)
@pytest.mark.filterwarnings("ignore:Anomaly")
def test_under_a_context_of_torch(context: Any) -> None:
    model, batch = mlp(), pair()
    step = make(mse, model, batch)
    with context():
        agrees(step, mse, model, batch)
    agrees(step, mse, model, batch)


def test_from_another_thread() -> None:
    model, batch = mlp(), pair()
    step = make(mse, model, batch)
    expected = agrees(step, mse, model, batch)
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(agrees(step, mse, model, batch)))
    thread.start()
    thread.join()
    assert torch.equal(found[0], expected)


def test_a_call_does_not_depend_on_the_example_batch() -> None:
    model = mlp()
    example = (torch.empty(6, 3), torch.empty(6, 2))
    step = make(mse, model, example)
    del example
    agrees(step, mse, model, pair())


def test_plain_use_of_the_readme() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))
    loader = [(torch.randn(8, 1, 8, 8), torch.randint(3, (8,))) for _ in range(4)]

    def loss_fn(model: Any, batch: Any) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = fullbatch.Step(loss_fn, model, loader[0], memory="2GiB", optimizer=optimizer)
    assert "microbatch" in str(step.plan)
    for batch in loader:
        agrees(step, loss_fn, model, batch)
        optimizer.step()
        optimizer.zero_grad()
    assert captures(step) == 1
