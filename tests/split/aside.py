"""Where `make test-all` installs what only the YOLO test needs; FULLBATCH_YOLO names another folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ASIDE = Path(os.environ.get("FULLBATCH_YOLO", Path(sys.prefix) / "yolo"))
