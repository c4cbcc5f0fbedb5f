"""What a step must carry through a checkpoint, so that a resumed run ends with the bits of one that was never stopped.

Limit that forced it: a dropout mask is a function of the generator's state, the task and the microbatch, and a sum of
gradients is rounded by the microbatches it is taken in. Weights and the optimizer's state alone are therefore not
enough. Shape of the answer: the state of the default generators, the number of steps, and the microbatch of each size
of batch that was seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fullbatch._errors import Fault, PlanError

_FORMAT = 1


@dataclass
class Progress:
    """Steps that were taken, and the microbatch by size of the batch; `pinned` those that a checkpoint brought."""

    steps: int = 0
    microbatches: dict[int, int] = field(default_factory=dict)
    pinned: dict[int, int] = field(default_factory=dict)

    def count(self, batch: int, microbatch: int) -> None:
        """One more step."""
        self.steps += 1
        self.microbatches[batch] = microbatch

    def state(self, device: torch.device) -> dict[str, Any]:
        """Ints and tensors, which `torch.load(..., weights_only=True)` reads."""
        generators = {name: source.read() for name, source in default_generators(device).items()}
        sizes = {**self.pinned, **self.microbatches}
        return {"format": _FORMAT, "steps": self.steps, "microbatches": sizes, "generators": generators}

    def load(self, state: Any, device: torch.device, given: Mapping[int, int], microbatch: int | None) -> None:
        """Takes over `state` and sets the default generators; changes nothing where it raises PlanError."""
        _check(state)
        sizes = {int(batch): int(size) for batch, size in state["microbatches"].items()}
        set_generators(default_generators(device), state["generators"], _others(sizes, given, microbatch))
        self.steps, self.microbatches, self.pinned = int(state["steps"]), dict(sizes), sizes


@dataclass(frozen=True)
class Source:
    """A generator: how its state is read, as what a checkpoint can hold, and how it is set."""

    read: Callable[[], Any]
    write: Callable[[Any], None]


def default_generators(device: torch.device) -> dict[str, Source]:
    """torch's own that a step on `device` draws from, by the name that a state has them under."""
    found = {"cpu": Source(torch.get_rng_state, lambda state: torch.set_rng_state(state.cpu()))}
    if device.type == "cuda":
        found[str(device)] = Source(
            lambda: torch.cuda.get_rng_state(device), lambda state: torch.cuda.set_rng_state(state.cpu(), device)
        )
    return found


def set_generators(sources: Mapping[str, Source], states: Mapping[str, Any], faults: Iterable[Fault] = ()) -> None:
    """Sets each generator that `states` has a state for.

    Raises PlanError with `faults`, found before, and those of states that a generator does not take; all generators
    are then as before.
    """
    before = {name: source.read() for name, source in sources.items()}
    found = list(faults)
    for name, source in sources.items():
        try:
            if name in states:
                source.write(states[name])
        except Exception as error:  # each kind of generator has its own ways to refuse
            found.append(_not_taken(name, error))
    if found:
        for name, source in sources.items():
            source.write(before[name])
        raise PlanError(*found)


def _not_taken(name: str, error: Exception) -> Fault:
    return Fault(
        f"The state of the generator {name} cannot be set.",
        got=f"{type(error).__name__}: {error!s:.80}",
        expected="the state that step.state_dict() read from it",
        next="step.load_state_dict(checkpoint['step'])",
    )


def no_state(state: Any, of: str = "a step") -> PlanError:
    """The error of something else in the place of a state."""
    got = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
    if isinstance(state, Mapping) and "format" in state:
        got = f"format {state['format']!r} with {got}"
    return PlanError.of(
        f"This is no state of {of}.", got=f"{got!s:.80}", expected="what step.state_dict() returned",
        next="step.load_state_dict(checkpoint['step'])",
    )  # fmt: skip


def _check(state: Any) -> None:
    names = {"format", "steps", "microbatches", "generators"}
    whole = isinstance(state, Mapping) and names <= state.keys() and state["format"] == _FORMAT
    if not whole or not is_count(state["steps"]) or not _are_sizes(state["microbatches"]):
        raise no_state(state)
    if not isinstance(state["generators"], Mapping) or "cpu" not in state["generators"]:
        raise no_state(state)


def is_count(value: Any, least: int = 0) -> bool:
    """Whether it is an int, and no bool, from `least` on."""
    return type(value) is int and value >= least


def _are_sizes(value: Any) -> bool:
    return isinstance(value, Mapping) and all(is_count(size, 1) for pair in value.items() for size in pair)


def _others(sizes: Mapping[int, int], given: Mapping[int, int], microbatch: int | None) -> list[Fault]:
    """Another microbatch would draw other masks and round otherwise."""
    asked = {batch: given.get(batch, min(microbatch, batch) if microbatch else size) for batch, size in sizes.items()}
    return [
        Fault(
            f"The checkpoint's steps of {batch} samples ran in microbatches of {size}.",
            got=f"a step that is asked for microbatches of {asked[batch]}",
            expected="the same microbatch: another draws other dropout masks, and rounds otherwise",
            next=f"microbatch={size}, or neither microbatch= nor plan=: the checkpoint's are used",
        )
        for batch, size in sizes.items()
        if asked[batch] != size
    ]
