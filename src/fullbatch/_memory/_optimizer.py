"""What an optimizer takes: its state before it exists, and the working memory of its step.

Limit that forced it: an optimizer's state appears at its first step, and its temporaries at every one, after a plan was
made and has run. Shape of the answer: a copy of the optimizer runs its own `step()` on copies of the parameters without
storage (`_live` counts), so that every optimizer is known that such tensors can drive. Two kinds they cannot: one that
branches on values and calls a closure (LBFGS), and one that compiles its step (torchao's low-bit ones). Those run on
small real tensors (`_standin`).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fullbatch import _torch
from fullbatch._memory import _standin
from fullbatch._memory._live import Live
from fullbatch._memory._twin import (
    is_stepped,
    parameters_of,
    parts_of,
    plain_step,
    state_bytes,
    tensors_in,
    with_parameters,
)  # fmt: skip

# Numbers that an optimizer reads out of tensors (a step count, a norm): of the first step, and of one long after.
_EARLY, _LATE = 0.5, 1e4


@dataclass(frozen=True)
class Footprint:
    """Bytes of an optimizer on one device.

    `states`: of each parameter's state, by the parameter's id. `shared`: of state that grows (LBFGS), when it is full.
    `working`: the most that `step()` holds at once besides parameters, gradients and state. `held`: what it holds of
    that while it calls a closure, so while the training step runs. `exact`: whether that was found by running it.
    """

    states: dict[int, int]
    shared: int
    working: int
    held: int
    exact: bool


def footprint(optimizer: torch.optim.Optimizer, device: torch.device) -> Footprint:
    """The footprint of `optimizer` on `device`, found once and again where its parameters or options change."""
    known = _KNOWN.setdefault(optimizer, {})
    key = device, _signature(optimizer)
    if key in known:
        return known[key]
    found = _find(optimizer, device)
    if found.exact or not _torch.profiler_running():  # under a profiler nothing can be measured: another time
        known.clear()
        known[key] = found
    return found


_KNOWN: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[Any, Footprint]] = weakref.WeakKeyDictionary()


def _signature(optimizer: torch.optim.Optimizer) -> Any:
    """Changes with whatever may change the memory: a rate that is annealed does not."""
    groups = [
        (
            tuple((id(p), p.shape, p.dtype, p.requires_grad) for p in group["params"]),
            tuple(sorted((name, bool(value)) for name, value in group.items() if isinstance(value, (int, float)))),
        )
        for group in optimizer.param_groups
    ]
    return tuple(groups)


def _find(optimizer: torch.optim.Optimizer, device: torch.device) -> Footprint:
    parts = parts_of(optimizer)
    if parts != [optimizer]:  # they step one after the other
        found = [footprint(one, device) for one in parts]
        states = {at: nbytes for one in found for at, nbytes in one.states.items()}
        return Footprint(states, 0, max((one.working for one in found), default=0), 0, all(one.exact for one in found))
    if isinstance(optimizer, torch.optim.LBFGS):
        shared, held, working = _standin.lbfgs(optimizer, device)
        return Footprint({}, shared, working, held, exact=True)
    try:
        return _on_fakes(optimizer, device)
    except Exception:  # an optimizer that branches on values, runs a closure, or takes sparse gradients
        return _assumed(optimizer, device)


def _assumed(optimizer: torch.optim.Optimizer, device: torch.device) -> Footprint:
    """Adam's two tensors a parameter, and as many again of the largest at work; where nothing is known."""
    sizes = {id(p): p.numel() * p.element_size() for p in parameters_of(optimizer) if p.device == device}
    states = {at: 2 * nbytes for at, nbytes in sizes.items()}
    return Footprint(states, 0, 2 * max(sizes.values(), default=0), 0, exact=False)


def _on_fakes(optimizer: torch.optim.Optimizer, device: torch.device) -> Footprint:
    _standin.warm(optimizer)
    mode = _torch.fake_mode()
    with mode, _torch.optimizer_on_fakes() as compiled:
        twins = {id(p): _twin(mode, p) for p in parameters_of(optimizer)}
        twin = with_parameters(optimizer, twins)
        first = _run(twin, twins, device, _EARLY)
        states = {at: state_bytes(twin.state.get(one, {}), device) for at, one in twins.items()}
        later = _run(twin, twins, device, _LATE)
    (early, one), (late, other) = first.inside(), later.inside()
    working, exact = max(early - sum(states.values()), late), one and other
    if compiled:
        working, exact = _standin.compiled(optimizer, device, working)
    return Footprint(states, 0, max(working, 0), 0, exact)


def _run(twin: Any, twins: dict[int, torch.Tensor], device: torch.device, number: float) -> Live:
    held = [tensor for one in twins.values() for tensor in (one, one.grad) if tensor is not None]
    live = Live(device, [*held, *tensors_in(dict(twin.state))])
    with live, _Numbers(number), torch.no_grad():
        plain_step(twin)
    return live


class _Numbers(TorchFunctionMode):
    """Where an optimizer reads a number out of a tensor without storage, it reads this one."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self._number = number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.item, torch.Tensor.__float__):
            return self._number
        return func(*args, **(kwargs or {}))


def _twin(mode: Any, parameter: torch.Tensor) -> torch.Tensor:
    twin = torch.nn.Parameter(_torch.to_fake(mode, parameter.detach()), requires_grad=parameter.requires_grad)
    if is_stepped(parameter):
        twin.grad = torch.empty_like(twin)
    return twin
