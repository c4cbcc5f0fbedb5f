"""A value that changes at every call makes every call a capture: that is said, once, by name.

Limit that forced it: a capture takes seconds, and nothing in a slow run shows that each call begins with one.
"""

from __future__ import annotations

import warnings


class Changes:
    """Why the last calls of a step were captured anew."""

    def __init__(self) -> None:
        self._reasons: list[str] = []
        self._warned = False

    def nothing(self) -> None:
        """A call that was captured before."""
        self._reasons.clear()

    def add(self, reasons: list[str]) -> None:
        """A call that was captured anew. Warns at the third in a row, unless a shape is what changes."""
        self._reasons = [*self._reasons[-2:], reasons[0] if reasons else ""]
        recent = self._reasons
        if len(recent) == 3 and not self._warned and all(recent) and not any("mismatch" in why for why in recent):
            self._warned = True
            warnings.warn(
                "fullbatch: the step was captured anew for each of its last calls, because a value that it reads "
                f"changes: {recent[-1]}. Pass it as a tensor in the batch instead.",
                stacklevel=4,
            )
