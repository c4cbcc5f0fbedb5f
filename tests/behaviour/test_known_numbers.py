"""A number that is known before the step runs is one, though the code takes it out of a tensor; and it is watched."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullbatch
from behaviour.asserting import both, negated, neither
from behaviour.support import agrees, captures, clear, make, pair


def _captured(loss_fn: Any) -> Any:
    """As the half of a pair that is captured whole: what is refused there is split in two where it stands alone."""
    return loss_fn, lambda outputs, batch: outputs


class Padded(nn.Module):
    """Codecs of transformers keep a padding as an integer buffer, and compute the other one from it."""

    def __init__(self, mode: str = "constant") -> None:
        super().__init__()
        self.conv, self.mode = nn.Conv1d(1, 2, 3), mode
        self.padding = nn.Buffer(torch.tensor(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        right = torch.ceil(torch.tensor(x.shape[-1]) / 4).to(torch.int64) * 4 - x.shape[-1]
        if x.shape[-1] <= max(self.padding, right):
            x = F.pad(x, (0, 1))
        return self.conv(F.pad(x, (self.padding, right), self.mode)).square()


def _of_padded(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch[:, None]).mean()


@pytest.mark.parametrize("mode", ["constant", "reflect"])
def test_a_padding_in_a_buffer(mode: str) -> None:
    model, batch = Padded(mode), torch.randn(6, 7)
    step = make(_of_padded, model, batch)
    agrees(step, _of_padded, model, batch)
    for padding, count in ((1, 2), (2, 2), (1, 2), (3, 3)):
        model.padding.fill_(padding)
        agrees(step, _of_padded, model, batch)
        assert captures(step) == count, "captured anew for another number, once"


class Counting(nn.Module):
    """The number that is read is another at each step, since the step writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.steps = nn.Buffer(torch.tensor(1))

    def forward(self, x: Tensor) -> Tensor:
        scale = 1 / self.steps.item()
        self.steps += 1
        return self.inner(x) * scale


def _of_counting(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def test_a_number_that_the_step_writes_is_refused() -> None:
    with pytest.raises(fullbatch.CaptureError, match="depends on the data"):
        make(_captured(_of_counting), Counting())


def _if_padded(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, ids = batch
    padding = ids.eq(0) & (ids < 9)
    out = model(x)
    if not padding.any():
        return out.square().mean()
    return out.square().mean(1).masked_fill(padding, 0.0).sum() / (~padding).sum()


def _as_item(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, ids = batch
    return model(x).square().mean() * (2.0 if (ids == 0).flatten().any().item() else 1.0)


def _negated(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, ids = batch
    full = not ids.eq(0).any()
    return model(x).square().mean() * (1.0 if full else 3.0)


@pytest.mark.parametrize("loss_fn", [_if_padded, _as_item, _negated])
def test_a_branch_on_the_ids_of_the_batch(loss_fn: Any) -> None:
    model, x = nn.Linear(3, 2), torch.randn(6, 3)
    full, padded = (x, torch.arange(6) + 1), (x, torch.arange(6))
    step = make(loss_fn, model, full)
    for batch in (full, padded, full, padded, padded):
        agrees(step, loss_fn, model, batch)
    assert captures(step) == 2
    agrees(step, loss_fn, model, (x[:5], torch.arange(5)))
    assert captures(step) == 3


def _changed_before(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, ids = batch
    flags = ids.clone()
    flags[0] = 0
    return model(x).square().mean() * (2.0 if (flags == 0).any() else 1.0)


def _changed_through_a_view(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, ids = batch
    flags = ids.clone()
    flags.view(-1)[0:1].zero_()
    return model(x).square().mean() * (2.0 if (flags == 0).any() else 1.0)


def _changed_through_a_function(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, ids = batch
    flags = ids.clone()
    for part in torch.chunk(torch.movedim(flags, 0, 0), 2):
        part.zero_()
    return model(x).square().mean() * (2.0 if (flags == 0).any() else 1.0)


def _length(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, ids = batch
    return model(x).square().mean() * (ids.max().item() + 1)


def _of_activations(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    out = model(batch[0])
    return out.square().mean() if out.sum() > 0 else out.mean()


@pytest.mark.parametrize(
    "loss_fn",
    [_changed_before, _changed_through_a_view, _changed_through_a_function, _length, _of_activations],
)
def test_what_is_not_known_stays_refused(loss_fn: Any) -> None:
    with pytest.raises(fullbatch.CaptureError):
        make(_captured(loss_fn), nn.Linear(3, 2), (torch.randn(6, 3), torch.arange(6) + 1))


@pytest.mark.parametrize("loss_fn", [both, neither, negated])
def test_assertions_of_several_conditions_hold_or_raise(loss_fn: Any) -> None:
    model, (x, y) = nn.Linear(3, 2), pair()
    step = make(loss_fn, model)
    agrees(step, loss_fn, model, (x, y))
    clear(model)
    with pytest.raises(RuntimeError):
        step((x * 1000, y))
    assert all(p.grad is None for p in model.parameters())


def _layer_drop(model: nn.Module, batch: Any, bound: float, compare: Callable[[Any, float], Any]) -> Tensor:
    out = batch[0]
    if not compare(torch.rand([]), bound):
        out = model(out)
    return F.mse_loss(out[:, :2], batch[1])


def test_no_draw_is_below_zero() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return _layer_drop(model, batch, 0.0, operator.lt)

    model = nn.Linear(3, 2)
    agrees(make(loss_fn, model), loss_fn, model, pair())


@pytest.mark.parametrize(("bound", "compare"), [(0.5, operator.lt), (0.0, operator.le), (0.0, operator.gt)])
def test_a_draw_that_decides_is_refused(bound: float, compare: Any) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return _layer_drop(model, batch, bound, compare)

    with pytest.raises(fullbatch.CaptureError):
        make(_captured(loss_fn), nn.Linear(3, 2))


def _in_place(drawn: Tensor) -> Tensor:
    drawn.sub_(0.5)
    return drawn


def _through_a_view(drawn: Tensor) -> Tensor:
    drawn.view(1).mul_(-1)
    return drawn


def _by_index(drawn: Tensor) -> Tensor:
    drawn[()] = -1
    return drawn


def _as_out(drawn: Tensor) -> Tensor:
    torch.neg(drawn.clone(), out=drawn)
    return drawn


@pytest.mark.parametrize("change", [_in_place, _through_a_view, _by_index, _as_out])
def test_a_draw_that_is_changed_before_it_decides_is_refused(change: Callable[[Tensor], Tensor]) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return _layer_drop(model, batch, 0.0, lambda drawn, bound: change(drawn) < bound)

    with pytest.raises(fullbatch.CaptureError):
        make(_captured(loss_fn), nn.Linear(3, 2))


def test_a_number_behind_a_branch_that_is_not_taken_is_not_asked_for() -> None:
    table = torch.tensor([1, 2, 3, 4, 5])

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        x, mask, ids = batch
        out = model(x)
        if mask.any() and (table[ids] > 4).any():
            out = out * 2
        return out.square().mean()

    model, x = nn.Linear(3, 2), torch.randn(6, 3)
    first = x, torch.ones(6, dtype=torch.bool), torch.tensor([0, 4, 1, 1, 1, 1])
    step = make(loss_fn, model, first)
    agrees(step, loss_fn, model, first)
    agrees(step, loss_fn, model, (x, torch.zeros(6, dtype=torch.bool), torch.tensor([99, 0, 0, 0, 0, 0])))
