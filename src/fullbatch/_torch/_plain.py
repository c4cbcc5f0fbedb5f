"""Numbers and answers that TorchDynamo is given, where it would refuse the step or ask. Seen on torch 2.13.

Reason: Dynamo stops at a number that is in a tensor, though it is known before the step runs, and answers
`is_compiling()` itself; no setting of it says otherwise. What is known says `Known`.
"""

from __future__ import annotations

import contextlib
import dis
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, Protocol

import torch
import torch._dynamo
from torch import fx
from torch._dynamo import symbolic_convert, variables
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from fullbatch._folders import OURS
from fullbatch._torch._allowed import contexts, required_gradients, shared_arguments
from fullbatch._torch._replace import handled, replaced


class Known(Protocol):
    """What a capture may know that Dynamo does not."""

    def answer(self, askers: tuple[CodeType, ...]) -> bool:
        """What code is told that asks whether it is compiled: the innermost first, then its callers."""

    def truth(self, node: fx.Node) -> bool | None:
        """Whether the tensor of `node` is true; None where only the data say."""

    def number(self, node: fx.Node) -> int | float | bool | None:
        """The number in the tensor of `node`; None where only the data say."""

    def way(self, node: fx.Node, line: str) -> tuple[bool, str] | None:
        """A truth that is assumed of the tensor of `node`, and the message of the check it needs; None: of no other."""


@contextlib.contextmanager
def as_plain(known: Known) -> Iterator[None]:
    """While it is entered, Dynamo captures more of what plain PyTorch runs."""
    with contextlib.ExitStack() as stack:
        _answered(stack, known)
        _jumps(stack, known)
        _numbers(stack, known)
        required_gradients(stack)
        contexts(stack)
        shared_arguments(stack)
        yield


def _answered(stack: contextlib.ExitStack, known: Known) -> None:
    """`is_compiling()` answers what `known` says, but for code of torch itself and of this package."""
    questions = (
        torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling, torch._utils.is_compiling,
        torch._dynamo.external_utils.is_compiling,
    )  # fmt: skip
    original = TorchInGraphFunctionVariable._get_handlers()[torch.compiler.is_compiling]

    def answer(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if tx.f_code.co_filename.startswith(OURS):
            return original(self, tx, *args, **kwargs)
        tx.mark_inconsistent_side_effects()
        return variables.ConstantVariable.create(known.answer(_askers(tx)))

    handled(stack, dict.fromkeys(questions, answer))


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
        found = _truth(self, value, known) if value.is_tensor() else None
        if found is not None:
            self.stack[-1] = variables.ConstantVariable.create(found)
        return handler(self, inst)

    return unary_not


def _truth(tx: Any, value: Any, known: Known) -> bool | None:
    """The truth of a tensor: known, or assumed and then checked in the graph; None where only the data say."""
    node = value.as_proxy().node
    found = known.truth(node)
    if found is not None or tx.output.current_tracer is not tx.output.root_tracer:
        return found
    frame = tx.frame_summary()
    assumed = known.way(node, f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}")
    if assumed is None:
        return None
    truth, message = assumed
    if message:
        _assert(tx, value, truth, message)
    return truth


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
        found = _truth(self, value, known)
        if found is not None:
            self.stack[-1] = variables.ConstantVariable.create(found)
        return handler(self, inst)

    return jump


def _assert(tx: Any, value: Any, holds: bool, words: str = "assertion error") -> None:
    """In the graph: raises where the truth of `value` is not `holds`."""
    if not holds:
        value = variables.TorchInGraphFunctionVariable(torch.logical_not).call_function(tx, [value], {})
    message = variables.ConstantVariable.create(words)
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
        if found is None and self.dtype is torch.bool:
            found = _truth(tx, self, known)
        return item(self, tx, *args, **kwargs) if found is None else variables.ConstantVariable.create(found)

    def create_proxy(self: Any, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **named: Any) -> Any:
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
        if name in _READERS:
            args = (*args[:1], *(_read(argument, known) for argument in args[1:]))
            kwargs = {key: _read(argument, known) for key, argument in kwargs.items()}
        return create(self, kind, target, args, kwargs, *more, **named)

    stack.enter_context(replaced(variables.TensorVariable, "method_item", method_item))
    stack.enter_context(replaced(OutputGraph, "create_proxy", create_proxy))


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
