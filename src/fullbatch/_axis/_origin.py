"""Where an operator of the graph came from: the module it ran in and the line of the user's code.

A backward operator has neither; it shares its sequence number with the forward operator it differentiates.
"""

from __future__ import annotations

import re
from typing import Any

from torch import fx

from fullbatch._ir import Origin

_LINE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


class Origins:
    """Answers for each node of one graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self._forward: dict[Any, fx.Node] = {}
        for node in graph.nodes:
            if node.meta.get("partitioner_tag") == "is_forward" and "seq_nr" in node.meta and _has_source(node):
                self._forward.setdefault(node.meta["seq_nr"], node)

    def of(self, node: fx.Node) -> Origin:
        """The origin of `node`."""
        backward = node.meta.get("partitioner_tag") == "is_backward"
        known = self._forward.get(node.meta.get("seq_nr"), node) if backward else node
        return Origin(str(node.target).removesuffix(".default"), _module(known), _source(known), backward)


def _has_source(node: fx.Node) -> bool:
    return bool(node.meta.get("stack_trace") or node.meta.get("nn_module_stack"))


def _module(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    path = re.sub(r"\['?([^'\]]+)'?\]", r".\1", path.replace("_modules", "").replace(".__dict__", ""))
    path = re.sub(r"\.{2,}", ".", path).removeprefix("L.")
    return path.removeprefix("model.") or "model"


def _source(node: fx.Node) -> str:
    """The innermost line that is not inside torch itself, nor inside a function of ours that loss_fn calls."""
    lines = _LINE.findall(node.meta.get("stack_trace") or "")
    libraries = ("/torch/", "/fullbatch/_head/")
    own = [
        line
        for line in lines
        if not any(name in line[0].replace("\\", "/") for name in libraries) and not line[2].startswith("whole_step")
    ]
    if not own:
        return ""
    file, line, _ = own[-1]
    return f"{file.replace(chr(92), '/').rsplit('/', 1)[-1]}:{line}"
