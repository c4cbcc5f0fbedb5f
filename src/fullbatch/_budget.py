"""For which budget, and in which microbatch, a call is planned.

Budget and microbatch may come from the user, from a plan that was given, from a checkpoint, or from what the device has
free. Which of them holds is one rule, here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fullbatch._captured import Captured, Request
from fullbatch._memory._free import RESERVE, free_bytes
from fullbatch._plan._plan import Plan


@dataclass(frozen=True)
class Wanted:
    """What a step was asked to keep to: `memory` in bytes, `microbatch` in samples, a plan."""

    memory: int | None
    microbatch: int | None
    saved: Plan | None

    def request(self, captured: Captured, size: int, device: torch.device, owned: int, must_fit: bool) -> Request:
        """What to plan for `size` samples. The user's words come first, then the plan's, then what is free."""
        budget, microbatch, saved, note = self.memory, self.microbatch, self.saved, ""
        if budget is None and microbatch is None:
            if saved is not None and saved.budget is None:
                microbatch = saved.microbatch
            else:
                budget, note = self._free(captured, device, owned)
        if microbatch is not None:
            microbatch = min(microbatch, size)
        return Request(budget, microbatch, owned, note, saved, must_fit=must_fit)

    def _free(self, captured: Captured, device: torch.device, owned: int) -> tuple[int, str]:
        if captured.free_budget is None:  # found once a capture: what is free moves with every step
            captured.free_budget = free_bytes(device) + owned
        saved = self.saved
        if saved is not None and saved.budget is not None and saved.budget <= captured.free_budget:
            return saved.budget, "budget: that of the plan that was given"
        note = f"budget: what is free now plus what the step owns, less a reserve of {RESERVE:.0%}"
        return captured.free_budget, note
