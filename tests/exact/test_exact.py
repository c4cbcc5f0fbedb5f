"""Every case, in microbatches of several sizes, equals plain PyTorch on the whole batch."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import fullbatch
from cases import GROUPS, Case, all_cases
from cases.reference import collect, compare, plain, training_flags

CASES = [pytest.param(case, id=f"{group}-{case.name}") for group in GROUPS for case in all_cases(group)]


@pytest.fixture(autouse=True)
def _light() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(min(2, threads))
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()


def batch_size(batch: Any) -> int:
    """The size of the first tensor of the batch: cases put per-sample tensors first."""
    if not isinstance(batch, dict | tuple | list | torch.Tensor):
        batch = dict(batch) if hasattr(batch, "keys") else vars(batch)
    return next(leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)).shape[0]


def _step_or_refusal(case: Case, loss_fn: Any, model: Any, batch: Any) -> fullbatch.Step | None:
    """The step; or None where Dynamo cannot take it and fullbatch says so, naming the line."""
    try:
        return fullbatch.Step(loss_fn, model, batch, microbatch=1)
    except fullbatch.CaptureError as error:
        if "dynamo-no" not in case.tags:
            raise
        refusal = error
    assert re.search(r"\.py:\d+ in ", refusal.faults[0].got), str(refusal)
    return None


@pytest.mark.parametrize("case", CASES)
def test_exact(case: Case) -> None:
    loss_fn, model, batch = case.build()
    reference = plain(loss_fn, model, batch)
    size = batch_size(batch)
    step = _step_or_refusal(case, loss_fn, copy.deepcopy(model), batch)
    if step is None:
        return
    for microbatch in sorted({1, 3, size // 2}):
        fresh = copy.deepcopy(model)
        flags = training_flags(fresh)
        # Private, for time only: one capture serves all sizes, and reads its tensors from whatever model is there.
        step._model, step._microbatch = fresh, microbatch
        out = step(copy.deepcopy(batch))
        result = collect(out, fresh)
        errors = compare(result, reference)
        assert step.plan.microbatch == microbatch
        where = f"{case.name} in microbatches of {microbatch} of {size}"
        assert errors.within(case.tolerance), (
            f"{where}: loss {errors.loss:.1e}, aux {errors.aux:.1e}, "
            f"grads {errors.grads:.1e} at {errors.worst_param!r}, "
            f"buffers {errors.buffers:.1e} at {errors.worst_buffer!r}, {errors.mismatches}"
        )
        loss = out[0] if isinstance(out, tuple) else out
        assert loss.grad_fn is None and not loss.requires_grad, f"{where}: the loss still has a graph"
        assert training_flags(fresh) == flags, f"{where}: training flags changed"
