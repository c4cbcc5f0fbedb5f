"""One functional graph of forward and backward, at the full batch's own shapes.

Autograd records only while it runs, and at the batch that runs. AOTAutograd traces forward and backward together
on tensors without storage, so the divisor of a mean is the whole batch's and no memory is spent. What comes out
has no in-place operations: buffers that the step changes are outputs of the graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from fullbatch import _torch
from fullbatch._capture._asked import asked
from fullbatch._capture._assumed import assumed
from fullbatch._capture._clean import clean, without_tokens
from fullbatch._capture._constants import settle
from fullbatch._capture._frontend import check_data_dependence, check_loss
from fullbatch._capture._masked import choose
from fullbatch._capture._precision import autocasts, refuse_formats
from fullbatch._capture._split import check_outputs, insert_loss, reached
from fullbatch._eager_loss import EagerLoss
from fullbatch._errors import CaptureError, Fault


@dataclass
class Joint:
    """The captured step. Positions count the inputs, and the outputs, of the graph that Dynamo made."""

    graph: fx.Graph
    module: fx.GraphModule
    sources: list[str]  # where each input came from, as a Python expression
    placeholders: dict[fx.Node, int]  # -> position of the input
    mutated: dict[int, fx.Node] = field(default_factory=dict)  # position of the input -> its new value
    outputs: list[fx.Node | Any] = field(default_factory=list)  # in the order the runner must return them
    gradients: dict[int, fx.Node | None] = field(default_factory=dict)  # position of the input -> its gradient
    notes: tuple[str, ...] = ()  # where the plain step is known to do otherwise
    autocast: tuple[torch.dtype, ...] = ()  # what autocast converts to, in the step or around it

    @property
    def wanted(self) -> list[fx.Node]:
        """What the step must return or write, in order; what is no tensor of the graph is left out."""
        found = [*self.outputs, *self.mutated.values(), *self.gradients.values()]
        return [item for item in found if isinstance(item, fx.Node)]


class _Holder(nn.Module):
    """The captured forward with its inputs as parameters (differentiated) and buffers (not)."""

    def __init__(self, graph: fx.GraphModule, inputs: Sequence[torch.Tensor], loss: int | None) -> None:
        super().__init__()
        self._forward, self._loss, self._count = [graph], loss, len(inputs)
        for position, tensor in enumerate(inputs):
            name = f"input{position}"
            if tensor.requires_grad:
                as_parameter = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor.detach())
                self.register_parameter(name, as_parameter)
            else:
                self.register_buffer(name, tensor)

    def forward(self) -> tuple[Any, ...]:
        inputs = [getattr(self, f"input{position}") for position in range(self._count)]
        # The interpreter carries each node's module and source line over to what it becomes.
        outputs = fx.Interpreter(self._forward[0]).run(*inputs)
        return tuple(
            # Cloned, or AOTAutograd would return the base of an output that is a view; the clone goes again.
            self._returned(out, position) if isinstance(out, torch.Tensor) else out
            for position, out in enumerate(outputs)
        )

    def _returned(self, out: torch.Tensor, position: int) -> torch.Tensor:
        if self._loss is None:  # each output has a cotangent
            return out.clone()
        return out if position == self._loss else out.detach().clone()


def trace_joint(graph: fx.GraphModule, inputs: Sequence[torch.Tensor], eager: EagerLoss | None = None) -> Joint:
    """The joint graph of `graph` for inputs of this metadata. Raises CaptureError, LossError.

    With `eager` the graph is a forward alone, and that loss stands between it and its backward.
    """
    settle(graph, inputs)
    choose(graph)
    loss_node = check_loss(graph) if eager is None else None
    if eager is not None:
        check_data_dependence(graph)
        check_outputs(graph)
    _refuse_mistraced(graph)
    _refuse_recurrent_dropout(graph)
    refuse_formats(graph)
    returned = next(node for node in graph.graph.nodes if node.op == "output").args[0]
    loss = None if loss_node is None else list(returned).index(loss_node)
    sources = [_torch.dynamo_source(node) for node in graph.graph.nodes if node.op == "placeholder"]
    _check_inputs(inputs, sources)
    mode = _torch.fake_mode()
    holder = _Holder(graph, [_torch.to_fake(mode, tensor) for tensor in inputs], loss)
    try:
        with _tracing(graph), _torch.joint_graph(holder, mode, _torch.loss_decompositions()) as module:
            joint = _read(module, sources, loss, len(returned), eager)
            joint.notes = (*_checkpointed_statistics(graph), *asked(graph), *assumed(graph))
            joint.autocast = autocasts(graph, inputs[0].device.type if inputs else "cpu")
    except (CaptureError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise CaptureError.of(
            f"The backward of the step cannot be traced: {type(error).__name__}: {str(error)[:400]}",
            expected="operations that autograd can differentiate once, without changing tensors it saved",
            next="run loss_fn(model, batch).backward() in plain PyTorch; if that works, report the operator named",
        ) from error
    return joint


# Operators whose traced form is another than their eager one, in torch itself: by name, and what to write instead.
_MISTRACED = {
    "multilabel_margin_loss": "targets padded with -1 are read as classes when traced (seen in torch 2.13)",
}


def _refuse_mistraced(graph: fx.GraphModule) -> None:
    for node in graph.graph.nodes:
        for name, why in _MISTRACED.items():
            if node.op == "call_function" and name in str(getattr(node.target, "__name__", node.target)):
                lines = (node.meta.get("stack_trace") or "").strip().splitlines()
                raise CaptureError.of(
                    f"torch.nn.functional.{name} cannot be captured: {why}.",
                    got=" ".join(line.strip() for line in lines[-2:]),
                    expected="an operator that torch traces as it runs it",
                    next="write the loss with torch.where and a mask of the valid targets",
                )


_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def _recurrent(graph: fx.GraphModule) -> list[fx.Node]:
    return [
        node
        for node in graph.graph.nodes
        if node.op == "call_function" and getattr(node.target, "__name__", "") in _RECURRENT
    ]


def _refuse_recurrent_dropout(graph: fx.GraphModule) -> None:
    """Traced, torch's recurrent layers have no dropout between them (torch._decomp, `_rnn_helper`; seen in 2.13)."""
    for node in _recurrent(graph):
        flags = [arg for arg in node.args if isinstance(arg, (bool, int, float))][:4]
        if len(flags) == 4 and flags[1] > 1 and flags[2] > 0 and flags[3]:
            lines = (node.meta.get("stack_trace") or "").strip().splitlines()
            name = str(getattr(node.target, "__name__", node.target)).upper()
            raise CaptureError.of(
                f"nn.{name} of {flags[1]} layers with dropout={flags[2]} cannot be captured: when traced, torch leaves "
                "the dropout between its layers out.",
                got=" ".join(line.strip() for line in lines[-2:]),
                expected="recurrent layers without dropout of their own, or in eval mode",
                next=f"one nn.{name} a layer, with nn.Dropout({flags[2]}) between them",
            )


def _tracing(graph: fx.GraphModule) -> contextlib.AbstractContextManager[Any]:
    """Recurrent layers are traced as operators; oneDNN's fused one keeps a workspace that no graph carries."""
    return _torch.without_onednn() if _recurrent(graph) else contextlib.nullcontext()


def _checkpointed_statistics(graph: fx.GraphModule) -> tuple[str, ...]:
    """A note where a checkpoint() of the user's holds a batch normalisation: the plain step updates it twice."""
    for node in graph.graph.nodes:
        if "tag_activation_checkpoint" not in str(node.target) or not isinstance(node.args[0], fx.Node):
            continue
        inner = getattr(graph, str(node.args[0].target))
        if any("batch_norm" in str(getattr(item.target, "__name__", "")) for item in inner.graph.nodes):
            return (
                "a checkpoint() holds a batch normalisation: its running statistics are updated once a step here, "
                "twice in plain PyTorch, whose recompute counts",
            )
    return ()


def _check_inputs(inputs: Sequence[torch.Tensor], sources: Sequence[str]) -> None:
    faults = []
    for tensor, source in zip(inputs, sources, strict=True):
        if type(tensor) not in (torch.Tensor, nn.Parameter) and not isinstance(tensor, nn.Parameter):
            faults.append(Fault(f"{source} is a {type(tensor).__name__}.", expected="a plain torch.Tensor"))
        elif tensor.layout != torch.strided:
            faults.append(Fault(f"{source} has layout {tensor.layout}.", expected="a dense (strided) tensor"))
        elif tensor.requires_grad and not tensor.is_leaf:
            faults.append(
                Fault(
                    f"{source} is the result of an earlier computation that needs a gradient.",
                    got=f"grad_fn={tensor.grad_fn}",
                    expected="leaf tensors: the step's backward ends at its own inputs",
                    next="compute it inside loss_fn, or detach() it",
                )
            )
    if faults:
        raise CaptureError(*faults)


def _read(
    module: fx.GraphModule, sources: list[str], loss: int | None, returned: int, eager: EagerLoss | None
) -> Joint:  # fmt: skip
    placeholders: dict[fx.Node, int] = {}
    tangents: dict[int, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op != "placeholder":
            continue
        desc = node.meta["desc"]
        kind = type(desc).__name__
        if kind == "TangentAOTInput":
            # Of the loss the gradient is one; of a tensor that the step changes in place it is nothing.
            output = desc.output
            plain = type(output).__name__ == "PlainAOTOutput"
            if plain and eager is not None:
                tangents[output.idx] = node
                continue
            _constant(module.graph, node, 1.0 if plain and output.idx == loss else 0.0)
        elif hasattr(desc, "target"):
            placeholders[node] = int(str(desc.target).removeprefix("input"))
        elif "Token" not in kind:
            raise CaptureError.of(
                "The step changes a tensor in place that shares its memory with another.",
                got=f"an input of the kind {kind}, among {', '.join(sources[:8])}",
                expected="parameters and buffers with memory of their own, or none of them changed in the step",
                next="buffer = buffer.clone() before it is registered",
            )
    if eager is not None:
        eager.reaches = reached(module.graph, tangents)
    without_tokens(module.graph)
    clean(module.graph)
    joint = Joint(module.graph, module, sources, placeholders, outputs=[None] * returned)
    output = next(node for node in module.graph.nodes if node.op == "output")
    for node, desc in zip(output.args[0], output.meta["desc"], strict=True):
        kind = type(desc).__name__
        if kind == "InputMutationAOTOutput":
            joint.mutated[int(desc.mutated_input.target.removeprefix("input"))] = node
        elif kind == "GradAOTOutput":
            joint.gradients[int(desc.grad_of.target.removeprefix("input"))] = node
        elif kind == "PlainAOTOutput":
            joint.outputs[desc.idx] = node if desc.idx == loss else _uncloned(node)
        elif node is not None and "Token" not in kind:
            raise CaptureError.of(f"The step has an output of a kind that is not supported: {kind}.")
    if eager is not None:
        insert_loss(module.graph, joint.outputs, list(joint.mutated.values()), tangents, eager)
        joint.outputs = []  # the loss takes them, and nobody else
    return joint


def _uncloned(node: Any) -> Any:
    is_clone = isinstance(node, fx.Node) and node.target is torch.ops.aten.clone.default
    return node.args[0] if is_clone else node


def _constant(graph: fx.Graph, tangent: fx.Node, number: float) -> None:
    """What enters the backward from outside is known: a constant stands for it."""
    value = tangent.meta["val"]
    with graph.inserting_before(tangent):
        one = graph.call_function(
            torch.ops.aten.full.default,
            (list(value.shape), number),
            {"dtype": value.dtype, "device": value.device, "pin_memory": False},
        )
    one.meta = {"val": value, "partitioner_tag": "is_backward"}
    tangent.replace_all_uses_with(one)
