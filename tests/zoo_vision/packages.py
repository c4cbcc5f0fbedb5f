"""The packages of vision, which lie beside the environment: see `vision.txt` and `tests/split/yolo.txt`."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from pathlib import Path

from split.aside import ASIDE, VISION, without_operators
from zoo.in_float64 import read_in_float64

HERE = Path(__file__).parent

_CODE = (
    "timm.layers", "timm.models", "torchvision.models", "torchvision.ops", "segmentation_models_pytorch",
    "monai.networks", "monai.losses", "ultralytics.nn", "ultralytics.utils.loss", "ultralytics.utils.tal",
    "ultralytics.utils.ops", "ultralytics.utils.metrics", "transformers.loss",
)  # fmt: skip


def _modelling_code(name: str) -> bool:
    of_transformers = name.startswith("transformers.models.") and ".modeling_" in name
    return of_transformers or any(name == code or name.startswith(f"{code}.") for code in _CODE)


def installed() -> bool:
    """Whether `make test-all` has installed them."""
    return (VISION / "timm").is_dir() and (ASIDE / "ultralytics").is_dir()


def import_packages() -> None:
    """Makes them importable, their code in float64."""
    without_operators()
    read_in_float64(_modelling_code)
    os.environ.setdefault("YOLO_CONFIG_DIR", tempfile.mkdtemp())
    os.environ.update(YOLO_OFFLINE="1", YOLO_VERBOSE="false")
    for folder in (ASIDE, VISION):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    logging.disable(logging.WARNING)  # of weights that are not loaded
