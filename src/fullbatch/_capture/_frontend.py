"""The user's Python, captured whole and guarded.

A traced graph freezes every Python value that it read. TorchDynamo guards them: when a flag, a closure variable,
a shape or a training mode differs, it captures anew. So fullbatch enters through it, and asks for the whole step
as one graph; what Dynamo cannot express is refused with the line it stands on.
"""

from __future__ import annotations

import contextlib
import random
import re
import sysconfig
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import fx

from fullbatch import _torch
from fullbatch._capture._sources import SEEDS, Source, seeds, source_of
from fullbatch._capture._values import Guard, Known
from fullbatch._capture._watch import Watch
from fullbatch._errors import CaptureError, FullbatchError, LossError
from fullbatch._folders import OURS

Runner = Callable[..., Any]


class _Stale(Exception):
    """Leaves a captured step before anything has run: something that it read and no guard covers is different."""


class _Elsewhere(Exception):
    """Leaves a captured step before anything has run: numbers in tensors are others, and so is the capture for them."""

    def __init__(self, epoch: int) -> None:
        super().__init__(epoch)
        self.epoch = epoch


class Frontend:
    """Calls `loss_fn(model, batch)` under guards; each new graph is handed to `on_graph`, which answers how to run it.

    A runner gets the graph's inputs (parameters, buffers, batch tensors, closure tensors, live at each call) and
    returns the graph's outputs.
    """

    def __init__(
        self, loss_fn: Callable[..., Any], on_graph: Callable[[fx.GraphModule], Runner], forward_only: bool = False
    ) -> None:
        self._loss_fn, self._forward_only = loss_fn, forward_only
        self._on_graph = on_graph
        self.captures = 0
        self.room = 64  # captures that are kept: guards are checked one after another
        self._epoch = 0  # a guarded value of our own: raised where captures up to now hold no longer
        self._newest = 0  # the highest one: those between are for other numbers in tensors (`_values.py`)
        self._known = Known()
        self._entered = 0  # the epoch of the last call
        self._turned: int | None = None  # where the next call begins, and
        self._settled: int | None = None  # where others do: `turn`, `settle`
        self._changed = ""
        self._scope: dict[str, Any] = {}
        self._drop: Callable[[], Any] = lambda: None
        self._renew()

    def _renew(self) -> None:
        """A fresh code object: Dynamo keeps captures by code, and two steps must not share them.

        Its globals are its own too: Dynamo puts what it compiled there, and it goes with them.
        """
        self._drop()
        whole_step = _whole_step(self._loss_fn, self._forward_only)
        self._code: CodeType = whole_step.__code__.replace(co_name=f"whole_step_{id(self)}")
        self._globals = dict(whole_step.__globals__)
        fresh = FunctionType(self._code, self._globals, "whole_step", whole_step.__defaults__, whole_step.__closure__)
        # Dynamo holds the backend and its runners by the code, out of the garbage collector's sight: they know this
        # object weakly, or neither it nor the model would ever be freed.
        alive = weakref.ref(self)
        self._call = _torch.guarded(fresh, lambda graph, example_inputs: _alive(alive)._backend(graph))
        self._drop = weakref.finalize(self, _torch.forget, self._code)
        self._held = 0

    def _backend(self, graph: fx.GraphModule) -> Runner:
        guard = self._known.guard(graph)
        self._known.note(graph)
        run, expressions = self._on_graph(graph), _torch.guarded_expressions()
        self.captures += 1
        self._held += 1
        self._known.begin()  # what raises from here on is no refusal
        watches: list[Watch] = []
        elsewhere: dict[tuple[str, ...], int] = {}  # other numbers -> the epoch of their capture
        alive = weakref.ref(self)

        def watched(*inputs: Any) -> Any:
            _alive(alive)._check(watches, expressions)
            if guard is not None:
                _alive(alive)._compare(guard, inputs, elsewhere)
            return run(*inputs)

        return watched

    def _compare(self, guard: Guard, inputs: Any, elsewhere: dict[tuple[str, ...], int]) -> None:
        values = guard.values(inputs)
        if values == guard.expected:
            return
        if values not in elsewhere:
            self._newest += 1
            elsewhere[values] = self._newest
            self._known.assumptions.inherit(self._entered, self._newest)
            self._changed = "a number that the step reads from a tensor has changed"
        raise _Elsewhere(elsewhere[values])

    def _check(self, watches: list[Watch], expressions: list[str]) -> None:
        if not watches:
            watches.append(Watch(expressions, self._scope))
        self._changed = watches[0].changed(self._scope)
        if self._changed:
            raise _Stale

    def __call__(self, model: Any, batch: Any, moved: Any, scale: torch.Tensor | None = None) -> Any:
        """(loss, aux, has_aux) as the runner returned them.

        `moved` is the device to bring batch tensors to, or None. The gradient is that of `scale` times the loss, where
        one is given.
        """
        if self._held > self.room:
            self._renew()
        local = {"model": model, "batch": batch, "moved": moved, "epoch": self._epoch, "loss_fn": self._loss_fn}
        local["gradient_scale"] = scale
        self._scope = {"L": local, "G": self._globals}
        drawn = random.getstate()
        try:
            with (
                _torch.capture_settings(),
                _torch.as_plain(self._known),
                torch.inference_mode(False),
                torch.enable_grad(),
            ):
                epoch = self._begin()
                while True:
                    self._known.begin()
                    self._known.assumptions.begin(epoch)
                    self._entered = epoch
                    try:
                        return self._call(model, batch, moved, epoch, scale)
                    except _Elsewhere as other:
                        random.setstate(drawn)
                        epoch = other.epoch if epoch != self._settled else self._usual()
                    except _Stale:
                        random.setstate(drawn)
                        self._settled = None
                        self._newest += 1
                        epoch = self._epoch = self._newest
                    except Exception as error:  # of any kind: what Dynamo forbids is not always one of its own
                        if self._known.tell_otherwise(str(error)):
                            random.setstate(drawn)
                            continue
                        if not isinstance(error, _torch.DynamoError):
                            raise
                        refusal, cause = explain_refusal(error)
                        raise refusal from cause
        except BaseException:
            random.setstate(drawn)
            raise
        finally:
            self._scope = {}

    def _begin(self) -> int:
        """The epoch in which a call begins."""
        turned, self._turned = self._turned, None
        if turned is not None:
            return turned
        return self._epoch if self._settled is None else self._settled

    def _usual(self) -> int:
        self._settled = None
        return self._epoch

    def turn(self, index: int) -> None:
        """After a call whose branch number `index` goes the other way (`_assumed.py`): the next one is to go it.

        A call that began with unusual branches has the next one begin with what is usual: so there is one way to each
        capture, and it is made once.
        """
        self._changed = "whether numbers that the step looks at are finite has changed"
        if self._entered == self._settled:
            self._settled = None
            return
        self._turned = self._known.assumptions.turned(self._entered, index, self._newest + 1)
        self._newest = max(self._newest, self._turned)

    def settle(self, done: bool) -> None:
        """After a step that began again: where it is `done`, the next begins with its branches, which often stay so."""
        unusual = done and bool(self._known.assumptions.other)
        self._settled, self._turned = (self._entered if unusual else None), None

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """What is captured inside is not dropped for another, until 64 more have come."""
        self.room = 1 << 16
        try:
            yield
        finally:
            self.room = self._held + 64

    def why(self, model: Any, batch: Any, moved: Any, scale: torch.Tensor | None = None) -> list[str]:
        """What made the newest capture necessary, in words."""
        if self._changed:
            return [self._changed]
        scope = {"model": model, "batch": batch, "moved": moved, "epoch": self._epoch, "loss_fn": self._loss_fn}
        scope["gradient_scale"] = scale
        try:
            return [_in_words(text, self._loss_fn) for text in _torch.why_recaptured(self._code, scope)]
        except Exception:  # a diagnosis only: it must never stop a step
            return []


def _alive(reference: weakref.ref[Frontend]) -> Frontend:
    frontend = reference()
    assert frontend is not None
    return frontend


_NO_LOSS = "fullbatch: "  # begins the message of an exception that carries a LossError through Dynamo


def _whole_step(loss_fn: Callable[..., Any], forward_only: bool = False) -> Any:
    mark = _torch.loss_marker()

    def differentiated(loss: Any, scale: Any) -> Any:
        # The scale is a tensor, and so an input of the graph: another value is no reason to capture anew.
        return mark(loss) if scale is None else (mark(loss * scale), loss)

    def whole_step(model: Any, batch: Any, moved: Any, epoch: int, gradient_scale: Any) -> Any:
        if epoch < 0:  # read, so that it is guarded
            return None
        if moved is not None:
            batch = _torch.tree_map(lambda leaf: leaf.to(moved) if isinstance(leaf, torch.Tensor) else leaf, batch)
        result = loss_fn(model, batch)
        if forward_only:
            return result
        if isinstance(result, torch.Tensor):
            return differentiated(result, gradient_scale), None, False
        if not isinstance(result, tuple):
            raise TypeError(f"{_NO_LOSS}a {type(result).__name__}")
        if len(result) != 2:
            raise TypeError(f"{_NO_LOSS}a tuple of {len(result)}")
        loss, aux = result
        if not isinstance(loss, torch.Tensor):
            raise TypeError(f"{_NO_LOSS}a tuple of a {type(loss).__name__} and a {type(aux).__name__}")
        return differentiated(loss, gradient_scale), aux, True

    return whole_step


def _in_words(guard: str, loss_fn: Any) -> str:
    """A guard's text with the names that the user knows."""
    text = guard.split("  #")[0].strip()
    for index, name in enumerate(getattr(getattr(loss_fn, "__code__", None), "co_freevars", ())):
        text = text.replace(f"L['loss_fn'].__closure__[{index}].cell_contents", name)
    text = re.sub(r"G\['__import_(\w+)'\]", lambda found: found[1].replace("_dot_", "."), text)
    text = re.sub(r"(?:dict\.__getitem__|___dict_getitem)\((.*), ('[^']*')\)", r"\1[\2]", text)
    return re.sub(r"\b[LG]\['(\w+)'\]", r"\1", text)


_LINE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.*)')
_PATHS = sysconfig.get_paths()


def user_line(trace: str) -> str:
    """The innermost line of a formatted traceback that is the user's, or of a library that the user calls."""
    lines = _LINE.findall(trace)
    theirs = [line for line in lines if not line[0].startswith((*OURS, "<")) and not _is_standard(line[0])]
    if not theirs:
        return "loss_fn"
    file, number, function, code = theirs[-1]
    return f"{file}:{number} in {function}: {code.strip()}"


def _is_standard(file: str) -> bool:
    """Whether Python's own library holds it, within whose folder installed packages may be."""
    return file.startswith((_PATHS["stdlib"], _PATHS["platstdlib"])) and "-packages" not in file


def explain_refusal(error: BaseException) -> tuple[FullbatchError, BaseException | None]:
    """Dynamo's refusal as ours (the line of the user's code, the reason, what to do), and its cause.

    The cause is the exception that loss_fn itself raises, where that is the reason.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, FullbatchError):
            return cause, cause.__cause__ or error
        cause = cause.__cause__ or cause.__context__
    text = str(error)
    trace = text.split("from user code:")[-1] if "from user code:" in text else ""
    original = _torch.original_exception(error)
    if not isinstance(original, AssertionError) and _needs_data(text):
        original = None
    if original is not None and str(original).startswith(_NO_LOSS):
        return bad_loss(str(original).removeprefix(_NO_LOSS), "a scalar tensor, or (loss, aux)"), None
    if original is not None:
        return CaptureError.of(
            f"loss_fn raises {type(original).__name__}: {original}"[:600],
            got=user_line(trace),
            expected="a loss_fn that runs in plain PyTorch",
            next="loss_fn(model, batch) by itself raises it with its own traceback",
        ), original
    source = source_of(text)
    if source is not None:
        return _drawn_elsewhere(source, user_line(trace)), error
    reason = text.split("from user code:")[0].strip().split("\n\n")[0]
    lines = [line.strip() for line in reason.splitlines() if line.strip() and not line.strip().startswith("Hint:")]
    reason = " ".join(lines).replace(" Explanation:", ":")[:600]
    return CaptureError.of(
        f"The step cannot be captured as one graph: {reason}",
        got=user_line(trace),
        expected="tensor operations whose shapes and order do not depend on the data",
        next=_advice(text),
    ), error


def _drawn_elsewhere(source: Source, line: str) -> CaptureError:
    return CaptureError.of(
        source.reason, got=line, expected="draws from torch's default generators (torch.rand, F.dropout and the like)",
        next=source.next,
    )  # fmt: skip


def _needs_data(text: str) -> bool:
    return bool(re.search("data.?dependent|dynamic.?(output.?)?shape|unbacked", text, re.IGNORECASE))


def _advice(text: str) -> str:
    lowered = text.lower()
    if "gradscaler" in lowered:
        return "step(batch, scaler=scaler), and return the loss as it is from loss_fn"
    if "nonzero" in lowered or "dynamic shape" in lowered or "unbacked" in lowered:
        return _NO_SELECTION
    if "torch.autograd.grad" in lowered:
        return _NO_GRADIENT
    if _needs_data(text) or "item()" in lowered or "tolist()" in lowered:
        return _NO_NUMBER
    if "print" in lowered or "logger" in lowered or "logging" in lowered:
        return "move logging out of loss_fn, or return the value as aux: return loss, {'name': value}"
    return "move what is not tensor arithmetic out of loss_fn, and pass its result in the batch" + _OTHERWISE


_NO_GRADIENT = (
    "torch.func.grad(lambda x: model(x).sum())(x), which is captured and may be differentiated again; or "
    "fullbatch.eager.Step with loss_fn(model, batch) -> (loss_sum, count)"
)

_OTHERWISE = (
    "; where the loss alone does this, fullbatch.Step((forward, loss), model, batch) runs it as it is; where the "
    "forward does, fullbatch.eager.Step with loss_fn(model, batch) -> (loss_sum, count)"
)
_NO_NUMBER = "keep the value a tensor: torch.where or a multiplication for .item()/float()/if tensor:" + _OTHERWISE
_NO_SELECTION = "replace x[mask] by torch.where(mask, x, 0) and divide by mask.sum()" + _OTHERWISE


def check_data_dependence(graph: fx.GraphModule) -> None:
    """Raises CaptureError where a number or a shape comes from the data: every size is a constant otherwise."""
    seeded = seeds(graph)
    if seeded is not None:
        raise _drawn_elsewhere(SEEDS, user_line(str(seeded.meta.get("stack_trace", ""))))
    for node in graph.graph.nodes:
        example = node.meta.get("example_value")
        if node.op == "placeholder" or getattr(example, "is_nested", False):
            continue
        number = isinstance(example, (torch.SymInt, torch.SymFloat, torch.SymBool))
        shape = isinstance(example, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in example.shape)
        if number or shape:
            raise CaptureError.of(
                f"A {'number' if number else 'shape'} in the step depends on the data.",
                got=user_line(str(node.meta.get("stack_trace", ""))),
                expected="numbers and shapes that are the same for all batches of one form",
                next=_NO_NUMBER if number else _NO_SELECTION,
            )


def check_loss(graph: fx.GraphModule) -> fx.Node:
    """The loss among the graph's nodes. Raises LossError where it is no scalar or needs no gradient."""
    check_data_dependence(graph)
    marks = (torch.ops.fullbatch.loss, torch.ops.fullbatch.loss.default)
    marked: list[fx.Node] = [node for node in graph.graph.nodes if node.target in marks]
    if len(marked) != 1:
        raise bad_loss("no tensor", "a scalar tensor, or (loss, aux)")
    example = marked[0].meta["example_value"]
    if example.numel() != 1:
        raise bad_loss(
            f"a tensor of shape {tuple(example.shape)}", "a scalar", "return loss.mean() (or loss.sum()) from loss_fn"
        )
    if not example.requires_grad:
        raise bad_loss(
            "a loss that no parameter reaches",
            "a loss that depends on at least one tensor with requires_grad",
            "check requires_grad_() of the parameters, and that loss_fn does not detach or run under no_grad",
        )
    if example.is_complex():
        raise bad_loss(f"a loss of dtype {example.dtype}", "a real scalar", "return loss.abs() or loss.real")
    return marked[0]


def bad_loss(got: str, expected: str, next: str = "return F.cross_entropy(model(x), y)") -> LossError:
    return LossError.of("loss_fn did not return a loss to differentiate.", got=got, expected=expected, next=next)
