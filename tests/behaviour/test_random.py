"""Random operators: from the seed alone, with the plain distribution, the same in a recompute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullbatch
from behaviour.support import clear, gradients, make


def _dropout_of_weights(model: Any, x: Tensor) -> Any:
    kept = F.dropout(x, 0.25, training=True)
    out = model(kept)
    return out.sum(), kept


def test_a_seed_gives_the_same_step() -> None:
    model, x = nn.Linear(5, 1), torch.randn(8, 5)
    step = make(_dropout_of_weights, model, x, microbatch=3)
    results = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        clear(model)
        loss, kept = step(x)
        results.append((loss, kept, model.weight.grad.clone()))
    first, again, other = results
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[1], other[1])


def test_the_gradient_is_that_of_the_masks_that_were_drawn() -> None:
    model, x = nn.Linear(5, 1), torch.randn(8, 5)
    _, kept = make(_dropout_of_weights, model, x, microbatch=3)(x)
    assert (kept == 0).any()
    # A linear model's gradient is the sum of the inputs that it saw.
    torch.testing.assert_close(model.weight.grad, kept.sum(0, keepdim=True), rtol=1e-12, atol=1e-12)
    assert ((kept == 0) | ((kept - x / 0.75).abs() < 1e-12)).all()


def test_masks_have_the_plain_distribution() -> None:
    model, x = nn.Linear(50, 1), torch.ones(64, 50)
    step = make(_dropout_of_weights, model, x, microbatch=10)
    masks = torch.stack([step(x)[1] != 0 for _ in range(30)]).double()
    count = masks.numel()
    assert abs(masks.mean().item() - 0.75) < 5 * (0.75 * 0.25 / count) ** 0.5
    # No two samples of a step, and no two steps, share a mask.
    rows = masks.flatten(0, 1)
    assert torch.unique(rows, dim=0).shape[0] > 0.99 * rows.shape[0]
    # Neighbouring microbatches are independent: the correlation of the masks of samples 10 apart is that of chance.
    a, b = masks[:, :-10] - 0.75, masks[:, 10:] - 0.75
    assert abs((a * b).mean().item()) < 5 * 0.75 * 0.25 / a.numel() ** 0.5


def test_the_loss_has_the_plain_mean_and_spread() -> None:
    model, x = nn.Linear(20, 1), torch.randn(16, 20)

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        return model(F.dropout(x, 0.5, training=True)).pow(2).mean()

    step = make(loss_fn, model, x, microbatch=5)
    ours = torch.stack([step(x) for _ in range(300)])
    with torch.no_grad():
        plain = torch.stack([loss_fn(model, x) for _ in range(300)])
    error = (plain.var() / 300 + ours.var() / 300).sqrt()
    assert abs(ours.mean() - plain.mean()) < 5 * error
    assert 0.7 < ours.std() / plain.std() < 1.4


class Deep(nn.Module):
    """Large activations, so that a small budget recomputes through dropout and a barrier."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.dropout(norm(layer(x)).relu(), 0.3, self.training)
        return x


def test_a_recompute_sees_the_mask_of_the_forward_bit_by_bit() -> None:
    model, x = Deep(), torch.randn(64, 16)

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        return model(x).pow(2).mean()

    with pytest.raises(fullbatch.BudgetError) as least:
        make(loss_fn, model, x, memory=10, microbatch=16)
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    results, recomputed = [], []
    for memory in (least.value.smallest, "1GiB"):
        for name, b in model.named_buffers():
            b.copy_(buffers[name])
        clear(model)
        step = fullbatch.Step(loss_fn, model, x, memory=memory, microbatch=16)
        torch.manual_seed(5)
        results.append((step(x), gradients(model), {n: b.clone() for n, b in model.named_buffers()}))
        recomputed.append(step.plan.recomputed)
    assert recomputed[0] > recomputed[1], "the budgets lead to different plans"
    (loss, grads, after), (other_loss, other_grads, other_after) = results
    assert torch.equal(loss, other_loss)
    for name, grad in grads.items():
        assert torch.equal(grad, other_grads[name]), name
    for name, value in after.items():
        assert torch.equal(value, other_after[name]), name


@pytest.mark.parametrize("microbatch", [1, 3, 8])
def test_the_default_generator_advances_by_one_draw_whatever_the_plan(microbatch: int) -> None:
    model, x = nn.Linear(5, 1), torch.randn(8, 5)
    step = make(_dropout_of_weights, model, x, microbatch=microbatch)
    torch.manual_seed(3)
    torch.empty((), dtype=torch.int64).random_()
    expected = torch.get_rng_state()
    torch.manual_seed(3)
    step(x)
    assert torch.equal(torch.get_rng_state(), expected)


def test_a_step_without_random_operators_leaves_the_generator_alone() -> None:
    model, x = nn.Linear(5, 1), torch.randn(8, 5)
    before = torch.get_rng_state()
    make(lambda model, x: model(x).sum(), model, x)(x)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "draw",
    [
        lambda out: torch.rand_like(out),
        lambda out: torch.randn(out.shape),
        lambda out: torch.bernoulli(torch.full_like(out, 0.5)),
        lambda out: torch.randint(0, 9, out.shape),
        lambda out: torch.empty_like(out).uniform_(),
        lambda out: torch.randperm(out.shape[0]),
        lambda out: F.gumbel_softmax(out.detach(), dim=1),
    ],
    ids=["rand_like", "randn", "bernoulli", "randint", "uniform_", "randperm", "gumbel"],
)
def test_draws_inside_loss_fn_differ_between_steps_and_samples(draw: Any) -> None:
    def loss_fn(model: Any, x: Tensor) -> Any:
        out = model(x)
        noise = draw(out)
        return (out * noise.view(out.shape[0], -1)).sum(), noise

    model, x = nn.Linear(5, 4), torch.randn(6, 5)
    step = make(loss_fn, model, x, microbatch=2)
    torch.manual_seed(0)
    clear(model)
    loss, first = step(x)
    seen = noise = first.view(6, -1) * torch.ones(6, 4)
    torch.testing.assert_close(model.weight.grad, noise.t().double() @ x, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(loss, (model(x) * seen).sum().detach())
    _, second = step(x)
    assert not torch.equal(first, second)
    assert not torch.equal(first[:2], first[2:4])
