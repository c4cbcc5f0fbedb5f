"""A second opinion on placements: what DTensor's own propagation says of an operator whose operands are `Shard(0)`.

DTensor divides tensors in space where fullbatch divides them in time, and the algebra is the same. Where a rule
answers, both must name the same placement, or the difference is listed here with its reason. Where a rule does not
answer, the operator runs on the whole batch, and nothing has to agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fullbatch._axis._build import Builder
from fullbatch._ir import Kind, Layout, Origin
from prove.prover import Call

fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
placed = pytest.importorskip("torch.distributed.tensor")
aten = torch.ops.aten


def _rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


X, W, G = _rand(4, 6), _rand(6, 3), _rand(4, 3)
X3, IMAGE, KERNEL = _rand(4, 6, 2), _rand(4, 6, 5, 5), _rand(2, 6, 3, 3)
IDS, LABELS = torch.randint(6, (4, 2)), torch.randint(6, (4,))
MEAN, RSTD = _rand(4, 1), _rand(4, 1)

# name: operator, arguments, and which of the tensors among them are sharded on which dimension
CASES: dict[str, tuple[Any, tuple[Any, ...], tuple[int | None, ...]]] = {
    "relu": (aten.relu.default, (X,), (0,)),
    "add": (aten.add.Tensor, (X, X), (0, 0)),
    "mul by whole": (aten.mul.Tensor, (X, _rand(6)), (0, None)),
    "gelu_backward": (aten.gelu_backward.default, (X, X), (0, 0)),
    "clone": (aten.clone.default, (X,), (0,)),
    "sum over the batch": (aten.sum.dim_IntList, (X, [0]), (0,)),
    "sum over features": (aten.sum.dim_IntList, (X, [1]), (0,)),
    "sum over features kept": (aten.sum.dim_IntList, (X, [1], True), (0,)),
    "sum over all": (aten.sum.default, (X,), (0,)),
    "mean over the batch": (aten.mean.dim, (X, [0]), (0,)),
    "mean over features": (aten.mean.dim, (X, [1]), (0,)),
    "amax over features": (aten.amax.default, (X, [1]), (0,)),
    "amax over the batch": (aten.amax.default, (X, [0]), (0,)),
    "var over features": (aten.var.correction, (X, [1]), (0,)),
    "softmax over features": (aten._softmax.default, (X, 1, False), (0,)),
    "softmax over the batch": (aten._softmax.default, (X, 0, False), (0,)),
    "log_softmax over features": (aten._log_softmax.default, (X, 1, False), (0,)),
    "softmax backward": (aten._softmax_backward_data.default, (X, X, 1, torch.float64), (0, 0)),
    "mm, rows": (aten.mm.default, (X, W), (0, None)),
    "mm, contraction": (aten.mm.default, (X.t(), G), (1, 0)),
    "mm, columns": (aten.mm.default, (G.t(), X.t().contiguous().t()), (1, 0)),
    "addmm, rows": (aten.addmm.default, (_rand(3), X, W), (None, 0, None)),
    "bmm": (aten.bmm.default, (X3, _rand(4, 2, 3)), (0, 0)),
    "view": (aten.view.default, (X3, [4, 12]), (0,)),
    "view, folded": (aten.view.default, (X3, [4, 3, 2, 2]), (0,)),
    "transpose": (aten.transpose.int, (X3, 0, 2), (0,)),
    "permute": (aten.permute.default, (X3, [2, 0, 1]), (0,)),
    "unsqueeze": (aten.unsqueeze.default, (X, 0), (0,)),
    "squeeze": (aten.squeeze.dim, (_rand(4, 1, 6), 1), (0,)),
    "expand": (aten.expand.default, (_rand(4, 1), [4, 6]), (0,)),
    "select": (aten.select.int, (X3, 1, 0), (0,)),
    "slice": (aten.slice.Tensor, (X, 1, 0, 3), (0,)),
    "cat over features": (aten.cat.default, ([X, X], 1), (0, 0)),
    "stack": (aten.stack.default, ([X, X], 0), (0, 0)),
    "split over features": (aten.split.Tensor, (X, 3, 1), (0,)),
    "gather over features": (aten.gather.default, (X, 1, IDS), (0, 0)),
    "index_select over features": (aten.index_select.default, (X, 1, LABELS), (0, None)),
    "embedding": (aten.embedding.default, (_rand(6, 3), IDS), (None, 0)),
    "embedding backward": (aten.embedding_dense_backward.default, (_rand(4, 2, 3), IDS, 6, -1, False), (0, 0)),
    "layer norm": (aten.native_layer_norm.default, (X, [6], _rand(6), _rand(6), 1e-5), (0, None, None)),
    "layer norm backward": (
        aten.native_layer_norm_backward.default, (X, X, [6], MEAN, RSTD, _rand(6), _rand(6), [True, True, True]),
        (0, 0, 0, 0, None, None),
    ),
    "convolution": (
        aten.convolution.default, (IMAGE, KERNEL, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1), (0, None),
    ),
    "convolution backward": (
        aten.convolution_backward.default,
        (_rand(4, 2, 5, 5), IMAGE, KERNEL, [2], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True] * 3), (0, 0, None),
    ),
    "cumsum over features": (aten.cumsum.default, (X, 1), (0,)),
    "topk over features": (aten.topk.default, (X, 2, 1), (0,)),
    "tril": (aten.tril.default, (X3,), (0,)),
    "mse_loss_backward": (aten.mse_loss_backward.default, (_rand(), X, X, 1), (None, 0, 0)),
    "smooth_l1_loss_backward": (aten.smooth_l1_loss_backward.default, (_rand(), X, X, 1, 1.0), (None, 0, 0)),
    "huber_loss_backward": (aten.huber_loss_backward.default, (_rand(), X, X, 1, 1.0), (None, 0, 0)),
}  # fmt: skip

DISAGREE = {"tril": "DTensor gathers; matrices are independent along the dimensions before them, as test_rules proves"}

# DTensor calls these local; they divide by the local element count. fullbatch has no rule for them, on purpose.
LOCAL_DIVISOR = ("mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward")


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    dist.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=2)
    yield placed.init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def ours(target: Any, args: tuple[Any, ...], dims: tuple[int | None, ...]) -> list[str]:
    """What the rule says of each output; "whole" where it has no answer."""
    call = Call(target, args, {})
    builder = Builder(4)
    for node, dim in zip(call.nodes, dims, strict=True):
        builder.input(node, None if dim is None else Layout(dim))
    builder.node(call.node, Origin())
    summed = {out for task in builder.tasks if task.kind is Kind.REDUCE for out in task.outputs}
    values = [builder._of[call.node]] if call.single else builder._many[call.node]
    found = []
    for value in values:
        layout = None if value is None else builder.values[value].layout
        found.append(f"shard {layout.dim}" if layout else "partial" if value in summed else "whole")
    return found


def theirs(mesh: Any, target: Any, args: tuple[Any, ...], dims: tuple[int | None, ...]) -> list[str]:
    """What DTensor says of each output."""
    remaining = iter(dims)

    def distributed(arg: Any) -> Any:
        if isinstance(arg, list):
            return [distributed(item) for item in arg]
        if not isinstance(arg, torch.Tensor):
            return arg
        dim = next(remaining)
        placement = placed.Replicate() if dim is None else placed.Shard(dim)
        return placed.distribute_tensor(arg, mesh, [placement], src_data_rank=None)

    out = target(*[distributed(arg) for arg in args])
    found = []
    for item in out if isinstance(out, (list, tuple)) else [out]:
        (placement,) = item.placements
        sharded = isinstance(placement, placed.Shard)
        found.append(f"shard {placement.dim}" if sharded else "partial" if placement.is_partial() else "whole")
    return found


@pytest.mark.parametrize("name", CASES)
def test_dtensor_agrees(name: str, mesh: Any) -> None:
    mine, other = ours(*CASES[name]), theirs(mesh, *CASES[name])
    if name in LOCAL_DIVISOR:
        assert mine == ["whole"]
        return
    agree = all(a in ("whole", b) for a, b in zip(mine, other, strict=True))
    assert agree != (name in DISAGREE), f"fullbatch says {mine}, DTensor {other}"
