"""A step given as `(forward, loss)`: what a call does between the captured forward and the captured backward.

The forward is captured, planned and split; `loss(outputs, batch)` runs as it is, once, on the outputs of the whole
batch (`_eager_loss`). Here its surroundings are made those of the plain step: autocast around the call, the default
generators, the scale; and what it leaves is put with the rest, to be written all or nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fullbatch import _torch
from fullbatch._eager_loss import Generators, LossCall, leaves_behind
from fullbatch._errors import LossError
from fullbatch._run._commit import Pending
from fullbatch._tree import map_tensors, named_tensors

Function = Callable[[Any, Any], Any]


@dataclass
class Split:
    """`forward(model, batch)`, `loss(outputs, batch)`, and what the last run of the loss drew from."""

    forward: Function
    loss: Function
    began: Generators | None = None

    def call(self, nest: Any, batch: Any, device: torch.device, scale: torch.Tensor | None, moves: bool) -> LossCall:
        """What one step gives to the loss. With `moves` the batch is brought to the device, as for the forward."""
        if moves:
            batch = map_tensors(lambda leaf: leaf.to(device), batch)
        kind = device.type
        autocast = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        return LossCall(self.loss, nest, batch, (), (), device, Generators.now(device), scale, autocast)

    def plain(self, model: Any, batch: Any) -> Any:
        """The plain step. The loss draws what the last planned run of it drew."""
        outputs = self.forward(model, batch)
        with _torch.without_modes(), self._drawing_again():
            return self.loss(outputs, batch)

    @contextlib.contextmanager
    def _drawing_again(self) -> Iterator[None]:
        if self.began is None:
            yield
            return
        now = Generators.now(self.began.device)
        self.began.restore()
        try:
            yield
        finally:
            now.restore()

    @contextlib.contextmanager
    def trial(self, model: Any) -> Iterator[Function]:
        """The plain step, for a certificate; gradients of what is not the twin's are as before when it ends."""
        kept: list[tuple[torch.Tensor, torch.Tensor | None]] = []

        def plain(twin: Any, batch: Any) -> Any:
            found = self.plain(twin, batch)
            own = list(named_tensors(twin, "parameters").values())
            for leaf in leaves_behind(found[0] if isinstance(found, tuple) else found, own):
                kept.append((leaf, leaf.grad))
            return found

        numpy = np.random.get_state()
        outside = [(leaf, leaf.grad) for leaf in named_tensors(model, "parameters").values()]
        try:
            yield plain
        finally:
            np.random.set_state(numpy)
            for leaf, grad in (*kept, *outside):
                leaf.grad = grad


def split_of(loss_fn: Any) -> Split | None:
    """The two functions of `(forward, loss)`; None for a single one. Raises LossError."""
    if not isinstance(loss_fn, (tuple, list)):
        return None
    if len(loss_fn) != 2 or not all(callable(part) for part in loss_fn):
        raise LossError.of(
            "The step is no pair of functions.", got=f"{type(loss_fn).__name__}: {loss_fn!r:.80}",
            expected="(forward, loss) with forward(model, batch) -> outputs and loss(outputs, batch) -> loss",
            next="fullbatch.Step((forward, loss), model, batch)",
        )  # fmt: skip
    return Split(*loss_fn)


@contextlib.contextmanager
def drawn_back(device: torch.device) -> Iterator[None]:
    """Generators of Python, NumPy and torch are as before where what it surrounds raises."""
    before = Generators.now(device)
    try:
        yield
    except BaseException:
        before.restore()
        raise


def merge(pending: Pending, call: LossCall) -> None:
    """Adds what the loss leaves: gradients of parameters that it reads itself, buffers that it changes."""
    places = {id(leaf): at for at, (leaf, _) in enumerate(pending.gradients)}
    for leaf, gradient in call.gradients:
        if id(leaf) in places:
            at = places[id(leaf)]
            pending.gradients[at] = (leaf, pending.gradients[at][1] + gradient)
        else:
            pending.gradients.append((leaf, gradient))
    written = {id(call.buffers[at]): value for at, value in call.changed.items()}
    pending.buffers = [(buffer, written.get(id(buffer), value)) for buffer, value in pending.buffers]
    call.gradients, call.changed = [], {}
