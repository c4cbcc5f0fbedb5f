"""One step of a split that was found: `loss_fn` runs as it is, and the captured graph answers its call of the model.

The captured program waits, as a generator, at the task that stands for the loss: `loss_fn` goes on with the outputs of
the whole batch, and its loss is sent back to the program when it returns. What surrounds `loss_fn` (grad mode,
autocast, generators) is the user's while it runs, and the program's while that runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fullbatch import _torch
from fullbatch._eager_loss import Generators, LossCall, Turns
from fullbatch._errors import LossError
from fullbatch._found import Nest, Place, Trap, all_modules, check_call
from fullbatch._memory._measure import counting
from fullbatch._put_back import replace
from fullbatch._run._commit import Pending
from fullbatch._split import Function, Split
from fullbatch._tree import leaves, named_tensors


class Found(Split):
    """A split that was found, as the step uses it: `forward` is captured, `loss_fn` runs around it."""

    def __init__(self, loss_fn: Function, place: Place, because: str) -> None:
        super().__init__(place.forward(), _no_loss)
        self.loss_fn, self.place = loss_fn, place
        self.note = (
            f"loss_fn cannot be captured whole (at {because}): the call {place.title}(...) is captured and runs in "
            f"microbatches, the rest of loss_fn runs as it is, on the whole batch (the call is at {place.line}); "
            "the code before it also runs on the example when the step is made or prepared: what it changes in model "
            "and batch is put back, other state of Python's (closures, iterators) is not"
        )
        self._first: Generators | None = None  # when loss_fn began, in the last run
        self._before: dict[Any, tuple[int, int]] = {}

    # ---- a step

    def run(self, model: Any, batch: Any, device: torch.device, answer: Callable[[Nest], Any]) -> Any:
        """What `loss_fn` returns, where its call of the module is answered by `answer`. Raises LossError."""
        self._first = Generators.now(device)
        called: list[BaseException | None] = []

        def answered(module: Any, *call: Any) -> Any:
            called.append(None)
            try:
                if len(called) > 1:
                    raise self._wrong("more than once")
                with trap.suspended():
                    check_call(self.place, call)  # type: ignore[arg-type]
                    return answer(call)  # type: ignore[arg-type]
            except BaseException as error:
                called[-1] = error
                raise

        with Trap([self.place.module(model)], answered) as trap:
            value = self._loss(model, batch)
        for error in called:
            if error is not None:  # an `except` of the user's took it
                raise error
        if not called:
            raise self._wrong("not at all, this time")
        return value

    def _loss(self, model: Any, batch: Any) -> Any:
        try:
            return self.loss_fn(model, batch)
        except RuntimeError as error:
            if "leaf Variable that requires grad" not in str(error):
                raise
            raise LossError.of(
                f"The loss changes one of the outputs of {self.place.title}(...) in place.",
                expected="in-place changes of the loss's own values only", next="x = x.clone() before it",
            ) from error  # fmt: skip

    def _wrong(self, how: str) -> LossError:
        return LossError.of(
            f"loss_fn calls {self.place.title}(...) {how}, where the step was split.", got=self.place.line,
            expected="one call in each step", next="say it yourself: fullbatch.Step((forward, loss), model, batch)",
        )  # fmt: skip

    # ---- what a plan counts

    def before(self, batch: Any) -> tuple[int, int] | None:
        """Bytes besides the arguments of the call that the code before it keeps, and that it takes at its peak.

        None: not known for such a batch.
        """
        return self._before.get(_form(batch))

    @contextlib.contextmanager
    def counted(self, batch: Any, device: torch.device) -> Iterator[Callable[[Nest], None]]:
        """While entered, that is measured, up to the call of what is yielded; at the first of each form only."""
        if self.before(batch) is not None or _torch.profiler_running():
            yield lambda call: None
            return
        with contextlib.ExitStack() as stack:
            counted = stack.enter_context(counting(device))
            known = {_torch.storage_key(tensor) for _, tensor in leaves(batch)}

            def reached(call: Nest) -> None:
                stack.close()
                made = {_torch.storage_key(tensor): tensor for _, tensor in leaves(call)}
                new = sum(one.untyped_storage().nbytes() for key, one in made.items() if key not in known)
                self._before[_form(batch)] = max(0, counted.retained - new), max(0, counted.peak - new)

            yield reached

    # ---- the plain step, for a certificate

    def plain(self, model: Any, batch: Any) -> Any:
        """The plain step, which draws what the last planned one drew."""
        if self._first is None or self.began is None:
            return self.loss_fn(model, batch)
        device, loss_began = self._first.device, self.began
        with contextlib.ExitStack() as modes:
            replayed = Generators.now(device)
            self._first.restore()
            modes.enter_context(_torch.without_modes())

            def answered(module: Any, *call: Any) -> Any:
                nonlocal replayed
                modes.close()
                replayed.restore()
                with trap.suspended():
                    result = module.forward(*call[0], **call[1])
                replayed = Generators.now(device)
                loss_began.restore()
                modes.enter_context(_torch.without_modes())
                return result

            try:
                with Trap([self.place.module(model)], answered) as trap:
                    return self.loss_fn(model, batch)
            finally:
                replayed.restore()


def _no_loss(outputs: Any, batch: Any) -> Any:
    raise AssertionError("the loss of a split that was found is the rest of loss_fn")


def _form(batch: Any) -> tuple[Any, ...]:
    return tuple((path, tuple(tensor.shape), tensor.dtype, tensor.device) for path, tensor in leaves(batch))


class Program:
    """The captured program of one step: `start` runs its forward, `finish` its backward."""

    def __init__(self, turns: Turns[Pending], call: LossCall) -> None:
        self._turns, self.call = turns, call

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """The graph says each conversion, and its own gradients."""
        with torch.no_grad(), torch.autocast(self.call.device.type, enabled=False):
            yield

    def start(self) -> None:
        """Up to the loss: the outputs of the captured call are filled."""
        with self._running():
            next(self._turns)

    def finish(self, box: list[Any]) -> Pending:
        """From what the loss returned, which is taken out of `box`, to the gradients."""
        with self._running():
            try:
                self._turns.send(box)  # type: ignore[arg-type]
            except StopIteration as end:
                pending: Pending = end.value
                return pending
        raise AssertionError("a step has one loss")

    def close(self) -> None:
        """Leaves a program that will not go on."""
        self._turns.close()


@contextlib.contextmanager
def buffers_back(model: Any) -> Iterator[None]:
    """Where what it surrounds raises, buffers that it changed or assigned are as before."""
    tables = [(table, dict(table)) for table in (module.__dict__["_buffers"] for module in all_modules(model))]
    kept = [(one, one.detach(), one.clone()) for one in named_tensors(model, "buffers").values()]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for table, old in tables:
                table.clear()
                table.update(old)
            for one, place, numbers in kept:
                replace(one, place)
                one.copy_(numbers)
        raise
