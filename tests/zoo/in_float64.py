"""Parts that a model computes in float32 by name are computed in float64 here.

Many models write `x.float()` or `.to(torch.float32)` around a norm, a softmax or a rotation, whatever the precision of
the model. Their results are then good to 1e-7, in plain PyTorch too, and a fault of 1e-9 could not be told from it. The
source of `transformers`, or of another package, is therefore read with these words replaced, line by line, so that line
numbers stay.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import re
import sys
from collections.abc import Callable, Sequence
from types import CodeType, ModuleType
from typing import Any

_WORDS = (
    (re.compile(r"\btorch\.(?:float32|float)\b"), "torch.float64"),
    (re.compile(r"\btorch\.complex64\b"), "torch.complex128"),
    (re.compile(r"\.float\(\)"), ".double()"),
)


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:  # no cached bytecode: it would be that of the unchanged source
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> CodeType:  # type: ignore[override]
        text = bytes(data).decode()
        for pattern, word in _WORDS:
            text = pattern.sub(word, text)
        return compile(text, path, "exec", dont_inherit=True, optimize=_optimize)


def _modelling_code(name: str) -> bool:
    return name.startswith("transformers.") and (".modeling_" in name or ".integrations." in name)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, wanted: Callable[[str], bool]) -> None:
        self._wanted = wanted

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not self._wanted(name):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return spec
        spec.loader = _Loader(name, spec.loader.path)
        return spec


def read_in_float64(wanted: Callable[[str], bool] = _modelling_code) -> None:
    """From now on modules with a name that is `wanted` are imported so. Those imported before stay as they are."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(wanted))
