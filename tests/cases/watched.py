"""A step that shows what it captured, for tests of what is behind a plan."""

from __future__ import annotations

from typing import Any

import fullbatch


class Watched(fullbatch.Step):
    """`captured` and `inputs`: the graph that ran last, and what it was called with."""

    def _run(self, captured: Any, inputs: Any) -> Any:
        self.captured, self.inputs = captured, inputs
        return super()._run(captured, inputs)
