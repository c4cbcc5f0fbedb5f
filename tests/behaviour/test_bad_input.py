"""Bad input raises an error of the project's own, which says what, got, expected and the next step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullbatch
from behaviour.support import BATCH, agrees, make, mlp, mse, pair
from fullbatch._cost import _probe


def refused(kind: type[fullbatch.FullbatchError], call: Callable[[], Any], *mentions: str) -> Any:
    """The error, which is complete and mentions each of `mentions`."""
    with pytest.raises(kind) as caught:
        call()
    error = caught.value
    assert isinstance(error, fullbatch.FullbatchError)
    assert error.faults
    for fault in error.faults:
        assert fault.what
        assert fault.got, fault
        assert fault.expected, fault
        assert fault.next, fault
    for text in mentions:
        assert text in str(error), str(error)
    return error


# ---- the budget


def _normed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))


def _dropped() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Dropout(0.5), nn.ReLU(), nn.Linear(64, 4))


def _classify(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _images(samples: int = 12) -> Any:
    return torch.randn(samples, 1, 8, 8), torch.arange(samples) % 4


@pytest.mark.parametrize("create", [_normed, _dropped], ids=["norm", "dropout"])
def test_the_smallest_budget_works_and_a_byte_less_does_not(create: Callable[[], nn.Module]) -> None:
    model, batch = create(), _images()
    error = refused(fullbatch.BudgetError, lambda: make(_classify, model, batch, memory=1000), "1,000 bytes")
    smallest = error.smallest
    assert f"memory={smallest}" in str(error)
    assert "peak is at" in str(error), "what dominates is named"
    assert "test_bad_input.py" in str(error), "with the user's line"
    refused(fullbatch.BudgetError, lambda: make(_classify, model, batch, memory=smallest - 1))
    step = make(_classify, model, batch, memory=smallest)
    assert step.plan.predicted_peak <= smallest
    step(batch)
    assert step.plan.predicted_peak <= smallest


def test_what_is_owned_is_named_where_it_alone_exceeds_the_budget() -> None:
    model = nn.Linear(1000, 1000)
    error = refused(
        fullbatch.BudgetError,
        lambda: make(lambda m, x: m(x).sum(), model, torch.randn(2, 1000), memory="1MB"),
        "parameters",
        "7.65 MiB",
    )
    assert error.smallest > 8 * 1000 * 1001


def test_a_budget_that_a_later_batch_exceeds() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    large = (torch.randn(400, 3), torch.randn(400, 2))
    smallest = refused(fullbatch.BudgetError, lambda: make(mse, model, pair(), memory=10)).smallest
    step = make(mse, model, pair(), memory=smallest)
    refused(fullbatch.BudgetError, lambda: step(large))
    assert all(p.grad is None for p in model.parameters())
    agrees(step, mse, model, pair())


NO_SIZES = ["6Gig", "", "much", 0, -5, "-1GB", "0GB", True, 1.5, float("nan"), "nan", "inf", b"1GB"]


@pytest.mark.parametrize("size", NO_SIZES, ids=repr)
def test_a_memory_that_is_no_size(size: Any) -> None:
    refused(fullbatch.MemorySizeError, lambda: make(mse, memory=size), repr(size), "6GiB")


@pytest.mark.parametrize("size", ["2GiB", "1.5 GB", "900mb", "10G", 2**30, " 3 GiB "])
def test_a_memory_that_is_a_size(size: Any) -> None:
    assert make(mse, memory=size).plan.microbatches == 1


# ---- the batch


def test_batch_sizes_that_differ() -> None:
    x, y = pair()
    mentions = ("batch[0]: (6, 3)", "batch[1]: (4, 2)", "batch_dims")
    refused(fullbatch.BatchError, lambda: make(mse, batch=(x, y[:4])), *mentions)


@pytest.mark.parametrize(
    "batch", [(), {}, None, ("a", 3), torch.tensor(1.0), (torch.tensor(1.0), 2)], ids=lambda b: type(b).__name__
)
def test_no_tensor_with_a_batch(batch: Any) -> None:
    refused(fullbatch.BatchError, lambda: fullbatch.Step(mse, mlp(), batch), "No tensor")


def test_an_empty_batch() -> None:
    refused(fullbatch.BatchError, lambda: make(mse, batch=pair(0)), "empty")


def test_an_empty_batch_at_a_later_call() -> None:
    model = mlp()
    step = make(mse, model)
    refused(fullbatch.BatchError, lambda: step(pair(0)), "empty")
    agrees(step, mse, model, pair())


@pytest.mark.parametrize("dims", [(0,), (0, 5), (0, -3), "0", {"x": 0}, (0, True), 2], ids=str)
def test_batch_dims_that_do_not_fit(dims: Any) -> None:
    refused(fullbatch.BatchError, lambda: make(mse, batch_dims=dims), "batch_dims")


def test_batch_dims_that_leave_no_tensor() -> None:
    refused(fullbatch.BatchError, lambda: make(mse, batch_dims=(None, None)), "No tensor")


@pytest.mark.parametrize("microbatch", [0, -1, BATCH + 1, 2.0, True, "2", float("inf")], ids=repr)
def test_a_microbatch_that_does_not_fit(microbatch: Any) -> None:
    mentions = (f"microbatch={microbatch!r}", f"1 to {BATCH}")
    refused(fullbatch.BatchError, lambda: make(mse, microbatch=microbatch), *mentions)


# ---- the model and the arguments


@pytest.mark.parametrize("model", ["m", None, 3, [], (), {}, [nn.Linear(3, 2), "x"], {"a": None}], ids=repr)
def test_a_model_that_is_no_module(model: Any) -> None:
    refused(fullbatch.ModelError, lambda: fullbatch.Step(mse, model, pair()), "Module")


def test_arguments_in_the_wrong_order() -> None:
    refused(fullbatch.ModelError, lambda: fullbatch.Step(mlp(), mse, pair()), "Step(loss_fn, model, batch)")


def test_a_loss_fn_that_is_no_function() -> None:
    refused(fullbatch.LossError, lambda: fullbatch.Step(None, mlp(), pair()), "NoneType")


def test_an_optimizer_that_is_none() -> None:
    refused(fullbatch.ModelError, lambda: make(mse, optimizer="adam"), "'adam'", "torch.optim")


def test_an_unknown_argument_is_named() -> None:
    with pytest.raises(TypeError, match="microbach"):
        make(mse, microbach=2)


def test_parameters_on_two_devices_are_named() -> None:
    model = mlp()
    model[2] = nn.Linear(4, 2, device="meta")
    refused(fullbatch.ModelError, lambda: make(mse, model), "cpu: 0.weight", "meta: 2.weight", "model.to(")


def test_a_model_moved_in_part_after_the_capture() -> None:
    model = mlp()
    step = make(mse, model)
    moved = model[2]
    model[2] = nn.Linear(4, 2, device="meta")
    refused(fullbatch.ModelError, lambda: step(pair()), "2.weight")
    model[2] = moved
    agrees(step, mse, model, pair())


# ---- the loss


LOSSES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "vector": (lambda m, b: m(b[0]), "shape (6, 2)"),
    "None": (lambda m, b: None, "NoneType"),
    "float": (lambda m, b: 3.0, "float"),
    "list": (lambda m, b: [mse(m, b), 1], "list"),
    "dict": (lambda m, b: {"loss": mse(m, b)}, "dict"),
    "tuple of three": (lambda m, b: (mse(m, b), 1, 2), "tuple of 3"),
    "tuple that begins with no tensor": (lambda m, b: (1.0, mse(m, b)), "float"),
    "detached": (lambda m, b: mse(m, b).detach(), "no parameter"),
    "integer": (lambda m, b: m(b[0]).argmax(), "no parameter"),
    "complex": (lambda m, b: m(b[0]).sum() * 1j, "complex"),
    "of the batch only": (lambda m, b: b[0].sum(), "no parameter"),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_that_is(loss: str) -> None:
    loss_fn, got = LOSSES[loss]
    refused(fullbatch.LossError, lambda: make(loss_fn), got)


def test_a_loss_under_no_grad() -> None:
    def loss_fn(model: Any, batch: Any) -> Tensor:
        with torch.no_grad():
            return mse(model, batch)

    refused(fullbatch.LossError, lambda: make(loss_fn), "no_grad")


def test_a_frozen_model() -> None:
    refused(fullbatch.LossError, lambda: make(mse, mlp().requires_grad_(False)), "requires_grad")


def test_a_loss_with_one_element_is_a_scalar() -> None:
    model, batch = mlp(), pair()
    loss_fn = lambda model, batch: mse(model, batch).view(1)  # noqa: E731
    assert agrees(make(loss_fn, model, batch), loss_fn, model, batch).shape == (1,)


# ---- what cannot be captured


def _item(model: Any, batch: Any) -> Any:
    return mse(model, batch) * batch[0].sum().item()  # here


def _float(model: Any, batch: Any) -> Any:
    return mse(model, batch) * float(batch[0].sum())  # here


def _branch(model: Any, batch: Any) -> Any:
    loss = mse(model, batch)
    if loss > 1:  # here
        loss = loss * 2
    return loss


def _while(model: Any, batch: Any) -> Any:
    loss = mse(model, batch)
    while loss > 1:  # here
        loss = loss / 2
    return loss


def _nonzero(model: Any, batch: Any) -> Any:
    return mse(model, batch) * (batch[0] > 0).nonzero().sum()  # here


def _mask(model: Any, batch: Any) -> Any:
    return model(batch[0])[batch[1] > 0].mean()  # here


def _where(model: Any, batch: Any) -> Any:
    return model(batch[0])[torch.where(batch[1].sum(1) > 0)[0]].mean()  # here


def _unique(model: Any, batch: Any) -> Any:
    return mse(model, batch) * len(torch.unique(batch[1]))  # here


def _tolist(model: Any, batch: Any) -> Any:
    return mse(model, batch) * batch[0].tolist()[0][0]  # here


def _numpy(model: Any, batch: Any) -> Any:
    return mse(model, batch) * float(batch[0].numpy().sum())  # here


def _range(model: Any, batch: Any) -> Any:
    return sum(mse(model, batch) for _ in range(int(batch[1].sum())))  # here


def _print(model: Any, batch: Any) -> Any:
    loss = mse(model, batch)
    print(loss)  # here
    return loss


def _backward(model: Any, batch: Any) -> Any:
    loss = mse(model, batch)
    loss.backward()  # here
    return loss


UNCAPTURABLE = {
    _item: ".item()", _float: ".item()", _branch: "torch.where", _while: "torch.where", _nonzero: "torch.where",
    _mask: "torch.where", _where: "torch.where", _unique: "data", _tolist: ".item()", _numpy: ".item()",
    _range: ".item()", _print: "aux", _backward: "backward",
}  # fmt: skip


@pytest.mark.parametrize("loss_fn", UNCAPTURABLE, ids=lambda f: f.__name__)
def test_data_dependence_names_the_line_and_says_what_to_do(loss_fn: Any) -> None:
    lines, first = inspect.getsourcelines(loss_fn)
    line = first + next(at for at, text in enumerate(lines) if "# here" in text)
    # As the captured half of a pair: by itself it is split where that can be, and the rest runs as it is.
    pair = loss_fn, lambda outputs, batch: outputs
    refused(fullbatch.CaptureError, lambda: make(pair), f"test_bad_input.py:{line}", UNCAPTURABLE[loss_fn])


@pytest.mark.parametrize("loss_fn", [_print, _backward], ids=lambda f: f.__name__)
def test_what_belongs_outside_of_loss_fn_is_no_reason_to_split_the_step(loss_fn: Any) -> None:
    refused(fullbatch.CaptureError, lambda: make(loss_fn), UNCAPTURABLE[loss_fn])


def test_data_dependence_in_a_module_names_its_line() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) if x.sum() > 0 else self.inner(-x)

    forward = mse, lambda outputs, batch: outputs
    refused(fullbatch.CaptureError, lambda: make(forward, Branching()), "in forward", "x.sum() > 0")


def test_a_tensor_computed_with_a_gradient_outside() -> None:
    outside = nn.Parameter(torch.ones(2)) * 2
    refused(fullbatch.CaptureError, lambda: make(lambda m, b: mse(m, b) + outside.sum()), "detach()")


# ---- exceptions of loss_fn's own


class Custom(Exception):
    pass


def _assert(batch: Any) -> Any:
    assert batch[0].shape[1] == 4, "four features"


def _raise(error: BaseException) -> Any:
    raise error


RAISES: dict[str, tuple[Callable[[Any, Any], Any], type[BaseException], str]] = {
    "ValueError": (lambda m, b: _raise(ValueError("label 7 is out of range")), ValueError, "label 7 is out of range"),
    "custom": (lambda m, b: _raise(Custom(f"six, got {len(b[0])}")), Custom, "six, got 6"),
    "KeyError": (lambda m, b: mse(m, {}["nope"]), KeyError, "nope"),
    "IndexError": (lambda m, b: mse(m, (b[0], b[2])), IndexError, "range"),
    "AttributeError": (lambda m, b: m.nope(b), AttributeError, "nope"),
    "NameError": (lambda m, b: nope(b), NameError, "nope"),  # noqa: F821
    "TypeError": (lambda m, b: F.cross_entropy(m(b[0])), TypeError, "target"),
    "wrong shape": (lambda m, b: m(b[0][:, :2]).sum(), RuntimeError, "[6, 2]"),
    "wrong number of arguments": (lambda m: m, TypeError, "argument"),
    "ZeroDivisionError": (lambda m, b: mse(m, b) * (1 / (len(b) - 2)), ZeroDivisionError, "zero"),
    "AssertionError": (lambda m, b: _assert(b), AssertionError, "four features"),
    "NotImplementedError": (lambda m, b: _raise(NotImplementedError()), NotImplementedError, "NotImplementedError"),
}


@pytest.mark.parametrize("raises", RAISES)
def test_an_exception_of_loss_fn_is_the_cause(raises: str) -> None:
    loss_fn, kind, text = RAISES[raises]
    error = refused(fullbatch.CaptureError, lambda: make(loss_fn), text, kind.__name__)
    assert type(error.__cause__) is kind


def test_an_exception_of_loss_fn_at_a_later_call() -> None:
    def loss_fn(model: Any, batch: Any) -> Tensor:
        if len(batch[0]) == 3:
            raise ValueError("three is not enough")
        return mse(model, batch)

    model = mlp()
    step = make(loss_fn, model)
    refused(fullbatch.CaptureError, lambda: step(pair(3)), "three is not enough", "test_bad_input.py")
    agrees(step, loss_fn, model, pair())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_dropout_between_recurrent_layers_is_refused(kind: Any) -> None:
    """Traced, torch 2.13 leaves it out: the gradient would be that of another network."""
    model = kind(4, 5, 2, batch_first=True, dropout=0.3)
    batch = torch.randn(6, 3, 4)

    def loss(m: Any, b: Any) -> torch.Tensor:
        return m(b)[0].square().mean()

    with pytest.raises(fullbatch.CaptureError, match=r"dropout=0\.3 cannot be captured") as caught:
        fullbatch.Step(loss, model, batch, microbatch=2)
    assert "between them" in str(caught.value)
    assert fullbatch.Step(loss, model.eval(), batch, microbatch=2).plan.microbatch == 2


@pytest.mark.parametrize("both", [False, True])
def test_a_recurrent_layer_in_float32(both: bool) -> None:
    """torch runs it as a fused oneDNN operator, whose workspace a graph does not carry."""
    torch.manual_seed(0)
    model = nn.LSTM(4, 5, 1, batch_first=True, bidirectional=both)
    batch = torch.randn(6, 3, 4)

    def loss(m: Any, b: Any) -> torch.Tensor:
        return m(b)[0].square().mean()

    loss(model, batch).backward()
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    for microbatch in (2, 6):
        model.zero_grad()
        fullbatch.Step(loss, model, batch, microbatch=microbatch)(batch)
        for grad, parameter in zip(grads, model.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, grad)


# ---- flags, formats and functions


def test_flags_that_are_no_flags_are_named_all_at_once() -> None:
    model, batch = mlp(), pair()
    error = refused(
        fullbatch.PlanError, lambda: fullbatch.Step(mse, model, batch, compile="yes", timed=1), "compile='yes'"
    )
    assert [fault.got for fault in error.faults] == ["compile='yes'", "timed=1"]


@pytest.mark.parametrize("dtype", ["float64", torch.int32, torch.complex64, torch.float8_e4m3fn])
def test_a_comparison_in_what_is_no_precision(dtype: Any) -> None:
    step = fullbatch.Step(mse, mlp(), pair())
    refused(fullbatch.VerifyError, lambda: step.verify(pair(), dtype=dtype), f"dtype={dtype!r}")


def test_measuring_what_is_no_function() -> None:
    refused(fullbatch.MeasureError, lambda: fullbatch.measure(3), "int: 3")


# ---- more than all memory


def _attention(model: Any, batch: Any) -> Tensor:
    hidden = model(batch)
    return (hidden @ hidden.transpose(1, 2)).softmax(-1).square().sum() + hidden.square().sum()


def test_a_sample_that_takes_more_than_all_memory() -> None:
    """Nothing of it is allocated while it is planned for: an operator alone would end the process."""
    batch, model = torch.randn(2, 300_000, 2), nn.Linear(2, 2)
    error = refused(
        fullbatch.BudgetError, lambda: fullbatch.Step(_attention, model, batch, memory="100MB"), "microbatches of 1"
    )
    assert error.smallest > 4 * 300_000**2


def test_results_that_are_more_than_is_free_are_not_made_to_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_probe, "free_bytes", lambda device: 2**20 - 1)
    monkeypatch.setattr(_probe, "_LARGE", 0)
    model, batch = nn.Linear(8, 2**12), torch.randn(6, 2**6, 8)  # 1 MiB of results for one sample
    step = fullbatch.Step(lambda m, b: m(b).tanh().square().mean(), model, batch, microbatch=1)
    assert any(_probe.NOT_RUN in note and "tanh" in note for note in step.plan.notes)
    monkeypatch.setattr(_probe, "free_bytes", lambda device: 2**30)
    step = fullbatch.Step(lambda m, b: m(b).tanh().square().mean(), model, batch, microbatch=1)
    assert not any(_probe.NOT_RUN in note for note in step.plan.notes)
