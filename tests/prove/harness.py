"""Proves every placement of a captured step: each value of the split run against the same value of the whole run.

The captured graph is interpreted once on the whole batch. The program made from it is then run task by task, and every
value that stands for a node of the graph is compared: a whole value with the node's, slices with its slices.
A wrong rule is thus named where it stands, and not by a wrong gradient somewhere else.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import fx

from fullbatch import Step
from fullbatch._captured import Captured
from fullbatch._ir import Kind
from fullbatch._plan._schedule import Do
from fullbatch._run._interpreter import Interpreter
from fullbatch._run._slices import cut


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


def differences(captured: Any, inputs: Sequence[torch.Tensor], microbatch: int, tolerance: float = 1e-9) -> list[str]:
    """What differs, in order: "name: error" of each value that is not the slice, or the whole, of its node.

    What a random operator drew on the whole batch is put in the place of what it draws in the split run.
    """
    program, joint = captured.program, captured.joint
    truth = _Recorder(joint.module, joint.graph).run_on({node: inputs[at] for node, at in joint.placeholders.items()})
    floor = 1e-6 * _scale(truth)
    schedule = captured._split.hold_all(microbatch).schedule
    interpreter = Interpreter(program, schedule)
    found: list[str] = []
    walk = interpreter.begin({at: inputs[at] for at in program.inputs}, seed=0)
    with torch.no_grad():
        for action in schedule.walk():
            walk.take(action)
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
                slot = walk.slot(out, action.microbatch)
                if item.layout is not None:
                    begin, end = interpreter.ranges[action.microbatch]
                    expected = cut(expected, item.layout, begin, end, program.batch)
                if task.random:
                    walk.live[slot] = expected
                    continue
                error = _error(walk.live[slot], expected, floor)
                if not error <= tolerance:
                    found.append(f"{item.name} ({task.kind.value} {task.origin}): {error:.2e}")
    return list(dict.fromkeys(found))


def _scale(truth: dict[str, Any]) -> float:
    """The largest value of the step that is no mask: rounding noise is measured against it, not against zero."""
    largest = 0.0
    for value in truth.values():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
            size = value.detach().abs()
            largest = max(largest, float(torch.where(size < 1e4, size, 0.0).max()))
    return largest


def _named(truth: dict[str, Any], name: str) -> torch.Tensor | None:
    base, bracket, index = name.partition("[")
    value = truth.get(base)
    if bracket and value is not None:
        value = value[int(index.rstrip("]"))]
    return value if isinstance(value, torch.Tensor) else None


def _error(value: torch.Tensor, expected: torch.Tensor, floor: float) -> float:
    if value.shape != expected.shape or value.dtype != expected.dtype:
        return float("inf")
    if expected.numel() == 0 or torch.equal(value, expected):
        return 0.0
    if not (expected.is_floating_point() or expected.is_complex()):
        return float("inf")
    odd = ~torch.isfinite(expected)
    if not torch.equal(value[odd].nan_to_num(0.5), expected[odd].nan_to_num(0.5)):
        return float("inf")
    value, expected = value[~odd], expected[~odd]
    if not expected.numel():
        return 0.0
    return float((value - expected).abs().max() / max(float(expected.abs().max()), floor, 1e-30))


class ProvedStep(Step):
    """A step that proves its program when it is called, and the one that cuts every whole value again wherever it can.

    What it returns and what it adds to `.grad` comes from the latter. `found` says what was wrong.
    """

    def __init__(self, *args: Any, tolerance: float = 1e-9, microbatch: int = 3, **kwargs: Any) -> None:
        self.found: list[str] = []
        self.programs = 0
        self._tolerance = tolerance
        super().__init__(*args, microbatch=microbatch, **kwargs)

    def _on_graph(self, graph: fx.GraphModule) -> Callable[..., Any]:
        captured = Captured(graph, measure=False)
        return lambda *inputs: self._run(captured, inputs)

    def _run(self, captured: Captured, inputs: Sequence[torch.Tensor]) -> Any:
        call = self._call
        assert call is not None
        assert self._microbatch is not None
        captured.prepare(inputs, call.leaves, call.shape)
        if call.only_plan:
            return super()._run(captured, inputs)
        resliced = Captured(captured._graph, reslice_above=0, measure=False)
        joint = copy.copy(captured.joint)  # tracing is most of the work, and the same for both
        with mock.patch("fullbatch._captured.trace_joint", return_value=joint):
            resliced.prepare(inputs, call.leaves, call.shape)
        for name, each in (("", captured), ("re-sliced: ", resliced)):
            size = min(self._microbatch, call.shape.size)
            self.found += [name + line for line in differences(each, inputs, size, self._tolerance)]
            self.programs += 1
        return super()._run(resliced, inputs)


__all__ = ["Kind", "ProvedStep", "differences"]
