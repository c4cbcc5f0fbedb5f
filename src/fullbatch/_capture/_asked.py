"""Code that asks whether it is being compiled, and may compute something else then.

TorchDynamo answers `torch.compiler.is_compiling()` with True while it captures. Here it answers False first, as in the
plain step, so that the step is captured that plain PyTorch runs. Often the question guards what cannot be captured
(`if not is_compiling(): check values`): where the capture is refused, whoever asked last before is told True, and it
begins again. So only code that cannot be captured otherwise is told that it is compiled, and the plan names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from types import CodeType

from torch import fx

_KEY = "fullbatch_asked"
_TRIES = 16  # captures that are begun again, before all are told True

Askers = tuple[CodeType, ...]
"""The code that asks, and its callers, the innermost first."""


class Answers:
    """What code that asks is told, through the captures of one step."""

    def __init__(self) -> None:
        self._yes: set[Askers] = set()  # those who must be told True
        self._all = False
        self._tries = 0
        self._refusal = ""
        self._given: dict[Askers, bool] = {}  # in this capture; who asked last stands last

    def begin(self) -> None:
        """Before a call that may capture."""
        self._given = {}

    def answer(self, askers: Askers) -> bool:
        """What is said to `askers`."""
        told = self._all or askers in self._yes
        self._given.pop(askers, None)
        self._given[askers] = told
        return told

    def tell_otherwise(self, refusal: str) -> bool:
        """After a refusal: whether another answer is to be tried.

        Where the last change of an answer changed nothing, all are told True at once, and then the refusal holds.
        """
        no = [askers for askers, told in self._given.items() if not told]
        if self._all or not no:
            return False
        self._all = self._tries >= _TRIES or refusal == self._refusal
        self._yes.add(no[-1])
        self._tries, self._refusal = self._tries + 1, refusal
        return True

    def note(self, graph: fx.GraphModule) -> None:
        """Keeps with `graph` who was told True."""
        told = [_place(askers) for askers, yes in self._given.items() if yes]
        graph.meta[_KEY] = tuple(dict.fromkeys(told))


def _place(askers: Sequence[CodeType]) -> str:
    names = [f"{code.co_qualname} ({PurePath(code.co_filename).name}:{code.co_firstlineno})" for code in askers[:2]]
    return " for ".join(name for name in names if not name.startswith("whole_step"))


def asked(graph: fx.GraphModule) -> tuple[str, ...]:
    """Notes for the plan: that the captured code asked, and who did."""
    places = graph.meta.get(_KEY, ())
    if not places:
        return ()
    return (
        "the step asks whether it is being compiled, and is captured only where it is told yes: "
        f"{', '.join(places)}. Where that code computes something else then, so does this step; step.verify() compares",
    )
