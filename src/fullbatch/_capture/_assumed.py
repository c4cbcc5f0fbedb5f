"""Branches on whether numbers are finite: captured as they go where all are, and begun again where some are not.

`if not torch.isfinite(x).all(): x = clamp(x)` (the encoder layers of detectors in transformers),
`if torch.isnan(loss): raise`: plain PyTorch reads a number that the step computes, and which way it goes is known only
once it runs. One way is nearly always taken. So that one is captured, and the condition, over the whole batch, is
checked in the step, before an uncaptured loss runs and before anything is written. Where it is otherwise the step stops
there (`Otherwise`), is captured with the other way, once, and begins again from the same random numbers. So no step
leaves what follows from a wrong guess.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fullbatch._capture._constants import name_of

_KEY = "fullbatch_assumed"
_MARK = "fullbatch assumes "  # begins the message of such a check, in a graph

_FINITE, _NOT_FINITE = {"isfinite"}, {"isnan", "isinf", "isposinf", "isneginf"}
_SAME = {"all", "any", "bool", "detach", "flatten", "reshape", "squeeze", "view"}
_NEGATED = {"logical_not", "bitwise_not", "invert", "not"}
_BOTH, _EITHER = {"logical_and", "bitwise_and", "and"}, {"logical_or", "bitwise_or", "or"}


class Otherwise(BaseException):
    """Leaves a step whose check number `index` does not hold: no error, and none that the user's code may catch."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


def if_finite(node: fx.Node) -> bool | None:
    """The truth of a condition where all numbers are finite; None where it is about something else."""
    name = name_of(node)
    if name in _FINITE or name in _NOT_FINITE:
        return name in _FINITE
    parts = [if_finite(source) for source in node.all_input_nodes]
    if not parts or None in parts:
        return None
    if len(parts) == 1 and name in _SAME | _NEGATED:
        return parts[0] if name in _SAME else not parts[0]
    if len(parts) == 2 and name in _BOTH | _EITHER:
        return all(parts) if name in _BOTH else any(parts)
    return None


@dataclass(frozen=True)
class _Made:
    """A branch of the capture: its condition, the way that was taken, and where it stands."""

    node: fx.Node
    truth: bool
    usual: bool
    line: str


@dataclass
class Assumptions:
    """Which way each branch of a capture goes. Captures are told apart by their epoch (`_frontend`)."""

    other: frozenset[int] = frozenset()  # of this capture: the branches, counted, that go the unusual way
    _made: list[_Made] = field(default_factory=list)
    _others: dict[int, frozenset[int]] = field(default_factory=dict)  # by epoch
    _turns: dict[tuple[int, int], int] = field(default_factory=dict)  # (epoch, branch) -> the epoch of the other way

    def begin(self, epoch: int) -> None:
        """Before a call that may capture for `epoch`."""
        self.other, self._made = self._others.get(epoch, frozenset()), []

    def way(self, node: fx.Node, line: str) -> tuple[bool, str] | None:
        """The way that is taken, and the message of the check that it needs ("": it has one already)."""
        usual = if_finite(node)
        if usual is None:
            return None
        mine = [made for made in self._made if made.node.graph is node.graph]  # Dynamo may have begun anew
        for made in mine:
            if made.node is node:
                return made.truth, ""
        truth = usual ^ (len(mine) in self.other)
        self._made.append(_Made(node, truth, usual, line))
        return truth, f"{_MARK}{len(mine)}"

    def inherit(self, epoch: int, newer: int) -> None:
        """A capture for other numbers goes the same ways."""
        self._others[newer] = self._others.get(epoch, frozenset())

    def turned(self, epoch: int, index: int, new: int) -> int:
        """The epoch of the capture in which branch `index` goes the other way: `new`, where there is none yet.

        The branches before it stay; those after it are as if nothing were known of them.
        """
        if (epoch, index) not in self._turns:
            before = self._others.get(epoch, frozenset())
            self._others[new] = frozenset(at for at in before if at < index) | ({index} - before)
            self._turns[epoch, index] = new
        return self._turns[epoch, index]

    def note(self, graph: fx.GraphModule) -> None:
        """Keeps with `graph` which branches were taken."""
        graph.meta[_KEY] = tuple(
            (made.line, made.truth is made.usual) for made in self._made if made.node.graph is graph.graph
        )


def assumed(graph: fx.GraphModule) -> tuple[str, ...]:
    """Notes for the plan: the branches, and how they go in this capture."""
    found: list[str] = []
    for usual, are in ((True, "are all finite"), (False, "are not all finite")):
        lines = dict.fromkeys(line for line, way in graph.meta.get(_KEY, ()) if way is usual)
        if lines:
            found.append(
                f"captured as it goes where the numbers it looks at {are}: {'; '.join(lines)}. Each step checks that, "
                "over the whole batch and before anything is written; where it is otherwise the step begins again with "
                "the other branch, which is captured the first time"
            )
    return tuple(found)


def is_assumed(node: fx.Node) -> bool:
    """Whether a check in a graph is one of these."""
    return len(node.args) > 1 and str(node.args[1]).startswith(_MARK)


def held(condition: torch.Tensor, message: str) -> torch.Tensor:
    """The check, as it is run: it waits for the condition, as the branch does in plain PyTorch. Raises Otherwise."""
    if not bool(condition):
        raise Otherwise(int(message.removeprefix(_MARK)))
    return _checked(condition, message)


def _checked(condition: torch.Tensor, message: Any) -> torch.Tensor:
    return torch.zeros((), device=condition.device)


held.stand_in = _checked  # type: ignore[attr-defined]  # what is run on tensors that mean nothing
held._qualified = "fullbatch.finite"  # type: ignore[attr-defined]
