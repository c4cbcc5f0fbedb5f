"""Where the captured part of a step ends at the outputs of its forward, and begins again at their cotangents.

The joint graph then has tangents as inputs: one for each output that needs a gradient. They are known once the loss has
run on the outputs of the whole batch, so one node stands for it, after the forward and before the backward: all outputs
in, all tangents out.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fullbatch import _torch
from fullbatch._eager_loss import EagerLoss, cotangent_form
from fullbatch._errors import CaptureError, LossError

WHY = "the loss runs as it is on the outputs of the whole batch"


def check_outputs(graph: fx.GraphModule) -> None:
    """Raises LossError where no output of the forward needs a gradient."""
    returned = next(node for node in graph.graph.nodes if node.op == "output").args[0]
    examples = [node.meta.get("example_value") for node in returned if isinstance(node, fx.Node)]
    if not any(isinstance(example, torch.Tensor) and example.requires_grad for example in examples):
        raise LossError.of(
            "No output of the forward needs a gradient.",
            got=f"{len(examples)} tensors", expected="outputs that depend on at least one tensor with requires_grad",
            next="check requires_grad_() of the parameters, and that forward does not detach or run under no_grad",
        )  # fmt: skip


def output_forms(graph: fx.GraphModule) -> list[Any]:
    """Of each output of the graph a tensor of its dtype and device; what is no tensor as it is."""
    returned = next(node for node in graph.graph.nodes if node.op == "output").args[0]
    return [node.meta["example_value"] if isinstance(node, fx.Node) else node for node in returned]


def output_bytes(graph: fx.GraphModule) -> int:
    """Bytes of the outputs that the graph computes."""
    returned = next(node for node in graph.graph.nodes if node.op == "output").args[0]
    made = {node for node in returned if isinstance(node, fx.Node) and node.op != "placeholder"}
    examples = [node.meta.get("example_value") for node in made]
    return sum(one.numel() * one.element_size() for one in examples if isinstance(one, torch.Tensor))


def reached(graph: fx.Graph, tangents: dict[int, fx.Node]) -> dict[int, frozenset[int]]:
    """For each gradient, by the position of its input, the cotangents it is made of, counted in the outputs' order.

    Where the loss reaches none of these outputs, plain PyTorch leaves no gradient, and not one of zeros. Asked before
    constants are recognised: a gradient of zeros is reached all the same.
    """
    number = {tangents[position]: at for at, position in enumerate(sorted(tangents))}
    made: dict[fx.Node, frozenset[int]] = {}
    for node in graph.nodes:
        own = frozenset([number[node]]) if node in number else frozenset()
        made[node] = own.union(*(made[source] for source in node.all_input_nodes))
    output = next(node for node in graph.nodes if node.op == "output")
    return {
        int(str(desc.grad_of.target).removeprefix("input")): made[node]
        for node, desc in zip(output.args[0], output.meta["desc"], strict=True)
        if type(desc).__name__ == "GradAOTOutput" and isinstance(node, fx.Node)
    }


def read_by_others(outputs: Sequence[fx.Node], wanted: Sequence[int]) -> frozenset[int]:
    """Those of `wanted` from which, in the forward, another wanted output is computed: positions in `outputs`.

    By the flow of data: a way on which no gradient goes (`detach()`) is not told from others here.
    """
    number = [(at, outputs[at]) for at in wanted]
    above: set[int] = set()
    for position, output in number:
        seen: set[fx.Node] = set()
        stack = [output]
        while stack:
            node = stack.pop()
            if node not in seen:
                seen.add(node)
                stack.extend(node.all_input_nodes)
        above.update(at for at, other in number if at != position and other in seen)
    return frozenset(above)


def insert_loss(
    graph: fx.Graph, outputs: list[Any], changed: list[Any], tangents: dict[int, fx.Node], loss: EagerLoss
) -> None:
    """Puts the loss into the joint graph. `tangents` are placeholders, by the position of their output."""
    given = [node for node in outputs if isinstance(node, fx.Node)]
    positions = [position for position, node in enumerate(outputs) if isinstance(node, fx.Node)]
    at_operand = {position: at for at, position in enumerate(positions)}
    wanted = [(at_operand[position], tangent) for position, tangent in sorted(tangents.items())]
    loss.wanted = [at for at, _ in wanted]
    loss.above = read_by_others(given, loss.wanted)
    loss.forms = [cotangent_form(tangent.meta["val"]) for _, tangent in wanted]
    order = {node: at for at, node in enumerate(graph.nodes)}
    users = [user for _, tangent in wanted for user in tangent.users]
    before = min(users, key=order.__getitem__, default=next(iter(reversed(graph.nodes))))
    writes = [node for node in changed if isinstance(node, fx.Node)]
    if any(order[node] >= order[before] for node in (*given, *writes)):
        raise CaptureError.of(
            "The forward's outputs are not complete before its backward begins.",
            expected="a forward whose outputs do not depend on a gradient",
            next="fullbatch.eager.Step with loss_fn(model, batch) -> (loss_sum, count)",
        )
    with graph.inserting_before(before):
        node = graph.call_function(_torch.EAGER_LOSS, (given, writes))
        node.meta = {"val": [tangent.meta["val"] for _, tangent in wanted], "kernel": loss}
        for at, (_, tangent) in enumerate(wanted):
            item = graph.call_function(operator.getitem, (node, at))
            item.meta = {"val": tangent.meta["val"], "partitioner_tag": "is_backward"}
            tangent.replace_all_uses_with(item)
