"""Arguments that `Step`, `eager.Step` and `largest` take: each check raises a named error, and changes nothing."""

from __future__ import annotations

import os
from typing import Any

import torch

from fullbatch._errors import (
    BatchError,
    Fault,
    LossError,
    MemorySizeError,
    ModelError,
    PlanError,
    VerifyError,
    check_all,
)
from fullbatch._memory._free import RESERVE, free_bytes
from fullbatch._memory._total import total_bytes
from fullbatch._plan._plan import Plan
from fullbatch._size import format_bytes, parse_bytes
from fullbatch._tree import check_devices


def check_callable(loss_fn: Any, optimizer: Any) -> None:
    """Raises LossError or ModelError where `loss_fn` is no function (or pair of them), or `optimizer` not of torch."""
    check_all(lambda: _check_function(loss_fn), lambda: check_optimizers(optimizer))


def _check_function(loss_fn: Any) -> None:
    if not callable(loss_fn) and not isinstance(loss_fn, (tuple, list)):
        raise LossError.of(
            "loss_fn is not a function.", got=f"{type(loss_fn).__name__}: {loss_fn!r:.80}",
            expected="a function of (model, batch)", next="fullbatch.Step(loss_fn, model, batch)",
        )  # fmt: skip


def check_optimizers(optimizer: Any) -> None:
    """Raises ModelError where `optimizer` is none of torch's, nor a list or tuple of some, each once."""
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        return
    if not isinstance(optimizer, (list, tuple)):
        raise ModelError(_no_optimizer("The optimizer", optimizer, "optimizer=torch.optim.AdamW(model.parameters())"))
    line = "optimizer=[torch.optim.AdamW(model.parameters())]"
    if not optimizer:
        raise ModelError.of("optimizer= is empty.", got=repr(optimizer), expected="one or more optimizers", next=line)
    faults = []
    for at, one in enumerate(optimizer):
        first = _first_at(optimizer, one)
        if not isinstance(one, torch.optim.Optimizer):
            faults.append(_no_optimizer(f"optimizer[{at}]", one, line))
        elif first < at:
            faults.append(_again(at, first, one))
    if faults:
        raise ModelError(*faults)


def _first_at(optimizers: Any, one: Any) -> int:
    """Where `one` itself first stands."""
    return next(at for at, other in enumerate(optimizers) if other is one)


def _again(at: int, first: int, one: Any) -> Fault:
    return Fault(
        f"optimizer[{at}] is optimizer[{first}] again.", got=f"the same {type(one).__name__} twice",
        expected="each optimizer once: its state is there once", next="optimizer=list(dict.fromkeys(optimizers))",
    )  # fmt: skip


def _no_optimizer(name: str, got: Any, next: str) -> Fault:
    return Fault(
        f"{name} is not one of torch.", got=f"{type(got).__name__}: {got!r:.80}",
        expected="a torch.optim.Optimizer, a list or tuple of them, or None", next=next,
    )  # fmt: skip


def check_memory(memory: int | str | None, model: Any) -> None:
    """Raises MemorySizeError where `memory` is no size, or is more than the model's device has."""
    if memory is None:
        return
    asked = parse_bytes(memory)
    try:
        device = check_devices(model)
    except ModelError:  # said by another check
        return
    total = total_bytes(device)
    if total is not None and asked > total:
        free = free_bytes(device)
        raise MemorySizeError.of(
            "The memory budget is more than the device has.",
            got=f"memory={memory!r}: {asked:,} bytes ({format_bytes(asked)})",
            expected=f"at most the {total:,} bytes ({format_bytes(total)}) of {device}",
            next=f"memory={free}, what is free now less a reserve of {RESERVE:.0%}, or no memory= for the same",
        )


def check_microbatch(microbatch: int | None, size: int) -> None:
    """Raises BatchError where `microbatch` is no number of samples from 1 to `size`."""
    if microbatch is None:
        return
    if isinstance(microbatch, bool) or not isinstance(microbatch, int) or not 1 <= microbatch <= size:
        raise BatchError.of(
            "The microbatch does not fit the batch.", got=f"microbatch={microbatch!r}",
            expected=f"an int from 1 to {size}, the samples in the batch", next=f"microbatch={max(1, size // 2)}",
        )  # fmt: skip


def given_plan(plan: Plan | str | os.PathLike[str] | None) -> Plan | None:
    """The plan itself, or the one in that file. Raises PlanError."""
    if plan is None or isinstance(plan, Plan):
        return plan
    if isinstance(plan, (str, os.PathLike)):
        return Plan.load(plan)
    raise PlanError.of(
        "plan= is no plan.", got=f"{type(plan).__name__}: {plan!r:.80}",
        expected="a fullbatch.Plan, or the path of a file that plan.save wrote", next='plan="plan.json"',
    )  # fmt: skip


def check_flags(**flags: Any) -> None:
    """Raises PlanError with all of `flags` that are neither True nor False."""
    faults = [
        Fault(
            f"{name}= is neither True nor False.",
            got=f"{name}={value!r:.80}",
            expected="a bool",
            next=f"fullbatch.Step(..., {name}=True)",
        )
        for name, value in flags.items()
        if not isinstance(value, bool)
    ]
    if faults:
        raise PlanError(*faults)


def check_precision(dtype: Any) -> None:
    """Raises VerifyError where `dtype` is not None, and no real floating point format that a CPU computes in."""
    known = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    if dtype is not None and dtype not in known:
        raise VerifyError.of(
            "A comparison needs a format of floating point numbers.", got=f"dtype={dtype!r:.80}",
            expected=f"None, or one of {', '.join(map(str, known))}", next="step.verify()",
        )  # fmt: skip
