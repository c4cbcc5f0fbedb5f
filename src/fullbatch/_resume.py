"""What a step must carry through a checkpoint, so that a resumed run ends with the bits of one that was never stopped.

Limit that forced it: a dropout mask is a function of the generator's state, the task and the microbatch, and a sum of
gradients is rounded by the microbatches it is taken in. Weights and the optimizer's state alone are therefore not
enough. Shape of the answer: the state of the default generators, the number of steps, the microbatch and the budget
that were asked for, and by program (each form of a batch is one) what it was planned for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fullbatch._errors import Fault, PlanError
from fullbatch._generators import default_generators, set_generators
from fullbatch._past import Past, is_count, past_of
from fullbatch._plan._plan import Plan

_FORMAT = 2
_BY_SIZE = 1  # the format whose microbatches were by the number of samples alone


@dataclass(frozen=True)
class Given:
    """What the step that loads or saves was given: a budget in bytes, samples at once, a plan."""

    memory: int | None
    microbatch: int | None
    plan: Plan | None

    @property
    def all_in(self) -> int | None:
        """The microbatch of every batch, where there is one."""
        if self.microbatch is None and self.memory is None and self.plan is not None and self.plan.budget is None:
            return self.plan.microbatch
        return self.microbatch


@dataclass
class Progress:
    """Steps that were taken, and what decides the microbatches of those to come.

    `microbatch` and `memory` are a checkpoint's, for a step that was given neither. `by_size` are microbatches by the
    number of samples, from a state of an earlier format. `programs` are pasts by `Captured.key`.
    """

    steps: int = 0
    microbatch: int | None = None
    memory: int | None = None
    by_size: dict[int, int] = field(default_factory=dict)
    programs: dict[str, Past] = field(default_factory=dict)

    def past(self, key: str, batch: int, budget: int, given: Given) -> Past:
        """That of a program of `batch` samples, which is planned for `budget` bytes."""
        if key not in self.programs:
            pinned = given.memory is None and given.plan is None and self.memory is not None
            self.programs[key] = Past(batch, self.memory or budget if pinned else budget, pinned)
        past = self.programs[key]
        past.budget = past.budget if past.pinned else budget
        past.first = self.by_size.get(batch) if given.plan is None else None
        return past

    def free(self, key: str) -> int | None:
        """The budget that a capture of this program found free, before it was dropped for others."""
        past = self.programs.get(key)
        return None if past is None or past.pinned else past.budget

    def state(self, device: torch.device, given: Given) -> dict[str, Any]:
        """Ints, strings and tensors in lists and dicts, which `torch.load(..., weights_only=True)` reads."""
        microbatch = given.all_in
        return {
            "format": _FORMAT,
            "steps": self.steps,
            "microbatch": self.microbatch if microbatch is None else microbatch,
            "memory": self.memory if given.memory is None else given.memory,
            "by_size": dict(self.by_size),
            "programs": {key: past.state() for key, past in self.programs.items()},
            "generators": {name: source.read() for name, source in default_generators(device).items()},
        }

    def load(self, state: Any, device: torch.device, given: Given) -> None:
        """Takes over `state` and sets the default generators; changes nothing where it raises PlanError."""
        loaded = _read(state)
        set_generators(default_generators(device), state["generators"], _others(loaded, given))
        vars(self).update(vars(loaded))


def no_state(state: Any, of: str = "a step") -> PlanError:
    """The error of something else in the place of a state."""
    got = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
    if isinstance(state, Mapping) and "format" in state:
        got = f"format {state['format']!r} with {got}"
    return PlanError.of(
        f"This is no state of {of}.", got=f"{got!s:.80}", expected="what step.state_dict() returned",
        next="step.load_state_dict(checkpoint['step'])",
    )  # fmt: skip


def _read(state: Any) -> Progress:
    if not isinstance(state, Mapping) or state.get("format") not in (_FORMAT, _BY_SIZE):
        raise no_state(state)
    generators = state.get("generators")
    whole = isinstance(generators, Mapping) and "cpu" in generators and is_count(state.get("steps"))
    old = state["format"] == _BY_SIZE
    sizes = state.get("microbatches" if old else "by_size")
    if not whole or not isinstance(sizes, Mapping) or not _are_sizes(sizes):
        raise no_state(state)
    progress = Progress(int(state["steps"]), by_size=dict(sizes))
    return progress if old else _with_programs(progress, state)


def _with_programs(progress: Progress, state: Mapping[str, Any]) -> Progress:
    asked, programs = [state.get(name, 0) for name in ("microbatch", "memory")], state.get("programs")
    if not all(value is None or is_count(value, 1) for value in asked) or not isinstance(programs, Mapping):
        raise no_state(state)
    progress.microbatch, progress.memory = asked
    for key, value in programs.items():
        past = past_of(value)
        if past is None or not isinstance(key, str):
            raise no_state(state)
        progress.programs[key] = past
    return progress


def _are_sizes(value: Mapping[Any, Any]) -> bool:
    return all(is_count(size, 1) for pair in value.items() for size in pair)


# ---- another microbatch, which would draw other masks and round otherwise


def _others(loaded: Progress, given: Given) -> list[Fault]:
    """What the step was given that is not the checkpoint's."""
    found = {**dict.fromkeys(_by_microbatch(loaded, given)), **dict.fromkeys(_by_plan(loaded, given))}
    return [
        Fault(
            f"The checkpoint's {what} in microbatches of {size}.",
            got=f"a step that is asked for microbatches of {asked}",
            expected="the same microbatch: another draws other dropout masks, and rounds otherwise",
            next=f"microbatch={size}, or neither microbatch= nor plan=: the checkpoint's are used",
        )
        for what, size, asked in found
    ]


def _by_microbatch(loaded: Progress, given: Given) -> Iterator[tuple[str, int, int]]:
    asked = given.all_in
    if asked is None:
        return
    if loaded.microbatch is not None:
        if loaded.microbatch != asked:
            yield "steps run", loaded.microbatch, asked
        return
    for batch, size in _decided(loaded):
        if size != min(asked, batch):
            yield f"steps of {batch} samples run", size, min(asked, batch)


def _decided(loaded: Progress) -> Iterator[tuple[int, int]]:
    """Samples of a batch, and at once."""
    yield from loaded.by_size.items()
    for past in loaded.programs.values():
        yield from ((past.batch, one.microbatch) for one in past.decisions)


def _by_plan(loaded: Progress, given: Given) -> Iterator[tuple[str, int, int]]:
    """A plan is for one program only. In less room than it needs the saved run may have planned anew."""
    plan = given.plan
    if plan is None or plan.fingerprint is None:
        return
    what = f"steps of {plan.batch} samples run"
    if loaded.microbatch is not None and min(loaded.microbatch, plan.batch) != plan.microbatch:
        yield what, min(loaded.microbatch, plan.batch), plan.microbatch
    if plan.batch in loaded.by_size and loaded.by_size[plan.batch] != plan.microbatch:
        yield what, loaded.by_size[plan.batch], plan.microbatch
    for key, past in loaded.programs.items():
        sizes = [one.microbatch for one in past.decisions]
        if plan.fingerprint.digest in key.split() and sizes and plan.microbatch not in sizes:
            yield what, sizes[-1], plan.microbatch
