"""A plain `loss_fn` that no graph can hold is split at the call of its model, and does what plain PyTorch does."""

from __future__ import annotations

import copy
import inspect
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fullbatch
from cases.reference import collect, compare, plain
from fullbatch._found_call import Found
from split.support import BATCH, CASES, composed, convnet, images

Loss = Any


def found(loss_fn: Loss, model: Any, batch: Any, **options: Any) -> fullbatch.Step:
    """The step, which must be one that was split."""
    step = fullbatch.Step(loss_fn, model, batch, **options)
    assert isinstance(step._split, Found)
    assert any("cannot be captured whole" in note for note in step.plan.notes)
    return step


def agrees(step: fullbatch.Step, loss_fn: Loss, model: Any, batch: Any, tolerance: float = 1e-9) -> Any:
    """Asserts that one call, from no gradient, does to the model what plain PyTorch does; returns its result."""
    for part in model if isinstance(model, tuple) else [model]:
        part.zero_grad(set_to_none=True)
    reference = plain(loss_fn, copy.deepcopy(model), batch)
    out = step(batch)
    errors = compare(collect(out, model), reference)
    assert errors.within(tolerance), errors
    return out


def branching(out: Tensor) -> Tensor:
    """What no graph can hold."""
    return out if out.max() > -1e9 else out * 2


def masked(model: Any, batch: Any) -> Tensor:
    out = branching(model(batch[0]))
    return out.movedim(1, -1)[batch[1] > 0.4].square().mean()


@pytest.mark.parametrize("microbatch", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_every_case_of_a_pair_as_one_function(name: str, microbatch: int) -> None:
    forward, loss, model, batch = CASES[name]()
    loss_fn = composed(forward, loss)
    step = fullbatch.Step(loss_fn, model, batch, microbatch=microbatch)
    assert isinstance(step._split, Found) or name not in ("hungarian_matching", "item_weight_and_branch")
    agrees(step, loss_fn, model, batch)
    agrees(step, loss_fn, model, batch)
    certificate = step.verify()
    assert certificate.ok and certificate.gradient_error < 1e-10, certificate


def test_budgets_and_the_predicted_peak() -> None:
    model, batch = convnet(), images()

    def loss_fn(model: Any, batch: Any) -> Tensor:
        prepared = batch[0].mul(2.0).add(1.0)
        return masked(model, (prepared, batch[1]))

    step = found(loss_fn, model, batch, microbatch=1)
    least = step.plan.owned + int(0.8 * (step.plan.plain_peak - step.plan.owned))
    step = found(loss_fn, model, batch, memory=least)
    for _ in range(2):
        agrees(step, loss_fn, model, batch)
        model.zero_grad(set_to_none=True)
    made = batch[0].numel() * 8  # the arguments are part of what the step owns, and are made inside of the call
    measured = fullbatch.measure(lambda: step(batch)).peak - made
    assert measured <= step.plan.activations <= 1.05 * measured


def test_the_plan_says_what_runs_as_it_is_and_from_where() -> None:
    step = found(masked, convnet(), images(), microbatch=3)
    (note,) = [note for note in step.plan.notes if "cannot be captured whole" in note]
    _, first = inspect.getsourcelines(masked)
    assert "test_found.py" in note and "in branching: return out if" in note
    assert f"the call is at {__file__}:{first + 1} in masked: out = branching(model(batch[0]))" in note
    assert "cannot be captured whole" in str(step.plan)
    assert any(f"test_found.py:{first + 1}" in str(barrier) for barrier in step.plan.barriers)


def test_a_loss_that_can_be_captured_is_not_split() -> None:
    def loss_fn(model: Any, batch: Any) -> Tensor:
        return (model(batch[0]).movedim(1, -1) * (batch[1] > 0.4)[..., None]).square().mean()

    step = fullbatch.Step(loss_fn, convnet(), images(), microbatch=3)
    assert step._split is None and not any("split" in note or "as it is" in note for note in step.plan.notes)


def test_loss_fn_runs_once_a_step() -> None:
    calls: list[str] = []

    def loss_fn(model: Any, batch: Any) -> Tensor:
        calls.append("before")
        out = branching(model(batch[0]))
        calls.append("after")
        return out[out > 0].mean()

    model, batch = convnet(), images()
    step = found(loss_fn, model, batch, microbatch=3)
    calls.clear()
    step(batch)
    assert calls == ["before", "after"]


def test_preprocessing_and_state_that_the_loss_reads_are_live() -> None:
    state = {"weight": 1.0, "hard": True, "scale": 2.0}

    def loss_fn(model: Any, batch: Any) -> Any:
        out = branching(model(batch["image"].float().div(255).sub(0.5).to(torch.float64) * state["scale"]))
        chosen = out.movedim(1, -1)[batch["mask"] > 0.5] if state["hard"] else out
        return chosen.square().mean() * state["weight"], {"rows": len(chosen)}

    model = convnet()
    batch = {"image": torch.randint(0, 255, (BATCH, 3, 8, 8), dtype=torch.uint8), "mask": images()[1]}
    step = found(loss_fn, model, batch, microbatch=3)
    captures = step._frontend.captures
    _, aux = agrees(step, loss_fn, model, batch)
    assert aux["rows"] == int((batch["mask"] > 0.5).sum())
    for change in ({"weight": 0.3}, {"hard": False}, {"scale": 0.5}):
        state.update(change)
        agrees(step, loss_fn, model, batch)
    assert step._frontend.captures == captures
    model.eval()
    agrees(step, loss_fn, model, batch)
    assert step._frontend.captures == captures + 1


def test_a_step_becomes_split_when_a_flag_makes_its_loss_one_that_cannot_be_captured() -> None:
    hard = [False]

    def loss_fn(model: Any, batch: Any) -> Tensor:
        out = model(batch[0])
        return branching(out)[out > 0].mean() if hard[0] else out.square().mean()

    model, batch = convnet(), images()
    step = fullbatch.Step(loss_fn, model, batch, microbatch=3)
    assert step._split is None
    agrees(step, loss_fn, model, batch)
    hard[0] = True
    agrees(step, loss_fn, model, batch)
    assert isinstance(step._split, Found)
    assert any("cannot be captured whole" in note for note in step.plan.notes)


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor(0.3))

    def forward(self, out: Tensor, mask: Tensor) -> Tensor:
        return (branching(out).movedim(1, -1)[mask] * self.log.exp()).logsumexp(0).sum()


@pytest.mark.parametrize("microbatch", [1, 3])
@pytest.mark.parametrize("where", ["outside", "in the model"])
def test_a_learnable_temperature_that_only_the_loss_reads(microbatch: int, where: str) -> None:
    net, criterion, batch = convnet(), Temperature(), images()
    twins = copy.deepcopy(net), copy.deepcopy(criterion)
    if where == "outside":
        step = found(lambda m, b: criterion(m(b[0]), b[1] > 0.4), net, batch, microbatch=microbatch)
    else:
        step = found(lambda m, b: m[1](m[0](b[0]), b[1] > 0.4), (net, criterion), batch, microbatch=microbatch)
    expected = twins[1](twins[0](batch[0]), batch[1] > 0.4)
    expected.backward()
    out = step(batch)
    assert compare(collect(out, (net, criterion)), collect(expected, twins)).within(1e-9)
    assert criterion.log.grad.abs() > 0


def test_a_head_with_batch_norm_behind_the_split_runs_on_the_whole_batch() -> None:
    """The branch stands between body and head, inside of the model."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.norm, self.head = convnet(), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            features = self.norm(self.body(x))
            if features.abs().max().item() > 1:
                features = features / 2
            return self.head(features)

    torch.manual_seed(1)
    model, batch = Branching(), images()
    step = found(lambda m, b: m(b[0]).square().mean(), model, batch, microbatch=3)
    assert step._split.place.title == "model.body"  # type: ignore[union-attr]
    agrees(step, lambda m, b: m(b[0]).square().mean(), model, batch)
    assert step.verify().ok


def test_dropout_in_the_model_and_draws_around_its_call() -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))
    batch = torch.randn(8, 6)

    def loss_fn(model: Any, batch: Any) -> Tensor:
        out = model(batch + 0.1 * torch.randn_like(batch))
        weight = 1.0 if out.max() > 0 else 2.0
        chosen = out[torch.rand(len(out)) < 0.7]
        return chosen.square().sum() + out.mean() * weight * torch.rand(()) * np.random.rand() * random.random()

    step = found(loss_fn, model, batch, microbatch=3)

    def run(seed: int) -> Any:
        model.zero_grad()
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        loss = step(batch)
        return loss, model[0].weight.grad.clone(), torch.rand(2), np.random.rand(), random.random()

    one, same, other = run(1), run(1), run(2)
    assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True))
    assert not torch.equal(one[1], other[1])
    state = np.random.get_state()[1].copy()
    certificate = step.verify()
    assert certificate.ok and certificate.realised_masks, certificate
    assert (np.random.get_state()[1] == state).all()


def test_without_draws_in_the_model_all_draws_are_those_of_the_plain_step() -> None:
    def loss_fn(model: Any, batch: Any) -> Tensor:
        out = branching(model(batch[0] + 0.1 * torch.randn_like(batch[0])))
        return out[torch.rand_like(out) < 0.7].square().sum()

    model, batch = convnet(), images()
    twin = copy.deepcopy(model)
    state = torch.get_rng_state()
    step = found(loss_fn, model, batch, microbatch=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    expected = plain(loss_fn, twin, batch)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    out = step(batch)
    assert torch.equal(drawn, torch.rand(3))
    assert compare(collect(out, model), expected).within(1e-9)
    assert step.verify().ok


def test_scale_autocast_and_no_grad() -> None:
    model, batch = convnet(), images()
    expected = plain(masked, copy.deepcopy(model), batch)
    step = found(masked, model, batch, microbatch=3)
    with torch.no_grad():
        out = step(batch, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**9))
    assert abs(float(out - expected.loss)) < 1e-12
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, 512 * expected.grads[name], rtol=1e-9, atol=1e-9)
    seen: list[Any] = []

    def cast(model: Any, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(batch[0])
        seen.append((out.dtype, torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
        return branching(out).float()[out > 0].mean()

    net = convnet().float()
    step = found(cast, net, (batch[0].float(),), microbatch=3)
    step((batch[0].float(),))
    assert seen == [(torch.bfloat16, False, True)] and net[0].weight.grad is not None


def test_hooks_on_the_module_run_once_a_step() -> None:
    model, batch, calls = convnet(), images(), []
    model.register_forward_pre_hook(lambda module, args: (calls.append("before"), (args[0] * 2,))[1])
    model.register_forward_hook(lambda module, args, out: (calls.append("after"), out + 1)[1])
    step = found(masked, model, batch, microbatch=3)
    calls.clear()
    agrees(step, masked, model, batch)
    assert calls == ["before", "after"] * 2  # the plain step's, and ours


@pytest.mark.parametrize("when", ["before the call", "after it", "in the model"])
def test_an_error_leaves_everything_as_it_was(when: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.norm = convnet(), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

    wrong = [False]

    def loss_fn(model: Any, batch: Any) -> Tensor:
        if wrong[0] and when == "before the call":
            torch.rand(3)
            raise ValueError("wrong")
        out = model.norm(model.body(batch[0] if not wrong[0] or when != "in the model" else batch[0][:, :2]))
        branching(out)
        if wrong[0]:
            torch.rand(3), np.random.rand()
            raise RuntimeError("wrong")
        return out[out > 0].mean()

    model, batch = Net(), images()
    step = found(loss_fn, model, batch, microbatch=3)
    step(batch)
    before = copy.deepcopy(model.state_dict())
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    torchs, numpy, wrong[0] = torch.get_rng_state(), np.random.get_state()[1].copy(), True
    forward = model.body.__dict__.get("forward")
    with pytest.raises((ValueError, RuntimeError, fullbatch.CaptureError)):
        step(batch)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads, strict=True))
    assert torch.equal(torchs, torch.get_rng_state()) and (numpy == np.random.get_state()[1]).all()
    assert model.body.__dict__.get("forward") is forward and torch.is_grad_enabled()
    wrong[0] = False
    agrees(step, loss_fn, model, batch)


def test_ledger_closure_prepare_and_a_short_batch() -> None:
    model, batch = convnet(), images()
    assert fullbatch.explain(masked, model, batch).peak > 0
    step = found(masked, model, batch, microbatch=3)
    prepared = step.prepare([images(5), tuple(torch.empty(t.shape, device="meta") for t in images(4))])
    assert {shape.samples for shape in prepared.shapes} == {4, 5}
    captures = step._frontend.captures
    agrees(step, masked, model, images(5))
    assert step._frontend.captures == captures
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    before = float(masked(copy.deepcopy(model), batch))
    optimizer.step(step.closure(batch))
    assert float(masked(copy.deepcopy(model), batch)) < before


def test_a_saved_plan_and_a_compiled_step(tmp_path: Any) -> None:
    model, batch = convnet(), images()
    found(masked, model, batch, microbatch=3).plan.save(tmp_path / "plan.json")
    step = found(masked, model, batch, plan=tmp_path / "plan.json")
    assert step.plan.loaded
    agrees(step, masked, model, batch)
    agrees(found(masked, model, batch, microbatch=3, compile=True), masked, model, batch)


def test_time_first_arguments_by_name_and_a_dict_of_models() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.GRU(4, 6), nn.Linear(6, 2)

        def forward(self, *, steps: Tensor, name: str, scale: Any = None) -> dict[str, Tensor]:
            assert name == "time first"
            return {"out": self.out(self.rnn(steps)[0])}

    def loss_fn(models: Any, batch: Any) -> Tensor:
        out = models["net"](steps=batch.transpose(0, 1), name="time first")["out"]
        return branching(out)[out > 0].square().mean()

    torch.manual_seed(0)
    models, batch = {"net": Recurrent()}, torch.randn(BATCH, 5, 4)
    step = found(loss_fn, models, batch, microbatch=3)
    assert step.plan.batch == BATCH and not step.plan.full_batch_nodes[1:]
    expected = loss_fn(copy.deepcopy(models), batch)
    reference = copy.deepcopy(models)
    loss_fn(reference, batch).backward()
    torch.testing.assert_close(step(batch), expected.detach(), rtol=1e-12, atol=0)
    for one, other in zip(models["net"].parameters(), reference["net"].parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-12)


def test_a_gradient_within_the_loss() -> None:
    """By the outputs it is exact; by what lies before them it would be none, and is refused."""

    def penalty(model: Any, batch: Any) -> Tensor:
        out = model(batch[0])
        (by_out,) = torch.autograd.grad(branching(out)[out > 0].square().sum(), out, create_graph=True)
        return by_out.square().mean()

    model, batch = convnet(), images()
    agrees(found(penalty, model, batch, microbatch=3), penalty, model, batch)

    def adaptive(model: Any, batch: Any) -> Tensor:
        out = model(batch[0])
        value = branching(out)[out > 0].mean()
        grad = torch.autograd.grad(value, model[-1].weight, retain_graph=True, allow_unused=True)[0]
        return value * (1.0 if grad is None else grad.norm().detach())

    step = found(adaptive, model, batch, microbatch=3)
    with pytest.raises(fullbatch.LossError, match=r"asks for the gradient by model\.6\.weight"):
        step(batch)

    def backwards(model: Any, batch: Any) -> Tensor:
        out = model(batch[0])
        value = out[out > 0].sum()
        if value.item() > 0:
            value.backward()
        return value

    with pytest.raises(fullbatch.LossError, match=r"calls backward\(\)"):
        found(backwards, model, batch, microbatch=3)(batch)
