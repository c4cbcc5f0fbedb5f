"""The user's Python, captured whole and guarded.

A traced graph freezes every Python value that it read. TorchDynamo guards them: when a flag, a closure variable,
a shape or a training mode differs, it captures anew. So fullbatch enters through it, and asks for the whole step
as one graph; what Dynamo cannot express is refused with the line it stands on.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import fx

from fullbatch import _torch
from fullbatch._errors import CaptureError, FullbatchError, LossError

Runner = Callable[..., Any]


class Frontend:
    """Calls `loss_fn(model, batch)` under guards; each new graph is handed to `on_graph`, which answers how to run it.

    A runner gets the graph's inputs (parameters, buffers, batch tensors, closure tensors, live at each call) and
    returns the graph's outputs.
    """

    def __init__(self, loss_fn: Callable[..., Any], on_graph: Callable[[fx.GraphModule], Runner]) -> None:
        self._loss_fn = loss_fn
        self._on_graph = on_graph
        self.captures = 0
        self._renew()

    def _renew(self) -> None:
        """A fresh code object: Dynamo keeps captures by code, and two steps must not share them."""
        whole_step = _whole_step(self._loss_fn)
        self._code: CodeType = whole_step.__code__.replace(co_name=f"whole_step_{id(self)}")
        fresh = FunctionType(
            self._code, whole_step.__globals__, "whole_step", whole_step.__defaults__, whole_step.__closure__
        )
        self._call = _torch.guarded(fresh, self._backend)
        self._held = 0

    def _backend(self, graph: fx.GraphModule, example_inputs: list[Any]) -> Runner:
        self.captures += 1
        self._held += 1
        return self._on_graph(graph)

    def __call__(self, model: Any, batch: Any, moved: Any) -> Any:
        """(loss, aux) as the runner returned them. `moved` is the device to bring batch tensors to, or None."""
        if self._held > 64:  # guards are checked one capture after another: do not keep them without end
            self._renew()
        with _torch.capture_settings(), torch.enable_grad():
            try:
                return self._call(model, batch, moved)
            except _torch.DynamoError as error:
                raise _refusal(error) from error

    def why(self, model: Any, batch: Any, moved: Any) -> list[str]:
        """Which guards made the newest capture necessary."""
        scope = {"model": model, "batch": batch, "moved": moved, "loss_fn": self._loss_fn}
        try:
            return _torch.why_recaptured(self._code, scope)
        except Exception:  # a diagnosis only: it must never stop a step
            return []


def _whole_step(loss_fn: Callable[..., Any]) -> Any:
    mark = _torch.loss_marker()

    def whole_step(model: Any, batch: Any, moved: Any) -> Any:
        if moved is not None:
            batch = _torch.tree_map(lambda leaf: leaf.to(moved) if isinstance(leaf, torch.Tensor) else leaf, batch)
        result = loss_fn(model, batch)
        if isinstance(result, tuple) and len(result) == 2:
            loss, aux = result
            if isinstance(loss, torch.Tensor):
                return mark(loss), aux, True
            return loss, "not a tensor", True
        if isinstance(result, torch.Tensor):
            return mark(result), None, False
        return result, "not a tensor", False

    return whole_step


_LINE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.*)')


def _refusal(error: Exception) -> FullbatchError:
    """Dynamo's refusal as ours: the line of the user's code, the reason, and what to do."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, FullbatchError):
            return cause
        cause = cause.__cause__ or cause.__context__
    text = str(error)
    lines = _LINE.findall(text.split("from user code:")[-1]) if "from user code:" in text else []
    where = f'{lines[-1][0]}:{lines[-1][1]} in {lines[-1][2]}: {lines[-1][3].strip()}' if lines else "unknown line"
    reason = text.split("from user code:")[0].strip().split("\n\n")[0]
    reason = " ".join(line.strip() for line in reason.splitlines() if line.strip())[:600]
    return CaptureError.of(
        f"The step cannot be captured as one graph: {reason}",
        got=where,
        expected="tensor operations whose shapes and order do not depend on the data",
        next=_advice(text),
    )


def _advice(text: str) -> str:
    lowered = text.lower()
    if "item()" in lowered or "scalar" in lowered or "data-dependent" in lowered and "shape" not in lowered:
        return "keep the value a tensor: replace .item()/float()/if tensor: by torch.where or a multiplication"
    if "nonzero" in lowered or "dynamic shape" in lowered or "data dependent" in lowered or "unbacked" in lowered:
        return "replace x[mask] by torch.where(mask, x, 0) and divide by mask.sum()"
    if "print" in lowered or "logger" in lowered or "logging" in lowered:
        return "move logging out of loss_fn, or return the value as aux: return loss, {'name': value}"
    return "move what is not tensor arithmetic out of loss_fn, and pass its result in the batch"


def check_loss(graph: fx.GraphModule) -> fx.Node:
    """The loss among the graph's nodes. Raises LossError where it is no scalar or needs no gradient."""
    marked = [node for node in graph.graph.nodes if node.target in (torch.ops.fullbatch.loss, torch.ops.fullbatch.loss.default)]
    if len(marked) != 1:
        raise _bad_loss("a graph without a loss", "a tensor computed from the model")
    example = marked[0].meta["example_value"]
    if example.numel() != 1:
        raise _bad_loss(
            f"a tensor of shape {tuple(example.shape)}", "a scalar", "return loss.mean() (or loss.sum()) from loss_fn"
        )
    if not example.requires_grad:
        raise _bad_loss(
            "a loss that no parameter reaches",
            "a loss that depends on at least one tensor with requires_grad",
            "check requires_grad_() of the parameters, and that loss_fn does not detach or run under no_grad",
        )
    if example.is_complex():
        raise _bad_loss(f"a loss of dtype {example.dtype}", "a real scalar", "return loss.abs() or loss.real")
    return marked[0]


def _bad_loss(got: str, expected: str, next: str = "return F.cross_entropy(model(x), y)") -> LossError:
    return LossError.of("loss_fn did not return a loss to differentiate.", got=got, expected=expected, next=next)
