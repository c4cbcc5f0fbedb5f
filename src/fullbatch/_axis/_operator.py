"""What an operator of the captured graph is, apart from where its tensors are placed."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fullbatch import _torch
from fullbatch._axis._kernels import KERNELS, in_strides
from fullbatch._axis._node import NodeView, Operand, Strategy
from fullbatch._ir import Ref

_VIEWS = {
    "view", "_unsafe_view", "reshape", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "slice",
    "select", "split", "split_with_sizes", "unbind", "chunk", "diagonal", "view_as_real", "view_as_complex", "unfold",
    "_reshape_alias", "as_strided", "real", "imag", "_conj", "_neg_view", "numpy_T", "swapaxes",
}  # fmt: skip


def metas(node: fx.Node) -> list[Any]:
    out = node.meta.get("val")
    forms = list(out) if isinstance(out, (list, tuple)) else [out]
    return _with_statistics(node, forms) if "batch_norm" in str(node.target) else forms


def _with_statistics(node: fx.Node, forms: list[Any]) -> list[Any]:
    """Traced, the statistics of a batch normalisation have the dtype of its input; run, that of its parameters."""
    given = [arg.meta["val"].dtype for arg in node.args[1:5] if isinstance(arg, fx.Node)]
    if "backward" in str(node.target) or not given or given[0] == forms[0].dtype:
        return forms
    return [forms[0], *(form.new_empty(form.shape, dtype=given[0]) for form in forms[1:3]), *forms[3:]]


def used_outputs(node: fx.Node, count: int) -> set[int]:
    if not isinstance(node.meta["val"], (list, tuple)):
        return {0}
    return {int(str(user.args[1])) for user in node.users if user.target is operator.getitem and user.users}


def complete(node: fx.Node, strategy: Strategy) -> bool:
    """Whether the rule says what every output is that anyone reads and that holds anything."""
    forms = metas(node)
    used = used_outputs(node, len(forms))
    return all(
        placed is not None or position not in used or not isinstance(meta, torch.Tensor) or not meta.numel()
        for position, (meta, placed) in enumerate(zip(forms, strategy.out, strict=True))
    )


def kernel(node: fx.Node) -> Any:
    return KERNELS.get(node.target, node.target)


def whole_kernel(node: fx.Node) -> Any:
    """The kernel for the whole batch. Batch normalisation is traced with other strides than it runs with."""
    found = kernel(node)
    if "batch_norm" not in str(node.target):
        return found
    strides = [tuple(meta.stride()) if isinstance(meta, torch.Tensor) else None for meta in metas(node)]
    return in_strides(found, tuple(strides))


def template(node: fx.Node, view: NodeView, patch: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    def convert(arg: Any) -> Any:
        if isinstance(arg, Operand):
            return Ref(arg.index)
        if isinstance(arg, (list, tuple)):
            return [convert(item) for item in arg]
        return arg

    merged = {**view.args, **patch}
    positional, keyword = [], {}
    for argument in _torch.schema(node.target).arguments:
        if argument.name not in merged:
            if not argument.kwarg_only and any(a.name in merged for a in _after(node, argument.name)):
                positional.append(argument.default_value)
            continue
        value = convert(merged[argument.name])
        if argument.kwarg_only:
            keyword[argument.name] = value
        else:
            positional.append(value)
    return positional, keyword


def _after(node: fx.Node, name: str) -> list[Any]:
    arguments = [argument for argument in _torch.schema(node.target).arguments if not argument.kwarg_only]
    position = [argument.name for argument in arguments].index(name)
    return arguments[position + 1 :]


def fields(node: fx.Node) -> dict[str, Any]:
    target = node.target
    packet = str(target).split(".")[1]
    return {
        "single": not isinstance(node.meta["val"], (list, tuple)),
        "random": torch.Tag.nondeterministic_seeded in target.tags and draws(node),  # type: ignore[union-attr]
        "view": packet in _VIEWS,
        "flops": flops(node),
    }


def flops(node: fx.Node, patch: Mapping[int, Any] | None = None) -> int:
    """Operations of `node`, with other arguments at the positions in `patch`."""
    given = [(patch or {}).get(at, arg) for at, arg in enumerate(node.args)]
    args, kwargs = _torch.tree_map(
        lambda arg: arg.meta["val"] if isinstance(arg, fx.Node) else arg, (tuple(given), node.kwargs)
    )
    return _torch.flops_of(node.target, args, kwargs, node.meta["val"])


def draws(node: fx.Node) -> bool:
    """Whether a random operator draws with these arguments: attention without dropout does not."""
    return draws_with(node.target, node.args, node.kwargs)


def draws_with(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """The same of an operator that is called with these arguments."""
    names = [argument.name for argument in _torch.schema(target).arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if "dropout_p" in names:
        return bool(given.get("dropout_p", 0.0))
    if "native_dropout" in str(target):
        return bool(given.get("p")) and given.get("train") is not False
    if "rrelu" in str(target):
        return bool(given.get("training", False))
    return True
