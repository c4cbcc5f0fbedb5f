"""Where the code is that is not the user's: as it was found, which may be through a link, and as it lies on disk."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def _both(folder: Path) -> set[str]:
    return {str(folder) + os.sep, str(folder.resolve()) + os.sep}


# Of torch and of this package; what `str.startswith` takes.
OURS = tuple(sorted(_both(Path(torch.__file__).parent) | _both(Path(__file__).parent)))
