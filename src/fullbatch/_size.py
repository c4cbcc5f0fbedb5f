"""Bytes as people write them: "6GiB", "800MB", 2**30."""

from __future__ import annotations

import math
import re

from fullbatch._errors import MemorySizeError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power
    _UNITS[_letter] = 1024**_power

_PATTERN = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(size: int | str) -> int:
    """Bytes of `size`: an int is bytes; "6GiB" is 6 * 2**30; "800MB" is 800 * 10**6; "6G" is "6GiB".

    Raises MemorySizeError where `size` is neither, or is not above zero.
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise _no_size(size)
    if isinstance(size, int):
        value = size
    else:
        match = _PATTERN.fullmatch(size)
        if match is None or match.group(2).lower() not in _UNITS:
            raise _no_size(size)
        number = float(match.group(1)) * _UNITS[match.group(2).lower()]
        if not math.isfinite(number):
            raise _no_size(size)
        value = int(number)
    if value <= 0:
        raise _no_size(size)
    return value


def _no_size(size: object) -> MemorySizeError:
    whole = isinstance(size, float) and math.isfinite(size) and size >= 1
    return MemorySizeError.of(
        "The memory budget is not a size.",
        got=f"memory={size!r}",
        expected='bytes above zero as an int, or a string such as "6GiB" or "800MB"',
        next=f"memory=int({size!r})" if whole else 'fullbatch.Step(loss_fn, model, batch, memory="6GiB")',
    )


def format_bytes(size: int) -> str:
    """`size` bytes for people: three significant digits in binary units, exact below 1 KiB."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{size} B" if unit == "B" else f"{value:.3g} {unit}" if abs(value) < 1000 else f"{value:.0f} {unit}"
