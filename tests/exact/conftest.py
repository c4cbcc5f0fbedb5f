"""Makes the ``cases`` package importable however pytest is started."""

import sys
from pathlib import Path

_tests = str(Path(__file__).resolve().parent.parent)
if _tests not in sys.path:
    sys.path.insert(0, _tests)
