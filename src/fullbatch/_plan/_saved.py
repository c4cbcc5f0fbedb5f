"""A plan as text and back: JSON without callables, small enough to keep beside a training script.

Stored is what was decided (the order of tasks in each stage, once for all microbatches) and what it was decided for
(the program's fingerprint). When values are dropped follows from the order and is derived again. Reading trusts
nothing: all that is wrong in a file is said at once.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullbatch._errors import Fault, PlanError
from fullbatch._ir import Barrier, FullBatchNode, Origin
from fullbatch._plan._fingerprint import Fingerprint, InputForm, Operator

if TYPE_CHECKING:
    from fullbatch._plan._plan import Plan

FORMAT = "fullbatch-plan"
VERSION = 1

LOADED = "this plan was loaded, not made here"
"""Begins the note of a plan that was given to a step; it says nothing of the plan itself, and is not stored."""

_COUNTS = (
    "batch", "microbatch", "microbatches", "stages", "predicted_peak", "plain_peak", "owned", "activations",
    "recomputed", "runs", "held",
)  # fmt: skip
_FLAGS = ("exact", "whole")
_SHARES = ("overhead", "bound")
_TEXTS = ("replicated", "notes")
_NEXT = "step.plan.save(path): the plan of a step, written anew"


def to_json(plan: Plan) -> str:
    """`plan` as JSON, one top-level entry a line. Raises PlanError where no step made the plan."""
    if plan.fingerprint is None:
        raise PlanError.of(
            "The plan does not say which program it is for.", got="a Plan put together by hand",
            expected="the plan of a step", next="step.plan.to_json()",
        )  # fmt: skip
    plain = {name: getattr(plan, name) for name in (*_COUNTS, "budget", *_FLAGS, *_SHARES, *_TEXTS)}
    plain["notes"] = [note for note in plan.notes if not note.startswith(LOADED)]
    entries = {
        "format": FORMAT,
        "version": VERSION,
        "plan": plain,
        "barriers": [[item.why, *astuple(item.origin), item.stage] for item in plan.barriers],
        "full_batch_nodes": [[item.why, *astuple(item.origin), item.nbytes] for item in plan.full_batch_nodes],
        "order": plan.order,
        "program": _program(plan.fingerprint),
    }
    lines = [f"{json.dumps(name)}: {json.dumps(value, separators=(',', ':'))}" for name, value in entries.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _program(found: Fingerprint) -> dict[str, Any]:
    """By columns, with each name once."""
    names = list(dict.fromkeys(name for op in found.operators for name in (op.mark, op.op, op.module)))
    index = {name: at for at, name in enumerate(names)}
    return {
        "torch": found.torch, "device": found.device, "threads": found.threads, "batch": found.batch,
        "results": found.results, "inputs": [list(astuple(form)) for form in found.inputs], "names": names,
        "tasks": [op.task for op in found.operators], "marks": [index[op.mark] for op in found.operators],
        "ops": [index[op.op] for op in found.operators], "modules": [index[op.module] for op in found.operators],
        "bytes": [op.nbytes for op in found.operators], "digests": " ".join(op.digest for op in found.operators),
    }  # fmt: skip


def write(text: str, path: str | os.PathLike[str]) -> None:
    """Writes `text` whole or not at all: beside the place first, then in one move. Raises PlanError."""
    target = Path(path)
    scratch = ""
    try:
        handle, scratch = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
        raise PlanError.of(
            "The plan cannot be written.", got=f"{target}: {error.strerror}", expected="a file in a folder that exists",
            next='step.plan.save("plan.json")',
        ) from error  # fmt: skip


def read(path: str | os.PathLike[str]) -> str:
    """The text of a file. Raises PlanError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError.of(
            "The plan cannot be read.", got=f"{path}: {getattr(error, 'strerror', None) or error}",
            expected="a file that step.plan.save wrote", next=_NEXT,
        ) from error  # fmt: skip


def parse(text: str) -> dict[str, Any]:
    """The fields of the plan that `text` holds. Raises PlanError, with all that is wrong."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise PlanError.of(
            "The plan is no JSON: it is cut off or damaged.", got=f"{error}, of {len(text)} characters",
            expected="the whole text that plan.to_json gave", next=_NEXT,
        ) from error  # fmt: skip
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        got = f'"format": {found.get("format")!r}' if isinstance(found, dict) else type(found).__name__
        raise PlanError.of("This is no plan.", got=got, expected=f'"format": "{FORMAT}"', next=_NEXT)
    if found.get("version") != VERSION:
        raise PlanError.of(
            "The plan is of another format version.", got=f'"version": {found.get("version")!r}',
            expected=f'"version": {VERSION}, which this fullbatch reads', next=_NEXT,
        )  # fmt: skip
    reader = _Reader()
    fields = _fields(reader, found)
    if not reader.faults:
        _consistent(reader, fields)
    if reader.faults:
        raise PlanError(*reader.faults)
    return fields


class _Reader:
    """Takes what is of the right form out of parsed JSON, and notes what is not."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []

    def wrong(self, where: str, got: str, expected: str) -> None:
        self.faults.append(Fault(f"The plan is damaged at {where!r}.", got=got, expected=expected, next=_NEXT))

    def take(self, holder: Any, name: str, fits: Callable[[Any], bool], expected: str) -> Any:
        value = holder.get(name) if isinstance(holder, dict) else None
        if isinstance(holder, dict) and name in holder and fits(value):
            return value
        self.wrong(name, "nothing" if value is None else f"{value!r:.60}", expected)
        return None

    def count(self, holder: Any, name: str) -> int:
        return int(self.take(holder, name, _is_count, "an int from 0") or 0)

    def ints(self, holder: Any, name: str) -> list[int]:
        return list(self.take(holder, name, lambda value: _all(value, _is_count), "a list of ints from 0") or [])

    def rows(self, holder: Any, name: str, form: Sequence[Callable[[Any], bool]]) -> list[Any]:
        def fits(value: Any) -> bool:
            return _all(value, lambda row: isinstance(row, list) and len(row) == len(form)) and all(
                check(item) for row in value for check, item in zip(form, row, strict=True)
            )

        return list(self.take(holder, name, fits, f"rows of {len(form)} entries") or [])

    def texts(self, holder: Any, name: str) -> list[str]:
        return list(self.take(holder, name, lambda value: _all(value, _is_text), "a list of texts") or [])

    def text(self, holder: Any, name: str) -> str:
        return str(self.take(holder, name, _is_text, "a text") or "")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_int(value) and value >= 0


def _is_count_or_none(value: Any) -> bool:
    return value is None or _is_count(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_share(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _all(value: Any, check: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(check(item) for item in value)


_ORIGIN = (_is_text, _is_text, _is_text, _is_flag)
_INPUT = (
    _is_text, lambda value: _all(value, _is_count), _is_text, lambda value: _all(value, _is_int),
    _is_count_or_none, _is_flag, _is_flag,
)  # fmt: skip


def _fields(reader: _Reader, found: dict[str, Any]) -> dict[str, Any]:
    plain = reader.take(found, "plan", lambda value: isinstance(value, dict), "an object")
    fields: dict[str, Any] = {}
    if plain is not None:
        fields |= {name: reader.count(plain, name) for name in _COUNTS}
        fields |= {name: reader.take(plain, name, _is_flag, "true or false") for name in _FLAGS}
        fields |= {name: reader.take(plain, name, _is_share, "a number from 0") for name in _SHARES}
        fields |= {name: tuple(reader.texts(plain, name)) for name in _TEXTS}
        fields["budget"] = reader.take(plain, "budget", _is_count_or_none, "bytes or null")
    barriers = reader.rows(found, "barriers", (_is_text, *_ORIGIN, _is_count))
    nodes = reader.rows(found, "full_batch_nodes", (_is_text, *_ORIGIN, _is_count))
    fields["barriers"] = tuple(Barrier(row[0], Origin(*row[1:5]), row[5]) for row in barriers)
    fields["full_batch_nodes"] = tuple(FullBatchNode(row[0], Origin(*row[1:5]), row[5]) for row in nodes)
    lists = reader.take(found, "order", lambda value: _all(value, lambda row: _all(row, _is_int)), "lists of ints")
    fields["order"] = tuple(tuple(row) for row in lists or ())
    program = reader.take(found, "program", lambda value: isinstance(value, dict), "an object")
    fields["fingerprint"] = None if program is None else _fingerprint(reader, program)
    return fields


def _fingerprint(reader: _Reader, found: dict[str, Any]) -> Fingerprint:
    names = reader.texts(found, "names")
    columns = {name: reader.ints(found, name) for name in ("tasks", "marks", "ops", "modules", "bytes")}
    digests = reader.text(found, "digests").split()
    forms = [
        InputForm(row[0], tuple(row[1]), row[2], tuple(row[3]), row[4], row[5], row[6])
        for row in reader.rows(found, "inputs", _INPUT)
    ]
    named = [*columns["marks"], *columns["ops"], *columns["modules"]]
    lengths = {len(digests), *(len(column) for column in columns.values())}
    operators: list[Operator] = []
    if len(lengths) > 1 or any(at >= len(names) for at in named):
        reader.wrong("program", f"columns of {sorted(lengths)} entries", "columns of one length, names that are listed")
    else:
        for task, mark, op, module, digest, nbytes in zip(
            columns["tasks"], columns["marks"], columns["ops"], columns["modules"], digests, columns["bytes"],
            strict=True,
        ):  # fmt: skip
            operators.append(Operator(task, names[mark], names[op], names[module], digest, nbytes))
    return Fingerprint(
        reader.text(found, "torch"), reader.text(found, "device"), reader.count(found, "threads"),
        reader.count(found, "batch"), tuple(forms), tuple(operators), reader.text(found, "results"),
    )  # fmt: skip


def _consistent(reader: _Reader, fields: dict[str, Any]) -> None:
    batch, size, count = fields["batch"], fields["microbatch"], fields["microbatches"]
    if not (batch >= 1 and size >= 1 and -(-batch // size) == count):
        reader.wrong("microbatch", f"{count} microbatches of {size} for {batch} samples", "all samples, each once")
    if fields["whole"] and size != batch:
        reader.wrong("whole", f"an unsplit batch of {batch} in microbatches of {size}", "one microbatch")
    if fields["predicted_peak"] != fields["owned"] + fields["activations"]:
        reader.wrong("predicted_peak", f"{fields['predicted_peak']:,} bytes", "owned and activations together")
    if fields["fingerprint"].batch != batch:
        reader.wrong("batch", f"{batch} samples, but a program for {fields['fingerprint'].batch}", "the same number")
    if len(fields["order"]) != fields["stages"]:
        reader.wrong("order", f"{len(fields['order'])} stages", f"{fields['stages']} stages")
