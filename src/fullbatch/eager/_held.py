"""Which modules hold what a backward reads, in bytes, and which of them are worth a checkpoint.

Limit that forced it: a checkpoint around a whole network saves nothing, since its recompute holds all at once, and one
around a single layer saves nothing, since it keeps an input of the same size. Shape of the answer: the entries of
ModuleList, ModuleDict and Sequential, and siblings of one class, are where networks repeat; what each of them saves in
one forward is counted, and those that hold more than their inputs are taken, the outermost first, the largest first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from fullbatch import _torch
from fullbatch._tree import leaves, named_tensors
from fullbatch.eager._buffers import Buffers
from fullbatch.eager._cut import Cut, Span
from fullbatch.eager._loop import Job
from fullbatch.eager._recompute import named_modules, wrapped
from fullbatch.eager._returned import checked


def repeated(model: Any) -> list[str]:
    """Entries of containers, and siblings of one class; where a model has none, all modules with modules in them."""
    everything = dict(named_modules(model))
    names = {id(module): name for name, module in everything.items()}
    found: dict[str, None] = {}
    for module in everything.values():
        children = list(module.children())
        kinds = Counter(type(child) for child in children)
        contained = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        for child in children:
            if contained or kinds[type(child)] > 1:
                found[names[id(child)]] = None
    several = {
        name: module for name, module in everything.items() if name and next(module.children(), None) is not None
    }
    usable = [name for name in found if _usable(everything[name])]
    return usable or [name for name, module in several.items() if _usable(module)]


def _usable(module: nn.Module) -> bool:
    return not isinstance(module, (nn.ModuleList, nn.ModuleDict, torch.jit.ScriptModule))


def worth(job: Job, cut: Cut, batch: Any, span: Span) -> dict[str, int]:
    """Modules worth a checkpoint in the order to place them, with the bytes that each frees in a forward of `span`.

    Modules that are inside of another one follow after all that are not.

    State moves as in a forward; the caller puts it back.
    """
    held = _Held(job.model, cut.take(batch, span, job.device))
    candidates = repeated(job.model)
    buffers = Buffers(job.model)
    try:
        with (
            torch.inference_mode(False), torch.enable_grad(), wrapped(job.model, candidates, held.wrap),
            torch.autograd.graph.saved_tensors_hooks(held.pack, lambda tensor: tensor),
        ):  # fmt: skip
            loss = checked(job.loss_fn(job.model, held.part))
            del loss
    finally:
        buffers.bind()
        buffers.rewind()
    gains = {name: held.gain(name) for name in candidates}
    useful = [name for name in candidates if gains[name] > 0]
    order = sorted(useful, key=lambda name: (depth(name, useful), -gains[name], useful.index(name)))
    return {name: gains[name] for name in order}


def depth(name: str, among: Iterable[str]) -> int:
    """How many of the others this module is in."""
    return sum(1 for other in among if other != name and name.startswith(f"{other}."))


class _Held:
    """What is saved for the backward while each module's forward runs, counted by storage."""

    def __init__(self, model: Any, part: Any) -> None:
        self.part = part
        self._open: list[str] = []
        owned = [*named_tensors(model, "parameters").values(), *named_tensors(model, "buffers").values()]
        self._owned = {_torch.storage_key(tensor) for tensor in [*owned, *(leaf for _, leaf in leaves(part))]}
        self._saved: dict[str, dict[int, int]] = {}
        self._inputs: dict[str, dict[int, int]] = {}

    def wrap(self, name: str, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            given = {key: nbytes for _, tensor in leaves((args, kwargs)) for key, nbytes in self._count(tensor)}
            self._inputs.setdefault(name, {}).update(given)
            self._open.append(name)
            try:
                return forward(*args, **kwargs)
            finally:
                self._open.pop()

        return run

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Counts a saved tensor for every module whose forward is running."""
        for key, nbytes in self._count(tensor):
            for name in self._open:
                self._saved.setdefault(name, {})[key] = nbytes
        return tensor.detach()  # an output that holds itself would never be freed

    def gain(self, name: str) -> int:
        """Bytes that a checkpoint frees: what is saved inside, less the inputs that it keeps."""
        saved, inputs = self._saved.get(name, {}), self._inputs.get(name, {})
        return sum(size for key, size in saved.items() if key not in inputs) - sum(
            size for key, size in inputs.items() if key not in saved
        )

    def _count(self, tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
        if tensor.layout is torch.strided and not _torch.is_fake(tensor):
            key = _torch.storage_key(tensor)
            if key not in self._owned:
                yield key, int(tensor.untyped_storage().nbytes())
