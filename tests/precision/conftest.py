"""Precision is what is tested: float32."""

from one_thread import one_thread

__all__ = ["one_thread"]
