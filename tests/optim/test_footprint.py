"""What an optimizer takes is known before it exists: its state to the byte, and the peak of its step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

import fullbatch
from fullbatch._memory._live import NUMBER, Live
from fullbatch._memory._optimizer import footprint
from fullbatch._memory._owned import owned_bytes
from fullbatch._memory._twin import parameters_of, state_bytes

CPU = torch.device("cpu")
Make = Callable[[Any], torch.optim.Optimizer]


def _matrices(parameters: Any) -> list[Any]:
    return [parameter for parameter in parameters if parameter.ndim == 2]


def _groups(parameters: Any) -> list[dict[str, Any]]:
    parameters = list(parameters)
    return [{"params": parameters[:1], "weight_decay": 0.1, "foreach": True}, {"params": parameters[1:]}]


OPTIMIZERS: dict[str, Make] = {
    "adadelta": lambda p: optim.Adadelta(p),
    "adadelta foreach decay": lambda p: optim.Adadelta(p, foreach=True, weight_decay=0.1),
    "adafactor": lambda p: optim.Adafactor(p),
    "adafactor foreach": lambda p: optim.Adafactor(p, foreach=True),
    "adagrad": lambda p: optim.Adagrad(p),
    "adagrad fused": lambda p: optim.Adagrad(p, fused=True),
    "adam": lambda p: optim.Adam(p),
    "adam decay, rate a tensor": lambda p: optim.Adam(p, lr=torch.tensor(0.1), weight_decay=0.1),
    "adamax": lambda p: optim.Adamax(p),
    "adamax foreach": lambda p: optim.Adamax(p, foreach=True),
    "adamw": lambda p: optim.AdamW(p),
    "adamw foreach": lambda p: optim.AdamW(p, foreach=True),
    "adamw fused": lambda p: optim.AdamW(p, fused=True),
    "adamw amsgrad": lambda p: optim.AdamW(p, amsgrad=True),
    "adamw groups": lambda p: optim.AdamW(_groups(p)),
    "asgd averaging": lambda p: optim.ASGD(p, t0=0.0),
    "asgd foreach": lambda p: optim.ASGD(p, foreach=True),
    "muon": lambda p: optim.Muon(_matrices(p)),
    "nadam": lambda p: optim.NAdam(p),
    "nadam foreach decay": lambda p: optim.NAdam(p, foreach=True, weight_decay=0.1, decoupled_weight_decay=True),
    "radam": lambda p: optim.RAdam(p),
    "radam foreach": lambda p: optim.RAdam(p, foreach=True),
    "rmsprop": lambda p: optim.RMSprop(p),
    "rmsprop centered momentum": lambda p: optim.RMSprop(p, centered=True, momentum=0.9),
    "rprop": lambda p: optim.Rprop(p),
    "rprop foreach": lambda p: optim.Rprop(p, foreach=True),
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "sgd nesterov decay": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd fused": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "lamb": lambda p: fullbatch.optim.LAMB(p, weight_decay=0.1),
    "lars": lambda p: fullbatch.optim.LARS(p, lr=0.1),
    "lars 2017": lambda p: fullbatch.optim.LARS(p, lr=0.1, form="2017"),
}

HALVES = ["lamb", "lars", "lars 2017"]  # torch's kernels for float16 are CUDA's

LOW_BIT = ["AdamW8bit", "AdamW4bit", "AdamWFp8", "Adam8bit"]


def _model(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 32), nn.BatchNorm1d(32)).to(dtype)


def _with_gradients(optimizer: torch.optim.Optimizer) -> None:
    for parameter in parameters_of(optimizer):
        parameter.grad = torch.randn_like(parameter)


def _measured(optimizer: torch.optim.Optimizer, steps: int = 8) -> tuple[int, int]:
    """Bytes of the state, and the most above parameters, gradients and state in any of `steps` steps."""
    _with_gradients(optimizer)
    before = state_bytes(dict(optimizer.state), CPU)
    peaks = [fullbatch.measure(optimizer.step).peak for _ in range(steps)]
    state = state_bytes(dict(optimizer.state), CPU)
    return state, max(peaks[0] - (state - before), *peaks[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_to_the_byte_and_the_peak_of_the_step(name: str, dtype: torch.dtype) -> None:
    optimizer = OPTIMIZERS[name](_model(dtype).parameters())
    found = footprint(optimizer, CPU)
    state, working = _measured(optimizer)
    assert found.exact
    assert sum(found.states.values()) == state
    assert working <= found.working <= working + NUMBER


@pytest.mark.parametrize("name", HALVES)
def test_state_in_float16_is_of_float32(name: str) -> None:
    optimizer = OPTIMIZERS[name](_model(torch.float16).parameters())
    found = footprint(optimizer, CPU)
    state, working = _measured(optimizer)
    tensors = 2 if name == "lamb" else 1
    assert found.exact
    assert sum(found.states.values()) == state == tensors * 4 * sum(p.numel() for p in parameters_of(optimizer))
    assert working <= found.working <= working + NUMBER


@pytest.mark.parametrize("name", LOW_BIT)
def test_low_bit_optimizers(name: str) -> None:
    import torchao.optim

    model = nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 32))
    optimizer = getattr(torchao.optim, name)(model.parameters())
    found = footprint(optimizer, CPU)
    state, working = _measured(optimizer, steps=3)
    assert found.exact
    assert sum(found.states.values()) == state < 2.6 * sum(p.numel() for p in model.parameters())
    assert working <= found.working <= working + NUMBER


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize(("history", "iterations"), [(4, 20), (7, 1), (10, 5)])
def test_lbfgs_once_its_history_is_full(search: str | None, history: int, iterations: int) -> None:
    """State to the byte but for a rate that is a tensor or not; the rest is a bound, since it depends on values."""
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 16)), torch.randn(8, 64), torch.randn(8, 16)
    optimizer = optim.LBFGS(
        model.parameters(), lr=0.1, history_size=history, max_iter=iterations, line_search_fn=search
    )
    parameters = parameters_of(optimizer)
    _with_gradients(optimizer)
    found, during = footprint(optimizer, CPU), 0
    live = Live(CPU, [*parameters, *(p.grad for p in parameters if p.grad is not None)])

    def closure() -> float:
        nonlocal during
        during = max(during, live.level)
        with torch.utils._python_dispatch._disable_current_modes():
            loss = nn.functional.mse_loss(model(x), y)
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                assert parameter.grad is not None
                parameter.grad.copy_(gradient)
        return loss.item()

    for _ in range(3 * history):
        with live:
            optimizer.step(closure)
    state, vector = state_bytes(dict(optimizer.state), CPU), 4 * sum(p.numel() for p in parameters)
    assert abs(found.shared - state) <= NUMBER
    assert during - state <= found.held + NUMBER
    assert live.peak - state <= found.working + NUMBER
    assert found.working - (live.peak - state) <= 3.01 * vector


def test_state_that_exists_in_part() -> None:
    """Parameters added later have none yet."""
    first, second = nn.Linear(8, 16), nn.Linear(16, 4)
    optimizer = optim.AdamW(first.parameters())
    _with_gradients(optimizer)
    optimizer.step()
    optimizer.add_param_group({"params": list(second.parameters())})
    counted = owned_bytes(CPU, [], [], [], optimizer).optimizer
    _with_gradients(optimizer)
    optimizer.step()
    assert counted == owned_bytes(CPU, [], [], [], optimizer).optimizer == state_bytes(dict(optimizer.state), CPU)


def test_low_bit_state_that_exists_is_counted_by_its_parts() -> None:
    import torchao.optim

    layer = nn.Linear(64, 128)
    optimizer = torchao.optim.AdamW8bit(layer.parameters())
    coming = owned_bytes(CPU, [], [], [], optimizer).optimizer
    _with_gradients(optimizer)
    optimizer.step()
    # Codes of a byte, a scale for each 256 of them and a map of 256 values, twice; the bias is kept as it is.
    expected = 2 * (64 * 128 + 64 * 128 // 256 * 4 + 256 * 4) + 2 * 4 * 128 + 2 * 4
    assert coming == owned_bytes(CPU, [], [], [], optimizer).optimizer == expected


def test_frozen_parameters_and_those_elsewhere_have_no_state() -> None:
    frozen, used = nn.Linear(8, 8).requires_grad_(False), nn.Linear(4, 4)
    optimizer = optim.AdamW([*frozen.parameters(), *used.parameters()])
    found = footprint(optimizer, CPU)
    assert sum(found.states.values()) == 2 * 4 * (16 + 4) + 2 * 4
    elsewhere = footprint(optimizer, torch.device("meta"))
    assert (sum(elsewhere.states.values()), elsewhere.working) == (0, 0)


def test_annealing_a_rate_finds_nothing_anew_and_a_changed_option_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from fullbatch._memory import _optimizer

    optimizer = optim.SGD(nn.Linear(8, 8).parameters(), lr=0.1, momentum=0.9)
    first, calls = footprint(optimizer, CPU), []
    found = _optimizer._find
    monkeypatch.setattr(_optimizer, "_find", lambda *given: calls.append(1) or found(*given))
    optimizer.param_groups[0]["lr"] = 0.05
    assert footprint(optimizer, CPU) is first
    assert not calls
    optimizer.param_groups[0]["momentum"] = 0.0
    assert sum(footprint(optimizer, CPU).states.values()) == 0 < sum(first.states.values())
    assert calls


class _Reads(optim.Optimizer):
    """Branches on a value, which a tensor without storage does not have."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in parameters_of(self):
            if parameter.grad is not None and (parameter.grad > 0).any():
                parameter.data.sub_(parameter.grad)


def test_an_optimizer_that_cannot_be_run_on_stand_ins_is_named() -> None:
    model, batch = nn.Linear(8, 8), torch.randn(4, 8)
    optimizer = _Reads(model.parameters())
    assert not footprint(optimizer, CPU).exact
    step = fullbatch.Step(lambda m, b: m(b).square().mean(), model, batch, microbatch=2, optimizer=optimizer)
    assert any("could not be run on stand-ins" in note for note in step.plan.notes)
    step(batch)
    optimizer.step()


def test_under_a_profiler_what_cannot_be_measured_is_not_taken_for_known() -> None:
    optimizer = optim.Muon([nn.Parameter(torch.randn(37, 53))])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert not footprint(optimizer, CPU).exact
    assert footprint(optimizer, CPU).exact


def test_sparse_adam() -> None:
    table = nn.Embedding(20, 8, sparse=True)
    optimizer = optim.SparseAdam(table.parameters())
    found = footprint(optimizer, CPU)
    table(torch.tensor([3, 3, 5])).sum().backward()
    optimizer.step()
    assert sum(found.states.values()) == state_bytes(dict(optimizer.state), CPU) == 2 * 4 * 160


@pytest.mark.parametrize(("options", "tensors"), [({}, 6), ({"foreach": False}, 3), ({"fused": True}, 0)])
def test_the_default_on_cuda_works_on_all_tensors_at_once(options: Any, tensors: int) -> None:
    """Tensors without storage take the path that real ones on CUDA would; no CUDA is needed for that."""
    from fullbatch import _torch
    from fullbatch._memory._optimizer import _Numbers
    from fullbatch._memory._twin import plain_step

    with _torch.fake_mode(), _torch.optimizer_on_fakes():
        parameters = [nn.Parameter(torch.empty(100, 100, device="cuda")) for _ in range(6)]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizer = optim.AdamW(parameters, **options)
        live = Live(parameters[0].device, [t for p in parameters for t in (p, p.grad) if t is not None])
        with live, _Numbers(0.5), torch.no_grad():
            plain_step(optimizer)
    assert 0 <= live.peak - (12 + tensors) * 40_000 < 100


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit"])
def test_what_an_optimizer_keeps_for_the_process_is_not_made_without_storage(name: str) -> None:
    """torchao keeps the map of its codes; one of stand-ins for numbers made every later step wrong."""
    import importlib

    import torchao.optim

    module = importlib.import_module(f"torchao.optim.subclass_{'8' if '8' in name else '4'}bit")
    kept = [one for key, one in vars(module).items() if key.startswith("get_qmap") and hasattr(one, "cache_clear")]
    assert kept
    expected = [one() for one in kept if not one.cache_clear()]
    for one in kept:
        one.cache_clear()
    footprint(getattr(torchao.optim, name)([nn.Parameter(torch.zeros(64, 128))]), CPU)
    assert [one() for one in kept] == expected
