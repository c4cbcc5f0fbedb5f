"""One call of a step whose loss runs as it is, around or behind the part that is captured.

Of a pair `(forward, loss)` the captured forward has returned when the loss runs (`behind`). Of a split that was found
the captured call is answered while `loss_fn` runs (`around`); `seek` finds where. Planning, and what a call is besides,
are those of any step (`_step`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from fullbatch._call import Call, PlannedOnly
from fullbatch._eager_loss import Generators, LossCall
from fullbatch._errors import CaptureError
from fullbatch._found import Left, Nest, Place, find, shape_of
from fullbatch._found_call import Found, Program, buffers_back
from fullbatch._put_back import unwatched, watched
from fullbatch._split import Function, Split, drawn_back, merge
from fullbatch._tree import leaves
from fullbatch._undone import undone_code

Result = tuple[torch.Tensor, Any, bool]
"""(loss, aux, has_aux) of a step."""


def behind(split: Split, batch: Any, call: Call) -> Result:
    """The step behind a captured forward that has returned its outputs, in which tensors are yet to be filled."""
    captured, executor = call.captured, call.executor
    assert captured is not None and executor is not None
    with torch.inference_mode(False), drawn_back(call.device):
        loss = split.call(call.outputs.pop(), batch, call.device, call.scale, call.moved is not None)
        with torch.autocast(call.device.type, enabled=False):  # the graph says each conversion
            call.pending = captured.run_with_loss(executor, call.inputs, loss, call.drawn)
        merge(call.pending, loss)
        split.began = loss.began
    assert loss.result is not None
    return loss.result


def around(found: Found, model: Any, batch: Any, call: Call, capture: Callable[[Nest, Call], Any]) -> Any:
    """One step whose loss_fn runs as it is, but for one call: that is captured, by `capture`."""
    batch, running = call.brought(batch), list[Program]()
    call.owned = [leaf for _, leaf in leaves(batch)]
    with contextlib.ExitStack() as stack:
        for each in (torch.inference_mode(False), torch.enable_grad(), drawn_back(call.device)):
            stack.enter_context(each)
        if call.only_plan:  # loss_fn runs up to the call, and is left there
            stack.enter_context(undone_code(model, call.device, batch))
        reached = stack.enter_context(found.counted(batch, call.device))
        stack.enter_context(buffers_back(model))  # counted as what the code before the call keeps
        answer = _answering(found, batch, call, capture, reached, running)
        try:
            with watched(compiled=not call.only_plan):
                box = [found.run(model, batch, call.device, answer)]
            call.pending = running[0].finish(box)
        except Left:
            raise PlannedOnly from None
        finally:
            for program in running:
                program.close()
        loss = running[0].call
        merge(call.pending, loss)
        found.began, call.executor = loss.began, None
    return loss.result


def _answering(
    found: Found, batch: Any, call: Call, capture: Callable[[Nest, Call], Any], reached: Callable[[Nest], None],
    running: list[Program],
) -> Callable[[Nest], Any]:  # fmt: skip
    """What answers the call: its outputs, of a program that is put into `running` and waits for the loss."""
    shape = call.shape

    def answer(nest: Nest) -> Any:
        with unwatched():
            return answered(nest)

    def answered(nest: Nest) -> Any:
        reached(nest)
        call.leaves, call.shape = shape_of(nest, found.place, batch, shape)
        call.before = found.before(batch) or (0, 0)
        try:
            outputs = capture(nest, call)
        except PlannedOnly:
            raise Left from None
        assert call.captured is not None and call.executor is not None
        now = Generators.now(call.device)
        loss = LossCall(None, None, (batch, nest), (), (), call.device, now, call.scale)
        turns = call.captured.turns_with_loss(call.executor, call.inputs, loss, call.drawn)
        running.append(Program(turns, loss))
        running[0].start()
        return outputs

    return answer


def seek(
    loss_fn: Function, model: Any, batch: Any, device: torch.device, refusal: CaptureError,
    attempt: Callable[[Found, Nest], None],
) -> Found:  # fmt: skip
    """Where a step that is refused can be split. `attempt` captures the call of such a split, or raises.

    Raises CaptureError: `refusal`, with what stands against a split.
    """
    because = refusal.faults[0].got

    def tried(place: Place, nest: Nest) -> None:
        with unwatched():
            attempt(Found(loss_fn, place, because), nest)

    with torch.inference_mode(False), torch.enable_grad(), undone_code(model, device, batch), watched():
        place = find(loss_fn, model, batch, tried, refusal)
    return Found(loss_fn, place, because)
