"""Optimizers for large batches, in which each tensor moves by a set share of its own length."""

from fullbatch.optim._lamb import LAMB
from fullbatch.optim._lars import LARS
from fullbatch.optim._trust import param_groups

__all__ = ["LAMB", "LARS", "param_groups"]
