"""What a captured step read and Dynamo's guards do not cover, watched by the expression that reached it.

Dynamo guards every value that a step read. It does not guard what the step found *missing* (`except KeyError`,
`except AttributeError`, `dict.pop(key, default)`), nor the sign of a zero, nor the methods of a class. Its guards name
each object that was read by an expression; here the names in those objects are remembered, and compared at each call.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

_FOREIGN = {"torch", *sys.stdlib_module_names}
_METHODS = (FunctionType, staticmethod, classmethod, property)
_PLAIN = (torch.Tensor, ModuleType, type, FunctionType, CodeType, str, bytes, int, tuple, list, set, frozenset)

# Watched with their module, or guarded by Dynamo itself.
_OF_MODULES = ("._parameters", "._buffers", "._modules", "_hooks", "_hooks_with_kwargs")
_NOISE = {b"KINETO_LOG_LEVEL"}  # torch's profiler puts it into the environment


class Watch:
    """The names that a captured step could see, by the expressions under which it saw them."""

    def __init__(self, expressions: Iterable[str], scope: dict[str, Any]) -> None:
        self._seen: list[tuple[str, Any]] = []
        classes: dict[type, None] = {}
        for text in dict.fromkeys(expressions):
            if text.endswith(_OF_MODULES):
                continue
            try:
                value = eval(text, scope)  # noqa: S307 - an expression of Dynamo's own making
            except Exception:  # not one that can be evaluated outside of a guard
                continue
            seen = _names(value)
            if seen is not None:
                self._seen.append((text, seen))
                classes.update((cls, None) for cls in type(value).__mro__)
        self._methods = [(cls, _methods(cls)) for cls in classes if cls.__module__.split(".")[0] not in _FOREIGN]
        self._code = compile(f"({''.join(f'{text}, ' for text, _ in self._seen)})", "<fullbatch watch>", "eval")

    def changed(self, scope: dict[str, Any]) -> str:
        """What is different now, in words; "" where nothing is."""
        try:
            values = eval(self._code, scope)  # noqa: S307
        except Exception as error:
            return f"something that the step reads is gone ({type(error).__name__}: {error})"
        for (text, before), value in zip(self._seen, values, strict=True):
            if _names(value) != before:
                return f"the names in {text} have changed"
        for cls, methods in self._methods:
            now = vars(cls)
            if any(now.get(name) is not method for name, method in methods.items()):
                return f"a method of {cls.__qualname__} has changed"
        return ""


def _names(value: Any) -> Any:
    """What can be missing in `value` (keys of a dictionary, attributes of an object), or the sign of a zero."""
    if isinstance(value, float):
        return math.copysign(1, value) if value == 0 else None
    if isinstance(value, dict):
        if "__builtins__" in value or "__import__" in value:  # the globals of a module, which grow as code runs
            return None
        # Tensors compare element by element. The order of names, where it is read, is guarded by Dynamo.
        return {id(key) if isinstance(key, torch.Tensor) else key for key in value} - _NOISE
    if isinstance(value, nn.Module):
        own = vars(value)
        return {*own, *own["_parameters"], *own["_buffers"], *own["_modules"]}
    if value is None or isinstance(value, _PLAIN) or not hasattr(value, "__dict__"):
        return None
    return {*vars(value)}


def _methods(cls: type) -> dict[str, Any]:
    return {name: item for name, item in vars(cls).items() if isinstance(item, _METHODS)}
