"""The loss head in plain PyTorch: the value and the gradients of `F.cross_entropy(F.linear(h, w))`, in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fullbatch
from fullbatch._head import _kernel


def plain(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, cap: float | None, **options: object
) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    loss = F.cross_entropy(logits.flatten(0, -2), target.flatten(), **options)  # type: ignore[arg-type]
    return loss.view(target.shape) if loss.dim() else loss


def worst(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("tile", [256, 8 << 20])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_value_and_gradients(tile: int, reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tiles that cut tokens and words unevenly, and with one tile for all."""
    monkeypatch.setattr(_kernel, "TILE", tile)
    for biased, smoothing, cap, part in itertools.product((False, True), (0.0, 0.1, 1.0), (None, 2.0), (None, 1, 5)):
        hidden, weight = torch.randn(2, 7, 3, requires_grad=True), torch.randn(33, 3, requires_grad=True)
        bias = torch.randn(33, requires_grad=True) if biased else None
        target = torch.randint(33, (2, 7))
        target[0, :3], target[1, 6] = 4, -1
        options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": 4 if part else -1}
        target[target == -1] = options["ignore_index"]
        reference = plain(hidden, weight, target, bias, cap, **options)
        loss = fullbatch.linear_cross_entropy(hidden, weight, target, bias, softcap=cap, slice=part, **options)
        assert loss.shape == reference.shape
        assert worst((loss,), (reference,)) <= 1e-12
        leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
        scale = torch.randn(reference.shape)
        found = torch.autograd.grad((loss * scale).sum(), leaves)
        assert worst(found, torch.autograd.grad((reference * scale).sum(), leaves)) <= 1e-12


def test_operator_is_one_that_torch_accepts() -> None:
    hidden, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((7, 3), (5, 3), (5,)))
    given = (hidden, weight, bias, torch.randint(5, (7,)), -100, 0.1, 2.0, 2)
    torch.library.opcheck(torch.ops.fullbatch.token_losses.default, given)


def test_only_the_gradients_that_are_wanted() -> None:
    hidden, weight, target = torch.randn(7, 3, requires_grad=True), torch.randn(5, 3), torch.randint(5, (7,))
    (found,) = torch.autograd.grad(fullbatch.linear_cross_entropy(hidden, weight, target), hidden)
    (expected,) = torch.autograd.grad(plain(hidden, weight, target, None, None), hidden)
    assert worst((found,), (expected,)) <= 1e-12


def test_words_that_are_masked_out() -> None:
    """A bias of -inf takes a word out of the vocabulary, whole tiles of words among them."""
    hidden, weight = torch.randn(7, 3, requires_grad=True), torch.randn(600, 3, requires_grad=True)
    bias = torch.zeros(600)
    bias[:580] = float("-inf")
    target = torch.randint(580, 600, (7,))
    expected = plain(hidden, weight, target, bias, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_kernel, "TILE", 512)
        loss = fullbatch.linear_cross_entropy(hidden, weight, target, bias)
        found = torch.autograd.grad(loss, (hidden, weight))
    assert worst((loss,), (expected,)) <= 1e-12
    assert worst(found, torch.autograd.grad(expected, (hidden, weight))) <= 1e-12


def test_nothing_to_predict() -> None:
    hidden, weight, target = torch.randn(7, 3, requires_grad=True), torch.randn(5, 3), torch.full((7,), -100)
    assert fullbatch.linear_cross_entropy(hidden, weight, target).isnan()
    loss = fullbatch.linear_cross_entropy(hidden, weight, target, reduction="sum")
    (found,) = torch.autograd.grad(loss, hidden)
    assert loss == 0
    assert not found.any()


def test_not_a_number_stays_one() -> None:
    hidden, weight, target = torch.randn(7, 3), torch.randn(5, 3), torch.randint(5, (7,))
    for bad in (float("inf"), float("nan")):
        wrong = hidden.clone()
        wrong[3, 1] = bad
        losses = fullbatch.linear_cross_entropy(wrong, weight, target, reduction="none")
        assert [bool(loss.isfinite()) for loss in losses] == [at != 3 for at in range(7)]


def test_bad_arguments_are_listed_together() -> None:
    hidden, weight, target = torch.randn(7, 3), torch.randn(5, 3), torch.randint(5, (7,))
    with pytest.raises(fullbatch.LossError) as caught:
        fullbatch.linear_cross_entropy(
            hidden, weight.float(), target.int(), reduction="all", label_smoothing=2, slice=0
        )  # type: ignore[arg-type]
    assert [fault.what for fault in caught.value.faults] == [
        "The target is not of words.", "The dtypes do not fit.", "There is no such reduction.",
        "The smoothing is out of range.", "The slice is out of range.",
    ]  # fmt: skip
    for wrong in ((hidden, weight.t(), target), (hidden, weight, target[:6]), (hidden, weight, target, torch.zeros(4))):
        with pytest.raises(fullbatch.LossError, match="not fit"):
            fullbatch.linear_cross_entropy(*wrong)
    with pytest.raises(fullbatch.LossError, match="softcap=-1"):
        fullbatch.linear_cross_entropy(hidden, weight, target, softcap=-1)


def test_a_target_that_is_no_word() -> None:
    """Plain PyTorch raises for it, and so must this: it would be a loss of another target otherwise."""
    for wrong in (5, -1):
        target = torch.tensor([0, wrong, -100])
        with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
            fullbatch.linear_cross_entropy(torch.randn(3, 3), torch.randn(5, 3), target)


def test_a_second_derivative_is_refused() -> None:
    """Its backward has none, and zeros in its place would be a wrong gradient."""
    hidden, weight = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    target = torch.randint(7, (5,))
    (slope,) = torch.autograd.grad(fullbatch.linear_cross_entropy(hidden, weight, target), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        slope.square().sum().backward()
    assert hidden.grad is None and weight.grad is None
