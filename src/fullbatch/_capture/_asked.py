"""Code that asks whether it is being compiled, and may compute something else then.

TorchDynamo answers `torch.compiler.is_compiling()` with True while it captures, and nothing can be compared at that
moment: the other branch often reads values, which cannot be captured. So the plan names who asks, before anything runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePath
from types import CodeType

from torch import fx

_QUESTIONS = {"is_compiling", "is_dynamo_compiling"}
_KEY = "fullbatch_asked"


def note_questions(graph: fx.GraphModule, traced: Iterable[CodeType]) -> None:
    """Inside a backend: keeps with `graph` which of the functions that were traced ask."""
    asking = [code for code in traced if not _QUESTIONS.isdisjoint(code.co_names) and "/torch/" not in code.co_filename]
    places = dict.fromkeys(
        f"{code.co_qualname} ({PurePath(code.co_filename).name}:{code.co_firstlineno})" for code in asking
    )
    graph.meta[_KEY] = tuple(places)


def asked(graph: fx.GraphModule) -> tuple[str, ...]:
    """Notes for the plan: that the captured code asked, and who did."""
    places = graph.meta.get(_KEY, ())
    if not places:
        return ()
    return (
        f"the step asks whether it is being compiled, and was told yes: {', '.join(places)}. Where that code computes "
        "something else then, so does this step; step.verify() compares",
    )
