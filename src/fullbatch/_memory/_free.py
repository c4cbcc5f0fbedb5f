"""How much memory there is when the user names no budget."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from fullbatch._size import format_bytes

RESERVE = 0.10
"""Share of what is free that is left alone: Python objects, other processes, the allocator's own rounding."""


def free_bytes(device: torch.device) -> int:
    """Bytes free on `device` now, less the reserve."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int((free + reusable) * (1 - RESERVE))
    return int(_host_free() * (1 - RESERVE))


def held_by_others(device: torch.device) -> str:
    """On CUDA, what is not free and not this process's tensors: a note for the plan; empty on the CPU."""
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    other = total - free - torch.cuda.memory_reserved(device)
    return f"{format_bytes(other)} of {device} are held outside of this process's tensors, and are not counted"


def _host_free() -> int:
    found = [_meminfo(), _cgroup()]
    known = [value for value in found if value is not None]
    if known:
        return max(min(known), 0)
    import os

    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _meminfo() -> int | None:
    with contextlib.suppress(OSError, ValueError, StopIteration):
        text = Path("/proc/meminfo").read_text()
        line = next(line for line in text.splitlines() if line.startswith("MemAvailable"))
        return int(line.split()[1]) * 1024
    return None


def _cgroup() -> int | None:
    """What the container's own limit leaves, where there is one."""
    with contextlib.suppress(OSError, ValueError):
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            return int(limit) - int(Path("/sys/fs/cgroup/memory.current").read_text())
    return None
