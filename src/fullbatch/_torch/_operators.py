"""Operators as they are run: what sees them, what they cost, asserts among them. Seen on torch 2.13.

Reason: torch documents the operators, and what may look at them as an extension point, without names that are public.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry

# Sees every operator that plain PyTorch runs; documented only as an extension point.
DispatchMode = TorchDispatchMode


# Leaves every dispatch mode, so that what runs inside is not seen by them; torch's own tracers use it.
without_modes = _disable_current_modes


def modes_around() -> list[str]:
    """Classes of the dispatch modes under which TorchDynamo captures nothing: it skips the frame and says no more."""
    count = torch._C._len_torch_dispatch_stack()
    modes = [torch._C._get_dispatch_stack_at(at) for at in range(count)]
    return [type(mode).__name__ for mode in modes if not (mode.is_infra_mode() or mode.ignore_compile_internals())]


# An operator of a captured graph, with one overload chosen; `torch.ops` has no public name for the class.
OpOverload = torch._ops.OpOverload


def schema(operator: Any) -> torch._C.FunctionSchema:
    """Names, defaults and aliases of an operator's arguments and results; nothing public has the aliases."""
    found: torch._C.FunctionSchema = operator._schema
    return found


def written_by(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that one call of an operator may write into; all of them where it does not say so.

    Batch normalisation writes running statistics that its schema gives as only read (2.13).
    """
    if not isinstance(operator, OpOverload) or "batch_norm" in operator._opname:
        given: list[Any] = [*args, *kwargs.values()]
    elif not schema(operator).is_mutable:
        return []
    else:
        given = []
        for at, argument in enumerate(schema(operator).arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given.append(args[at] if at < len(args) else kwargs.get(argument.name))
    return [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """oneDNN is off. The public `torch.backends.mkldnn.flags` also sets TF32 and warns of it (2.13)."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def flops_of(target: object, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Floating-point operations of one ATen call, mostly by torch's own counting formulas; 0 where there is none."""
    packet = getattr(target, "overloadpacket", None)
    own = _FLOPS.get(packet)
    formula = flop_registry.get(packet)
    try:
        if own is not None:
            return own(*args, **kwargs)
        return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))
    except Exception:  # a formula that does not know this overload must not stop planning
        return 0


def _convolution_backward_flops(grad: Any, source: Any, weight: Any, *rest: Any) -> int:
    """Once the forward for each of the two gradients that are asked for."""
    transposed, mask = rest[4], rest[7]
    places = math.prod((source if transposed else grad).shape[2:])
    return int(2 * grad.shape[0] * places * weight.numel() * (bool(mask[0]) + bool(mask[1])))


def _attention_flops(query: Any, key: Any, *_: Any, **__: Any) -> int:
    """Two products of queries by keys by width. Where scores are causal the kernel does half of it, at a lower rate."""
    return int(4 * math.prod(query.shape) * key.shape[-2])


def _attention_backward_flops(grad: Any, query: Any, key: Any, *_: Any, **__: Any) -> int:
    """Five such products: scores are made again."""
    return _attention_flops(query, key) * 5 // 2


# Torch's formulas leave out the attention that a CPU runs, and count the gradient of a grouped convolution's weight
# as if there were one group: for a depthwise one that is as many times too much as it has channels.
_FLOPS: dict[Any, Callable[..., int]] = {
    torch.ops.aten.convolution_backward: _convolution_backward_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}


def assert_on_device(condition: torch.Tensor) -> None:
    """Fails on the device where `condition` is false, without waiting for it; a public check would wait."""
    torch._assert_async(condition)


# What `assert` on a tensor's value is in a captured graph: it raises on the device.
asserts_on_device = torch._assert_async


def profiler_running() -> bool:
    """Whether a profiler is active; torch itself lets a second one end the first in silence."""
    from torch.autograd import profiler

    return bool(profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled())
