"""What a captured step says about precision: where autocast is on, and formats that are refused.

Autocast leaves conversions in the traced graph, made under the state that each operator stood in, and the state itself
in the graph that Dynamo made.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from fullbatch import _torch
from fullbatch._errors import CaptureError


def autocasts(graph: fx.GraphModule, kind: str) -> tuple[torch.dtype, ...]:
    """The dtypes that autocast for devices of this kind converts to, in the step or around its call, each once."""
    found: dict[torch.dtype, None] = {}
    if torch.is_autocast_enabled(kind):
        found[torch.get_autocast_dtype(kind)] = None
    for node in _nodes(graph):
        if getattr(node.target, "__name__", "") == "_enter_autocast":
            device, dtype, enabled, *_ = (*node.args, None, True)
            if enabled and device == kind:
                found[dtype if isinstance(dtype, torch.dtype) else torch.get_autocast_dtype(kind)] = None
    return tuple(found)


def precisions(graph: fx.Graph) -> tuple[torch.dtype, ...]:
    """The floating point dtypes of a traced graph, each once."""
    found: dict[torch.dtype, None] = {}
    for node in graph.nodes:
        made = node.meta.get("val")
        for item in made if isinstance(made, (list, tuple)) else (made,):
            if isinstance(item, torch.Tensor) and item.dtype.is_floating_point:
                found[item.dtype] = None
    return tuple(found)


def refuse_formats(graph: fx.GraphModule) -> None:
    """Raises CaptureError where the step holds floating point numbers of eight bits or fewer."""
    for node in _nodes(graph):
        example = node.meta.get("example_value")
        if isinstance(example, torch.Tensor) and is_small(example):
            raise small_format(example.dtype, _place(node))


def is_small(tensor: torch.Tensor) -> bool:
    """Whether its numbers are floating point ones of eight bits or fewer."""
    return tensor.dtype.is_floating_point and tensor.dtype.itemsize < 2


def small_format(dtype: torch.dtype, place: str) -> CaptureError:
    """The refusal of such a format, in a step that is captured and in one that is not."""
    return CaptureError.of(
        f"The step uses {dtype}, which is not supported.",
        got=place,
        expected="float64, float32, bfloat16 or float16",
        next="torch.autocast(device, torch.bfloat16) inside loss_fn, and weights in float32 or bfloat16",
    )


def _place(node: fx.Node) -> str:
    if node.op == "placeholder":
        return _torch.dynamo_source(node)
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    return " ".join(line.strip() for line in lines[-2:] if line.strip(" ^"))


def _nodes(graph: fx.GraphModule) -> Iterator[fx.Node]:
    """The nodes of a graph, those of the graphs that it calls among them (a checkpoint's)."""
    for module in graph.modules():
        if isinstance(module, fx.GraphModule):
            yield from module.graph.nodes
