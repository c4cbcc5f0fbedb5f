"""What a step reads besides tensors is noticed when it has changed."""

from __future__ import annotations

import collections
import copy
import dataclasses
import gc
import itertools
import os
import random
import re
import time
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullbatch
from behaviour.support import agrees, captures, clear, make, mlp, mse, pair

WEIGHT = 0.5
PLACE: dict[str, Any] = {}


class Scaled(nn.Module):
    """A model that reads Python values of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.weight, self.flag, self.config, self.steps = 0.5, False, {"scales": [1.0, 2.0]}, 0

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x) * self.weight * sum(self.config["scales"])
        return out.relu() if self.flag else out


def follows(loss_fn: Any, change: Callable[[Any], Any], model: Any = None, batch: Any = None) -> fullbatch.Step:
    """The step agrees with plain PyTorch before and after `change(model)`, and the change made a difference."""
    model, batch = mlp() if model is None else model, pair() if batch is None else batch
    step = make(loss_fn, model, batch)
    before = agrees(step, loss_fn, model, batch)
    change(model)
    after = agrees(step, loss_fn, model, batch)
    assert not torch.equal(before, after), "the test changed nothing"
    return step


# ---- where a value may live


def test_global() -> None:
    def change(_: Any) -> None:
        globals()["WEIGHT"] = 0.7

    follows(lambda model, batch: WEIGHT * mse(model, batch), change)


def test_closure_variable() -> None:
    weight = 0.5

    def loss_fn(model: Any, batch: Any) -> Tensor:
        return weight * mse(model, batch)

    def change(_: Any) -> None:
        nonlocal weight
        weight = 0.7

    follows(loss_fn, change)


@pytest.mark.parametrize(
    ("name", "value"), [("weight", 0.9), ("flag", True), ("config", {"scales": [4.0]})], ids=["number", "flag", "dict"]
)
def test_attribute_of_the_model(name: str, value: Any) -> None:
    follows(mse, lambda model: setattr(model, name, value), Scaled())


def test_list_inside_the_model_changed_in_place() -> None:
    follows(mse, lambda model: model.config["scales"].append(3.0), Scaled())


def test_number_in_the_batch() -> None:
    def loss_fn(model: Any, batch: Any) -> Tensor:
        return batch[2] * mse(model, batch)

    model, (x, y) = mlp(), pair()
    step = make(loss_fn, model, (x, y, 0.3))
    for weight in (0.3, 0.8, 0.3):
        agrees(step, loss_fn, model, (x, y, weight))
    assert captures(step) == 2, "a value seen before is not captured again"


def test_default_argument() -> None:
    def loss_fn(model: Any, batch: Any, weight: float = 0.5) -> Tensor:
        return weight * mse(model, batch)

    follows(loss_fn, lambda _: setattr(loss_fn, "__defaults__", (0.9,)))


def test_callable_object() -> None:
    class Loss:
        weight = 0.5

        def __call__(self, model: Any, batch: Any) -> Tensor:
            return self.weight * mse(model, batch)

    loss_fn = Loss()
    follows(loss_fn, lambda _: setattr(loss_fn, "weight", 0.9))


def test_helper_function_replaced() -> None:
    PLACE["helper"] = lambda loss: loss * 2
    follows(
        lambda model, batch: PLACE["helper"](mse(model, batch)),
        lambda _: PLACE.update(helper=lambda loss: loss * 3),
    )


def test_learning_rate_of_an_optimizer() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    follows(
        lambda model, batch: mse(model, batch) * optimizer.param_groups[0]["lr"],
        lambda _: optimizer.param_groups[0].update(lr=0.3),
        model,
    )


READS = {"[]": lambda: os.environ["FB_TEST"], "getenv": lambda: os.getenv("FB_TEST", "1")}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_environment_variable(read: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FB_TEST", "0.5")
    follows(lambda model, batch: mse(model, batch) * float(read()), lambda _: monkeypatch.setenv("FB_TEST", "0.9"))


def test_environment_variable_that_was_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FB_TEST", raising=False)
    follows(
        lambda model, batch: mse(model, batch) * float(os.getenv("FB_TEST", "0.5")),
        lambda _: monkeypatch.setenv("FB_TEST", "0.9"),
    )


@dataclasses.dataclass(frozen=True)
class Frozen:
    weight: float


class Slotted:
    __slots__ = ("weight",)


Named = collections.namedtuple("Named", "weight")


def _slotted() -> Slotted:
    slotted = Slotted()
    slotted.weight = 0.5
    return slotted


HOLDERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "frozen-dataclass": (lambda: Frozen(0.5), lambda o: o.weight, lambda o: PLACE.update(o=Frozen(0.9))),
    "namespace": (lambda: types.SimpleNamespace(w=0.5), lambda o: o.w, lambda o: setattr(o, "w", 0.9)),
    "slots": (_slotted, lambda o: o.weight, lambda o: setattr(o, "weight", 0.9)),
    "namedtuple": (lambda: Named(0.5), lambda o: o.weight, lambda o: PLACE.update(o=Named(0.9))),
    "nested": (lambda: {"a": [{"w": 0.5}]}, lambda o: o["a"][0]["w"], lambda o: o["a"][0].update(w=0.9)),
    "deque": (lambda: collections.deque([0.5]), sum, lambda o: o.append(0.9)),
    "user-dict": (lambda: collections.UserDict(w=0.5), lambda o: o["w"], lambda o: o.update(w=0.9)),
    "set": (lambda: {0.5}, sum, lambda o: o.add(0.9)),
    "list-length": (lambda: [1, 2], len, lambda o: o.append(3)),
    "string": (lambda: "0.5", float, lambda o: PLACE.update(o="0.9")),
    "numpy-scalar": (lambda: np.float64(0.5), lambda o: o, lambda o: PLACE.update(o=np.float64(0.9))),
    "numpy-array": (lambda: np.array([0.5]), lambda o: torch.from_numpy(o).sum(), lambda o: o.fill(0.9)),
    "int-or-bool": (lambda: 1, lambda o: 5.0 if o is True else 2.0, lambda o: PLACE.update(o=True)),
    "int-or-float": (lambda: 1, lambda o: 5.0 if isinstance(o, float) else 2.0, lambda o: PLACE.update(o=1.0)),
    "sign-of-zero": (lambda: 0.0, lambda o: 5.0 if str(o) == "-0.0" else 2.0, lambda o: PLACE.update(o=-0.0)),
    "none": (lambda: None, lambda o: 1.0 if o is None else o, lambda o: PLACE.update(o=0.9)),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_value_held_by(holder: str) -> None:
    create, read, change = HOLDERS[holder]
    PLACE["o"] = create()
    follows(lambda model, batch: mse(model, batch) * read(PLACE["o"]), lambda _: change(PLACE["o"]))


# ---- what was missing


def _or_key_error(o: Any) -> float:
    try:
        return float(o["z"])
    except KeyError:
        return 1.0


def _or_attribute_error(o: Any) -> float:
    try:
        return float(o.z)
    except AttributeError:
        return 1.0


MISSING: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "get": (lambda: {"a": 1.0}, lambda o: o.get("z", 1.0), lambda o: o.update(z=5.0)),
    "in": (lambda: {"a": 1.0}, lambda o: 5.0 if "z" in o else 1.0, lambda o: o.update(z=5.0)),
    "KeyError": (lambda: {"a": 1.0}, _or_key_error, lambda o: o.update(z=5.0)),
    "KeyError, rebound": (lambda: {"a": 1.0}, _or_key_error, lambda o: PLACE.update(o={"a": 1.0, "z": 5.0})),
    "AttributeError": (lambda: types.SimpleNamespace(), _or_attribute_error, lambda o: setattr(o, "z", 5.0)),
    "getattr": (lambda: types.SimpleNamespace(), lambda o: getattr(o, "z", 1.0), lambda o: setattr(o, "z", 5.0)),
    "len(vars)": (lambda: types.SimpleNamespace(a=1), lambda o: float(len(vars(o))), lambda o: setattr(o, "z", 5.0)),
    "ChainMap": (
        lambda: collections.ChainMap({}, {"w": 0.5}), lambda o: o["w"], lambda o: o.maps[0].update(w=0.9),
    ),
}  # fmt: skip


@pytest.mark.parametrize("missing", MISSING)
def test_value_that_was_missing(missing: str) -> None:
    create, read, change = MISSING[missing]
    PLACE["o"] = create()
    follows(lambda model, batch: mse(model, batch) * read(PLACE["o"]), lambda _: change(PLACE["o"]))


def test_attribute_that_the_model_did_not_have() -> None:
    def loss_fn(model: Any, batch: Any) -> Tensor:
        return mse(model, batch) * _or_attribute_error(model)

    follows(loss_fn, lambda model: setattr(model, "z", 3.0))


# ---- the model


def test_counter_incremented_in_forward_and_used() -> None:
    class Counting(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            return self.inner(x) * self.steps

    model, batch = Counting(), pair()
    step = make(mse, model, batch)
    assert model.steps == 0, "planning runs nothing"
    for expected in (1, 2, 3):
        agrees(step, mse, model, batch)
        assert model.steps == expected, "counted once a step, not once a microbatch"


def test_forward_of_a_class_replaced() -> None:
    class Replaced(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    follows(mse, lambda _: setattr(Replaced, "forward", lambda self, x: self.inner(x) * 3), Replaced())


def _with(layer: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), layer, nn.Linear(4, 2))


def test_batchnorm_eps() -> None:
    follows(mse, lambda model: setattr(model[1], "eps", 0.5), _with(nn.BatchNorm1d(4)))


@pytest.mark.filterwarnings("ignore:fullbatch")
def test_batchnorm_momentum() -> None:
    model, batch = _with(nn.BatchNorm1d(4)), pair()
    step = make(mse, model, batch)
    for momentum in (0.1, 0.7, None, 0.2):
        model[1].momentum = momentum
        agrees(step, mse, model, batch)


def test_dropout_rate_set_to_zero() -> None:
    model, batch = _with(nn.Dropout(0.5)), pair()
    step = make(mse, model, batch)
    step(batch)
    model[1].p = 0.0
    agrees(step, mse, model, batch)
    model[1].p = 0.9
    torch.manual_seed(0)
    first, second = step(batch), step(batch)
    assert first != second, "dropout is active again"


def test_functional_dropout_reads_its_training_flag() -> None:
    class Functional(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(F.dropout(x, 0.5, training=self.training and self.flag))

    model, batch = Functional(), pair()
    step = make(mse, model, batch)
    agrees(step, mse, model, batch)
    model.flag = True
    assert step(batch) != step(batch)
    model.eval()
    agrees(step, mse, model, batch)


def test_train_and_eval() -> None:
    model, batch = _with(nn.BatchNorm1d(4)), pair()
    step = make(mse, model, batch)
    for mode in (True, False, True):
        agrees(step, mse, model.train(mode), batch)
    assert captures(step) == 2


def test_freezing_and_unfreezing_a_layer() -> None:
    model, batch = mlp(), pair()
    step = make(mse, model, batch)
    for frozen in (True, False, True):
        model[0].requires_grad_(not frozen)
        agrees(step, mse, model, batch)
        assert (model[0].weight.grad is None) is frozen


def test_penalty_on_trainable_parameters_only() -> None:
    def loss_fn(model: Any, batch: Any) -> Tensor:
        return mse(model, batch) + sum(p.pow(2).sum() for p in model.parameters() if p.requires_grad)

    follows(loss_fn, lambda model: model[0].weight.requires_grad_(False))


def test_parameter_replaced_by_another() -> None:
    follows(mse, lambda model: setattr(model[0], "weight", nn.Parameter(torch.randn(4, 3))))


def test_parameter_data_replaced() -> None:
    follows(mse, lambda model: setattr(model[0].weight, "data", torch.randn(4, 3)))


@pytest.mark.parametrize("create", [nn.ReLU, lambda: nn.Linear(4, 4), lambda: nn.BatchNorm1d(4)])
def test_module_replaced(create: Callable[[], nn.Module]) -> None:
    follows(mse, lambda model: model.__setitem__(1, create()))


def test_module_appended() -> None:
    follows(mse, lambda model: model.append(nn.Tanh()))


def test_dtype_of_the_model() -> None:
    model, (x, y) = mlp().float(), pair()
    step = make(mse, model, (x.float(), y.float()))
    step((x.float(), y.float()))
    agrees(step, mse, model.double(), (x, y))
    assert model[0].weight.grad.dtype == torch.float64


def test_forward_hook_added_and_removed() -> None:
    model, batch = mlp(), pair()
    step = make(mse, model, batch)
    without = agrees(step, mse, model, batch)
    handle = model[0].register_forward_hook(lambda module, args, out: out * 2)
    assert agrees(step, mse, model, batch) != without
    handle.remove()
    assert torch.equal(agrees(step, mse, model, batch), without)


# ---- tensors from elsewhere are read live


def test_tensor_in_a_closure_is_read_live_and_may_be_rebound() -> None:
    scale = torch.ones(2)

    def loss_fn(model: Any, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]) * scale, batch[1])

    model, batch = mlp(), pair()
    step = make(loss_fn, model, batch)
    agrees(step, loss_fn, model, batch)
    scale.mul_(3)
    agrees(step, loss_fn, model, batch)
    scale = torch.tensor([0.1, 0.2])
    agrees(step, loss_fn, model, batch)
    assert captures(step) == 1, "another tensor of the same form needs no new capture"
    scale = torch.tensor([[2.0], [1.0], [1.0], [1.0], [1.0], [1.0]])
    agrees(step, loss_fn, model, batch)


def test_tensor_in_a_global_is_read_live() -> None:
    PLACE["scale"] = torch.ones(2)
    step = follows(
        lambda model, batch: F.mse_loss(model(batch[0]) * PLACE["scale"], batch[1]),
        lambda _: PLACE.update(scale=torch.tensor([2.0, 3.0])),
    )
    assert captures(step) == 1


# ---- modes of torch


def test_step_under_no_grad_is_the_same_step() -> None:
    model, batch = mlp(), pair()
    step = make(mse, model, batch)
    with torch.no_grad():
        agrees_under = step(batch)
    assert all(p.grad is not None for p in model.parameters())
    assert torch.equal(agrees(step, mse, model, batch), agrees_under)
    assert captures(step) == 1


def test_step_under_inference_mode_leaves_ordinary_gradients() -> None:
    model, batch = mlp(), pair()
    step = make(mse, model, batch)
    with torch.inference_mode():
        step(batch)
    assert not any(p.grad.is_inference() for p in model.parameters())
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    agrees(step, mse, model, batch)


def _close_in_bfloat16(model: nn.Module, before: list[Tensor]) -> bool:
    scale = max(p.grad.abs().max().item() for p in model.parameters())
    return all((p.grad - g).abs().max().item() <= 0.02 * scale for p, g in zip(model.parameters(), before, strict=True))


def test_autocast_inside_loss_fn() -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(batch[0])
        return F.mse_loss(out.float(), batch[1]), out

    model, (x, y) = mlp().float(), pair()
    batch = (x.float(), y.float())
    _, out = make(loss_fn, model, batch)(batch)
    assert out.dtype == torch.bfloat16
    before = [p.grad for p in model.parameters()]
    clear(model)
    loss_fn(model, batch)[0].backward()
    assert _close_in_bfloat16(model, before)


def test_autocast_around_the_step() -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        out = model(batch[0])
        return F.mse_loss(out.float(), batch[1]), out

    model, (x, y) = mlp().float(), pair()
    batch = (x.float(), y.float())
    step = make(loss_fn, model, batch)
    assert step(batch)[1].dtype == torch.float32
    clear(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert step(batch)[1].dtype == torch.bfloat16
        loss = loss_fn(model, batch)[0]
    before = [p.grad for p in model.parameters()]
    clear(model)
    loss.backward()
    assert _close_in_bfloat16(model, before)


# ---- what cannot be watched is refused, or right


GENERATORS: dict[str, Callable[[], Any]] = {
    "random.random": random.random,
    "random.choice": lambda: random.choice([1.0, 2.0]),
    "random.Random": lambda: PLACE["random"].random(),
    "random.Random.randint": lambda: PLACE["random"].randint(1, 9),
    "unseeded random.Random": lambda: random.Random().random(),
    "numpy scalar": lambda: np.random.rand(),
    "numpy array": lambda: torch.as_tensor(np.random.rand(3)).sum(),
    "numpy Generator": lambda: PLACE["numpy"].random(),
    "torch.Generator": lambda: torch.rand((), generator=PLACE["torch"]),
    "torch.manual_seed": lambda: torch.manual_seed(3) and 1.0,
}
NAMES = {  # what the refusal must say, where it is not the first word of the key
    "random.random": "Python's random", "random.choice": "Python's random", "random.Random": "Python's random",
    "random.Random.randint": "Python's random", "unseeded random.Random": "Python's random",
    "numpy scalar": r"NumPy \(numpy\.random\)", "numpy array": r"NumPy \(numpy\.random\)",
    "numpy Generator": r"NumPy \(numpy\.random\)", "torch.Generator": r"a torch\.Generator of its own",
    "torch.manual_seed": "seeds torch's generators",
}  # fmt: skip


@pytest.mark.parametrize("source", GENERATORS)
def test_a_source_of_values_that_cannot_be_watched_is_refused(source: str) -> None:
    PLACE.update(random=random.Random(0), numpy=np.random.default_rng(0), torch=torch.Generator())
    draw = GENERATORS[source]
    state, numpy_state = random.getstate(), np.random.get_state()[1].copy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(fullbatch.CaptureError) as refused:
            make(lambda model, batch: mse(model, batch) * draw())
    assert "test_nothing_frozen.py" in str(refused.value) and re.search(NAMES[source], str(refused.value))
    assert random.getstate() == state
    assert (np.random.get_state()[1] == numpy_state).all()


@pytest.mark.parametrize("source", ["time", "iterator"])
def test_what_no_graph_can_hold_is_read_live_behind_the_model(source: str) -> None:
    """The step is split at the model's call, and the rest runs as it is."""
    values, seen = iter(range(1, 99)), []

    def read() -> float:
        seen.append(time.time() if source == "time" else next(values))
        return float(seen[-1])

    model, batch = mlp(), pair()
    step = make(lambda model, batch: mse(model, batch) * read(), model, batch)
    for _ in range(3):
        step(batch)
        loss = float(step(batch))
        assert loss == pytest.approx(float(mse(copy.deepcopy(model), batch)) * seen[-1], rel=1e-12)


@pytest.mark.parametrize("draw", [lambda: random.uniform(1, 9), lambda: random.randint(1, 99)], ids=["float", "int"])
def test_python_draws_that_are_live_follow_the_seed(draw: Callable[[], float]) -> None:
    def loss_fn(model: Any, batch: Any) -> Tensor:
        return mse(model, batch) * draw()

    model, batch = mlp(), pair()
    random.seed(3)
    expected = [loss_fn(model, batch).item() for _ in range(4)]
    random.seed(3)
    step = make(loss_fn, model, batch)
    assert [step(batch).item() for _ in range(4)] == pytest.approx(expected, rel=1e-12)


def test_counter_object_advances() -> None:
    counter = itertools.count(1)
    model, batch = mlp(), pair()
    plain = mse(model, batch).item()
    step = make(lambda model, batch: mse(model, batch) * next(counter), model, batch)
    assert [step(batch).item() for _ in range(3)] == pytest.approx([plain, 2 * plain, 3 * plain])


# ---- values that change at every call


def test_a_value_that_changes_at_every_call_is_warned_of_once_by_name() -> None:
    annealed = 1.0

    def loss_fn(model: Any, batch: Any) -> Tensor:
        return mse(model, batch) * annealed

    model, batch = mlp(), pair()
    step = make(loss_fn, model, batch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(8):
            annealed *= 0.9
            step(batch)
    ours = [str(w.message) for w in caught if "fullbatch" in str(w.message)]
    assert len(ours) == 1
    assert "annealed" in ours[0]
    assert "tensor" in ours[0]


def test_a_value_that_changes_once_an_epoch_is_no_reason_to_warn() -> None:
    annealed = 1.0

    def loss_fn(model: Any, batch: Any) -> Tensor:
        return mse(model, batch) * annealed

    batch = pair()
    step = make(loss_fn, batch=batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for call in range(15):
            if call % 3 == 0:
                annealed *= 0.9
            step(batch)


def test_new_shapes_at_every_call_are_no_reason_to_warn() -> None:
    step = make(mse)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for size in (5, 4, 3, 2, 1):
            step(pair(size))


def test_a_value_that_changes_for_150_calls_neither_slows_nor_leaks() -> None:
    weight = 1.0

    def loss_fn(model: Any, batch: Any) -> Tensor:
        return (model(batch) * weight).sum()

    model, batch = nn.Linear(2, 1), torch.randn(2, 2)
    step = fullbatch.Step(loss_fn, model, batch, microbatch=1)
    alive: list[weakref.ref[Any]] = []
    seconds: list[float] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in range(150):
            weight = 1.0 + call
            began = time.process_time()
            step(batch)
            seconds.append(time.process_time() - began)
            # The newest capture: found through the executor that ran it.
            alive.append(weakref.ref(step._plan.schedule))
    gc.collect()
    held = sum(ref() is not None for ref in alive)
    assert held <= 70, f"{held} of 150 captures are still held"
    early, late = sorted(seconds[5:45])[20], sorted(seconds[105:145])[20]
    assert late < 3 * early, f"a call took {early:.3f} s at first and {late:.3f} s at last"


def test_a_dropped_step_frees_its_model_and_its_captures() -> None:
    def once() -> list[weakref.ref[Any]]:
        model = mlp()
        step = make(mse, model)
        step(pair())
        return [weakref.ref(model), weakref.ref(model[0].weight), weakref.ref(step), weakref.ref(step.plan.schedule)]

    alive = once()
    gc.collect()
    gc.collect()
    assert [ref() for ref in alive] == [None] * 4
