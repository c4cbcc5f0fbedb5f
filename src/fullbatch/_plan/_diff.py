"""Two plans side by side: what each decided, and which operators only one of them runs again."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from rich.table import Table

from fullbatch._plan._fingerprint import AGAIN, Fingerprint
from fullbatch._printed import Printed
from fullbatch._size import format_bytes

if TYPE_CHECKING:
    from fullbatch._plan._plan import Plan

_ROWS = 20
"""Operators that are printed; `PlanDiff.recomputed` has them all."""


class Row(NamedTuple):
    """One thing that the two plans decided differently, in words."""

    what: str
    this: str
    other: str


class Recomputed(NamedTuple):
    """An operator of a module, and how often each plan runs it again for a microbatch.

    `nbytes` is what its outputs take for the whole batch: what the plan that does not run it again holds instead.
    """

    operator: str
    module: str
    this: int
    other: int
    nbytes: int

    @property
    def where(self) -> str:
        """The operator with its module."""
        return f"{self.operator} in {self.module}" if self.module else self.operator


@dataclass(frozen=True)
class PlanDiff(Printed):
    """What `plan.diff(other)` found. Empty where both decided the same for the same program."""

    rows: tuple[Row, ...]
    recomputed: tuple[Recomputed, ...]

    @property
    def held(self) -> tuple[int, int]:
        """Bytes, for the whole batch, that each plan does not make again and the other does."""
        this = sum(item.nbytes for item in self.recomputed if not item.this)
        return this, sum(item.nbytes for item in self.recomputed if not item.other)

    def __bool__(self) -> bool:
        return bool(self.rows or self.recomputed)

    def __rich__(self) -> Table:
        table = Table(title="fullbatch plans" + ("" if self else ": the same"), title_justify="left")
        for name in ("what", "this plan", "other plan"):
            table.add_column(name)
        for row in self.rows:
            table.add_row(*row)
        if self.recomputed:
            table.add_section()
            table.add_row("held where the other runs again", *(format_bytes(nbytes) for nbytes in self.held))
        for item in self.recomputed[:_ROWS]:
            held = f"held, {format_bytes(item.nbytes)}" if item.nbytes else "held"
            shown = [f"run again {times}x" if times else held for times in (item.this, item.other)]
            table.add_row(item.where, *shown)
        if len(self.recomputed) > _ROWS:
            table.add_row(f"... and {len(self.recomputed) - _ROWS} more operators", "", "")
        return table


def diff(this: Plan, other: Plan) -> PlanDiff:
    """The differences between two plans, which may be for different programs: operators are matched by name."""
    words = zip(_words(this), _words(other), strict=True)
    rows = [Row(what, mine, theirs) for (what, mine), (_, theirs) in words if mine != theirs]
    if this.fingerprint is not None and other.fingerprint is not None:
        mine, theirs = this.fingerprint, other.fingerprint
        surroundings = [
            ("torch", mine.torch, theirs.torch), ("device", mine.device, theirs.device),
            ("threads", str(mine.threads), str(theirs.threads)),
        ]  # fmt: skip
        rows += [Row(*row) for row in surroundings if row[1] != row[2]]
        if mine.digest != theirs.digest and this.whole == other.whole:
            rows.append(Row("program", f"{len(mine.operators)} operators", f"{len(theirs.operators)}, another program"))
    return PlanDiff(tuple(rows), _recomputed(this, other))


def _words(plan: Plan) -> list[tuple[str, str]]:
    return [
        ("batch", f"{plan.batch} samples"),
        ("microbatch", f"{plan.microbatch} samples x {plan.microbatches}" + (", unsplit" if plan.whole else "")),
        ("stages", str(plan.stages)),
        ("peak memory", _bytes(plan.predicted_peak)),
        ("  owned before", _bytes(plan.owned)),
        ("  while it runs", _bytes(plan.activations)),
        ("budget", "none given" if plan.budget is None else _bytes(plan.budget)),
        ("held across stages", f"{plan.held} values a microbatch"),
        ("recomputed", f"{plan.recomputed} runs of {plan.runs}"),
        ("extra time", f"{plan.overhead:.1%}"),
        ("least extra time", f"{plan.bound:.1%}"),
        ("peak known from", "operators measured alone" if plan.exact else "shapes"),
    ]


def _bytes(count: int) -> str:
    return f"{count:,} ({format_bytes(count)})" if count >= 1024 else format_bytes(count)


def _recomputed(this: Plan, other: Plan) -> tuple[Recomputed, ...]:
    mine, theirs = _again(this), _again(other)
    sizes = _sizes(other.fingerprint) | _sizes(this.fingerprint)
    found = [
        Recomputed(*name, mine[name], theirs[name], sizes.get(name, 0))
        for name in dict.fromkeys([*mine, *theirs])
        if mine[name] != theirs[name]
    ]
    return tuple(sorted(found, key=lambda item: (-item.nbytes, item.where)))


def _again(plan: Plan) -> Counter[tuple[str, str]]:
    """How often each operator of a module runs again for one microbatch. Cutting a slice again costs nothing."""
    runs = Counter(item for body in plan.order for item in body if item >= 0)
    again: Counter[tuple[str, str]] = Counter()
    for operator in plan.fingerprint.operators if plan.fingerprint is not None else ():
        times = runs[operator.task] - (operator.mark != AGAIN)
        if operator.mark in ("local", AGAIN) and times > 0:
            again[operator.op, operator.module] += times
    return again


def _sizes(fingerprint: Fingerprint | None) -> dict[tuple[str, str], int]:
    sizes: dict[tuple[str, str], int] = {}
    for operator in fingerprint.operators if fingerprint is not None else ():
        if operator.mark == "local":
            name = (operator.op, operator.module)
            sizes[name] = sizes.get(name, 0) + operator.nbytes
    return sizes
