"""What a step must carry through a checkpoint, so that a resumed run ends with the bits of one that was never stopped.

Limit that forced it: a dropout mask is a function of the generator's state, the task and the microbatch, and a sum of
gradients is rounded by the microbatches it is taken in. Weights and the optimizer's state alone are therefore not
enough. Shape of the answer: the state of the default generators, the number of steps, and the microbatch of each size
of batch that was seen.
"""

from __future__ import annotations

from collections.abc import Mapping
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
        generators = {"cpu": torch.get_rng_state()}
        if device.type == "cuda":
            generators[str(device)] = torch.cuda.get_rng_state(device)
        sizes = {**self.pinned, **self.microbatches}
        return {"format": _FORMAT, "steps": self.steps, "microbatches": sizes, "generators": generators}

    def load(self, state: Any, device: torch.device, given: Mapping[int, int], microbatch: int | None) -> None:
        """Takes over `state` and sets the default generators; changes nothing where it raises PlanError."""
        _check(state)
        sizes = {int(batch): int(size) for batch, size in state["microbatches"].items()}
        _refuse_others(sizes, given, microbatch)
        torch.set_rng_state(state["generators"]["cpu"].cpu())
        own = state["generators"].get(str(device))
        if device.type == "cuda" and own is not None:
            torch.cuda.set_rng_state(own.cpu(), device)
        self.steps, self.microbatches, self.pinned = int(state["steps"]), dict(sizes), sizes


def _check(state: Any) -> None:
    names = {"format", "steps", "microbatches", "generators"}
    whole = isinstance(state, Mapping) and names <= state.keys() and state["format"] == _FORMAT
    if not whole or not isinstance(state["generators"].get("cpu"), torch.Tensor):
        got = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise PlanError.of(
            "This is no state of a step.", got=f"{got!s:.80}", expected="what step.state_dict() returned",
            next="step.load_state_dict(checkpoint['step'])",
        )  # fmt: skip


def _refuse_others(sizes: Mapping[int, int], given: Mapping[int, int], microbatch: int | None) -> None:
    """Another microbatch would draw other masks and round otherwise."""
    asked = {batch: given.get(batch, min(microbatch, batch) if microbatch else size) for batch, size in sizes.items()}
    faults = [
        Fault(
            f"The checkpoint's steps of {batch} samples ran in microbatches of {size}.",
            got=f"a step that is asked for microbatches of {asked[batch]}",
            expected="the same microbatch: another draws other dropout masks, and rounds otherwise",
            next=f"microbatch={size}, or neither microbatch= nor plan=: the checkpoint's are used",
        )
        for batch, size in sizes.items()
        if asked[batch] != size
    ]
    if faults:
        raise PlanError(*faults)
