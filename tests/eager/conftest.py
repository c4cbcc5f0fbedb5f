from __future__ import annotations

from exactly import exactly

__all__ = ["exactly"]
