"""Writes `docs/zoo-vision.md` from results: `python -m zoo_vision.table` (in the folder `tests`)."""

from __future__ import annotations

import json
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from split.aside import ASIDE, VISION
from zoo.table import Page, markdown

from .packages import HERE

DOCS = HERE.parents[1] / "docs" / "zoo-vision.md"
RESULTS = HERE / "results.json"
PACKAGES = ("timm", "torchvision", "segmentation-models-pytorch", "monai", "ultralytics")

_HEAD = """# The zoo of vision

Models of `timm` (small ones of its families), `torchvision` (classes, segmentation, films, flow, dense detectors),
`segmentation_models_pytorch` (each decoder, encoders, losses), `monai` (2D and 3D), `ultralytics` (detection,
segmentation, poses) and the detectors of `transformers` that are kin of DETR, without pretrained weights, BatchNorm in
train mode: the step in microbatches of 1 and of 3 (uneven) of a batch of 4, in float64, against the plain step. The
error is the largest of those of the loss, of all gradients and of all buffers, each divided by the largest value of its
kind. Exact is at most 1e-9. This page is written by `python -m zoo_vision.table` from what `python -m zoo_vision.run`
found (both in `tests`); `make test-all` installs the packages aside and runs these models again. All models that
`tests/zoo_vision/offers` has were run. Other models of `transformers` are [in the other zoo](zoo.md).
"""

_UNCOUNTED = """models are not counted: plain PyTorch does not run
them so, or they have too many parameters."""

_HOW = """How the models are made (`tests/zoo_vision`): each with the smallest images that it takes, and ten classes or
fewer; some transformers with fewer blocks; dropout is 0, stochastic depth what the package gives by default; no
parameter is zero. The loss is the mean square distance of every output to a fixed wave; Dice or the loss named for
`segmentation_models_pytorch`. `ultralytics/...+own-loss` and the detectors of torchvision are the package's own loss,
which assigns boxes to anchors by the data, as `fullbatch.Step((forward, loss), ...)`; `transformers/...+own-loss` is
the package's own matching of queries to boxes, in one `loss_fn`. What a model computes in float32 by name is computed
in float64.
"""


def page() -> Page:
    """The words of the page."""
    installed = distributions(path=[str(ASIDE), str(VISION)])
    found = {each.name.lower().replace("_", "-"): each.version for each in installed}
    named = ", ".join(f"{name} {found.get(name, '?')}" for name in PACKAGES)
    return Page(_HEAD, f"torch {torch.__version__}, {named}.", _UNCOUNTED, _HOW)


def results(source: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """What was found, by model."""
    found: dict[str, dict[str, Any]] = json.loads(source.read_text())
    return found


def main() -> None:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    DOCS.write_text(markdown(results(source), page()))


if __name__ == "__main__":
    main()
