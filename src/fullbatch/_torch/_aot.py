"""Forward and backward as one functional graph, and TorchInductor on a part of it. Seen on torch 2.13.

Reason: AOTAutograd's joint graph has no public form (torch.export has the forward alone), and TorchInductor is public
through Dynamo only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.fx.traceback as traceback
from torch import fx
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx  # traces a function of plain operators into a graph

_LIBRARY = torch.library.Library("fullbatch", "DEF")

_LIBRARY.define("loss(Tensor x) -> Tensor")

_LIBRARY.impl("loss", lambda x: x.view_as(x), "CompositeImplicitAutograd")

# Stands in a captured graph for a loss that is not captured: its kernel is in the node's meta, and it is never called.
_LIBRARY.define("eager_loss(Tensor[] outputs, Tensor[] changed) -> Tensor[]")

EAGER_LOSS = torch.ops.fullbatch.eager_loss.default


def loss_marker() -> Callable[[Any], Any]:
    """An identity operator that survives capture, so that the loss is found among a graph's outputs."""
    return torch.ops.fullbatch.loss  # type: ignore[no-any-return]


@contextlib.contextmanager
def joint_graph(
    module: torch.nn.Module, mode: FakeTensorMode, decompositions: dict[Any, Any]
) -> Iterator[fx.GraphModule]:
    """AOTAutograd's joint graph of forward and backward: functional, mutations as outputs, None where unreached.

    Placeholders and outputs carry `meta["desc"]`; nodes carry `seq_nr`, which pairs a backward with its forward.
    """
    with (
        contextlib.ExitStack() as stack,
        mode,
        traceback.preserve_node_meta(),
        torch._functorch.config.patch(
            functionalize_rng_ops=False,
            fake_tensor_propagate_real_tensors=False,
            backward_pass_autocast="off",  # as backward() called outside of autocast, where it belongs
        ),
    ):
        exported = aot_export_joint_with_descriptors(stack, module, (), decompositions=decompositions)
        yield exported.graph_module


def loss_decompositions() -> dict[Any, Any]:
    """Losses written out as element-wise operations and a mean, so that the mean alone couples the batch.

    torch.export's public table decomposes far more, layers among it.
    """
    aten = torch.ops.aten
    return torch._decomp.get_decompositions(  # type: ignore[no-any-return]
        [
            aten.mse_loss, aten.mse_loss_backward, aten.smooth_l1_loss, aten.smooth_l1_loss_backward,
            aten.huber_loss, aten.huber_loss_backward, aten.binary_cross_entropy, aten.binary_cross_entropy_backward,
            aten.binary_cross_entropy_with_logits, aten.soft_margin_loss, aten.soft_margin_loss_backward,
            aten.l1_loss, aten.kl_div, aten.addcmul, aten.addcdiv, aten.lerp, aten.mish_backward,
            aten.std, aten.std_mean, aten.stack, aten.addr, aten.addmv, aten.mv, aten.dot, aten.norm,
            aten.trace, aten.frobenius_norm, aten.instance_norm, aten.logsumexp, aten.new_zeros, aten.new_ones,
            aten.index_add, aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.margin_ranking_loss,
        ]
    )  # fmt: skip


def compiled(fn: Callable[..., list[torch.Tensor]], inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """A function of tensors of fixed forms, compiled by TorchInductor for exactly these; nothing is guarded.

    Not torch.compile, which enters through Dynamo: its guards cost as much at every call as several small operators,
    and this package's own capture is at work around each run.
    """
    import torch._inductor  # takes a second, and only compile=True needs it

    graph = make_fx(fn, tracing_mode="fake")(*inputs)
    return torch._inductor.compile(graph, list(inputs))  # type: ignore[no-any-return]
