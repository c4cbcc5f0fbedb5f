"""Against plain PyTorch on the whole batch: gradients, loss and buffers to 1e-10 in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullbatch
from cases.reference import collect, compare
from eager.support import Net, agrees, plain, squeezed, token_loss, tokens


@pytest.mark.parametrize("microbatch", [1, 2, 3, 5, None])
def test_a_model_that_branches_on_data_and_calls_numpy(microbatch: int | None) -> None:
    model, batch = Net(), tokens([32, 9, 1, 30, 12])
    with pytest.raises(fullbatch.CaptureError):
        fullbatch.Step(lambda m, b: token_loss(m, b)[0], model, batch)
    step = fullbatch.eager.Step(token_loss, model, batch, microbatch=microbatch)
    agrees(step, token_loss, model, batch)
    agrees(step, token_loss, model, tokens([1, 2, 3], seed=3))


def test_microbatches_are_weighted_by_their_counts() -> None:
    model, batch = Net(), tokens([10, 1, 1, 1])
    step = fullbatch.eager.Step(token_loss, model, batch, microbatch=1)
    agrees(step, token_loss, model, batch)
    # The mean of the microbatches' means is another number: the test can tell them apart.
    mean = torch.stack([F.cross_entropy(model(x[None])[0], y) for x, y in zip(*batch, strict=True)]).mean()
    assert abs(mean - step(batch)) > 1e-4


def test_a_microbatch_without_a_valid_token() -> None:
    model, batch = Net(), tokens([0, 5, 0, 2])
    agrees(fullbatch.eager.Step(token_loss, model, batch, microbatch=1), token_loss, model, batch)


def test_a_microbatch_that_no_parameter_reaches() -> None:
    model = nn.Linear(3, 1)

    def loss_fn(m: Any, x: Tensor) -> tuple[Tensor, int]:
        kept = x[x[:, 0] > 0]
        return (m(kept).square().sum() if len(kept) else torch.zeros(())), len(x)

    x = torch.randn(6, 3)
    x[:2, 0] = -1.0
    agrees(fullbatch.eager.Step(loss_fn, model, x, microbatch=2), loss_fn, model, x)


def test_gradients_are_added_to_those_that_are_there() -> None:
    model, batch = Net(), tokens([10, 1, 1, 1])
    step = fullbatch.eager.Step(token_loss, model, batch, microbatch=2)
    step(batch)
    once = {name: p.grad.clone() for name, p in model.named_parameters()}
    kept = {name: p.grad for name, p in model.named_parameters()}
    step(batch)
    for name, p in model.named_parameters():
        assert p.grad is kept[name]
        torch.testing.assert_close(p.grad, 2 * once[name], rtol=1e-12, atol=1e-14)


def test_a_hook_on_a_parameter_sees_the_gradient_of_the_whole_batch_once() -> None:
    model, batch = Net(), tokens([10, 1, 1, 1])
    seen: list[Tensor] = []
    handle = model.out.weight.register_hook(lambda g: seen.append(g.clone()))
    late: list[Tensor] = []
    model.out.bias.register_post_accumulate_grad_hook(lambda p: late.append(p.grad.clone()))
    step = fullbatch.eager.Step(token_loss, model, batch, microbatch=1)
    assert not seen and not late
    reference = plain(token_loss, model, batch)
    seen.clear(), late.clear()
    step(batch)
    assert len(seen) == len(late) == 1
    torch.testing.assert_close(seen[0], reference.grads["out.weight"], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(late[0], reference.grads["out.bias"], rtol=1e-10, atol=1e-12)
    handle.remove()
    step(batch)
    assert len(seen) == 1


def test_a_parameter_outside_of_the_model_and_a_batch_with_gradients() -> None:
    model, scale = nn.Linear(3, 2), nn.Parameter(torch.tensor(1.5))

    def loss_fn(m: Any, x: Tensor) -> tuple[Tensor, int]:
        return (scale * m(x)).tanh().sum(), x.numel()

    x = torch.randn(6, 3, requires_grad=True)
    step = fullbatch.eager.Step(loss_fn, model, x, microbatch=2)
    assert scale.grad is None and x.grad is None
    loss, count = loss_fn(model, x)
    expected = torch.autograd.grad(loss / count, [scale, x, model.weight])
    step(x)
    for tensor, reference in zip([scale, x, model.weight], expected, strict=True):
        torch.testing.assert_close(tensor.grad, reference, rtol=1e-12, atol=1e-14)


def test_a_penalty_on_gradients_inside_of_the_loss() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss_fn(m: Any, x: Tensor) -> tuple[Tensor, int]:
        x = x.clone().requires_grad_()
        out = m(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.square().sum() + slope.square().sum(), len(x)

    x = torch.randn(5, 3)
    agrees(fullbatch.eager.Step(loss_fn, model, x, microbatch=2), loss_fn, model, x)


def test_frozen_inputs_keep_their_gradient_under_checkpoints() -> None:
    """huggingface/transformers#26221: a reentrant checkpoint whose input needs no gradient loses those inside of it."""
    model, batch = Net(), tokens([32, 9, 1, 30])
    step = squeezed(token_loss, model, batch)
    assert "blocks.0" in step.plan.checkpointed  # its input is the batch
    agrees(step, token_loss, model, batch)
    model.blocks[1].requires_grad_(False)
    agrees(step, token_loss, model, batch)
    assert model.blocks[0].wide.weight.grad.abs().max() > 0
    assert model.blocks[1].wide.weight.grad is None


def test_half_precision_is_summed_in_float32() -> None:
    """1 + 2**-9 is 1 in bfloat16: 64 microbatches added in bfloat16 would lose what they bring."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    x = torch.full((65, 1), 2.0**-9, dtype=torch.bfloat16)
    x[0] = 1.0

    def loss_fn(m: Any, x: Tensor) -> tuple[Tensor, int]:
        return m(x).sum(), 1 if x[0] == 1 else 0

    step = fullbatch.eager.Step(loss_fn, model, x, microbatch=1)
    step(x)
    assert model.weight.grad.item() == 1.125
    assert model.weight.grad.dtype == torch.bfloat16


def test_sums_of_half_precision_do_not_overflow() -> None:
    """The mean of the gradients fits into float16; their sum over a microbatch of eight does not."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.float16)
    x = torch.full((64, 1), 60000.0, dtype=torch.float16)
    loss_fn = lambda m, x: (m(x).float().sum(), len(x))  # noqa: E731
    fullbatch.eager.Step(loss_fn, model, x, microbatch=8)(x)
    torch.testing.assert_close(model.weight.grad.float(), torch.full((1, 1), 60000.0).float(), rtol=1e-3, atol=0)


def test_a_scaler_multiplies_the_gradient_and_not_the_loss() -> None:
    model, batch = Net(), tokens([10, 1, 1, 1])
    step = fullbatch.eager.Step(token_loss, model, batch, microbatch=2)
    loss = agrees(step, token_loss, model, batch)
    once = model.out.weight.grad.clone()
    model.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    assert torch.equal(step(batch, scaler=scaler), loss)
    torch.testing.assert_close(model.out.weight.grad, 1024 * once, rtol=1e-12, atol=0)


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("squeeze", [False, True])
def test_autocast(where: str, squeeze: bool) -> None:
    model, batch = Net(width=16).float(), tokens([32, 9, 1, 30], width=16)
    batch = batch[0].float(), batch[1]

    def loss_fn(m: Any, b: Any) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=where == "inside" or torch.is_autocast_enabled("cpu")):
            return token_loss(m, b)

    with torch.autocast("cpu", torch.bfloat16, enabled=where == "outside"):
        step = squeezed(loss_fn, model, batch) if squeeze else fullbatch.eager.Step(loss_fn, model, batch, microbatch=2)
        loss = step(batch)
        whole, count = loss_fn(model, batch)
    gradients = torch.autograd.grad(whole / count, list(model.parameters()))
    scale = max(float(g.abs().max()) for g in gradients)
    assert abs(float(loss - (whole / count).detach())) < 1e-2 * float(loss)
    for parameter, reference in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad.dtype == torch.float32
        assert float((parameter.grad - reference).abs().max()) < 3e-2 * scale


def test_scripted_and_parametrized_parts() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scripted = torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.Tanh()))
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
            self.recurrent = nn.LSTM(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.recurrent(self.normed(self.scripted(x)))[0]

    model, x = Parts(), torch.randn(5, 6, 3)
    loss_fn = lambda m, x: (m(x).square().sum(), len(x))  # noqa: E731
    step = fullbatch.eager.Step(loss_fn, model, x, microbatch=2)
    step(x)
    loss, count = loss_fn(model, x)
    gradients = torch.autograd.grad(loss / count, list(model.parameters()))
    for parameter, reference in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, reference, rtol=1e-10, atol=1e-12)


def test_lists_and_arrays_with_an_entry_a_sample_are_cut() -> None:
    model = nn.Linear(3, 2)
    batch = {"x": torch.randn(5, 3), "kind": ["a", "b", "a", "b", "b"], "weight": np.arange(1.0, 6.0), "name": "run"}

    def loss_fn(m: Any, b: Any) -> tuple[Tensor, float]:
        signs = torch.tensor([1.0 if kind == "a" else -2.0 for kind in b["kind"]])
        return (m(b["x"]).sin().sum(1) * signs * torch.from_numpy(b["weight"])).sum(), b["weight"].sum()

    step = fullbatch.eager.Step(loss_fn, model, batch, microbatch=2)
    assert any("batch['kind'], batch['weight']" in note for note in step.plan.notes)
    agrees(step, loss_fn, model, batch)


def test_samples_of_different_sizes_in_lists() -> None:
    """As detectors take them: a list of images and a list of dicts of boxes."""
    model = nn.Conv2d(3, 4, 3)
    images = [torch.randn(3, 6 + n, 8 - n) for n in range(4)]
    targets = [{"boxes": torch.randn(n, 2), "label": n} for n in range(4)]

    def loss_fn(m: Any, b: Any) -> tuple[Tensor, int]:
        loss = torch.zeros(())
        for image, target in zip(*b, strict=True):
            score = m(image[None]).mean()
            loss = loss + (score - target["boxes"]).square().sum() + score * target["label"]
        return loss, sum(len(target["boxes"]) for target in b[1])

    batch = images, targets
    step = fullbatch.eager.Step(loss_fn, model, batch, microbatch=3, batch_dims="list")
    assert (step.plan.batch, step.plan.microbatches) == (4, 2)
    agrees(step, loss_fn, model, batch)


def test_a_shared_tensor_and_another_batch_dimension() -> None:
    model = nn.Linear(3, 2)
    batch = torch.randn(4, 6, 3), torch.randn(2)

    def loss_fn(m: Any, b: Any) -> tuple[Tensor, int]:
        return (m(b[0]) * b[1]).sin().sum(), b[0].shape[1]

    step = fullbatch.eager.Step(loss_fn, model, batch, microbatch=4, batch_dims=(1, None))
    assert any("batch[1]" in note for note in step.plan.notes)
    agrees(step, loss_fn, model, batch)


def test_models_in_a_dict() -> None:
    models = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(4, 1)})
    model = dict(models.items())
    loss_fn = lambda m, x: (m["b"](m["a"](x).sin()).square().sum(), len(x))  # noqa: E731
    x = torch.randn(5, 3)
    step = fullbatch.eager.Step(loss_fn, model, x, microbatch=2)
    reference = plain(loss_fn, model, x)
    errors = compare(collect(step(x), model), reference)
    assert errors.within(1e-10), errors
