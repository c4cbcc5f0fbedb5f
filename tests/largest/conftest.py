"""Tiny models in float64 on one thread."""

from exactly import exactly

__all__ = ["exactly"]
