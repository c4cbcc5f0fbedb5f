"""Arguments that `Step`, `eager.Step` and `largest` take: each check raises a named error, and changes nothing."""

from __future__ import annotations

import os
from typing import Any

import torch

from fullbatch._errors import BatchError, LossError, MemorySizeError, ModelError, PlanError
from fullbatch._memory._free import RESERVE, free_bytes
from fullbatch._memory._total import total_bytes
from fullbatch._plan._plan import Plan
from fullbatch._size import format_bytes, parse_bytes
from fullbatch._tree import check_devices


def check_callable(loss_fn: Any, optimizer: Any) -> None:
    """Raises LossError or ModelError where `loss_fn` is no function (or pair of them), or `optimizer` not of torch."""
    if not callable(loss_fn) and not isinstance(loss_fn, (tuple, list)):
        raise LossError.of(
            "loss_fn is not a function.", got=f"{type(loss_fn).__name__}: {loss_fn!r:.80}",
            expected="a function of (model, batch)", next="fullbatch.Step(loss_fn, model, batch)",
        )  # fmt: skip
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ModelError.of(
            "The optimizer is not one of torch.", got=f"{type(optimizer).__name__}: {optimizer!r:.80}",
            expected="a torch.optim.Optimizer, or None", next="optimizer=torch.optim.AdamW(model.parameters())",
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
