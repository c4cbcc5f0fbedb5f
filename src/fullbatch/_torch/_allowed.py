"""What TorchDynamo refuses though plain PyTorch runs it and nothing follows from it. Seen on torch 2.13.

Reason: models of transformers and monai have it, and no setting of Dynamo's allows it. Each function takes one refusal
away, or says what stands in its place, while it is entered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo
from torch._dynamo import variables
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables.builtin import SetAttrBuiltinVariable
from torch._dynamo.variables.ctx_manager import NullContextVariable
from torch._dynamo.variables.functions import SkipFunctionVariable
from torch._dynamo.variables.misc import AutogradFunctionVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from fullbatch._torch._replace import handled, replaced


@contextlib.contextmanager
def more_captured() -> Iterator[None]:
    """While it is entered, Dynamo captures things that it refuses (2.13) and that models of transformers and monai do.

    A check of a tensor's values (`torch._check_tensor_all`) is an assertion that runs with the step, and no number that
    the data decide. `x.requires_grad = True` on a value of the step changes nothing but what is read of it.
    """
    checks: dict[Callable[..., Any], int] = {torch._check_tensor_all: 0, torch._check_tensor_all_with: 1}
    setter, getter = SetAttrBuiltinVariable._call_setattr, variables.TensorVariable.method_attr_requires_grad
    with contextlib.ExitStack() as stack:
        handled(stack, {check: _asserted(at) for check, at in checks.items()})
        for each in (
            replaced(SetAttrBuiltinVariable, "_call_setattr", _requiring(setter)),
            replaced(variables.TensorVariable, "method_attr_requires_grad", _not_after(getter)),
            replaced(SkipFunctionVariable, "call_function", _scripted(SkipFunctionVariable.call_function)),
        ):
            stack.enter_context(each)
        yield


def _asserted(at: int) -> Callable[..., Any]:
    """Dynamo's handler of a check whose condition is the argument number `at`."""

    def handler(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        condition = args[at] if len(args) > at else kwargs["cond"]
        message = variables.ConstantVariable.create("a check of values (torch._check_tensor_all) fails")
        run = variables.TorchInGraphFunctionVariable(torch._assert_async)
        run.call_function(tx, [condition.call_method(tx, "all", [], {}), message], {})
        return variables.ConstantVariable.create(None)

    return handler


def _requiring(setter: Callable[..., Any]) -> Callable[..., Any]:
    def call_setattr(self: Any, tx: Any, owner: Any, name: Any, value: Any) -> Any:
        sets = owner.is_tensor() and name.is_python_constant() and name.as_python_constant() == "requires_grad"
        if sets and owner.source is None and value.is_python_constant() and value.as_python_constant() is True:
            tx.output.fullbatch_required = True
            return variables.ConstantVariable.create(None)
        return setter(self, tx, owner, name, value)

    return call_setattr


def _not_after(getter: Callable[..., Any]) -> Callable[..., Any]:
    def requires_grad(self: Any, tx: Any) -> Any:
        if getattr(tx.output, "fullbatch_required", False):
            torch._dynamo.exc.unimplemented(
                gb_type="requires_grad is read after it was set on a value of the step",
                context="",
                explanation="What follows from that value requires a gradient in plain PyTorch, and not as captured.",
                hints=[],
            )
        return getter(self, tx)

    return requires_grad


def _scripted(call: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.jit.isinstance` of a class is `isinstance`: TorchScript alone reads more into it."""

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        kind = args[1].as_python_constant() if len(args) == 2 and args[1].is_python_constant() else None
        of_class = isinstance(kind, type) and kind not in (list, tuple, dict)  # these it refuses
        if self.value is torch.jit.isinstance and of_class:
            return variables.BuiltinVariable(isinstance).call_function(tx, args, kwargs)
        return call(self, tx, args, kwargs)

    return call_function


def required_gradients(stack: contextlib.ExitStack) -> None:
    """`requires_grad` set on a value of the step is in the graph, and no reason to refuse its outputs.

    Dynamo refuses since AOTAutograd drops the flag of outputs; of these only the loss is differentiated, by parameters.
    """
    call = TorchInGraphFunctionVariable.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        wanted = kwargs.get("requires_grad")
        if wanted is None or not wanted.is_python_constant() or wanted.as_python_constant() is not True:
            return call(self, tx, args, kwargs)
        made = call(self, tx, args, {key: value for key, value in kwargs.items() if key != "requires_grad"})
        return made.call_method(tx, "requires_grad_", [], {}) if made.is_tensor() else made

    stack.enter_context(replaced(TorchInGraphFunctionVariable, "call_function", call_function))
    ignored = replaced(OutputGraph, "_check_requires_grad_intermediate_outputs", lambda self, rv, tx: None)
    stack.enter_context(ignored)
    _unregistered(stack)


def _unregistered(stack: contextlib.ExitStack) -> None:
    """A tensor that the step made of an nn.Buffer is none itself: `module.buffer = buffer.to(dtype)` asks that."""
    python_type = variables.TensorVariable.python_type

    def of_step(self: Any) -> type:
        kind: type = python_type(self)
        return torch.Tensor if kind is torch.nn.Buffer and self.source is None else kind

    stack.enter_context(replaced(variables.TensorVariable, "python_type", of_step))


def contexts(stack: contextlib.ExitStack) -> None:
    """Where there is no device, cuDNN's flags change nothing, and no stream of it is being captured."""
    if not torch.xpu.is_available():
        call = SkipFunctionVariable.call_function

        def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            if self.value is torch.xpu.is_current_stream_capturing:
                return variables.ConstantVariable.create(False)
            return call(self, tx, args, kwargs)

        stack.enter_context(replaced(SkipFunctionVariable, "call_function", call_function))
    if torch.cuda.is_available():
        return

    def flags(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        return NullContextVariable()

    def capturing(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        return variables.ConstantVariable.create(False)

    handled(stack, {torch.backends.cudnn.flags: flags, torch.cuda.is_current_stream_capturing: capturing})


def shared_arguments(stack: contextlib.ExitStack) -> None:
    """One tensor given twice to an `autograd.Function` is given as itself and as a view: gradients add up the same."""
    apply = AutogradFunctionVariable.call_apply

    def call_apply(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        seen: list[Any] = []
        given = []
        for argument in args:
            if argument.is_tensor():
                node = argument.as_proxy().node
                if node in seen:
                    argument = argument.call_method(tx, "view_as", [argument], {})
                seen.append(node)
            given.append(argument)
        return apply(self, tx, given, kwargs)

    stack.enter_context(replaced(AutogradFunctionVariable, "call_apply", call_apply))
