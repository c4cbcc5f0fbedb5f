"""Optimizers that take less: state in eight bits, no state, and the same step with less at work."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import optim

from fullbatch._memory._optimizer import footprint
from fullbatch._memory._twin import each_of, parameters_of, parts_of, with_parameters
from fullbatch._propose._changed import Asked, Change, Made
from fullbatch._propose._tried import Tried
from fullbatch._propose._twin import Untried
from fullbatch._tree import named_tensors

_EIGHT_BITS: dict[type, str] = {optim.Adam: "Adam8bit", optim.AdamW: "AdamW8bit"}
_SHARED = ("lr", "betas", "eps", "weight_decay", "amsgrad")  # what both kinds of Adam take
_INSTALL = "pip install 'fullbatch[lowbit]'"


def optimizers(asked: Asked, step: Tried) -> Iterator[Change]:
    """Other optimizers for the same captured step; none of them is stepped."""
    each = each_of(asked.optimizer)
    if any(parts_of(one) != [one] for one in each):
        return
    found = [list(_of_one(asked, step, one)) for one in each]
    for what in dict.fromkeys(change.what for changes in found for change in changes):
        yield _together([next((one for one in changes if one.what == what), None) for changes in found], each)


def _together(changes: list[Change | None], each: tuple[torch.optim.Optimizer, ...]) -> Change:
    """One change of all optimizers that it is for: the most that any works on counts, and one alone saves nothing."""
    some = [change for change in changes if change is not None]
    if len(each) == 1:
        return some[0]
    lines = [change.line if change is not None else "" for change in changes]
    return replace(some[0], line=_line(lines), make=lambda: _all_made(changes, each))


def _all_made(changes: list[Change | None], each: tuple[torch.optim.Optimizer, ...]) -> Made:
    """The optimizers that can be changed, changed; the others as they are. Raises Untried where none can."""
    made: list[Made | None] = []
    refused: list[Untried] = []
    for change in changes:
        try:
            made.append(change.make() if change is not None else None)
        except Untried as error:
            made.append(None)
            refused.append(error)
    done = [one for one in made if one is not None]
    if not done:
        raise refused[0]
    after = [one for new, old in zip(made, each, strict=True) for one in each_of(new.optimizer if new else old)]
    reasons = dict.fromkeys([*(one.reason for one in done if one.reason), *map(str, refused)])
    line = _line([one.line if one is not None else "" for one in made])
    return replace(done[0], line=line, reason="; ".join(reasons), optimizer=after)


def _line(lines: list[str]) -> str:
    """What stands for each optimizer, in one list; "" for one that stays, and where all do."""
    if not any(lines):
        return ""
    parts = [line.removeprefix("optimizer = ") or f"optimizer[{at}]" for at, line in enumerate(lines)]
    return f"optimizer = [{', '.join(parts)}]"


def _of_one(asked: Asked, step: Tried, optimizer: torch.optim.Optimizer) -> Iterator[Change]:
    yield from _at_work(asked, step, optimizer)
    states = footprint(optimizer, asked.device).states
    if sum(states.values()) < 2 * sum(parameter.numel() for parameter in parameters_of(optimizer)):
        return  # it keeps little already
    name = _EIGHT_BITS.get(type(optimizer), "")
    line = f"optimizer = torchao.optim.{name}({_groups(asked.model, optimizer)}, ...)" if name else ""
    yield Change("optimizer state in 8 bits", line, False, lambda: _eight_bits(asked, step, optimizer, name))
    if name:
        line = f"optimizer = torch.optim.Adafactor({_groups(asked.model, optimizer)})"
        what = "Adafactor: sums of rows and columns as state"
        yield Change(what, line, False, lambda: _adafactor(step, optimizer, line))


def _eight_bits(asked: Asked, step: Tried, optimizer: torch.optim.Optimizer, name: str) -> Made:
    kind = type(optimizer).__name__
    if not name:
        raise Untried(f"torchao keeps the state of Adam and AdamW in 8 bits, and none of {kind}")
    if any(group.get("maximize") for group in optimizer.param_groups):
        raise Untried(f"torchao's {name} does not maximize")
    try:
        made = getattr(importlib.import_module("torchao.optim"), name)
    except ImportError:
        raise Untried(f"torchao is not installed: {_INSTALL}") from None
    groups = [
        {"params": list(group["params"]), **{option: _number(group[option]) for option in _SHARED}}
        for group in optimizer.param_groups
    ]
    line = f"optimizer = torchao.optim.{name}({_groups(asked.model, optimizer)}{_options(made, optimizer, _SHARED)})"
    return Made(step, line, "the time of optimizer.step() is not predicted", made(groups))


def _adafactor(step: Tried, optimizer: torch.optim.Optimizer, line: str) -> Made:
    groups = [{"params": list(group["params"])} for group in optimizer.param_groups]
    return Made(step, line, "another optimizer, with a learning rate of its own", optim.Adafactor(groups))


def _at_work(asked: Asked, step: Tried, optimizer: torch.optim.Optimizer) -> Iterator[Change]:
    """The same arithmetic with less at work: not over all parameters at once, or in one kernel."""
    groups, kind = optimizer.param_groups, type(optimizer).__name__
    if not type(optimizer).__module__.startswith("torch.optim.") or not all("foreach" in group for group in groups):
        return
    if any(group.get("fused") for group in groups):
        return
    usual = asked.device.type == "cuda"  # where torch chooses it
    if any(group["foreach"] or (group["foreach"] is None and usual) for group in groups):
        line = f"optimizer = torch.optim.{kind}(..., foreach=False)"
        make = partial(_with, step, optimizer, line, foreach=False)
        yield Change("optimizer.step() a tensor at a time", line, True, make, True)
    if all("fused" in group for group in groups):
        line = f"optimizer = torch.optim.{kind}(..., fused=True)"
        make = partial(_with, step, optimizer, line, foreach=None, fused=True)
        yield Change("optimizer.step() in one kernel", line, True, make, True)


def _with(step: Tried, optimizer: torch.optim.Optimizer, line: str, **options: Any) -> Made:
    """The optimizer with other options, its state shared and only read."""
    twin = with_parameters(optimizer, {id(parameter): parameter for parameter in parameters_of(optimizer)})
    twin.param_groups = [{**group, **options} for group in twin.param_groups]
    twin.state = optimizer.state
    return Made(step, line, "", twin)


def _number(option: Any) -> Any:
    """A rate that is a tensor would be shared with the other optimizer."""
    return float(option) if isinstance(option, torch.Tensor) else option


def _groups(model: Any, optimizer: torch.optim.Optimizer) -> str:
    """What the user would hand over as parameters."""
    if len(optimizer.param_groups) > 1:
        return "groups"
    parameters = {id(parameter) for parameter in named_tensors(model, "parameters").values()}
    own = {id(parameter) for parameter in parameters_of(optimizer)}
    return "model.parameters()" if isinstance(model, torch.nn.Module) and own == parameters else "parameters"


def _options(kind: Any, optimizer: torch.optim.Optimizer, names: tuple[str, ...]) -> str:
    """The options that are not those that `kind` has by itself; with several groups those of the groups hold."""
    usual = {name: one.default for name, one in inspect.signature(kind.__init__).parameters.items()}
    given = {name: _number(optimizer.defaults[name]) for name in names if name in optimizer.defaults}
    if len(optimizer.param_groups) == 1:
        given = {name: _number(optimizer.param_groups[0][name]) for name in names}
    return "".join(f", {name}={value!r}" for name, value in given.items() if value != usual.get(name))
