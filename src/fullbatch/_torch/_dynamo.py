"""TorchDynamo as fullbatch runs it: settings of a capture, its guards, what it says where it stops. Seen on torch 2.13.

Reason: torch.compile is the public way in, and `guarded` takes it. That every Python value is guarded or refused, that
a capture can be let go, and why one no longer holds, are said by Dynamo's own modules only.
"""

from __future__ import annotations

import ast
import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
import torch._dynamo
from torch._dynamo.variables import misc

from fullbatch._torch._allowed import more_captured
from fullbatch._torch._replace import replaced


@contextlib.contextmanager
def capture_settings() -> Iterator[None]:
    """Dynamo's settings for one step: every change of a Python value recaptures, shapes are never symbolic."""
    # A program that turns torch.compile off does not mean this: nothing is compiled here.
    with torch.compiler.set_stance("default"), _dynamo_config(), _nothing_frozen(), more_captured():
        yield


def _dynamo_config() -> contextlib.AbstractContextManager[Any]:
    return torch._dynamo.config.patch(  # type: ignore[no-any-return]
        disable=False,
        allow_rnn=True,  # LSTM and GRU have no other path
        automatic_dynamic_shapes=False,  # the full batch's constants are what makes the result exact
        assume_static_by_default=True,
        specialize_float=True,  # a float of the user's becomes a guarded constant
        recompile_limit=2**30,
        accumulated_recompile_limit=2**30,
        fail_on_recompile_limit_hit=True,
        capture_scalar_outputs=False,
        suppress_errors=False,
        skip_nnmodule_hook_guards=False,  # a forward hook added later must be noticed
        ignore_logging_functions=_logging_functions(),  # a message is no reason to refuse a model
        use_numpy_random_stream=True,  # numpy's draws are refused, not replaced by torch's
    )


def _logging_functions() -> set[Any]:
    """Logger methods, those that libraries add to the class among them (transformers' warning_once)."""
    names = ("debug", "info", "warning", "error", "warning_once", "info_once", "warning_advice", "log")
    found = {getattr(logging.Logger, name, None) for name in names} - {None}
    return found | set(torch._dynamo.config.ignore_logging_functions)


@contextlib.contextmanager
def _nothing_frozen() -> Iterator[None]:
    """While it is entered, Dynamo guards or refuses what it otherwise takes for a constant.

    These are globals of the standard library's `os` (the environment, through `os.getenv`), and the state of a
    `random.Random`.
    """
    convert = torch._dynamo.symbolic_convert
    is_stdlib = convert.is_stdlib
    with (
        replaced(convert, "is_stdlib", lambda module: module is not os and is_stdlib(module)),
        replaced(misc.RandomVariable, "is_supported_random_obj", staticmethod(lambda value: False)),
        replaced(misc.RandomClassVariable, "call_function", _seeded_only(misc.RandomClassVariable.call_function)),
    ):
        yield


def _seeded_only(create: Callable[..., Any]) -> Callable[..., Any]:
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if not args:
            torch._dynamo.exc.unimplemented(
                gb_type="random.Random() without a seed",
                context="",
                explanation="Its draws would be constants.",
                hints=[],
            )
        return create(self, tx, args, kwargs)

    return call_function


def guarded(fn: Callable[..., Any], backend: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` captured whole by Dynamo on first call and whenever a guard fails."""
    return torch.compile(fn, backend=backend, fullgraph=True, dynamic=False)  # type: ignore[no-any-return]


def forget(code: CodeType) -> None:
    """Drops all captures of `code`, and what Dynamo holds for them; `torch.compiler.reset` would drop everybody's."""
    torch._C._dynamo.eval_frame.reset_code(code)


def traced_code() -> list[CodeType]:
    """Inside a backend: the code of all functions that were traced into the graph, which nothing public says."""
    return list(torch._guards.TracingContext.get_traced_code() or [])


def guarded_expressions() -> list[str]:
    """Inside a backend: the expressions, in `L` (locals) and `G` (globals), that the graph's guards are about.

    No public form says what a guard is about.
    """
    context = torch._guards.TracingContext.try_get()
    return [] if context is None else [guard.name for guard in context.guards_context.dynamo_guards if guard.name]


def why_recaptured(code: CodeType, scope: dict[str, Any]) -> list[str]:
    """What Dynamo's guards say of the newest earlier capture of `code` for the arguments in `scope`.

    `TORCH_LOGS=recompiles` prints this, and gives it to nobody.
    """
    entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(code)
    reasons: list[str] = []
    for entry in entries[1:2]:
        info = entry.guard_manager.check_verbose(scope)
        reasons.extend(str(part) for part in info.verbose_code_parts)
    return reasons


DynamoError = torch._dynamo.exc.TorchDynamoException


def original_exception(error: BaseException) -> BaseException | None:
    """The exception of the traced Python code itself, where Dynamo stopped because of one.

    Dynamo interprets the code: an exception that it raises exists as a description, of which it is rebuilt.
    """
    text, link = str(error), error
    if "failed to find name in frame builtins" in text:
        found = re.search(r"Failed to find name `(\w+)`", text)
        return NameError(f"name '{found[1]}' is not defined") if found else None
    if "assertion failed" in text:  # one on a tensor's value depends on the data
        return AssertionError("the assertion is false") if "ConstantVariable(bool: False)" in text else None
    marks = ("Observed exception", "when making fake tensor call", "failed to bind arguments")
    if not any(mark in text for mark in marks):
        return None
    observed: BaseException | None = None
    while link is not None:
        if not type(link).__module__.startswith("torch._"):
            return link
        if isinstance(link, torch._dynamo.exc.ObservedException):
            observed = link
        link = link.__cause__ or link.__context__  # type: ignore[assignment]
    return None if observed is None else _rebuilt(observed, text)


def _rebuilt(observed: BaseException, text: str) -> BaseException:
    known: dict[type, Any] = {made: python for python, made in torch._dynamo.exc.observed_exception_map.items()}
    kind = known.get(type(observed))
    described = re.search(r"raised exception \w+\((.*)\)", text)
    try:
        args = ast.literal_eval(f"({described[1]},)") if described and described[1] else ()
        if isinstance(kind, type) and issubclass(kind, Exception):
            return kind(*args)
    except Exception:  # arguments that are no literals, or an exception that takes others
        pass
    return RuntimeError(described[0].removeprefix("raised exception ") if described else str(observed))
