"""How much memory the device has at all: a budget above it is a mistake, and would end in the kernel's killer.

In a container the machine's own figure is not the limit: the control group's is, in either of its two versions, and
that of any group above it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

_GROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def total_bytes(device: torch.device) -> int | None:
    """Bytes that `device` has, or that this process may use of them; None where that cannot be found."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type != "cpu":
        return None
    return min([*_physical(), *_limits()], default=None)


def _physical() -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError):
        yield os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _limits() -> Iterator[int]:
    """The limits of the control groups that this process is in; none is "max", or a number beyond any memory."""
    with contextlib.suppress(OSError):
        for line in _MEMBERSHIP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                yield from _of_group(_GROUPS, path, "memory.max")
            elif "memory" in controllers.split(","):
                yield from _of_group(_GROUPS / "memory", path, "memory.limit_in_bytes")


def _of_group(root: Path, path: str, name: str) -> Iterator[int]:
    group = root / path.lstrip("/")
    for folder in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError):
            yield int((folder / name).read_text())
        if folder == root:
            return
