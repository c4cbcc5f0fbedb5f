"""Run as a program by tests: plans one step and prints what was learnt of its operators, as JSON."""

from __future__ import annotations

import json
import sys
import warnings

import torch
from small_programs import SIZES, captured_convolutions

from fullbatch._cost import _probe
from fullbatch._cost._probe import Prober

torch.set_num_threads(1)
sessions = 0
measure = _probe.memory_events


def counted(fn):
    global sessions
    sessions += 1
    return measure(fn)


_probe.memory_events = counted
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    program, inputs = captured_convolutions()
    prober = Prober(program, inputs)
    cost = prober.costs(SIZES)
    assert cost is not None
found = [[task.id, size, repr(cost(task, size))] for task in program.tasks for size in sorted(SIZES)]
keys = sorted(key for key in prober._keys.values() if not key.startswith("here"))
ours = [str(one.message) for one in caught if "fullbatch" in str(one.message)]
json.dump({"found": found, "keys": keys, "sessions": sessions, "warnings": ours}, sys.stdout)
