"""What is proposed is mostly of precision: float32."""

from one_thread import one_thread

__all__ = ["one_thread"]
