"""Proves every placement of a captured step: each value of the split run against the same value of the whole run.

The captured graph is interpreted once on the whole batch. The program made from it is then run task by task, and every
value that stands for a node of the graph is compared: a whole value with the node's, slices with its slices.
A wrong rule is thus named where it stands, and not by a wrong gradient somewhere else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fullbatch._ir import Kind
from fullbatch._plan._keep import choose_keep
from fullbatch._plan._schedule import ALL, Do, Keep, make_schedule
from fullbatch._run._executor import Executor, cut


class _Recorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, graph: fx.Graph) -> None:
        super().__init__(module, garbage_collect_values=False, graph=graph)

    def run_on(self, by_node: dict[fx.Node, torch.Tensor]) -> dict[str, Any]:
        with torch.no_grad():
            for node in self.graph.nodes:
                if node.op == "placeholder":
                    self.env[node] = by_node.get(node, torch.ones(()))
                elif node.op != "output":
                    self.env[node] = self.run_node(node)
        return {node.name: value for node, value in self.env.items()}


def differences(captured: Any, inputs: list[torch.Tensor], microbatch: int, tolerance: float = 1e-9) -> list[str]:
    """What differs, in order: "name: error" of each value that is not the slice, or the whole, of its node."""
    program, joint = captured.program, captured.joint
    truth = _Recorder(joint.module, joint.graph).run_on({node: inputs[at] for node, at in joint.placeholders.items()})
    schedule = make_schedule(program, captured.stages, Keep(choose_keep(program, 0.0)), microbatch)
    executor = Executor(program, schedule)
    found: list[str] = []
    env: dict[Any, Any] = {(value, ALL): inputs[at] for at, value in program.inputs.items()}
    executor._seed, executor._drawn = 0, None
    bounds = executor._bounds
    with torch.no_grad():
        for action, step in zip(schedule.actions, executor._steps, strict=True):
            step(env)
            if action.do is not Do.RUN:
                continue
            task = program.by_id[action.subject]
            for out in task.outputs:
                if out is None or program.values[out].partial:
                    continue
                item = program.values[out]
                expected = _named(truth, item.name)
                if expected is None:
                    continue
                slot = (out, action.microbatch if item.local else ALL)
                if item.layout is not None:
                    begin, end = bounds[action.microbatch]
                    expected = cut(expected, item.layout, begin, end, program.batch)
                error = _error(env[slot], expected)
                if not error <= tolerance:
                    found.append(f"{item.name} ({task.kind.value} {task.origin}): {error:.2e}")
    return list(dict.fromkeys(found))


def _named(truth: dict[str, Any], name: str) -> torch.Tensor | None:
    base, bracket, index = name.partition("[")
    value = truth.get(base)
    if bracket and value is not None:
        value = value[int(index.rstrip("]"))]
    return value if isinstance(value, torch.Tensor) else None


def _error(value: torch.Tensor, expected: torch.Tensor) -> float:
    if value.shape != expected.shape:
        return float("inf")
    if expected.numel() == 0:
        return 0.0
    if not (expected.is_floating_point() or expected.is_complex()):
        return 0.0 if torch.equal(value, expected) else float("inf")
    if torch.equal(torch.nan_to_num(value), torch.nan_to_num(expected)):
        return 0.0
    return float((value - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


__all__ = ["Kind", "differences"]
