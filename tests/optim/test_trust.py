"""LAMB and LARS against the identity |dw| / |w| = lr and against the formulas of their papers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fullbatch
from fullbatch.optim import LAMB, LARS, param_groups

SHAPES = [(40, 30), (50,), (3, 4, 5, 6), (1,)]


def _parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=dtype) * 10.0**at) for at, shape in enumerate(SHAPES)]


def _gradients(parameters: list[nn.Parameter]) -> None:
    for at, parameter in enumerate(parameters):
        parameter.grad = torch.randn_like(parameter) * 10.0 ** (3 - 2 * at)


def _small(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = (1e-4 * torch.randn(parameter.shape)).to(parameter.dtype)


def _moved(parameters: list[nn.Parameter], optimizer: Any) -> list[float]:
    before = [parameter.detach().double().clone() for parameter in parameters]
    optimizer.step()
    return [((p - b).norm() / b.norm()).item() for p, b in zip(parameters, before, strict=True)]


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("lr", [1e-3, torch.tensor(0.3, dtype=torch.float64)])
@pytest.mark.parametrize("make", [LAMB, LARS])
def test_every_step_moves_each_tensor_by_the_rate_s_share_of_its_length(make: Any, lr: Any, decay: float) -> None:
    parameters = _parameters()
    optimizer = make(parameters, lr=lr, weight_decay=decay)
    for _ in range(5):
        _gradients(parameters)
        assert _moved(parameters, optimizer) == pytest.approx([float(lr)] * len(SHAPES), rel=1e-12)


HALVES: dict[str, Any] = {
    "lamb": lambda p: LAMB(p, lr=0.25, weight_decay=0.01),
    "lars": lambda p: LARS(p, lr=0.25),
    "lars trust": lambda p: LARS(p, lr=2.5e-6, trust=1e5),
    "lars 2017": lambda p: LARS(p, lr=0.25, momentum=0.0, form="2017"),
    "lamb not adapted": lambda p: LAMB(p, lr=0.25, adapt=False),
}


def _copies(parameters: list[nn.Parameter], dtype: torch.dtype) -> list[nn.Parameter]:
    copies = [nn.Parameter(parameter.detach().to(dtype)) for parameter in parameters]
    for copied, parameter in zip(copies, parameters, strict=True):
        copied.grad = None if parameter.grad is None else parameter.grad.to(dtype)
    return copies


@pytest.mark.parametrize("scale", [1.0, 1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", HALVES)
def test_halves_step_as_float64_does_on_the_same_numbers(name: str, dtype: torch.dtype, scale: float) -> None:
    """In float16 a ratio above 65,504 is infinite, and squares of gradients of 1e-4 are zero: neither is kept in it."""
    torch.manual_seed(0)
    half = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    optimizer, state, reference = HALVES[name](half), None, None
    for _ in range(3):
        for parameter in half:
            parameter.grad = (scale * torch.randn(parameter.shape)).to(dtype)
        exact = _copies(half, torch.float64)  # each step from the weights in half precision, with its own state
        reference = HALVES[name](exact)
        if state is not None:
            reference.load_state_dict(state)
        before = [parameter.detach().clone() for parameter in exact]
        optimizer.step()
        reference.step()
        state = copy.deepcopy(reference.state_dict())
        for parameter, right, old in zip(half, exact, before, strict=True):
            # The weight is rounded once; bfloat16 keeps moments of eight bits, as torch's optimizers do.
            share = 0.02 if dtype == torch.bfloat16 else 1e-3
            moved = (right - old).detach().norm() * share
            limit = torch.finfo(dtype).eps * right.detach().norm() + moved
            assert (parameter.detach().double() - right.detach()).norm() <= limit


@pytest.mark.parametrize("make", [LAMB, LARS, lambda p, lr: LARS(p, lr=lr, form="2017")])
def test_the_identity_holds_in_halves(make: Any) -> None:
    for dtype, share in ((torch.float16, 2e-4), (torch.bfloat16, 2e-3)):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(100, 80).to(dtype))
        weight.grad = (1e-6 * torch.randn(100, 80)).to(dtype)
        assert _moved([weight.detach()], make([weight], lr=0.1)) == pytest.approx([0.1], rel=share)


def test_trust_multiplies_the_rate_and_2017_keeps_the_identity_at_first() -> None:
    parameters = _parameters()
    _gradients(parameters)
    assert _moved(parameters, LARS(parameters, lr=0.1, trust=0.01)) == pytest.approx([1e-3] * len(SHAPES), rel=1e-12)
    optimizer = LARS(parameters, lr=0.1, trust=0.01, form="2017")
    assert _moved(parameters, optimizer) == pytest.approx([1e-3] * len(SHAPES), rel=1e-12)
    assert max(_moved(parameters, optimizer)) > 1.5e-3  # momentum adds up


def test_lamb_is_algorithm_2_of_you_et_al_2019() -> None:
    parameters = _parameters()
    expected = [parameter.detach().clone() for parameter in parameters]
    first, second = [torch.zeros_like(w) for w in expected], [torch.zeros_like(w) for w in expected]
    optimizer = LAMB(parameters, lr=0.01, betas=(0.8, 0.95), eps=1e-5, weight_decay=0.02)
    for step in range(1, 5):
        _gradients(parameters)
        for at, parameter in enumerate(parameters):
            gradient = parameter.grad
            assert gradient is not None
            first[at] = 0.8 * first[at] + 0.2 * gradient
            second[at] = 0.95 * second[at] + 0.05 * gradient**2
            ratio = (first[at] / (1 - 0.8**step)) / ((second[at] / (1 - 0.95**step)).sqrt() + 1e-5)
            update = ratio + 0.02 * expected[at]
            expected[at] = expected[at] - 0.01 * expected[at].norm() / update.norm() * update
        optimizer.step()
    for parameter, weight in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.detach(), weight, rtol=1e-12, atol=0)


def test_lars_is_that_of_you_gitman_and_ginsburg_2017() -> None:
    parameters = _parameters()
    expected = [parameter.detach().clone() for parameter in parameters]
    velocity = [torch.zeros_like(w) for w in expected]
    optimizer = LARS(parameters, lr=2.0, momentum=0.9, weight_decay=5e-4, trust=1e-3, form="2017")
    for _ in range(4):
        _gradients(parameters)
        for at, parameter in enumerate(parameters):
            w, g = expected[at], parameter.grad
            assert g is not None
            rate = 1e-3 * w.norm() / (g.norm() + 5e-4 * w.norm())
            velocity[at] = 0.9 * velocity[at] + 2.0 * rate * (g + 5e-4 * w)
            expected[at] = w - velocity[at]
        optimizer.step()
    for parameter, weight in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.detach(), weight, rtol=1e-12, atol=0)


def test_lars_is_algorithm_1_of_you_et_al_2019() -> None:
    parameters = _parameters()
    expected = [parameter.detach().clone() for parameter in parameters]
    mean = [torch.zeros_like(w) for w in expected]
    optimizer = LARS(parameters, lr=0.02, momentum=0.7, weight_decay=0.1)
    for _ in range(4):
        _gradients(parameters)
        for at, parameter in enumerate(parameters):
            w, g = expected[at], parameter.grad
            assert g is not None
            mean[at] = 0.7 * mean[at] + 0.3 * (g + 0.1 * w)
            expected[at] = w - 0.02 * w.norm() / mean[at].norm() * mean[at]
        optimizer.step()
    for parameter, weight in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.detach(), weight, rtol=1e-12, atol=0)


def test_without_adaptation_they_are_adamw_and_sgd() -> None:
    for mine, theirs in [
        (lambda p: LAMB(p, lr=0.01, eps=1e-8, weight_decay=0.1, adapt=False),
         lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-8, weight_decay=0.1)),
        (lambda p: LARS(p, lr=0.01, weight_decay=0.1, adapt=False, form="2017"),
         lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1)),
    ]:  # fmt: skip
        one, other = _parameters(), _parameters()
        a, b = mine(one), theirs(other)
        for _ in range(3):
            _gradients(one)
            for x, y in zip(one, other, strict=True):
                y.grad = x.grad
            a.step()
            b.step()
        for x, y in zip(one, other, strict=True):
            # AdamW takes the decay off first, LAMB adds it to the direction: the same at that step.
            torch.testing.assert_close(x.detach(), y.detach(), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("make", [LAMB, lambda p, lr: LARS(p, lr=lr), lambda p, lr: LARS(p, lr=lr, form="2017")])
def test_a_tensor_of_zeros_leaves_zero_and_a_zero_gradient_is_no_nan(make: Any) -> None:
    zero, still = nn.Parameter(torch.zeros(5)), nn.Parameter(torch.ones(5))
    optimizer = make([zero, still], lr=0.1)
    zero.grad, still.grad = torch.ones(5), torch.zeros(5)
    optimizer.step()
    assert (zero != 0).all()
    assert torch.equal(still.detach(), torch.ones(5))


def test_groups_exclude_biases_and_normalisations() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2))
    model[2].bias.requires_grad_(False)
    adapted, others = param_groups(model, weight_decay=0.01)
    assert [p.ndim for p in adapted["params"]] == [4, 2]
    assert (adapted["weight_decay"], adapted["adapt"]) == (0.01, True)
    assert [p.ndim for p in others["params"]] == [1, 1, 1]
    assert (others["weight_decay"], others["adapt"]) == (0.0, False)
    optimizer = LAMB([adapted, others], lr=0.1)
    for parameter in [*adapted["params"], *others["params"]]:
        parameter.grad = torch.randn_like(parameter)
    moved = _moved([*adapted["params"], others["params"][1]], optimizer)
    assert moved[:2] == pytest.approx([0.1, 0.1], rel=1e-5)
    assert moved[2] == pytest.approx(0.1, rel=1e-3)  # ones, each moved by Adam's first step of lr


@pytest.mark.parametrize(
    "make", [lambda p: LAMB(p, lr=0.1), lambda p: LARS(p, lr=0.1), lambda p: LARS(p, lr=0.1, form="2017")]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_state_round_trip_gives_the_same_bits(make: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    one = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    first = make(one)
    _small(one)
    first.step()
    other = [nn.Parameter(p.detach().clone()) for p in one]
    second = make(other)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for parameters, optimizer in ((one, first), (other, second)):
        torch.manual_seed(3)
        _small(parameters)
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_closure_is_run_with_gradients_and_its_loss_returned() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = LAMB([weight], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert weight.detach().norm().item() == pytest.approx(0.9 * 3**0.5, rel=1e-6)


def test_all_options_out_of_range_are_named() -> None:
    with pytest.raises(fullbatch.OptimizerError) as caught:
        LAMB([nn.Parameter(torch.ones(1))], lr=-1, betas=(0.9, 1.0), eps=-1, weight_decay=-1)
    assert len(caught.value.faults) == 4
    assert isinstance(caught.value, ValueError)
    with pytest.raises(fullbatch.OptimizerError, match="adapt=1"):
        LARS([{"params": [nn.Parameter(torch.ones(1))], "adapt": 1}], lr=0.1)
    with pytest.raises(fullbatch.OptimizerError, match="2018"):
        LARS([nn.Parameter(torch.ones(1))], lr=0.1, form="2018")  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [LAMB, LARS])
def test_a_sparse_gradient_is_refused_before_anything_moves(make: Any) -> None:
    dense, table = nn.Parameter(torch.ones(3)), nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 1])).sum().backward()
    dense.grad = torch.ones(3)
    with pytest.raises(fullbatch.OptimizerError, match="sparse"):
        make([dense, *table.parameters()], lr=0.1).step()
    assert torch.equal(dense.detach(), torch.ones(3))


@pytest.mark.parametrize("kind", [LAMB, LARS])
def test_options_that_are_no_numbers_are_named_all_at_once(kind: Any) -> None:
    weights = [nn.Parameter(torch.ones(2, 2))]
    with pytest.raises(fullbatch.OptimizerError) as caught:
        kind(weights, lr="x", weight_decay=None)
    assert [fault.got for fault in caught.value.faults] == ["lr='x'", "weight_decay=None"]
    if kind is LAMB:
        for betas in (0.9, (0.9, "x"), (0.9,), None):
            with pytest.raises(fullbatch.OptimizerError, match="betas is out of range"):
                kind(weights, betas=betas)
