"""How the adapter changes torch for a while: an attribute, or Dynamo's handler of a function. Seen on torch 2.13."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch._dynamo.variables.torch import TorchInGraphFunctionVariable


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """While it is entered, an attribute of a class or module of torch's is `value`."""
    kept = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def handled(stack: contextlib.ExitStack, handlers: dict[Any, Callable[..., Any]]) -> None:
    """Until `stack` is left, Dynamo calls these in place of the functions of torch that they stand for."""
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
