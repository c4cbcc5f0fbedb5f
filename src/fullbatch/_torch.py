"""Every private torch interface that fullbatch touches, each with the reason. Seen to work on torch 2.13.

Nothing else in the package imports a name of torch that begins with an underscore, or that torch does not
document as public.
"""

from __future__ import annotations

import ast
import contextlib
import logging
import os
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any

import torch
import torch._dynamo  # the guarded capture; torch.compile's front end
import torch.fx.traceback as traceback
from torch import fx
from torch._dynamo import variables
from torch._dynamo.variables import builtin as _builtin
from torch._dynamo.variables import misc
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx  # traces a function of plain operators into a graph
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry

# torch.utils._pytree: registering and flattening of nests is public only in C++ form (optree); transformers
# registers its outputs here.
# Sees every operator that plain PyTorch runs; documented only as an extension point.
DispatchMode = TorchDispatchMode

tree_map = pytree.tree_map

# Leaves every dispatch mode, so that what runs inside is not seen by them.
without_modes = _disable_current_modes


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """oneDNN is off. The public `torch.backends.mkldnn.flags` also sets TF32 and warns of it (2.13)."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def loss_marker() -> Callable[[Any], Any]:
    """An identity operator that survives capture, so that the loss is found among a graph's outputs."""
    return torch.ops.fullbatch.loss  # type: ignore[no-any-return]


_LIBRARY = torch.library.Library("fullbatch", "DEF")
_LIBRARY.define("loss(Tensor x) -> Tensor")
_LIBRARY.impl("loss", lambda x: x.view_as(x), "CompositeImplicitAutograd")
# Stands in a captured graph for a loss that is not captured: its kernel is in the node's meta, and it is never called.
_LIBRARY.define("eager_loss(Tensor[] outputs, Tensor[] changed) -> Tensor[]")
EAGER_LOSS = torch.ops.fullbatch.eager_loss.default


@contextlib.contextmanager
def capture_settings() -> Iterator[None]:
    """Dynamo's settings for one step: every change of a Python value recaptures, shapes are never symbolic."""
    # A program that turns torch.compile off does not mean this: nothing is compiled here.
    with torch.compiler.set_stance("default"), _dynamo_config(), _nothing_frozen(), _more_captured():
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


@contextlib.contextmanager
def _nothing_frozen() -> Iterator[None]:
    """While it is entered, Dynamo guards or refuses what it otherwise takes for a constant.

    These are globals of the standard library's `os` (the environment, through `os.getenv`), and the state of a
    `random.Random`.
    """
    convert = torch._dynamo.symbolic_convert
    is_stdlib = convert.is_stdlib
    with (
        _replaced(convert, "is_stdlib", lambda module: module is not os and is_stdlib(module)),
        _replaced(misc.RandomVariable, "is_supported_random_obj", staticmethod(lambda value: False)),
        _replaced(misc.RandomClassVariable, "call_function", _seeded_only(misc.RandomClassVariable.call_function)),
    ):
        yield


@contextlib.contextmanager
def _more_captured() -> Iterator[None]:
    """While it is entered, Dynamo captures things that it refuses (2.13) and that models of transformers and monai do.

    A check of a tensor's values (`torch._check_tensor_all`) is an assertion that runs with the step, and no number that
    the data decide. `x.requires_grad = True` on a value of the step changes nothing but what is read of it.
    """
    handlers, skipped = variables.TorchInGraphFunctionVariable._get_handlers(), variables.functions.SkipFunctionVariable
    checks: dict[Callable[..., Any], int] = {torch._check_tensor_all: 0, torch._check_tensor_all_with: 1}
    kept = {check: handlers[check] for check in checks}
    handlers.update({check: _asserted(at) for check, at in checks.items()})
    setter, getter = _builtin.SetAttrBuiltinVariable._call_setattr, variables.TensorVariable.method_attr_requires_grad
    try:
        with (
            _replaced(_builtin.SetAttrBuiltinVariable, "_call_setattr", _requiring(setter)),
            _replaced(variables.TensorVariable, "method_attr_requires_grad", _not_after(getter)),
            _replaced(skipped, "call_function", _scripted(skipped.call_function)),
        ):
            yield
    finally:
        handlers.update(kept)


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


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    kept = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


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


def guarded_expressions() -> list[str]:
    """Inside a backend: the expressions, in `L` (locals) and `G` (globals), that the graph's guards are about."""
    context = torch._guards.TracingContext.try_get()
    return [] if context is None else [guard.name for guard in context.guards_context.dynamo_guards if guard.name]


def numpy_name(target: object) -> str | None:
    """The name of NumPy's function, method or operator that Dynamo (2.13) has a node of its graph call, else None."""
    utils = torch._dynamo.utils
    kinds = (utils.numpy_to_tensor_wrapper, utils.numpy_method_wrapper, utils.numpy_operator_wrapper)
    return target.__name__.removeprefix("wrapped_") if isinstance(target, kinds) else None


def traced_code() -> list[CodeType]:
    """Inside a backend: the code of all functions that were traced into the graph."""
    return list(torch._guards.TracingContext.get_traced_code() or [])


def _logging_functions() -> set[Any]:
    """Logger methods, those that libraries add to the class among them (transformers' warning_once)."""
    names = ("debug", "info", "warning", "error", "warning_once", "info_once", "warning_advice", "log")
    found = {getattr(logging.Logger, name, None) for name in names} - {None}
    return found | set(torch._dynamo.config.ignore_logging_functions)


def guarded(fn: Callable[..., Any], backend: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` captured whole by Dynamo on first call and whenever a guard fails."""
    return torch.compile(fn, backend=backend, fullgraph=True, dynamic=False)  # type: ignore[no-any-return]


def forget(code: CodeType) -> None:
    """Drops all captures of `code`, and what Dynamo holds for them."""
    torch._C._dynamo.eval_frame.reset_code(code)


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


def why_recaptured(code: CodeType, scope: dict[str, Any]) -> list[str]:
    """What Dynamo's guards say of the newest earlier capture of `code` for the arguments in `scope`."""
    entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(code)
    reasons: list[str] = []
    for entry in entries[1:2]:
        info = entry.guard_manager.check_verbose(scope)
        reasons.extend(str(part) for part in info.verbose_code_parts)
    return reasons


def dynamo_source(placeholder: fx.Node) -> str:
    """Where Dynamo found a graph input, as a Python expression such as L['model'].weight."""
    source = getattr(placeholder, "_dynamo_source", None)  # what it took the tensor from; the node's name is mangled
    return str(getattr(source, "name", "") or placeholder.name)


def fake_mode() -> FakeTensorMode:
    """Tensors without storage: tracing at the full batch costs no memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def to_fake(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A fake tensor with the metadata of `tensor`, every size a constant."""
    return mode.from_tensor(tensor, static_shapes=True)


def free_symbols(value: object) -> set[Any]:
    """The symbols of a number of Dynamo's that is none yet: it depends on data."""
    kinds = (torch.SymInt, torch.SymFloat, torch.SymBool)
    return set(value.node.expr.free_symbols) if isinstance(value, kinds) else set()


@contextlib.contextmanager
def quiet_shapes() -> Iterator[None]:
    """A shape that a model refuses is no message: torch logs each with a traceback, besides raising it."""
    logger = logging.getLogger(FakeTensor.__module__)
    kept = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(kept)


def is_fake(value: object) -> bool:
    """Whether `value` has metadata only."""
    return isinstance(value, FakeTensor)


def is_wrapper(kind: type) -> bool:
    """Whether tensors of this class hold others and have no storage of their own (a low-bit optimizer state)."""
    return hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with storage that `tensor` is made of: itself, but for one that wraps others."""
    if not is_wrapper(type(tensor)):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return [part for name in names for part in plain_parts(getattr(tensor, name))]


@contextlib.contextmanager
def optimizer_on_fakes() -> Iterator[list[str]]:
    """While entered, an optimizer steps on fake tensors as it would on real ones; yields the names of what it compiles.

    Optimizers choose their implementation over all parameters at once (foreach) by exact type, from a list of torch's.
    One that compiles its own step (torchao) runs it uncompiled.
    """
    compiled: list[str] = []

    def uncompiled(fn: Any, *_: Any, **__: Any) -> Any:
        compiled.append(getattr(fn, "__name__", str(fn)))
        return fn

    supported = sys.modules["torch.optim.optimizer"]._foreach_supported_types  # torch.optim hides its module
    supported.append(FakeTensor)  # type: ignore[arg-type]
    try:
        with _replaced(torch, "compile", uncompiled):
            yield compiled
    finally:
        supported.remove(FakeTensor)  # type: ignore[arg-type]


@contextlib.contextmanager
def joint_graph(
    module: torch.nn.Module, mode: FakeTensorMode, decompositions: dict[Any, Any]
) -> Iterator[fx.GraphModule]:
    """AOTAutograd's joint graph of forward and backward: functional, mutations as outputs, None where unreached.

    Placeholders and outputs carry `meta["desc"]`; nodes carry `seq_nr`, which pairs a backward with its forward.
    """
    with (
        contextlib.ExitStack() as stack,
        mode,
        traceback.preserve_node_meta(),
        torch._functorch.config.patch(
            functionalize_rng_ops=False,
            fake_tensor_propagate_real_tensors=False,
            backward_pass_autocast="off",  # as backward() called outside of autocast, where it belongs
        ),
    ):
        exported = aot_export_joint_with_descriptors(stack, module, (), decompositions=decompositions)
        yield exported.graph_module


def loss_decompositions() -> dict[Any, Any]:
    """Losses written out as element-wise operations and a mean, so that the mean alone couples the batch."""
    aten = torch.ops.aten
    return torch._decomp.get_decompositions(  # type: ignore[no-any-return]
        [
            aten.mse_loss, aten.mse_loss_backward, aten.smooth_l1_loss, aten.smooth_l1_loss_backward,
            aten.huber_loss, aten.huber_loss_backward, aten.binary_cross_entropy, aten.binary_cross_entropy_backward,
            aten.binary_cross_entropy_with_logits, aten.soft_margin_loss, aten.soft_margin_loss_backward,
            aten.l1_loss, aten.kl_div, aten.addcmul, aten.addcdiv, aten.lerp, aten.mish_backward,
            aten.std, aten.std_mean, aten.stack, aten.addr, aten.addmv, aten.mv, aten.dot, aten.norm,
            aten.trace, aten.frobenius_norm, aten.instance_norm, aten.logsumexp, aten.new_zeros, aten.new_ones,
            aten.index_add, aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.margin_ranking_loss,
        ]
    )  # fmt: skip


def compiled(fn: Callable[..., list[torch.Tensor]], inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """A function of tensors of fixed forms, compiled by TorchInductor for exactly these; nothing is guarded.

    Not torch.compile, which enters through Dynamo: its guards cost as much at every call as several small operators,
    and this package's own capture is at work around each run.
    """
    import torch._inductor  # takes a second, and only compile=True needs it

    graph = make_fx(fn, tracing_mode="fake")(*inputs)
    return torch._inductor.compile(graph, list(inputs))  # type: ignore[no-any-return]


def storage_key(tensor: torch.Tensor) -> int:
    """Identifies the storage behind a tensor; an address would not do, since all storages of `meta` have none."""
    return int(tensor.untyped_storage()._cdata)


# An operator of a captured graph, with one overload chosen.
OpOverload = torch._ops.OpOverload

# The common base of every batch normalisation.
BatchNorm = torch.nn.modules.batchnorm._BatchNorm


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd knows the tensor as a view of another."""
    return tensor._base is not None


def gradient_hooks(parameter: torch.Tensor) -> list[Callable[..., Any]]:
    """What register_hook added to a parameter, in order."""
    return list((getattr(parameter, "_backward_hooks", None) or {}).values())


def accumulated_hooks(parameter: torch.Tensor) -> list[Callable[..., Any]]:
    """What register_post_accumulate_grad_hook added to a parameter, in order."""
    return list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())


def backward_hooks(module: torch.nn.Module) -> list[Callable[..., Any]]:
    """The backward hooks of a module, those that run before its backward among them."""
    return [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]


def global_hooks(kind: str) -> list[Callable[..., Any]]:
    """Hooks of all modules, of kind "forward" or "backward"."""
    tables = (f"_global_{kind}_hooks", f"_global_{kind}_pre_hooks")
    return [hook for table in tables for hook in getattr(torch.nn.modules.module, table, {}).values()]


def drop_hooks(parameter: torch.Tensor) -> None:
    """Removes every gradient hook of a copied parameter: the user's hooks must not see a trial run."""
    parameter._backward_hooks = None  # type: ignore[assignment]
    if hasattr(parameter, "_post_accumulate_grad_hooks"):
        parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]


def flops_of(target: object, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Floating-point operations of one ATen call by torch's own counting formulas; 0 where it has none."""
    formula = flop_registry.get(getattr(target, "overloadpacket", None))
    if formula is None:
        return 0
    try:
        return int(formula(*args, **kwargs, out_val=out))
    except Exception:  # a formula that does not know this overload must not stop planning
        return 0


def assert_on_device(condition: torch.Tensor) -> None:
    """Fails on the device where `condition` is false, without waiting for it; a public check would wait."""
    torch._assert_async(condition)


# What `assert` on a tensor's value is in a captured graph: it raises on the device.
asserts_on_device = torch._assert_async


def profiler_running() -> bool:
    """Whether a profiler is active; torch itself lets a second one end the first in silence."""
    from torch.autograd import profiler

    return bool(profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled())


def take_hooks(tensor: torch.Tensor) -> tuple[Any, Any]:
    """Takes a leaf's gradient hooks away, for `give_hooks`: they must see the gradient of the whole batch, once.

    Handles that register_hook returned stay valid, since they refer to the dictionaries that come back.
    """
    taken = (getattr(tensor, "_backward_hooks", None), getattr(tensor, "_post_accumulate_grad_hooks", None))
    if taken[0]:
        tensor._backward_hooks = None
    if taken[1]:
        # An empty table: None leaves torch's own pointer to the old one (2.13).
        tensor._post_accumulate_grad_hooks = OrderedDict()  # type: ignore[attr-defined]
    return taken


def give_hooks(tensor: torch.Tensor, taken: tuple[Any, Any]) -> None:
    """Puts back what `take_hooks` took."""
    if taken[0]:
        tensor._backward_hooks = taken[0]
    if taken[1]:
        tensor._post_accumulate_grad_hooks = taken[1]  # type: ignore[attr-defined]


def graph_leaves(result: torch.Tensor) -> list[torch.Tensor]:
    """The tensors at which the autograd graph of `result` ends; an AccumulateGrad node alone knows its `variable`."""
    found: list[torch.Tensor] = [result] if result.grad_fn is None and result.requires_grad else []
    stack, seen = [result.grad_fn], {result.grad_fn}
    while stack:
        node = stack.pop()
        if node is None:
            continue
        if hasattr(node, "variable"):
            found.append(node.variable)
        new = [following for following, _ in node.next_functions if following not in seen]
        seen.update(new)
        stack.extend(new)
    return found


@contextlib.contextmanager
def watched_backward(look: Callable[[Sequence[Any], Sequence[Any] | None], None]) -> Iterator[None]:
    """While entered, `look(of, by)` sees each call of autograd's engine before it runs, and may raise.

    `backward()` and `grad()` both go through this function (2.13). No `by`: gradients are left in all leaves.
    """
    run: Callable[..., Any] = vars(torch.autograd)["_engine_run_backward"]

    def watched(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        look(outputs, args[3] if len(args) > 3 else ())
        return run(outputs, *args, **kwargs)

    with _replaced(torch.autograd, "_engine_run_backward", watched):
        yield


# A tensor inside of torch.func's transforms (vmap, grad) wraps another; captured, the transform would be left out.
is_transformed = torch._C._functorch.is_functorch_wrapped_tensor


def version(tensor: torch.Tensor) -> int:
    """How often a tensor, or one that shares its memory, was changed in place; what autograd checks in a backward."""
    return 0 if tensor.is_inference() else int(tensor._version)
