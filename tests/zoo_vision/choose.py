"""Writes `timm.txt`, the models of timm that stand for all: `python -m zoo_vision.choose` (in the folder `tests`).

The smallest of each family: of each module of timm and the letters that a name begins with. Counting the parameters of
1,371 models takes minutes, so the choice is kept.
"""

from __future__ import annotations

import contextlib
import re

import torch

from .packages import HERE, import_packages

LISTED = HERE / "timm.txt"


def smallest() -> dict[tuple[str, str], tuple[int, str]]:
    """By module and first letters: how many parameters the smallest model has, and its name."""
    import_packages()
    import timm
    from timm.models._registry import _model_to_module

    found: dict[tuple[str, str], tuple[int, str]] = {}
    for name in timm.list_models():
        family = (_model_to_module[name], re.split(r"[_\d]", name)[0])
        with contextlib.suppress(Exception), torch.device("meta"):
            size = sum(p.numel() for p in timm.create_model(name, num_classes=10).parameters())
            found[family] = min(found.get(family, (size, name)), (size, name))
    return found


def main() -> None:
    LISTED.write_text("".join(f"{name}\n" for _, name in sorted(smallest().values(), key=lambda item: item[1])))


if __name__ == "__main__":
    main()
