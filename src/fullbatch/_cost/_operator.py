"""One task alone: as a function of its operands, and what it does to their memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fullbatch._axis._strides import has_dense_strides
from fullbatch._cost._forms import Found, Meta, Output
from fullbatch._ir import Kind, Program, Reduction, Ref, Task
from fullbatch._run._slices import add_moments, cut, owns_dense_storage, paste

aten = torch.ops.aten

# Element-wise operators with the number of their tensor operands, which allocate their output and nothing else where
# all operands have one dense form; tests compare each with what is measured.
SAME_FORM: dict[Any, int] = {
    aten.relu.default: 1, aten.neg.default: 1, aten.abs.default: 1, aten.exp.default: 1, aten.tanh.default: 1,
    aten.sigmoid.default: 1, aten.silu.default: 1, aten.sqrt.default: 1, aten.rsqrt.default: 1,
    aten.add.Tensor: 2, aten.sub.Tensor: 2, aten.mul.Tensor: 2, aten.div.Tensor: 2, aten.threshold_backward.default: 2,
    aten.tanh_backward.default: 2, aten.sigmoid_backward.default: 2,
}  # fmt: skip


def without_running(task: Task, metas: Sequence[Meta]) -> Found | None:
    """What an element-wise operator does, where its kind alone says so to the byte; else None."""
    if task.kernel is None or not metas or SAME_FORM.get(task.kernel.fn) is None or task.outputs == (None,):
        return None
    count, first = SAME_FORM[task.kernel.fn], metas[0]
    operands = task.kernel.args[:count]
    if len(operands) < count or not all(isinstance(arg, Ref) for arg in operands) or any(m != first for m in metas):
        return None
    # A dimension of one element may have any stride, and the output then another. A scalar is not worth the thought.
    if first.device.type != "cpu" or first.dtype not in (torch.float32, torch.float64):
        return None
    if min(first.shape, default=0) < 2 or not has_dense_strides(first.bare()):
        return None
    nbytes = first.elements * first.dtype.itemsize
    return Found(nbytes, ((first, nbytes, None),))


def alone(task: Task, program: Program, samples: int) -> Callable[..., Any]:
    """A function of the task's operands that allocates what one run for `samples` allocates (0: once a step)."""
    batch = program.batch
    if task.kind is Kind.SLICE:
        layout = task.layout
        assert layout is not None
        return lambda x: cut(x, layout, 0, samples, batch)
    if task.kind is Kind.GATHER:
        (value,) = task.outputs
        assert value is not None
        shape = program.values[value].shape
        return (lambda x: x) if samples == batch else (lambda x: x.new_empty(shape))
    if task.kind is Kind.REDUCE:
        many = samples != batch
        return lambda x: x if not many or owns_dense_storage(x) else x.clone(memory_format=torch.contiguous_format)
    assert task.kernel is not None
    # The user's own code, and checks of values, are not run on tensors that mean nothing.
    stand_in: Callable[..., Any] | None = getattr(task.kernel.fn, "stand_in", None)
    kernel = task.kernel if stand_in is None else replace(task.kernel, fn=stand_in)
    bound = kernel.bind()
    return lambda *tensors: bound(samples or batch, *tensors)


def repeated(task: Task, program: Program, samples: int, inputs: Sequence[torch.Tensor]) -> Callable[[], Any] | None:
    """One run for `samples` on these operands, to be timed again and again; None where it does nothing."""
    batch = program.batch
    if task.kind in (Kind.GATHER, Kind.REDUCE):
        if samples == batch:
            return None
        (part,), (value,) = inputs, task.outputs
        assert value is not None
        if task.kind is Kind.GATHER:
            layout = task.layout
            assert layout is not None
            whole = part.new_empty(program.values[value].shape)
            return lambda: paste(whole, part, layout, 0, samples, batch)
        total = part.clone(memory_format=torch.contiguous_format)
        if task.reduction is Reduction.MOMENTS:
            return lambda: add_moments(total, part, samples, samples)
        return lambda: total.add_(part)
    call = alone(task, program, samples)
    return lambda: call(*inputs)


def outcome(task: Task, inputs: Sequence[torch.Tensor], results: Any) -> tuple[Output | None, ...]:
    """The form and the bytes of each used output, and whose view it is."""
    results = (results,) if task.single or task.kind in (Kind.SLICE, Kind.GATHER, Kind.REDUCE) else tuple(results)
    shown = {tensor.untyped_storage().data_ptr(): at for at, tensor in enumerate(inputs) if tensor.numel()}
    mine: dict[int, int] = {}
    outputs: list[Output | None] = []
    for value, tensor in zip(task.outputs, results, strict=False):
        if value is None or not isinstance(tensor, torch.Tensor):
            outputs.append(None)
            continue
        address, nbytes = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        if nbytes == 0 or (task.view and not inputs):  # nothing, or a constant that the graph holds
            outputs.append((Meta.of(tensor), 0, None))
        elif address in shown:
            outputs.append((Meta.of(tensor), 0, shown[address]))
        elif address in mine:
            outputs.append((Meta.of(tensor), 0, -1 - mine[address]))
        else:
            mine[address] = len(outputs)
            outputs.append((Meta.of(tensor), nbytes, None))
    return tuple(outputs)
