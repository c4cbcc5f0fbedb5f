"""`optimizer=[a, b]`: the state of all of them, and the most that any of their steps allocates, are in the budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import fullbatch
from fullbatch._memory._live import NUMBER
from fullbatch._memory._optimizer import footprint
from fullbatch._memory._owned import optimizer_step, owned_bytes
from fullbatch._memory._twin import parameters_of, state_bytes

CPU = torch.device("cpu")


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))


def _loss(model: Any, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def _pair(model: nn.Sequential) -> list[optim.Optimizer]:
    return [optim.AdamW(model[0].parameters()), optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)]


PAIRS = {
    "two of a kind": lambda m: [optim.AdamW(m[0].parameters()), optim.AdamW(m[2].parameters())],
    "AdamW and SGD": _pair,
    "over all, and a tensor at a time": lambda m: (
        optim.AdamW(m[0].parameters(), foreach=True), optim.RAdam(m[2].parameters(), foreach=False)
    ),
    "both step the same": lambda m: [optim.Adam(m.parameters()), optim.RMSprop(m.parameters())],
    "three": lambda m: [optim.Adagrad(m[0].parameters()), optim.Adafactor([m[2].weight]), optim.NAdam([m[2].bias])],
    "a matrix by Muon": lambda m: [optim.Muon([m[0].weight, m[2].weight]), optim.AdamW([m[0].bias, m[2].bias])],
}  # fmt: skip


def _with_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)


def _state(optimizers: Any) -> int:
    return sum(state_bytes(dict(one.state), CPU) for one in optimizers)


@pytest.mark.parametrize("kinds", PAIRS)
def test_state_to_the_byte_and_the_peak_of_the_steps_one_after_another(kinds: str) -> None:
    model = _model()
    optimizers = PAIRS[kinds](model)
    _with_gradients(model)
    coming = owned_bytes(CPU, [], [], [], optimizers).optimizer
    needed = optimizer_step(CPU, model.parameters(), optimizers)
    peaks = []
    for one in optimizers:  # state that one has is there before another's first step
        one.step()
        assert owned_bytes(CPU, [], [], [], optimizers).optimizer == coming
        peaks.append(fullbatch.measure(one.step).peak)
    assert coming == _state(optimizers) > 0
    together = fullbatch.measure(lambda: [one.step() for one in optimizers]).peak
    assert max(peaks) == together
    assert needed.exact and together <= needed.working
    most = max(footprint(one, CPU).working for one in optimizers)
    assert needed.working == most < sum(footprint(one, CPU).working for one in optimizers)


@pytest.mark.parametrize("kinds", ["two of a kind", "AdamW and SGD"])
def test_working_memory_is_measured(kinds: str) -> None:
    model = _model()
    optimizers = PAIRS[kinds](model)
    needed = optimizer_step(CPU, model.parameters(), optimizers).working
    _with_gradients(model)
    for one in optimizers:
        one.step()
    measured = fullbatch.measure(lambda: [one.step() for one in optimizers]).peak
    assert measured <= needed <= measured + NUMBER


def test_a_step_counts_as_much_for_two_as_for_one_of_all_parameters() -> None:
    model, batch = _model(), torch.randn(8, 128)
    one, both = optim.AdamW(model.parameters()), PAIRS["two of a kind"](model)

    def owned(optimizer: Any) -> int:
        return fullbatch.Step(_loss, model, batch, microbatch=4, optimizer=optimizer).plan.owned

    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert owned(both) == owned(one) == owned(None) + 8 * numbers + 4 * 4
    step = fullbatch.Step(_loss, model, batch, microbatch=4, optimizer=both)
    step(batch)
    for optimizer in both:
        optimizer.step()
        optimizer.zero_grad()
    assert owned(both) == step.plan.owned


def test_a_list_of_one_is_that_one() -> None:
    model, batch = _model(), torch.randn(8, 128)
    optimizer = optim.AdamW(model.parameters())
    alone = fullbatch.Step(_loss, model, batch, microbatch=4, optimizer=optimizer).plan
    assert fullbatch.Step(_loss, model, batch, microbatch=4, optimizer=(optimizer,)).plan.owned == alone.owned


def test_lbfgs_beside_another_holds_its_vectors_while_it_alone_steps() -> None:
    model = _model()
    lbfgs, adam = optim.LBFGS(model[0].parameters(), history_size=4), optim.AdamW(model[2].parameters())
    of_lbfgs, of_adam = footprint(lbfgs, CPU), footprint(adam, CPU)
    owned = owned_bytes(CPU, [], [], [], [lbfgs, adam]).optimizer
    assert owned == of_lbfgs.shared + of_lbfgs.held + sum(of_adam.states.values())
    after = optimizer_step(CPU, [], [lbfgs, adam]).working
    assert after == max(of_lbfgs.working, of_adam.working) - of_lbfgs.held
    two = owned_bytes(CPU, [], [], [], [lbfgs, optim.LBFGS(model[2].parameters(), history_size=4)]).optimizer
    assert two < 2 * (of_lbfgs.shared + of_lbfgs.held)


def test_the_least_budget_holds_for_the_optimizers_too() -> None:
    """What BudgetError names works, one byte less does not, and the step of all of them stays within it."""
    model, batch = _model(), torch.randn(8, 128)
    optimizers = [optim.AdamW(layer.parameters(), foreach=True) for layer in (model[0], model[2])]
    with pytest.raises(fullbatch.BudgetError, match="optimizer's step") as refused:
        fullbatch.Step(_loss, model, batch, memory=10_000, optimizer=optimizers)
    least = refused.value.smallest
    with pytest.raises(fullbatch.BudgetError):
        fullbatch.Step(_loss, model, batch, memory=least - 1, optimizer=optimizers)
    step = fullbatch.Step(_loss, model, batch, memory=least, optimizer=optimizers)
    step(batch)
    for optimizer in optimizers:
        optimizer.step()
    held = sum(2 * 4 * parameter.numel() for parameter in model.parameters()) + _state(optimizers) + 4 * batch.numel()
    peak = held + fullbatch.measure(lambda: [one.step() for one in optimizers]).peak
    assert least - NUMBER <= peak <= least


def test_explain_largest_and_the_eager_step_take_several() -> None:
    model, batch = _model(), torch.randn(8, 128)
    optimizers = _pair(model)
    ledger = fullbatch.explain(_loss, model, batch, optimizers)
    expected = 2 * 4 * (128 * 256 + 256) + 2 * 4 + 4 * (256 * 128 + 128)
    assert ledger.owned.optimizer == expected
    assert ledger.after.working == max(footprint(one, CPU).working for one in optimizers)

    def eager(optimizer: Any) -> int:
        def summed(model: Any, batch: Tensor) -> tuple[Tensor, int]:
            return model(batch).square().sum(), batch.numel()

        return fullbatch.eager.Step(summed, model, batch, microbatch=4, optimizer=optimizer).plan.owned

    assert eager(optimizers) == eager(None) + expected
    small = fullbatch.largest(_loss, model, batch, memory="3MiB", optimizer=optimizers, multiple_of=64, most=1024)
    large = fullbatch.largest(_loss, model, batch, memory="3MiB", multiple_of=64, most=1024)
    assert 0 < small.plain.size < large.plain.size


def test_a_proposal_changes_all_that_it_is_for() -> None:
    """The most that any works on counts: to change one of two alike would save nothing."""
    model, batch = nn.Sequential(*[nn.Linear(128, 128) for _ in range(8)]), torch.randn(2, 128)
    both = [optim.AdamW(layers.parameters(), foreach=True) for layers in (model[:4], model[4:])]
    others = [*both, optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1, foreach=False)]
    rows = {row.what: row for row in fullbatch.propose(_loss, model, batch, optimizer=others).rows}
    line = "optimizer = [torch.optim.AdamW(..., foreach=False), torch.optim.AdamW(..., foreach=False), optimizer[2]]"
    assert rows["optimizer.step() a tensor at a time"].line == line
    fused = rows["optimizer.step() in one kernel"]
    assert fused.saved is not None and fused.saved > 0
    alone = {row.what: row for row in fullbatch.propose(_loss, model, batch, optimizer=both[:1]).rows}
    assert alone["optimizer.step() a tensor at a time"].line == "optimizer = torch.optim.AdamW(..., foreach=False)"
    adafactor = rows["Adafactor: sums of rows and columns as state"]
    assert adafactor.line.endswith(", optimizer[2]]")
    assert adafactor.saved is not None and adafactor.saved >= 7.5 * sum(p.numel() for p in model.parameters())
    assert parameters_of(both[0]) == list(model[:4].parameters())


@pytest.mark.parametrize("kind", [fullbatch.Step, fullbatch.eager.Step])
def test_a_closure_clears_the_gradients_of_all(kind: Any) -> None:
    model, batch = _model(), torch.randn(8, 128)
    elsewhere = nn.Parameter(torch.zeros(3))
    elsewhere.grad = torch.ones(3)
    optimizers = [optim.LBFGS(model.parameters(), max_iter=3), optim.SGD([elsewhere], lr=0.1)]

    def loss_fn(model: Any, batch: Tensor) -> Any:
        loss = model(batch).square()
        return loss.mean() if kind is fullbatch.Step else (loss.sum(), loss.numel())

    step = kind(loss_fn, model, batch, microbatch=3, optimizer=optimizers)
    before = float(_loss(model, batch).detach())
    optimizers[0].step(step.closure(batch))
    assert elsewhere.grad is None
    assert float(_loss(model, batch)) < 0.9 * before


def test_what_is_no_optimizer_is_said_for_each_at_once() -> None:
    model, batch = _model(), torch.randn(8, 128)
    good = optim.AdamW(model.parameters())
    with pytest.raises(fullbatch.ModelError) as refused:
        fullbatch.Step(_loss, model, batch, microbatch=4, optimizer=[good, "adam", good, None])
    faults = refused.value.faults
    assert [fault.what for fault in faults] == [
        "optimizer[1] is not one of torch.",
        "optimizer[2] is optimizer[0] again.",
        "optimizer[3] is not one of torch.",
    ]
    assert [fault.got for fault in faults] == ["str: 'adam'", "the same AdamW twice", "NoneType: None"]
    assert all(fault.expected and fault.next for fault in faults)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "optimizer= is empty"),
        (7, "not one of torch"),
        ({"a": 1}, "not one of torch"),
        ((None,), r"optimizer\[0\]"),
    ],
)
def test_bad_lists_are_refused_wherever_one_is_taken(given: Any, message: str) -> None:
    model, batch = _model(), torch.randn(8, 128)
    for call in (
        lambda: fullbatch.Step(_loss, model, batch, microbatch=4, optimizer=given),
        lambda: fullbatch.eager.Step(_loss, model, batch, microbatch=4, optimizer=given),
        lambda: fullbatch.explain(_loss, model, batch, given),
        lambda: fullbatch.largest(_loss, model, batch, optimizer=given),
        lambda: fullbatch.propose(_loss, model, batch, optimizer=given),
    ):
        with pytest.raises(fullbatch.ModelError, match=message):
            call()


def test_loss_and_optimizer_are_both_named() -> None:
    with pytest.raises(fullbatch.FullbatchError) as refused:
        fullbatch.Step(3, _model(), torch.randn(8, 128), microbatch=4, optimizer=[3])  # type: ignore[arg-type]
    assert [fault.what for fault in refused.value.faults] == [
        "loss_fn is not a function.", "optimizer[0] is not one of torch.",
    ]  # fmt: skip


def test_a_proposal_that_none_of_them_can_take_says_why_and_has_no_line() -> None:
    model, batch = _model(), torch.randn(4, 128)
    both = [optim.RAdam(model[0].parameters()), optim.NAdam(model[2].parameters())]
    rows = {row.what: row for row in fullbatch.propose(_loss, model, batch, optimizer=both).rows}
    row = rows["optimizer state in 8 bits"]
    assert (row.line, row.saved) == ("", None)
    assert "none of RAdam" in row.reason
