"""What differs between the program that a plan is for and the one that it is given to, in words and all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fullbatch._errors import Fault
from fullbatch._plan._fingerprint import Fingerprint, InputForm, Operator

REMAKE = "step = fullbatch.Step(loss_fn, model, batch, memory=...), then step.plan.save(path): a plan for this step"

_SHOWN = 4
"""Examples of one kind of difference that are named."""


def differences(then: Fingerprint, now: Fingerprint) -> list[Fault]:
    """Faults for whatever of the plan's program `then` is not so in the step's program `now`."""
    tensors = list(_tensors(then, now))
    found = [*_surroundings(then, now), *tensors, *_operators(then, now, arguments=not tensors)]
    if not found and then.digest != now.digest:
        found.append(
            Fault(
                "The plan is for a step that returns or writes something else.", got="other results",
                expected="the same loss, auxiliary values, gradients and buffers", next=REMAKE,
            )
        )  # fmt: skip
    return found


def _surroundings(then: Fingerprint, now: Fingerprint) -> Iterator[Fault]:
    if then.torch != now.torch:
        yield Fault(
            "The plan was made with another version of torch.", got=f"torch {now.torch}",
            expected=f"torch {then.torch}, for whose operators the plan was made", next=REMAKE,
        )  # fmt: skip
    if then.device != now.device:
        yield Fault(
            "The plan is for another device.", got=f"a model on {now.device}", expected=f"a model on {then.device}",
            next=f"model.to({then.device!r}), or {REMAKE}",
        )  # fmt: skip


def _tensors(then: Fingerprint, now: Fingerprint) -> Iterator[Fault]:
    before = {form.source: form for form in then.inputs}
    after = {form.source: form for form in now.inputs}
    gone = [source for source in before if source not in after]
    new = [source for source in after if source not in before]
    if gone or new:
        other = ([f"without {_few(gone)}"] if gone else []) + ([f"also {_few(new)}"] if new else [])
        yield Fault(
            "The plan is for another model or batch: it reads other tensors.", got="; ".join(other),
            expected=f"the {len(before)} tensors of the plan", next=REMAKE,
        )  # fmt: skip
    common = [(before[source], after[source]) for source in before if source in after]
    if then.batch != now.batch:
        yield Fault(
            "The plan is for another batch.", got=f"{now.batch} samples", expected=f"{then.batch} samples",
            next=f"Step(loss_fn, model, batch, plan=...) with an example batch of {then.batch} samples",
        )  # fmt: skip
    yield from _changed(common, "The plan is for tensors of other shapes.", lambda form: form.shape)
    yield from _changed(common, "The plan is for tensors of another dtype.", lambda form: form.dtype)
    yield from _changed(
        [pair for pair in common if pair[0].shape == pair[1].shape],
        "The plan is for tensors in another memory order.", lambda form: f"strides {form.strides}",
    )  # fmt: skip
    yield from _changed(
        common, "The plan is for tensors that carry the batch elsewhere.", lambda form: f"dimension {form.batch_dim}"
    )
    yield from _changed(common, "The plan is for tensors that are used otherwise.", _use)


def _use(form: InputForm) -> str:
    return ("gets" if form.gradient else "no") + " gradient" + (", is changed by the step" if form.changed else "")


def _changed(pairs: list[tuple[InputForm, InputForm]], what: str, read: Callable[[InputForm], Any]) -> Iterator[Fault]:
    differ = [(was, now) for was, now in pairs if read(was) != read(now)]
    if differ:
        yield Fault(
            what,
            got=_few([f"{now.source}: was {read(was)}, is {read(now)}" for was, now in differ], "; "),
            expected="what the plan was made for",
            next=REMAKE,
        )


def _operators(then: Fingerprint, now: Fingerprint, arguments: bool) -> Iterator[Fault]:
    """The first operators that differ. Their arguments are compared where the tensors that come in are the same."""
    pairs = list(zip(then.operators, now.operators, strict=False))
    for was, found in pairs:
        if (was.op, was.module) != (found.op, found.module):
            yield Fault(
                "The plan is for another model: other operators run.", got=f"first that differs: {_name(found)}",
                expected=_name(was), next=REMAKE,
            )  # fmt: skip
            return
    if len(then.operators) != len(now.operators):
        longer = then.operators if len(then.operators) > len(pairs) else now.operators
        yield Fault(
            "The plan is for another model: it has another number of operators.",
            got=f"{len(now.operators)}; only one of the two has {_name(longer[len(pairs)])}",
            expected=f"{len(then.operators)} operators", next=REMAKE,
        )  # fmt: skip
        return
    other = [_name(found) for was, found in pairs if was != found] if arguments else []
    if other:
        yield Fault(
            "The plan is for the same operators with other arguments or other data flow.", got=_few(other),
            expected="the arguments, shapes and data flow of the plan", next=REMAKE,
        )  # fmt: skip


def _name(operator: Operator) -> str:
    return f"{operator.op} in {operator.module}" if operator.module else operator.op


def _few(items: list[str], separator: str = ", ") -> str:
    items = list(dict.fromkeys(items))
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return separator.join(items[:_SHOWN]) + more
