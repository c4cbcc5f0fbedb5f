"""Tiny models in float64 on one thread."""

from exactly import exactly
from split.aside import ASIDE

__all__ = ["exactly"]

collect_ignore = [] if (ASIDE / "ultralytics").is_dir() else ["test_yolo.py"]
