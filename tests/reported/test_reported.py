"""Faults that people reported of other remedies for memory: the wrong value made by hand, and the right one here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fullbatch
from cases.reference import Result, collect, compare, plain


def _clear(model: nn.Module) -> None:
    model.zero_grad(set_to_none=True)


def _agrees(step: fullbatch.Step, loss_fn: Any, model: Any, batch: Any, tolerance: float = 1e-12) -> Result:
    """One step from no gradient: loss, gradients and buffers are those of plain PyTorch."""
    reference = plain(loss_fn, model, batch)
    found = collect(step(batch), model)
    errors = compare(found, reference)
    assert errors.within(tolerance), errors
    return found


def _least(loss_fn: Any, model: Any, batch: Any, microbatch: int) -> fullbatch.Step:
    """The step at its smallest budget, where it recomputes."""
    with pytest.raises(fullbatch.BudgetError) as refused:
        fullbatch.Step(loss_fn, model, batch, memory=10, microbatch=microbatch)
    step = fullbatch.Step(loss_fn, model, batch, memory=refused.value.smallest, microbatch=microbatch)
    assert step.plan.recomputed > 0
    return step


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_a_short_last_batch_has_its_own_mean() -> None:
    """huggingface/accelerate and Lightning count a loader's batches: an incomplete window of accumulation at its end is
    divided by the full window, with updates of 1, 1, 0.5 where 1, 1, 1 are right."""
    data, parts = torch.ones(10, 1), 2
    weight = nn.Linear(1, 1, bias=False)

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        return model(x).mean()

    wrong, right = [], []
    for window in data.split(4):
        _clear(weight)
        for part in window.split(2):
            (loss_fn(weight, part) / parts).backward()
        wrong.append(weight.weight.grad.item())
    step = fullbatch.Step(loss_fn, weight, data[:4], microbatch=2)
    for window in data.split(4):
        _clear(weight)
        step(window)
        right.append(weight.weight.grad.item())
    assert wrong == [1, 1, 0.5]
    assert right == pytest.approx([1, 1, 1], abs=1e-15)


def test_the_mean_over_tokens_is_that_of_the_batch() -> None:
    """Trainers that take the mean of the microbatches' means: with sequences of 10, 1, 1 and 1 tokens the gradient is
    1.14 times the right one away from it."""
    lengths, width = torch.tensor([10, 1, 1, 1]), 10
    tokens = torch.where(torch.arange(4)[:, None] == 0, 1.0, 5.45).expand(4, width)[..., None].clone()
    valid = torch.arange(width) < lengths[:, None]
    model = nn.Linear(1, 1, bias=False)

    def loss_fn(model: Any, batch: Any) -> Tensor:
        tokens, valid = batch
        return (model(tokens).squeeze(-1) * valid).sum() / valid.sum()

    loss_fn(model, (tokens, valid)).backward()
    right = model.weight.grad.clone()
    _clear(model)
    for at in range(4):
        (loss_fn(model, (tokens[at : at + 1], valid[at : at + 1])) / 4).backward()
    wrong = ((model.weight.grad - right).abs().max() / right.abs().max()).item()
    assert wrong == pytest.approx(1.14, abs=0.005)
    _clear(model)
    fullbatch.Step(loss_fn, model, (tokens, valid), microbatch=1)((tokens, valid))
    assert ((model.weight.grad - right).abs().max() / right.abs().max()).item() < 1e-12


class Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(5, 4), nn.Linear(3, 4)
        self.logit_scale = nn.Parameter(torch.tensor(1.5))

    def features(self, batch: Any) -> tuple[Tensor, Tensor]:
        return F.normalize(self.image(batch[0]), dim=1), F.normalize(self.text(batch[1]), dim=1)

    def loss(self, image: Tensor, text: Tensor) -> Tensor:
        logits = self.logit_scale.exp() * image @ text.t()
        target = torch.arange(image.shape[0])
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2


def _clip_loss(model: Any, batch: Any) -> Tensor:
    return model.loss(*model.features(batch))


@pytest.mark.parametrize("parts", [2, 4])
def test_the_logit_scale_has_the_gradient_of_one_loss(parts: int) -> None:
    """mlfoundations/open_clip#761: with k microbatches, each of which repeats the loss on cached features, the gradient
    of the logit scale comes out k times too large."""
    torch.manual_seed(0)
    model, batch = Clip(), (torch.randn(8, 5), torch.randn(8, 3))
    _clip_loss(model, batch).backward()
    right = model.logit_scale.grad.item()
    _clear(model)
    size = 8 // parts
    with torch.no_grad():
        cached = model.features(batch)
    for at in range(0, 8, size):
        mine = model.features([each[at : at + size] for each in batch])
        model.loss(*(torch.cat([c[:at], m, c[at + size :]]) for c, m in zip(cached, mine, strict=True))).backward()
    assert model.logit_scale.grad.item() / right == pytest.approx(parts, rel=1e-12)
    _clear(model)
    fullbatch.Step(_clip_loss, model, batch, microbatch=size)(batch)
    assert model.logit_scale.grad.item() / right == pytest.approx(1.0, rel=1e-12)


def test_batch_norm_under_a_contrastive_loss_moves_once_a_batch() -> None:
    """luyug/GradCache#15: encoders with BatchNorm see the statistics of a chunk, and their buffers move at each."""
    torch.manual_seed(0)
    model, batch = Clip(), (torch.randn(8, 5) + 3, torch.randn(8, 3))
    model.image = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))  # type: ignore[assignment]
    reference = plain(_clip_loss, model, batch)
    step = fullbatch.Step(_clip_loss, model, batch, microbatch=2)
    found = collect(step(batch), model)
    assert compare(found, reference).within(1e-12)
    assert found.buffers["image.1.num_batches_tracked"] == 1
    with torch.no_grad():
        for part in batch[0].split(2):
            model.image(part)
    assert model.image[1].num_batches_tracked == 1 + 4, "by chunks"  # type: ignore[index]


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_recompute_moves_running_statistics_once(momentum: float | None) -> None:
    """pytorch/pytorch#96136: under checkpoint() the recompute moves BatchNorm's running statistics a second time."""

    def built() -> nn.Sequential:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16, momentum=momentum), nn.Tanh()) for _ in range(4)]
        return nn.Sequential(*layers)

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        return model(x).pow(2).mean()

    x, checkpointed, model = torch.randn(32, 16) + 2, built(), built()
    checkpoint(checkpointed, x, use_reentrant=False).pow(2).mean().backward()
    assert checkpointed[0][1].num_batches_tracked == 2
    found = _agrees(_least(loss_fn, model, x, 8), loss_fn, model, x, 1e-11)
    assert found.buffers["0.1.num_batches_tracked"] == 1


class Centred(nn.Module):
    """The centre of DINO's teacher, an exponential moving average over batches."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 4)
        self.register_buffer("centre", torch.zeros(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        out = self.head(x)
        loss = -(F.softmax((out.detach() - self.centre) / 0.1, 1) * F.log_softmax(out, 1)).sum(1).mean()
        self.centre.mul_(0.9).add_(out.detach().mean(0, keepdim=True), alpha=0.1)
        return loss


def test_a_centre_moves_as_with_the_whole_batch() -> None:
    """lightly-ai/lightly-train#968: a centre that moves at each microbatch is another after four of one sample than
    after one of four."""
    torch.manual_seed(0)
    x, start = torch.randn(4, 3), Centred()
    centres = []
    for microbatch in (4, 1):
        model = Centred()
        model.load_state_dict(start.state_dict())
        step = fullbatch.Step(lambda model, x: model(x), model, x, microbatch=microbatch)
        _agrees(step, lambda model, x: model(x), model, x)
        centres.append(model.centre.clone())
    torch.testing.assert_close(*centres, rtol=1e-12, atol=1e-14)
    with torch.no_grad():
        for part in x.split(1):
            start(part)
    assert (start.centre - centres[0]).abs().max() > 0.1 * centres[0].abs().max(), "one microbatch after another"


def test_frozen_inputs_keep_the_gradients_of_what_follows() -> None:
    """huggingface/transformers#26221: a reentrant checkpoint whose inputs need no gradient drops those of the weights
    inside of it."""
    torch.manual_seed(0)
    embedding = nn.Embedding(9, 16).requires_grad_(False)
    body = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16)) for _ in range(2)))
    model, head = nn.Sequential(embedding, body, nn.Linear(16, 1)), nn.Linear(16, 1)
    tokens = torch.randint(0, 9, (16, 8))

    def loss_fn(model: Any, tokens: Tensor) -> Tensor:
        return model(tokens).pow(2).mean()

    head(checkpoint(body, embedding(tokens), use_reentrant=True)).pow(2).mean().backward()
    assert all(p.grad is None for p in body.parameters())
    found = _agrees(_least(loss_fn, model, tokens, 8), loss_fn, model, tokens, 1e-11)
    assert all((found.grads[name] is None) == name.startswith("0.") for name in found.grads)


class Listing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            self.seen.append(x.detach().pow(2).mean())
        return x


def test_a_list_that_forward_appends_to_grows_once() -> None:
    """pytorch/pytorch#155171: a list that the forward appends to grows again in a checkpoint's recompute."""
    torch.manual_seed(0)
    model, checkpointed, x = Listing(), Listing(), torch.randn(32, 16)

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        return model(x).pow(2).mean() + 0.1 * torch.stack(model.seen).sum()

    checkpoint(checkpointed, x, use_reentrant=False).pow(2).mean().backward()
    assert len(checkpointed.seen) > 4
    loss_fn(model, x)
    expected, model.seen = list(model.seen), []
    step = _least(loss_fn, model, x, 8)
    assert not model.seen
    _agrees(step, loss_fn, model, x, 1e-11)
    torch.testing.assert_close(model.seen, expected, rtol=1e-12, atol=0)


def test_the_gradient_goes_through_the_statistics() -> None:
    """Two-phase BatchNorm, which takes the whole batch's statistics as constants: its gradient has a cosine of 0.84 to
    0.91 with the true one."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()) for _ in range(3)]
    model, batch = nn.Sequential(*layers, nn.Linear(32, 3)), (torch.randn(64, 32), torch.randint(0, 3, (64,)))

    def loss_fn(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def frozen(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer[0](x)
            mean, var = x.detach().mean(0), x.detach().var(0, unbiased=False)
            x = layer[2](F.batch_norm(x, mean, var, layer[1].weight, layer[1].bias, training=False))
        return model[-1](x)

    F.cross_entropy(frozen(batch[0]), batch[1]).backward()
    wrong = _flat(model)
    _clear(model)
    loss_fn(model, batch).backward()
    right = _flat(model)
    _clear(model)
    fullbatch.Step(loss_fn, model, batch, microbatch=16)(batch)
    assert 0.84 <= F.cosine_similarity(wrong, right, dim=0).item() <= 0.91
    assert F.cosine_similarity(_flat(model), right, dim=0).item() == pytest.approx(1.0, abs=1e-12)


def test_a_recompute_does_not_redraw_dropout() -> None:
    """allenai/OLMo-core#828: dropout that is drawn again in the recompute moves the loss and the gradient."""
    torch.manual_seed(0)
    x = torch.randn(32, 16)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.3)) for _ in range(4)))

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        return model(x).pow(2).mean()

    def redrawn(keep: bool) -> Tensor:
        _clear(model)
        torch.manual_seed(1)
        checkpoint(model, x, use_reentrant=False, preserve_rng_state=keep).pow(2).mean().backward()
        return _flat(model)

    kept, moved = redrawn(True), redrawn(False)
    assert (kept - moved).abs().max() > 0.01 * kept.abs().max()
    results = []
    for step in (_least(loss_fn, model, x, 8), fullbatch.Step(loss_fn, model, x, microbatch=8, memory="1GiB")):
        _clear(model)
        torch.manual_seed(1)
        results.append((step(x), _flat(model)))
        assert step.verify(x).ok
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
