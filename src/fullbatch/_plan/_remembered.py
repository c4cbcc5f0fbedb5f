"""A plan that was found once is not searched for again, in this process or a later one.

The search of a deep network takes seconds, at every start of a training script. Its result is an order of tasks: a few
kilobytes. What it depends on (both programs, the room, the microbatch, the machine and its settings, the source of this
package) is hashed into a key; what is found under it is restored like a saved plan, walked, and measured, and is used
only if it fits. A plan is as good as the search that found it, so that nothing else is remembered: no refusal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fullbatch._cost._cache import plan_file
from fullbatch._cost._keys import digest, machine, settings
from fullbatch._errors import PlanError
from fullbatch._plan._planner import Choice
from fullbatch._plan._restore import order_of, restore
from fullbatch._plan._schedule import microbatches
from fullbatch._plan._side import Side
from fullbatch._plan._simulate import simulate


def remembering(
    programs: tuple[str, str], split: Side, whole: Side, room: int, microbatch: int | None, device: torch.device,
    search: Callable[[], Choice],
) -> Choice:  # fmt: skip
    """What `search` found for these programs (by their digests), room in bytes and microbatch, now or before."""
    file = plan_file()
    if file is None:
        return search()
    here = machine(device), settings(device, torch.get_num_threads())
    key = digest("plan", *programs, str(room), str(microbatch), *here)
    found = _restored(file.get(key), split, whole, room)
    if found is None:
        found = search()
        if found.exact:
            file.put(key, [found.whole, found.size, found.overhead, found.bound, order_of(found.schedule)])
            file.flush()
    return found


def _restored(entry: Any, split: Side, whole: Side, room: int) -> Choice | None:
    """The remembered choice; None where there is none, it makes no sense, or does not fit any more."""
    try:
        unsplit, size, overhead, bound, order = entry
        side = whole if unsplit else split
        program, samples = side.program, microbatches(side.program.batch, size)
        schedule = restore(program, side.stages, tuple(tuple(body) for body in order), samples)
        cost = side.exact(size)
        if cost is None:
            return None
        simulated = simulate(program, schedule, cost)
        whole_batch = bool(unsplit)
    except (TypeError, ValueError, ArithmeticError, PlanError):
        return None
    if simulated.peak > room:
        return None
    return Choice(program, side.stages, schedule, simulated, size, True, overhead, bound, whole_batch)
