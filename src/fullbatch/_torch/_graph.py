"""What a graph of TorchDynamo's says of its inputs and nodes. Seen on torch 2.13.

Reason: a backend gets an fx graph, whose nodes are public; where an input came from, and what a target may write, are
attributes that Dynamo and torch's operators keep for themselves.
"""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo
from torch import fx

from fullbatch._torch._operators import schema


def dynamo_source(placeholder: fx.Node) -> str:
    """Where Dynamo found a graph input, as a Python expression such as L['model'].weight."""
    source = getattr(placeholder, "_dynamo_source", None)  # what it took the tensor from; the node's name is mangled
    return str(getattr(source, "name", "") or placeholder.name)


def input_source(placeholder: fx.Node) -> str:
    """Where Dynamo found an input of the graph that it is making, as a Python expression."""
    return str(placeholder.meta["grapharg"].source.name)


def input_example(placeholder: fx.Node) -> torch.Tensor | None:
    """The tensor that the step was called with, for an input of the graph that Dynamo is making.

    A backend gets the inputs only once the graph is whole; a number is wanted before.
    """
    argument = placeholder.meta.get("grapharg")
    found = None if argument is None else argument.example
    return found if isinstance(found, torch.Tensor) else None


def keep_input(node: fx.Node) -> None:
    """Dynamo drops a graph input that nothing reads: one whose value was read as a number stays."""
    with node.graph.inserting_after(node):
        user = node.graph.call_method("detach", (node,))
    user.meta = {key: node.meta[key] for key in ("example_value", "stack_trace") if key in node.meta}


def numpy_name(target: object) -> str | None:
    """The name of NumPy's function, method or operator that Dynamo (2.13) has a node of its graph call, else None."""
    utils = torch._dynamo.utils
    kinds = (utils.numpy_to_tensor_wrapper, utils.numpy_method_wrapper, utils.numpy_operator_wrapper)
    return target.__name__.removeprefix("wrapped_") if isinstance(target, kinds) else None


def free_symbols(value: object) -> set[Any]:
    """The symbols of a number of Dynamo's that is none yet: it depends on data."""
    kinds = (torch.SymInt, torch.SymFloat, torch.SymBool)
    return set(value.node.expr.free_symbols) if isinstance(value, kinds) else set()


def may_write(target: Any) -> bool:
    """Whether an operator writes into its arguments, or runs code of its own that may."""
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True
    if isinstance(target, torch._ops.OpOverload):
        return bool(schema(target).is_mutable)
    if isinstance(target, torch._ops.OpOverloadPacket):
        return any(schema(getattr(target, name)).is_mutable for name in target.overloads())
    return False
