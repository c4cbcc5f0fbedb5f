"""Training steps that fullbatch has to get exactly right, written as plain PyTorch.

A case is a function that builds ``(loss_fn, model, batch)``. The group of a case is the first word of the name of the
file that holds it (``code_shapes.py`` -> ``code``). Nothing in this package knows about fullbatch.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

LossFn = Callable[[Any, Any], Any]
Built = tuple[LossFn, Any, Any]

GROUPS: dict[str, tuple[str, ...]] = {
    "norms": ("norms", "norms_more"),
    "losses": ("losses_class", "losses_regression"),
    "coupled": ("coupled_contrastive", "coupled_statistics", "coupled_state"),
    "models": ("models_vision", "models_blocks", "models_sequence", "models_text"),
    "code": ("code_shapes", "code_indexing", "code_layers", "code_math", "code_training", "code_autograd"),
}


@dataclass(frozen=True)
class Case:
    """One training step.

    Tags: ``dynamo-no`` (TorchDynamo itself refuses it); ``float32`` (third-party code computes a part in float32) and
    ``ill-conditioned`` (plain PyTorch does not reproduce itself), for which 1e-10 is out of reach.
    """

    name: str
    build: Callable[[], Built]
    tags: frozenset[str]

    @property
    def tolerance(self) -> float:
        """How close to plain PyTorch a result must be."""
        return 1e-5 if "float32" in self.tags else 1e-7 if "ill-conditioned" in self.tags else 1e-10

    def __str__(self) -> str:
        return self.name


_registry: dict[str, dict[str, Case]] = {group: {} for group in GROUPS}


def case(*tags: str, name: str | None = None) -> Callable[[Callable[[], Built]], Callable[[], Built]]:
    """Register the decorated builder; it runs with a fixed seed and float64 as the default dtype."""

    def register(build: Callable[[], Built]) -> Callable[[], Built]:
        @functools.wraps(build)
        def seeded() -> Built:
            default = torch.get_default_dtype()
            torch.set_default_dtype(torch.float64)
            try:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(0)
                    return build()
            finally:
                torch.set_default_dtype(default)

        cases = _registry[build.__module__.rsplit(".", 1)[-1].split("_")[0]]
        title = name or build.__name__
        if title in cases:
            raise ValueError(f"two cases are called {title}")
        cases[title] = Case(title, seeded, frozenset(tags))
        return seeded

    return register


def all_cases(group: str | None = None) -> list[Case]:
    """Every case of a group, or of all groups, in the order in which they are written."""
    found: list[Case] = []
    for each in GROUPS if group is None else (group,):
        for module in GROUPS[each]:
            importlib.import_module(f"{__name__}.{module}")
        found += _registry[each].values()
    return found
