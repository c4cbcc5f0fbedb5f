"""What surrounds the eager loss is what surrounds it in plain PyTorch; a step that raises changes nothing."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullbatch
from cases.reference import buffers_of, collect, compare, grads_of, plain
from split.support import BATCH, CASES, agrees, composed, convnet, first, images, step_of


def masked(outputs: Tensor, batch: Any) -> Tensor:
    return outputs.movedim(1, -1)[batch[1] > 0.4].square().mean()


class Criterion(nn.Module):
    """A loss with parameters, and a running value, of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, outputs: Tensor, batch: Any) -> Tensor:
        with torch.no_grad():
            self.seen += 1
        return masked(outputs, batch) * self.scale.exp() + self.scale


def test_parameters_of_the_loss_get_their_gradient_with_the_others() -> None:
    model, criterion = convnet(), Criterion()
    reference = copy.deepcopy(criterion)
    case = first, criterion, model, images()
    step = step_of(case, microbatch=3)
    expected = plain(composed(first, reference), model, images())
    out = step(images())
    assert compare(collect(out, model), expected).within(1e-10)
    torch.testing.assert_close(criterion.scale.grad, reference.scale.grad, rtol=1e-12, atol=0)
    step(images())
    torch.testing.assert_close(criterion.scale.grad, 2 * reference.scale.grad, rtol=1e-9, atol=0)
    assert criterion.seen == 2


def test_a_parameter_that_forward_and_loss_read_gets_both_gradients_and_its_hook_once() -> None:
    model = convnet()
    last = model[-1].bias

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        return masked(outputs, batch) + last[last > -1].square().sum()

    twin = copy.deepcopy(model)
    found = masked(twin(images()[0]), images()) + twin[-1].bias[twin[-1].bias > -1].square().sum()
    found.backward()
    fired = []
    last.register_post_accumulate_grad_hook(lambda p: fired.append(p.grad.clone()))
    step_of((first, loss, model, images()), microbatch=3)(images())
    assert len(fired) == 1
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-9, atol=1e-12)


def test_a_hook_on_a_parameter_of_the_loss_is_refused() -> None:
    model, criterion = convnet(), Criterion()
    criterion.scale.register_hook(lambda grad: grad * 2)
    step = step_of((first, criterion, model, images()), microbatch=3)
    with pytest.raises(fullbatch.ModelError, match="register_hook"):
        step(images())
    assert all(parameter.grad is None for parameter in [*model.parameters(), criterion.scale])


@pytest.mark.parametrize("microbatch", [3, BATCH])
def test_the_loss_sees_and_changes_buffers_that_the_forward_changed(microbatch: int) -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = convnet()
            self.register_buffer("center", torch.full((4,), 0.1))

        def forward(self, x: Tensor) -> Tensor:
            found = self.body(x)
            self.center.mul_(0.9).add_(found.detach().mean((0, 2, 3)), alpha=0.1)
            return found

    model = Counted()

    def against(model: Any) -> Any:
        def loss(outputs: Tensor, batch: Any) -> Tensor:
            bigger = outputs.movedim(1, -1) - model.center
            model.center[model.center > 0] += 1
            return bigger[batch[1] > 0.4].square().mean() + model.body[1].running_mean.sum()

        return loss

    twin = copy.deepcopy(model)
    step = step_of((lambda m, b: m(b[0]), against(model), model, images()), microbatch=microbatch)
    for _ in range(2):
        for each in (model, twin):
            each.zero_grad()
        expected = against(twin)(twin(images()[0]), images())
        expected.backward()
        out = step(images())
        reference = collect(expected, twin)
        assert compare(collect(out, model), reference).within(1e-10)


def test_a_norm_that_the_loss_calls_again_is_updated_again() -> None:
    """BatchNorm's kernel writes running statistics without counting it as a change."""
    model, batch = convnet(8), images()

    def against(model: Any) -> Any:
        return lambda outputs, batch: masked(outputs + model[1](outputs), batch)

    twin = copy.deepcopy(model)
    expected = against(twin)(first(twin, batch), batch)
    expected.backward()
    out = step_of((first, against(model), model, batch), microbatch=3)(batch)
    assert compare(collect(out, model), collect(expected, twin)).within(1e-10)
    assert model[1].num_batches_tracked == 2


def test_a_gradient_by_what_lies_before_the_outputs_is_refused() -> None:
    model, batch = convnet(), images()

    def by_weight(outputs: Tensor, batch: Any) -> Tensor:
        value = masked(outputs, batch)
        grad = torch.autograd.grad(value, model[-1].weight, retain_graph=True, allow_unused=True)[0]
        return value if grad is None else value * grad.norm()

    def backward(outputs: Tensor, batch: Any) -> Tensor:
        masked(outputs, batch).backward()
        return masked(outputs, batch)

    for loss, wrong in ((by_weight, r"by model\.6\.weight"), (backward, r"calls backward\(\)")):
        with pytest.raises(fullbatch.LossError, match=wrong):
            step_of((first, loss, model, batch), microbatch=3)(batch)
        assert all(parameter.grad is None for parameter in model.parameters())


class _Tower(nn.Module):
    """Features, and a head that is computed of them; `apart`: of what leads to them instead."""

    def __init__(self, apart: bool = False) -> None:
        super().__init__()
        self.body, self.head, self.apart = nn.Linear(6, 12), nn.Linear(12, 4), apart

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        features = torch.tanh(hidden)
        return features, self.head(hidden if self.apart else features)


def _tower_value(outputs: tuple[Tensor, Tensor], batch: Any) -> Tensor:
    features, logits = outputs
    return logits[logits > 0].square().sum() + features.square().mean()


def _hooked(at: int) -> Any:
    def loss(outputs: tuple[Tensor, Tensor], batch: Any) -> Tensor:
        outputs[at].register_hook(lambda grad: 0.1 * grad)
        return _tower_value(outputs, batch)

    return loss


def _by_output(at: int, **settings: Any) -> Any:
    def loss(outputs: tuple[Tensor, Tensor], batch: Any) -> Tensor:
        value = _tower_value(outputs, batch)
        (grad,) = torch.autograd.grad(value, outputs[at], retain_graph=True, **settings)
        return value * grad.norm().detach()

    return loss


def test_gradients_by_an_output_of_which_another_is_made_are_refused() -> None:
    """In plain PyTorch they have the way through the other output too; the loss's own graph does not."""
    batch = (torch.randn(7, 6),)
    for loss, wrong in (
        (_hooked(0), r"register_hook on an output of shape \(7, 12\), of which another output is made"),
        (_by_output(0), r"by an output of shape \(7, 12\), of which another output is made"),
        (_by_output(0, create_graph=True), "of which another output is made"),
        (_by_output(0, allow_unused=True), "of which another output is made"),
    ):
        model = _Tower()
        with pytest.raises(fullbatch.LossError, match=wrong):
            step_of((first, loss, model, batch), microbatch=3)(batch)
        with pytest.raises(fullbatch.LossError, match=wrong):
            fullbatch.Step(lambda m, b, loss=loss: loss(m(b[0]), b), model, batch, microbatch=3)(batch)
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("apart", [False, True])
def test_gradients_by_other_outputs_are_those_of_the_plain_step(apart: bool) -> None:
    batch = (torch.randn(7, 6),)
    for at in (0, 1) if apart else (1,):
        for loss in (_hooked(at), _by_output(at)):
            case = first, loss, _Tower(apart), batch
            agrees(step_of(case, microbatch=3), case)


def test_the_certificate_repeats_draws_of_numpy_and_python() -> None:
    def loss(outputs: Tensor, batch: Any) -> Tensor:
        return masked(outputs, batch) * np.random.rand() + outputs.mean() * random.random()

    step = step_of((first, loss, convnet(), images()), microbatch=3)
    step(images())
    python, numpy = random.getstate(), np.random.get_state()[1].copy()
    assert step.verify(images()).ok
    assert python == random.getstate() and (numpy == np.random.get_state()[1]).all()


def _dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))


def _noisy(outputs: Tensor, batch: Any) -> Tensor:
    chosen = outputs[torch.rand(len(outputs)) < 0.7]
    return chosen.square().sum() + outputs.mean() * torch.rand(())


def test_draws_of_forward_and_loss_follow_the_seed_and_move_the_generator() -> None:
    model, batch = _dropping(), torch.randn(8, 6)
    step = step_of((lambda m, b: m(b), _noisy, model, batch), microbatch=3)

    def run(seed: int) -> tuple[Tensor, Tensor]:
        model.zero_grad()
        torch.manual_seed(seed)
        step(batch)
        return model[0].weight.grad.clone(), torch.rand(2)

    step(batch)
    (one, after), (same, then), (other, _) = run(1), run(1), run(2)
    assert torch.equal(one, same) and torch.equal(after, then) and not torch.equal(one, other)
    # The generator has moved by the step's one draw, and by what the loss draws.
    torch.manual_seed(1)
    torch.empty((), dtype=torch.int64).random_()
    torch.rand(len(batch)), torch.rand(())
    assert torch.equal(torch.rand(2), after)
    torch.manual_seed(1)
    step(batch)
    step(batch)
    assert not torch.equal(torch.rand(2), after)
    certificate = step.verify()
    assert certificate.ok and certificate.realised_masks, certificate


def test_masks_differ_from_step_to_step_where_the_loss_draws_nothing() -> None:
    model, batch = _dropping(), torch.randn(8, 6)
    step = step_of((lambda m, b: m(b), lambda out, b: out[out > 0].sum(), model, batch), microbatch=3)
    found = []
    for _ in range(3):
        model.zero_grad()
        step(batch)
        found.append(model[0].weight.grad.clone())
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])


def test_without_draws_in_the_forward_the_loss_draws_what_it_draws_in_the_plain_step() -> None:
    model, batch = convnet(1), images()

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        return _noisy(outputs.flatten(1), batch)

    step = step_of((first, loss, model, batch), microbatch=3)
    twin = copy.deepcopy(model)
    for each in (0, 1):
        torch.manual_seed(each)
        expected = plain(composed(first, loss), twin, batch)
        drawn = torch.rand(3)
        model.load_state_dict(twin.state_dict())
        model.zero_grad()
        torch.manual_seed(each)
        out = step(batch)
        assert torch.equal(drawn, torch.rand(3))
        assert compare(collect(out, model), expected).within(1e-10)
    assert step.verify().ok


@pytest.mark.parametrize("when", ["at once", "after it has run"])
def test_an_error_in_the_loss_leaves_everything_as_it_was(when: str) -> None:
    model, batch = nn.Sequential(convnet(), nn.Dropout(0.3)), images()
    wrong = [when == "at once"]

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        value = masked(outputs, batch) * torch.rand(()) * random.random() * np.random.rand()
        if wrong[0]:
            raise ValueError("no match")
        return value

    step = step_of((first, loss, model, batch), microbatch=3)
    if not wrong[0]:
        step(batch)
        wrong[0] = True
    grads, buffers = grads_of(model), buffers_of(model)
    torchs, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    with pytest.raises(ValueError, match="no match"):
        step(batch)
    for before, now in ((grads, grads_of(model)), (buffers, buffers_of(model))):
        for name, value in before.items():
            assert (value is None and now[name] is None) or torch.equal(value, now[name]), name
    assert torch.equal(torchs, torch.get_rng_state()) and python == random.getstate()
    assert (numpy == np.random.get_state()[1]).all()
    wrong[0] = False
    step(batch)


def test_outputs_batch_and_losses_that_are_refused() -> None:
    model, batch = convnet(), images()

    def refused(loss: Any, kind: type[Exception], match: str, forward: Any = first) -> None:
        with pytest.raises(kind, match=match):
            step_of((forward, loss, model, batch), microbatch=3)(batch)
        assert all(parameter.grad is None for parameter in model.parameters())

    def in_batch(outputs: Tensor, batch: Any) -> Tensor:
        batch[1].mul_(1.0)
        return outputs.mean()

    def in_place(outputs: Tensor, batch: Any) -> Tensor:
        with torch.no_grad():
            outputs.clamp_(max=1.0)
        return outputs.mean()

    def in_integers(outputs: Any, batch: Any) -> Tensor:
        outputs[1].add_(1)
        return outputs[0].mean()

    def in_weights(outputs: Tensor, batch: Any) -> Tensor:
        with torch.no_grad():
            model[0].weight.mul_(1.0)
        return outputs.mean()

    refused(in_weights, fullbatch.LossError, r"model\.0\.weight in place")
    refused(in_batch, fullbatch.LossError, r"batch\[1\] in place")
    refused(in_place, fullbatch.LossError, "one of the outputs in place")
    refused(in_integers, fullbatch.LossError, "outputs in place", lambda m, b: (m(b[0]), m(b[0]).argmax(1)))
    refused(lambda outputs, batch: outputs.mean((1, 2, 3)), fullbatch.LossError, r"shape \(7,\)")
    refused(lambda outputs, batch: 3.0, fullbatch.LossError, "a float")
    refused(lambda outputs, batch: outputs.detach().mean(), fullbatch.LossError, "no output of the forward reaches")
    refused(masked, fullbatch.LossError, "No output of the forward", lambda m, b: m(b[0]).detach())
    with pytest.raises(fullbatch.LossError, match="no pair of functions"):
        fullbatch.Step((first, masked, masked), model, batch)  # type: ignore[arg-type]


def test_forwards_that_branch_on_data_are_pointed_at_what_runs_them() -> None:
    for body in (
        lambda out, y: out.movedim(1, -1)[y > 0.4].mean(),
        lambda out, y: out.mean() * out.detach().max().item(),
        lambda out, y: out.mean() if out.mean() > 0 else -out.mean(),
    ):
        forward = lambda m, b, body=body: body(m(b[0]), b[1])  # noqa: E731
        with pytest.raises(fullbatch.CaptureError) as caught:
            fullbatch.Step((forward, lambda out, b: out), convnet(), images())
        assert "fullbatch.Step((forward, loss), model, batch)" in str(caught.value)


def test_the_loss_scale_is_applied_to_the_loss() -> None:
    model, batch = convnet(), images()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9)
    expected = plain(composed(first, masked), model, batch)
    step = step_of((first, masked, model, batch), microbatch=3)
    out = step(batch, scaler=scaler)
    assert abs(float(out - expected.loss)) < 1e-12
    for name, grad in grads_of(model).items():
        torch.testing.assert_close(grad, 512 * expected.grads[name], rtol=1e-9, atol=1e-9)


def test_autocast_around_the_step_holds_in_the_loss_and_not_in_its_backward() -> None:
    seen: list[Any] = []

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        product = batch[1] @ batch[1].mT
        seen.append((outputs.dtype, product.dtype, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        outputs.register_hook(lambda grad: seen.append(torch.is_autocast_enabled("cpu")))
        return outputs.float()[outputs > 0].mean() * product.float().mean()

    model, batch = convnet().float(), tuple(tensor.float() for tensor in images())
    step = step_of((first, loss, model, batch), microbatch=3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step(batch)
    assert seen == [(torch.bfloat16, torch.bfloat16, True, True), False]


def test_what_the_forward_stores_on_modules_reaches_the_loss() -> None:
    class Storing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.features, self.calls = convnet(), None, 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.features = self.body[0](x)
            return self.body[1:](self.features)

    model, batch = Storing(), images()

    def against(model: Any) -> Any:
        return lambda outputs, batch: masked(outputs, batch) + model.features[model.features > 0].mean()

    twin = copy.deepcopy(model)
    expected = against(twin)(twin(batch[0]), batch)
    expected.backward()
    out = step_of((lambda m, b: m(b[0]), against(model), model, batch), microbatch=3)(batch)
    assert compare(collect(out, model), collect(expected, twin)).within(1e-10)
    assert model.calls == 1
    torch.testing.assert_close(model.features, twin.features.detach(), rtol=1e-10, atol=1e-12)


def test_the_loss_may_change_between_calls_without_a_new_capture() -> None:
    model, batch = convnet(), images()
    weight = [1.0]

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        return masked(outputs, batch) * weight[0]

    case = first, loss, model, batch
    step = step_of(case, microbatch=3)
    agrees(step, case)
    captures = step._frontend.captures
    weight[0] = 3.0
    agrees(step, case)
    assert step._frontend.captures == captures
    model.eval()
    agrees(step, case)


def test_under_inference_mode_and_no_grad() -> None:
    case = CASES["boolean_mask"]()
    step = step_of(case, microbatch=3)
    expected = plain(composed(*case[:2]), case[2], case[3])
    for mode in (torch.no_grad, torch.inference_mode):
        case[2].load_state_dict(convnet().state_dict())
        case[2].zero_grad()
        with mode():
            out = step(case[3])
        assert compare(collect(out, case[2]), expected).within(1e-10)


def test_the_ledger_of_a_pair() -> None:
    forward, loss, model, batch = CASES["boolean_mask"]()
    ledger = fullbatch.explain((forward, loss), model, batch)
    assert ledger.peak > 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_half_precision_outputs_keep_their_dtype() -> None:
    model, batch = convnet().to(torch.bfloat16), images()
    batch = batch[0].to(torch.bfloat16), batch[1]
    step = step_of(
        (first, lambda out, b: F.softplus(out).movedim(1, -1)[b[1] > 0.4].mean(), model, batch), microbatch=7
    )
    loss = step(batch)
    assert loss.dtype == torch.bfloat16 and model[0].weight.grad.dtype == torch.bfloat16
