"""What TorchDynamo is made to capture that it refuses by itself: private interfaces, with reasons. Seen on torch 2.13.

Kept apart from `_torch.py` for its size alone. Each change below lets Dynamo see what plain PyTorch sees: a number that
is known before the step runs, a context that changes nothing on this device, the answer to `is_compiling()`.
"""

from __future__ import annotations

import contextlib
import dis
import operator
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any, Protocol

import torch
import torch._dynamo
from torch import fx
from torch._dynamo import symbolic_convert, variables
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables.ctx_manager import NullContextVariable
from torch._dynamo.variables.functions import SkipFunctionVariable
from torch._dynamo.variables.misc import AutogradFunctionVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable


class Known(Protocol):
    """What a capture may know that Dynamo does not."""

    def answer(self, askers: tuple[CodeType, ...]) -> bool:
        """What code is told that asks whether it is compiled: the innermost first, then its callers."""

    def truth(self, node: fx.Node) -> bool | None:
        """Whether the tensor of `node` is true; None where only the data say."""

    def number(self, node: fx.Node) -> int | float | bool | None:
        """The number in the tensor of `node`; None where only the data say."""


@contextlib.contextmanager
def as_plain(known: Known) -> Iterator[None]:
    """While it is entered, Dynamo captures more of what plain PyTorch runs."""
    with contextlib.ExitStack() as stack:
        _answered(stack, known)
        _jumps(stack, known)
        _numbers(stack, known)
        _leaves(stack)
        _contexts(stack)
        _shared_arguments(stack)
        yield


def _swap(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    kept = vars(owner)[name]
    setattr(owner, name, value)
    stack.callback(setattr, owner, name, kept)


def _handled(stack: contextlib.ExitStack, handlers: dict[Any, Callable[..., Any]]) -> None:
    table = TorchInGraphFunctionVariable._get_handlers()  # cached by torch: one table for the process
    kept = {function: table.get(function) for function in handlers}

    def restore() -> None:
        for function, before in kept.items():
            if before is None:
                del table[function]
            else:
                table[function] = before

    table.update(handlers)
    stack.callback(restore)


_OURS = tuple(str(Path(file).resolve().parent) + os.sep for file in (torch.__file__, __file__))


def _answered(stack: contextlib.ExitStack, known: Known) -> None:
    """`is_compiling()` answers what `known` says, but for code of torch itself and of this package."""
    questions = (
        torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling, torch._utils.is_compiling,
        torch._dynamo.external_utils.is_compiling,
    )  # fmt: skip
    original = TorchInGraphFunctionVariable._get_handlers()[torch.compiler.is_compiling]

    def answer(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if tx.f_code.co_filename.startswith(_OURS):
            return original(self, tx, *args, **kwargs)
        tx.mark_inconsistent_side_effects()
        return variables.ConstantVariable.create(known.answer(_askers(tx)))

    _handled(stack, dict.fromkeys(questions, answer))


def _askers(tx: Any) -> tuple[CodeType, ...]:
    """The code that Dynamo is in, and two of its callers: what asks is often a helper of a line."""
    found: list[CodeType] = []
    while tx is not None and len(found) < 3:
        found.append(tx.f_code)
        tx = tx.parent
    return tuple(found)


def _jumps(stack: contextlib.ExitStack, known: Known) -> None:
    """`if tensor:` goes the way that is known; where the other way is a failed assertion, it is asserted."""
    for table in _TABLES:
        for code in _JUMPS:
            handler = table[code]
            table[code] = _jump(handler, known, "_IF_TRUE" in dis.opname[code])
            stack.callback(table.__setitem__, code, handler)
        handler = table[_NOT]
        table[_NOT] = _not(handler, known)
        stack.callback(table.__setitem__, _NOT, handler)


# Each class of translators has a table of its own, filled when the class is made.
_TABLES: list[list[Any]] = [
    kind.dispatch_table
    for kind in (
        symbolic_convert.InstructionTranslator,
        symbolic_convert.InliningInstructionTranslator,
        symbolic_convert.InliningGeneratorInstructionTranslator,
    )
]
_JUMPS = [
    code
    for code, name in enumerate(dis.opname)
    if "JUMP" in name and ("_IF_TRUE" in name or "_IF_FALSE" in name) and _TABLES[0][code] is not None
]


_NOT = dis.opmap["UNARY_NOT"]


def _not(handler: Callable[..., Any], known: Known) -> Callable[..., Any]:
    def unary_not(self: Any, inst: Any) -> Any:
        value = self.stack[-1]
        found = known.truth(value.as_proxy().node) if value.is_tensor() else None
        if found is not None:
            self.stack[-1] = variables.ConstantVariable.create(found)
        return handler(self, inst)

    return unary_not


def _jump(handler: Callable[..., Any], known: Known, if_true: bool) -> Callable[..., Any]:
    def jump(self: Any, inst: Any) -> Any:
        value = self.stack[-1]
        if not value.is_tensor():
            return handler(self, inst)
        following = self.instructions[self.instruction_pointer]
        fails_here = following.opname == "LOAD_ASSERTION_ERROR"
        fails_there = inst.target is not None and inst.target.opname == "LOAD_ASSERTION_ERROR"
        if fails_here and if_true:  # a plain assert, which Dynamo knows
            return handler(self, inst)
        if fails_here or fails_there:
            self.pop()
            _assert(self, value, holds=if_true if fails_here else not if_true)
            return self.jump(inst) if fails_here else None
        found = known.truth(value.as_proxy().node)
        if found is not None:
            self.stack[-1] = variables.ConstantVariable.create(found)
        return handler(self, inst)

    return jump


def _assert(tx: Any, value: Any, holds: bool) -> None:
    """In the graph: raises where the truth of `value` is not `holds`."""
    if not holds:
        value = variables.TorchInGraphFunctionVariable(torch.logical_not).call_function(tx, [value], {})
    message = variables.ConstantVariable.create("assertion error")
    variables.TorchInGraphFunctionVariable(torch._assert_async).call_function(tx, [value, message], {})


# Functions whose integer arguments, alone or in lists, are numbers also where a tensor is given.
_READERS = {
    "pad", "interpolate", "reshape", "view", "expand", "repeat", "narrow", "arange", "getitem", "roll", "zeros", "ones",
    "full",
}  # fmt: skip


def _numbers(stack: contextlib.ExitStack, known: Known) -> None:
    """`.item()`, `int(tensor)` and sizes given as tensors are numbers where they are known."""
    item, create = variables.TensorVariable.method_item, OutputGraph.create_proxy

    def method_item(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        found = known.number(self.as_proxy().node)
        return item(self, tx, *args, **kwargs) if found is None else variables.ConstantVariable.create(found)

    def create_proxy(self: Any, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **named: Any) -> Any:
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
        if name in _READERS:
            args = (*args[:1], *(_read(argument, known) for argument in args[1:]))
            kwargs = {key: _read(argument, known) for key, argument in kwargs.items()}
        return create(self, kind, target, args, kwargs, *more, **named)

    _swap(stack, variables.TensorVariable, "method_item", method_item)
    _swap(stack, OutputGraph, "create_proxy", create_proxy)


def _read(argument: Any, known: Known) -> Any:
    """`argument` with known integers in place of tensors without dimensions."""
    if isinstance(argument, (tuple, list)):
        return type(argument)(_read(part, known) for part in argument)
    if isinstance(argument, slice):
        return slice(*(_read(part, known) for part in (argument.start, argument.stop, argument.step)))
    if not isinstance(argument, fx.Proxy):
        return argument
    example = argument.node.meta.get("example_value")
    if not isinstance(example, torch.Tensor) or example.dim() or example.dtype not in _INTEGERS:
        return argument
    found = known.number(argument.node)
    return argument if found is None else found


_INTEGERS = {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8}


def _leaves(stack: contextlib.ExitStack) -> None:
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

    _swap(stack, TorchInGraphFunctionVariable, "call_function", call_function)
    _swap(stack, OutputGraph, "_check_requires_grad_intermediate_outputs", lambda self, rv, tx: None)
    _unregistered(stack)


def _unregistered(stack: contextlib.ExitStack) -> None:
    """A tensor that the step made of an nn.Buffer is none itself: `module.buffer = buffer.to(dtype)` asks that."""
    python_type = variables.TensorVariable.python_type

    def of_step(self: Any) -> type:
        kind: type = python_type(self)
        return torch.Tensor if kind is torch.nn.Buffer and self.source is None else kind

    _swap(stack, variables.TensorVariable, "python_type", of_step)


def _contexts(stack: contextlib.ExitStack) -> None:
    """Where there is no device, cuDNN's flags change nothing, and no stream of it is being captured."""
    if not torch.xpu.is_available():
        call = SkipFunctionVariable.call_function

        def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            if self.value is torch.xpu.is_current_stream_capturing:
                return variables.ConstantVariable.create(False)
            return call(self, tx, args, kwargs)

        _swap(stack, SkipFunctionVariable, "call_function", call_function)
    if torch.cuda.is_available():
        return

    def flags(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        return NullContextVariable()

    def capturing(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        return variables.ConstantVariable.create(False)

    _handled(stack, {torch.backends.cudnn.flags: flags, torch.cuda.is_current_stream_capturing: capturing})


def _shared_arguments(stack: contextlib.ExitStack) -> None:
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

    _swap(stack, AutogradFunctionVariable, "call_apply", call_apply)


def keep(node: fx.Node) -> None:
    """Dynamo drops a graph input that nothing reads: one whose value was read as a number stays."""
    with node.graph.inserting_after(node):
        user = node.graph.call_method("detach", (node,))
    user.meta = {key: node.meta[key] for key in ("example_value", "stack_trace") if key in node.meta}


def example(placeholder: fx.Node) -> torch.Tensor | None:
    """The tensor that the step was called with, for an input of the graph that Dynamo is making."""
    argument = placeholder.meta.get("grapharg")
    found = None if argument is None else argument.example
    return found if isinstance(found, torch.Tensor) else None


def source(placeholder: fx.Node) -> str:
    """Where Dynamo found an input of the graph that it is making, as a Python expression."""
    return str(placeholder.meta["grapharg"].source.name)


def may_write(target: Any) -> bool:
    """Whether an operator writes into its arguments, or runs code of its own that may."""
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True
    if isinstance(target, torch._ops.OpOverload):
        return bool(target._schema.is_mutable)
    if isinstance(target, torch._ops.OpOverloadPacket):
        return any(getattr(target, name)._schema.is_mutable for name in target.overloads())
    return False


COMPARISONS = {
    operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "__lt__": "<", "__le__": "<=", "__gt__": ">", "__ge__": ">=",
}  # fmt: skip
