"""Where a step that cannot be captured whole is split: at the call of its model.

A loss that matches, selects by a mask or asks for a number is rarely written as a pair: `loss_fn(model, batch)` calls
the model once, and what follows is the loss. Then the pair is in the code already. Shape of the answer: `loss_fn` runs
as it is, once a step; its call of the model is answered by the captured graph of that call, which waits between its
forward and its backward until `loss_fn` has returned (`_found_call`). So nothing of the user's runs twice.

The rule: the first call of a module of the model, if it can be captured; else the first call inside of that one, and so
on (a model of transformers that computes its loss itself is split behind its body). It must hold more than half of the
model's parameters, or hardly any memory would be saved; what comes after it may call other modules, on the whole batch.
"""

from __future__ import annotations

import contextlib
import linecache
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import nn

from fullbatch import _torch
from fullbatch._errors import BudgetError, CaptureError, Fault, FullbatchError, LossError, PlanError
from fullbatch._folders import OURS
from fullbatch._tree import BatchShape, leaves, modules

Nest = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of the call that is captured."""

_PAIR = "say it yourself: fullbatch.Step((forward, loss), model, batch)"


# Refusals for which code that need not be captured may be the reason: Dynamo's own, and what depends on the data. Not
# exceptions of the user's, randomness that can be passed in, operators that are refused.
_REFUSALS = re.compile(r"The step cannot be captured as one graph: |A (number|shape) in the step depends on the data")

# What belongs outside of loss_fn, captured or not: to split the step for it would cost memory for nothing.
_MISPLACED = re.compile(r"gradscaler|\bprint\b|logg(er|ing)|\.(backward|retain_grad|zero_grad)\(", re.IGNORECASE)


def may_split(refusal: CaptureError) -> bool:
    """Whether a step that is refused so may be one whose model can be captured by itself."""
    fault = refusal.faults[0]
    return bool(_REFUSALS.match(fault.what)) and not _MISPLACED.search(f"{fault.what} {fault.got}")


class Left(BaseException):
    """Leaves `loss_fn` early: no error, and none that an `except Exception` of the user's would take for one."""


@dataclass(frozen=True)
class Place:
    """A module of a model: where it is, and the line that calls it."""

    key: Any  # of a tuple or dict of modules; None for a single one
    names: tuple[str, ...]
    at: tuple[str, int, str] | None = None  # file, line and function of the call

    @property
    def line(self) -> str:
        """The call, as errors and plans name lines."""
        return "" if self.at is None else "{}:{} in {}: ".format(*self.at) + linecache.getline(*self.at[:2]).strip()

    def module(self, model: Any) -> nn.Module:
        """The module itself."""
        found = model if self.key is None else model[self.key]
        for name in self.names:
            found = getattr(found, name)
        return found  # type: ignore[no-any-return]

    @property
    def title(self) -> str:
        """As the user would write it."""
        root = "model" if self.key is None else f"model[{self.key!r}]"
        return ".".join((root, *self.names))

    def forward(self) -> Callable[[Any, Any], Any]:
        """What is captured: the call of the module. Hooks on it run around, uncaptured, as in the plain step."""
        key, names = self.key, self.names

        def forward(model: Any, batch: Any) -> Any:
            module = model if key is None else model[key]
            for name in names:
                module = getattr(module, name)
            return module.forward(*batch[0], **batch[1])

        forward.__code__ = self._standing_at(forward.__code__)
        return forward

    def _standing_at(self, code: CodeType) -> CodeType:
        """The same code, said to stand where the user calls the module: plans and errors name that line."""
        stdlib = sysconfig.get_paths()["stdlib"]
        if self.at is None or (self.at[0].startswith(stdlib) and "site-packages" not in self.at[0]):
            return code  # Dynamo skips what stands in the standard library
        file, line, name = self.at
        first = line - max(number for *_, number in code.co_lines() if number) + code.co_firstlineno
        return code if first < 1 else code.replace(co_filename=file, co_firstlineno=first, co_name=name)


class Trap:
    """While entered, a call of one of `watched` is answered by `answer(module, args, kwargs)`."""

    def __init__(self, watched: Sequence[nn.Module], answer: Callable[[nn.Module, Any, Any], Any]) -> None:
        self._watched, self._answer = watched, answer
        self._own: dict[int, Any] = {}

    def __enter__(self) -> Trap:
        for module in self._watched:
            if id(module) not in self._own:
                self._own[id(module)] = module.__dict__.get("forward", self)  # self: there was none
                module.__dict__["forward"] = self._answering(module)
        return self

    def _answering(self, module: nn.Module) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._answer(module, args, kwargs)

    def __exit__(self, *_: object) -> None:
        for module in self._watched:
            own = self._own.pop(id(module), None)
            if own is self:
                del module.__dict__["forward"]
            elif own is not None:
                module.__dict__["forward"] = own

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """The modules are as they were."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def original(self, module: nn.Module) -> Callable[..., Any]:
        """The module's own forward."""
        own = self._own[id(module)]
        return type(module).forward.__get__(module) if own is self else own  # type: ignore[no-any-return]


def places(model: Any) -> dict[int, Place]:
    """Each module of a model, by its id."""
    keyed = not isinstance(model, nn.Module)
    roots = modules(model)
    keys = (list(model) if isinstance(model, dict) else range(len(model))) if keyed else [None]
    found: dict[int, Place] = {}
    for key, root in zip(keys, roots.values(), strict=True):
        for name, module in root.named_modules():
            found.setdefault(id(module), Place(key, tuple(name.split(".")) if name else ()))
    return found


def all_modules(model: Any) -> list[nn.Module]:
    """Each module once, in order."""
    return list({id(module): module for root in modules(model).values() for module in root.modules()}.values())


def find(
    loss_fn: Callable[[Any, Any], Any],
    model: Any,
    batch: Any,
    attempt: Callable[[Place, Nest], None],
    refusal: CaptureError,
) -> Place:
    """The place to split at. `attempt` captures a call, or raises.

    Raises CaptureError: `refusal`, with what stands against a split.
    """
    known, search = places(model), _Search(attempt, _held(all_modules(model)))
    search.trap = Trap(all_modules(model), lambda module, *call: search.answer(known[id(module)], module, call))
    error: BaseException | None = None
    try:
        with search.trap:
            loss_fn(model, batch)
    except Left:
        pass
    except Exception as raised:  # the user's own
        error, search.why = raised, f"loss_fn raises {type(raised).__name__} before it calls the model: {raised}"
    if search.found is None:
        why = search.why or "loss_fn calls no module of the model"
        found = CaptureError(
            *refusal.faults,
            Fault(f"It was not split at the call of the model either: {why[:600]}", search.line or "loss_fn",
                  "one call of the model, or of a module that holds most of it, that can be captured", _PAIR),
        )  # fmt: skip
        raise found from error or refusal.__cause__
    return search.found


def _held(of: Sequence[nn.Module]) -> int:
    """Elements of all parameters."""
    own = {id(one): one.numel() for module in of for one in module.parameters(recurse=False)}
    return sum(own.values())


class _Search:
    """One run of `loss_fn` up to the call that can be captured."""

    trap: Trap

    def __init__(self, attempt: Callable[[Place, Nest], None], total: int) -> None:
        self._attempt, self._total = attempt, total
        self.found: Place | None = None
        self.why = self.line = ""

    def answer(self, place: Place, module: nn.Module, call: Nest) -> Any:
        """Takes the call, or goes into it."""
        place = Place(place.key, place.names, _caller())
        try:
            with self.trap.suspended():
                self._try(place, module, call)
        except CaptureError as error:
            self._refused(place, error)
            if not may_split(error):
                raise Left from None
            self.trap.original(module)(*call[0], **call[1])  # a call inside of it does not return
        except FullbatchError as error:
            self._refused(place, error)
        raise Left

    def _try(self, place: Place, module: nn.Module, call: Nest) -> None:
        held = _held(list(module.modules()))
        if 2 * held <= self._total:
            raise LossError.of(f"it holds {held:,} of the model's {self._total:,} parameters, and the rest would run "
                               "on the whole batch")  # fmt: skip
        check_call(place, call)
        with contextlib.suppress(BudgetError, PlanError):  # captured; this is said where the step is planned
            self._attempt(place, call)
        self.found = place

    def _refused(self, place: Place, error: FullbatchError) -> None:
        fault = error.faults[0]
        self.why, self.line = f"{place.title}(...): {fault.what}", fault.got or place.line


def check_call(place: Place, call: Nest) -> None:
    """Raises LossError where the answer of the captured graph would not be what the call gives."""
    given = [tensor for _, tensor in leaves(call)]
    wrong = ""
    if not torch.is_grad_enabled():
        wrong = "it is called under torch.no_grad()"
    elif any(_torch.is_transformed(tensor) for tensor in given):
        wrong = "it is called inside of a transform of torch.func"
    elif any(tensor.requires_grad for tensor in given):
        wrong = "an argument of it needs a gradient, which would end there"
    if wrong:
        raise LossError.of(
            f"The call {place.title}(...) cannot stand for the captured part: {wrong}.", got=place.line,
            expected="a call whose arguments follow from the batch alone", next=_PAIR,
        )  # fmt: skip


def shape_of(call: Nest, place: Place, batch: Any, shape: BatchShape) -> tuple[list[torch.Tensor], BatchShape]:
    """The tensors of a call's arguments, and which dimension of each carries the batch. Raises LossError.

    A wrong guess is a slower plan, and no wrong result: whatever is cut is put together again where it is needed whole.
    """
    own = [tensor for _, tensor in leaves(batch)]
    by_id = {id(tensor): (path, dim) for tensor, path, dim in zip(own, shape.paths, shape.dims, strict=True)}
    by_shape = {tensor.shape: dim for tensor, dim in zip(own, shape.dims, strict=True) if dim is not None}
    given = [*leaves(call[0], f"{place.title}(...)"), *leaves(call[1], f"{place.title}(...)")]
    paths, dims = [], []
    for path, tensor in given:
        guess = by_shape.get(tensor.shape, _carrying(tensor, shape.size))
        path, dim = by_id.get(id(tensor), (path, guess))
        paths.append(path)
        dims.append(dim)
    if all(dim is None for dim in dims):
        raise LossError.of(
            f"No argument of {place.title}(...) carries the batch.",
            got=", ".join(f"{path}: {tuple(tensor.shape)}" for path, tensor in given)[:300] or "no tensor",
            expected=f"{shape.size} samples in one dimension of one of them", next=_PAIR,
        )  # fmt: skip
    return [tensor for _, tensor in given], BatchShape(shape.size, tuple(paths), tuple(dims))


def _carrying(tensor: torch.Tensor, size: int) -> int | None:
    """The first dimension of as many elements as the batch has samples."""
    return next((dim for dim, length in enumerate(tensor.shape) if length == size), None)


def _caller() -> tuple[str, int, str] | None:
    """File, line and function of the user's that is being run."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(OURS):
        frame = frame.f_back
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
