"""Steps that cannot be captured: plain microbatches with checkpoints placed by measurement, weighted by counts."""

from fullbatch.eager._plan import Plan, Trial
from fullbatch.eager._step import Step

__all__ = ["Plan", "Step", "Trial"]
