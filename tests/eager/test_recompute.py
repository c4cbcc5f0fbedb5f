"""Under checkpoints: the same masks, draws, lists, caches and statistics in the recompute, and no trace of it."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import fullbatch
from cases.reference import collect, compare
from eager.support import Block, Net, agrees, squeezed, token_loss, tokens


def by_hand(model: Any, batch: Any) -> Any:
    """One sample after another in plain PyTorch, without checkpoints, on a copy: what a seed gives at microbatch 1.

    Gradients are those of sum(loss_sum) / sum(count); generators go on as they would.
    """
    twin = copy.deepcopy(model)
    losses, counts = [], []
    for x, targets in zip(*batch, strict=True):
        loss, count = token_loss(twin, (x[None], targets[None]))
        losses.append(loss)
        counts.append(count)
    mean = torch.stack(losses).sum() / torch.stack(counts).sum()
    mean.backward()
    return collect(mean, twin)


def seeded(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)


def assert_as_by_hand(step: fullbatch.eager.Step, model: nn.Module, batch: Any) -> None:
    model.zero_grad()
    seeded(5)
    reference = by_hand(model, batch)
    drawn = torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index]
    seeded(5)
    errors = compare(collect(step(batch), model), reference)
    assert not errors.mismatches, errors
    assert max(errors.loss, errors.grads) <= 1e-10, errors
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert np.random.get_state()[1].tolist() == drawn[1]  # type: ignore[index]


@pytest.fixture
def batch() -> Any:
    return tokens([32, 9, 1, 30])


def test_every_microbatch_runs_under_checkpoints(batch: Any) -> None:
    model = Net()
    step = squeezed(token_loss, model, batch)
    runs = [0]
    model.blocks[0].wide.register_forward_hook(lambda *_: runs.__setitem__(0, runs[0] + 1))
    step(batch)
    assert runs[0] == 2 * 4
    assert "forward" not in vars(model.blocks[0])


def test_dropout(batch: Any) -> None:
    model = Net(p=0.5)
    step = squeezed(token_loss, model, batch)
    assert_as_by_hand(step, model, batch)
    results = []
    for seed in (3, 3, 4):
        model.zero_grad()
        seeded(seed)
        results.append((step(batch), model.out.weight.grad.clone()))
    first, again, other = results
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[1], other[1])


class Noisy(Block):
    """Noise from NumPy's global generator and from one of its own."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.own = np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        noise = np.random.rand(*x.shape) + self.own.random(x.shape)
        return super().forward(x * torch.from_numpy(1 + 0.1 * noise))


def test_random_numbers_of_numpy(batch: Any) -> None:
    model = Net(block=Noisy)
    step = squeezed(token_loss, model, batch)
    assert any("random numbers of NumPy or Python" in note for note in step.plan.notes)
    assert_as_by_hand(step, model, batch)


class Recording(Block):
    """Appends to a list and counts, and computes with both."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.kept: list[Tensor] = []
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out = super().forward(x) * self.calls
        self.kept.append(out.square().sum())
        return out + len(self.kept)


def recording_loss(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    for block in model.blocks:
        block.kept.clear()
    loss, count = token_loss(model, batch)
    return loss + 0.01 * sum(kept for block in model.blocks for kept in block.kept), count


def test_a_list_that_forward_appends_to_and_a_counter(batch: Any) -> None:
    """pytorch/pytorch#155171: a list grows once more in the recompute."""
    model = Net(block=Recording)
    step = squeezed(recording_loss, model, batch)
    assert len(step.plan.checkpointed) >= 3
    assert [block.calls for block in model.blocks] == [0] * 4  # planning counts for nothing
    agrees(step, recording_loss, model, batch)
    assert [(block.calls, len(block.kept)) for block in model.blocks] == [(1, 1)] * 4
    for block in model.blocks:
        block.kept.clear()  # a copy of the model for the reference cannot have graphs in it
    agrees(step, recording_loss, model, batch)
    assert [(block.calls, len(block.kept)) for block in model.blocks] == [(2, 1)] * 4
    assert any("blocks.0.kept" in note for note in step.plan.notes)


class Spectral(Block):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.wide = spectral_norm(self.wide)


@pytest.mark.parametrize("squeeze", [False, True])
def test_a_power_iteration_moves_once_a_step(batch: Any, squeeze: bool) -> None:
    model = Net(block=Spectral)
    make = squeezed if squeeze else fullbatch.eager.Step
    step = make(token_loss, model, batch, **({} if squeeze else {"microbatch": 1}))
    agrees(step, token_loss, model, batch)
    agrees(step, token_loss, model, batch)


class Normed(Block):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.norm = nn.BatchNorm1d(width, momentum=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x.mT).mT)


@pytest.mark.parametrize("squeeze", [False, True])
@pytest.mark.parametrize("momentum", [0.3, None])
def test_batch_norm_makes_one_update_with_the_mean_of_the_microbatches(
    batch: Any, squeeze: bool, momentum: float | None
) -> None:
    model = Net(block=Normed)
    for block in model.blocks:
        block.norm.momentum = momentum
    start = copy.deepcopy(model.state_dict())
    options: dict[str, Any] = {"allow_inexact": True, **({} if squeeze else {"microbatch": 2})}
    step = (squeezed if squeeze else fullbatch.eager.Step)(token_loss, model, batch, **options)
    assert bool(step.plan.checkpointed) is squeeze
    assert all(torch.equal(value, start[name]) for name, value in model.state_dict().items())
    expected = []
    for first in range(0, 4, step.plan.microbatch):
        twin = copy.deepcopy(model)
        token_loss(twin, tuple(part[first : first + step.plan.microbatch] for part in batch))
        expected.append({name: value.double() for name, value in twin.named_buffers()})
    step(batch)
    for name, value in model.named_buffers():
        mean = torch.stack([buffers[name] for buffers in expected]).mean(0)
        torch.testing.assert_close(value.double(), mean, rtol=1e-12, atol=1e-14)
    assert [int(block.norm.num_batches_tracked) for block in model.blocks] == [1] * 4


class Counting(Block):
    """Computes with a buffer that it moves first, once it is told to."""

    def __init__(self, width: int, p: float = 0.0, started: bool = False) -> None:
        super().__init__(width, p)
        self.register_buffer("moved", torch.ones(()))
        self.started, self.calls = started, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.started:
            self.moved.add_(1)
        self.calls += 1
        return super().forward(x * self.moved)


def test_a_buffer_that_begins_to_move_after_planning(batch: Any) -> None:
    model = Net(block=Counting)
    step = squeezed(token_loss, model, batch, allow_inexact=True)
    agrees(step, token_loss, model, batch)
    for block in model.blocks:
        block.started = True
    agrees(step, token_loss, model, batch)
    agrees(step, token_loss, model, batch)
    assert [block.calls for block in model.blocks] == [3] * 4


def test_such_a_step_draws_what_it_would_if_the_buffer_had_been_known(batch: Any) -> None:
    results = []
    for started in (False, True):
        torch.manual_seed(0)
        model = Net(block=Counting, p=0.5, started=started)
        step = squeezed(token_loss, model, batch, allow_inexact=True)
        for block in model.blocks:
            block.started = True
        seeded(5)
        results.append((collect(step(batch), model), torch.get_rng_state()))
    (late, after), (known, expected) = results
    assert compare(late, known).within(0.0)
    assert torch.equal(after, expected)


class Layer:
    """Keys of one layer, as a cache that is made before the forward holds them."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None


class Cache:
    def __init__(self, layers: int) -> None:
        self.layers = [Layer() for _ in range(layers)]


class Pair:
    """A cache in a cache, as transformers' EncoderDecoderCache."""

    def __init__(self, layers: int) -> None:
        self.own, self.cross = Cache(layers), Cache(layers)


class Caching(Block):
    index = 0

    def forward(self, x: Tensor, cache: Pair | None = None) -> Tensor:
        assert cache is not None
        layer = cache.own.layers[self.index]
        layer.keys = x if layer.keys is None else torch.cat([layer.keys, x], 1)
        return super().forward(x) + layer.keys.sum(1, keepdim=True)


def test_a_cache_that_blocks_are_given_is_filled_once(batch: Any) -> None:
    model = Net(block=Caching)
    caches = []
    for index, block in enumerate(model.blocks):
        block.index = index

    def loss_fn(m: Any, b: Any) -> tuple[Tensor, Tensor]:
        cache = Pair(4)
        caches.append(cache)
        x = b[0]
        for block in m.blocks:
            x = block(x, cache=cache)
        return (x.square().sum((1, 2)) * (1 if x.sum() != 0 else 2)).sum(), torch.tensor(len(x))

    step = squeezed(loss_fn, model, batch)
    assert not any("recompute differs" in note for note in step.plan.notes)
    caches.clear()
    agrees(step, loss_fn, model, batch)
    assert all(layer.keys.shape[1] == 32 for cache in caches for layer in cache.own.layers)


class Global(Block):
    """Computes with a list that belongs to no module and is no argument: nothing can put it back."""

    shared: list[int] = []  # noqa: RUF012

    def forward(self, x: Tensor) -> Tensor:
        Global.shared.append(1)
        return super().forward(x * torch.tensor(1.0 + len(Global.shared)))


def test_a_module_whose_recompute_differs_is_not_checkpointed(batch: Any) -> None:
    def loss_fn(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
        Global.shared.clear()
        return token_loss(model, batch)

    model = Net(blocks=6)
    model.blocks[1] = Global(8)
    step = squeezed(loss_fn, model, batch)
    assert "blocks.1" not in step.plan.checkpointed
    assert any("recompute differs: blocks.1" in note for note in step.plan.notes)
    agrees(step, loss_fn, model, batch)


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.add_(self.back.bias))


def test_a_module_that_changes_its_input_is_not_checkpointed(batch: Any) -> None:
    model = Net(blocks=6)
    model.blocks[2] = InPlace(8)
    step = squeezed(token_loss, model, batch)
    assert "blocks.2" not in step.plan.checkpointed
    agrees(step, token_loss, model, batch)
