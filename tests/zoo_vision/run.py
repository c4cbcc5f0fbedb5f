"""Every model of vision, each in a process of its own: `python -m zoo_vision.run --out zoo_vision/results.json`.

(In the folder `tests`, as `zoo.run`, whose options it has.)
"""

from __future__ import annotations

import resource
from functools import partial

from zoo import compare
from zoo.run import main

from .models import build, names
from .packages import import_packages

WARM = ("timm/resnet10t", "torchvision/resnet18", "ultralytics/yolov8n", "segmentation_models_pytorch/unet")

LARGEST = 6 << 30
"""Bytes that a process may take, torch itself included."""

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_DATA, (LARGEST, LARGEST))
    import_packages()
    main(names, partial(compare.judge, build=build), WARM)
