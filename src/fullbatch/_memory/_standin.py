"""Optimizers that tensors without storage cannot drive, run on small real ones.

LBFGS branches on values: what it holds is so many vectors of all parameters together, and so many more for each step
of its history. They are counted on a small problem, with two lengths of history. An optimizer that compiles
its step allocates what the compiled kernels allocate: it steps one stand-in of each form, one at a time, as it steps
the parameters.
"""

from __future__ import annotations

from typing import Any

import torch

from fullbatch import _torch
from fullbatch._cost._forms import Meta
from fullbatch._memory._live import Live
from fullbatch._memory._measure import measure
from fullbatch._memory._twin import is_stepped, parameters_of, plain_step, state_bytes, with_parameters

_SIZE, _HISTORIES = 1024, (2, 3)
_ITERATIONS = 60  # fill those histories, and meet most turns of a line search


def lbfgs(optimizer: torch.optim.LBFGS, device: torch.device) -> tuple[int, int, int]:
    """Bytes of its state once the history is full; what it holds besides during a closure; at the most."""
    parameters = parameters_of(optimizer)
    if not parameters or parameters[0].device != device:
        return 0, 0, 0
    size, history = sum(p.numel() for p in parameters), int(optimizer.param_groups[0]["history_size"])
    vector = _SIZE * parameters[0].element_size()

    def scaled(nbytes: int) -> int:
        """Whole vectors are of the parameters' size; what is over are scalars, few beside one vector."""
        return nbytes // vector * size * parameters[0].element_size() + nbytes % vector

    runs = [_run_lbfgs(optimizer, parameters[0], history) for history in _HISTORIES]
    few, more = (scaled(state) for state, _, _ in runs)
    state = few + (more - few) * (history - _HISTORIES[0])
    return state, max(scaled(held) for _, held, _ in runs), max(scaled(working) for _, _, working in runs)


def _run_lbfgs(optimizer: torch.optim.LBFGS, like: torch.Tensor, history: int) -> tuple[int, int, int]:
    """Bytes of the state, and the most above it during a closure and at any time, on one vector of parameters."""
    x = torch.ones(_SIZE, dtype=like.dtype, device=like.device)
    x.grad = torch.zeros_like(x)
    twin = with_parameters(optimizer, {id(like): x})
    slow = {} if twin.param_groups[0]["line_search_fn"] else {"lr": 1e-3}  # or it arrives before the history is full
    twin.param_groups[0].update(history_size=history, tolerance_change=0.0, tolerance_grad=-1.0, **slow)
    _torch.optimizes(twin, [x])
    live, during = Live(like.device, [x, x.grad]), 0

    def closure() -> float:
        nonlocal during
        during = max(during, live.level)
        with _torch.without_modes():
            return _value(x, curved=twin.state[x].get("n_iter", 0) < _ITERATIONS // 2)

    for _ in range(_ITERATIONS):
        with live, torch.no_grad():
            plain_step(twin, closure)
        if twin.state[x]["n_iter"] >= _ITERATIONS:
            break
    state = state_bytes(twin.state[x], like.device)
    return state, max(during - state, 0), max(live.peak - state, 0)


def _value(x: torch.Tensor, curved: bool) -> float:
    """A function whose gradient is written to `x.grad`: slopes of many sizes and a dent on the way, and then a plane.

    On a plane gradients do not change, so that LBFGS makes a pair for its history that it does not keep.
    """
    slopes = torch.linspace(1.0, 30.0, x.numel(), dtype=x.dtype, device=x.device)
    assert x.grad is not None
    if not curved:
        x.grad.copy_(slopes)
        return float((slopes * x).sum())
    x.grad.copy_(slopes * x + torch.cos(7 * x))
    return float((slopes * x * x / 2 + torch.sin(7 * x) / 7).sum())


def warm(optimizer: torch.optim.Optimizer) -> None:
    """One step of each group on a small real tensor, uncompiled, before any on tensors without storage.

    What an optimizer computes once for the process and keeps (torchao: the map of its codes) must be computed of real
    numbers: made without storage it would be wrong for every later step, in silence. torch's own keep nothing.
    """
    if type(optimizer).__module__.startswith(("torch.optim.", "fullbatch.optim.")):
        return
    for group in optimizer.param_groups:
        for dtype in {parameter.dtype for parameter in group["params"]}:
            form = Meta((64, 64), (64, 1), dtype, group["params"][0].device)  # large enough to be held in few bits
            parameter = torch.nn.Parameter(form.filled())
            parameter.grad = form.filled()
            twin = with_parameters(optimizer, {})
            twin.param_groups = [{**group, "params": [parameter]}]
            with _torch.optimizer_on_fakes():
                plain_step(twin)


def compiled(optimizer: torch.optim.Optimizer, device: torch.device, uncompiled: int) -> tuple[int, bool]:
    """The most that its compiled step holds for any one parameter, and whether that was measured.

    Compiling takes seconds for each form of a parameter; the optimizer's own first step then finds it done.
    """
    most = 0
    for group in optimizer.param_groups:
        for form in {Meta.of(p) for p in group["params"] if is_stepped(p) and p.device == device}:
            try:
                most = max(most, _compiled_step(optimizer, group, form))
            except Exception:  # no compiler, or a profiler runs
                return uncompiled, False
    return most, True


def _compiled_step(optimizer: torch.optim.Optimizer, group: dict[str, Any], form: Meta) -> int:
    parameter = torch.nn.Parameter(form.filled())
    parameter.grad = form.filled()
    twin = with_parameters(optimizer, {})
    twin.param_groups = [{**group, "params": [parameter]}]
    plain_step(twin)  # compiles
    twin.state.clear()
    peaks = [measure(lambda: plain_step(twin), form.device).peak for _ in range(2)]  # the first makes the state
    return max(peaks[0] - state_bytes(dict(twin.state), form.device), peaks[1])
