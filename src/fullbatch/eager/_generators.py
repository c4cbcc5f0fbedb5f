"""Generators that an eager forward may draw from: the default ones, and those that it holds.

Limit that forced it: code that is not traced draws from wherever it likes. Shape of the answer: the default generators
of torch, Python and NumPy (`fullbatch._generators`), and by name those that modules hold or that `loss_fn` closes over.
"""

from __future__ import annotations

import random
from typing import Any

from fullbatch._generators import Source, default_generators, packed, unpacked
from fullbatch.eager._loop import Job
from fullbatch.eager._state import Snapshot, closed_over, get_generator, set_generator


def generators_of(job: Job) -> dict[str, Source]:
    """All that a step of this job is known to draw from, by the name that a checkpoint has them under."""
    held = Snapshot(
        [(f"model.{name}".rstrip("."), root) for name, root in job.roots()]
        + [(f"loss_fn.{name}", value) for name, value in closed_over(job.loss_fn)]
    ).generators()
    own = {name: _source(generator) for name, generator in held.items()}
    return {**default_generators(job.device), **own}


def _source(generator: Any) -> Source:
    def write(state: Any) -> None:
        set_generator(generator, unpacked(state, python=isinstance(generator, random.Random)))

    return Source(lambda: packed(get_generator(generator)), write)
