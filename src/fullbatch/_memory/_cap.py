"""A counting, capped CPU allocator, built on demand from ``cap.cpp`` beside this file.

Limit that forced it: PyTorch keeps no count of CPU memory and has no way to refuse a CPU allocation (CUDA has
``set_per_process_memory_fraction``, the CPU has nothing), so "this training step fits 2 GiB" cannot be shown on a CPU.
Shape of the answer: a ``c10::Allocator`` put in the place of the default one through the public ``c10::SetAllocator``.
It is a plain shared library with a C interface called through ctypes, because that compiles in about a second against
the wheel's own headers, where an extension module with Python bindings takes half a minute.

What is counted: every CPU byte that goes through c10 while installed, at the requested size: tensors, gradients,
saved activations, oneDNN's scratch memory. What is not: tensors made before ``install()``, Python objects, and the
buffers that MKL, OpenBLAS or numpy take with their own malloc.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import ClassVar

import torch
from torch.utils.cpp_extension import include_paths, library_paths

from fullbatch._errors import MeasureError

_SOURCE = Path(__file__).with_name("cap.cpp")


def cache_folder() -> Path:
    """The folder for compiled helpers: the platform's user cache, or the temporary folder where that is read-only."""
    if os.environ.get("XDG_CACHE_HOME"):
        base = Path(os.environ["XDG_CACHE_HOME"])
    elif sys.platform == "darwin":
        base = Path("~/Library/Caches").expanduser()
    else:
        base = Path("~/.cache").expanduser()
    for folder in (base / "fullbatch", Path(tempfile.gettempdir()) / f"fullbatch-{os.getuid()}"):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # A shared temporary folder may hold a directory of that name planted by somebody else: loading a library
            # from it would run their code.
            if folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK | os.X_OK):
                return folder
        except OSError:
            continue
    return Path(tempfile.mkdtemp(prefix="fullbatch-"))


def _compiler() -> str | None:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next((path for path in map(shutil.which, names) if path), None)


def _build() -> Path:
    """Compiles ``cap.cpp`` unless the cache already has it; returns the library's path or raises MeasureError."""
    if sys.platform not in ("linux", "darwin"):
        raise MeasureError.of(
            "The counting allocator has no build for this system.", got=sys.platform, expected="linux or darwin"
        )
    compiler = _compiler()
    if compiler is None:
        raise MeasureError.of(
            "No C++ compiler found; the counting allocator is built on first use.",
            expected="$CXX, c++, g++ or clang++ on the PATH",
            next="install a compiler (Debian: apt-get install g++), or set CXX",
        )
    abi = int(torch.compiled_with_cxx11_abi())
    flags = ["-std=c++17", "-O2", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    parts = [_SOURCE.read_text(encoding="utf-8"), torch.__version__, str(torch.version.git_version), version, *flags]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    library = cache_folder() / f"cap-{key}.so"
    if library.exists():
        return library
    # Built under another name and moved into place, so that a process starting meanwhile never loads half a file.
    with tempfile.TemporaryDirectory(dir=library.parent) as work:
        output = Path(work) / library.name
        command = [compiler, *flags, str(_SOURCE), "-o", str(output)]
        command += [f"-I{path}" for path in include_paths()] + [f"-L{path}" for path in library_paths()] + ["-lc10"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise MeasureError.of(
                "The counting allocator could not be built.", got=f"{compiler} said:\n{done.stderr[-2000:]}"
            )
        os.replace(output, library)
    return library


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(_build()))  # libc10 is found by name: torch has it loaded already
    except OSError as error:
        raise MeasureError.of("The counting allocator was built but does not load.", got=str(error)) from error
    library.fullbatch_set_cap.argtypes = [ctypes.c_int64]
    library.fullbatch_record.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    for name in ("live", "peak", "refused", "cap", "recorded", "now_ns"):
        getattr(library, f"fullbatch_{name}").restype = ctypes.c_int64
    return library


@functools.cache
def available() -> str | None:
    """None where the counting allocator can be used, else the reason why not, in words. Builds it if need be."""
    try:
        _library()
    except MeasureError as error:
        return str(error)
    return None


class CountingAllocator:
    """The process's counting CPU allocator; every instance is a handle on the same one.

    All sizes are bytes. Making an instance builds or loads the library and raises
    :class:`fullbatch._errors.MeasureError` where ``available()`` gives a reason. ``install()`` concerns the whole
    process and every thread in it. Tensors that exist before it stay valid, but are never counted.
    """

    # Kept for good: a thread caught inside the recording may still write to an old buffer.
    _buffers: ClassVar[list[torch.Tensor]] = []

    def __init__(self) -> None:
        self._lib = _library()

    def install(self) -> CountingAllocator:
        """Makes it the allocator of all new CPU tensors. Doing it twice changes nothing."""
        self._lib.fullbatch_install()
        return self

    def uninstall(self) -> None:
        """Gives new tensors back to the previous allocator; tensors of ours are still counted down when freed."""
        self._lib.fullbatch_uninstall()

    @property
    def installed(self) -> bool:
        """Whether new CPU tensors come from this allocator."""
        return bool(self._lib.fullbatch_installed())

    @property
    def live(self) -> int:
        """Bytes held now."""
        return int(self._lib.fullbatch_live())

    @property
    def peak(self) -> int:
        """The most bytes held at once since ``install()`` or the latest ``reset_peak()``."""
        return int(self._lib.fullbatch_peak())

    def reset_peak(self) -> None:
        """Starts ``peak`` again from what is live."""
        self._lib.fullbatch_reset_peak()

    @property
    def refused(self) -> int:
        """The size in bytes of the latest request that the cap refused; 0 if none was."""
        return int(self._lib.fullbatch_refused())

    @property
    def cap(self) -> int | None:
        """The most bytes that may be live; a request beyond it raises ``torch.OutOfMemoryError``. None: no cap."""
        value = int(self._lib.fullbatch_cap())
        return None if value < 0 else value

    @cap.setter
    def cap(self, nbytes: int | None) -> None:
        if nbytes is not None and nbytes < 0:
            raise ValueError(f"a cap is a number of bytes, 0 or more, or None; got {nbytes}")
        self._lib.fullbatch_set_cap(-1 if nbytes is None else nbytes)

    def record(self, capacity: int = 1 << 20) -> None:
        """Starts a timeline of at most ``capacity`` events (16 bytes each, allocated now, outside the count)."""
        # numpy's malloc, because a torch buffer would be counted and could itself be refused by the cap.
        import numpy as np

        buffer = torch.from_numpy(np.zeros((capacity, 2), dtype=np.int64))
        self._buffers.append(buffer)
        self._start_ns = int(self._lib.fullbatch_now_ns())
        self._start_live = self.live
        self._lib.fullbatch_record(buffer.data_ptr(), capacity)

    def timeline(self) -> list[tuple[float, int]]:
        """Stops the recording and returns its (seconds since ``record()``, live bytes) points, oldest first.

        Events past the capacity are dropped. Empty if nothing was recorded.
        """
        if not self._buffers:
            return []
        buffer = self._buffers[-1]
        kept = min(int(self._lib.fullbatch_recorded()), buffer.shape[0])
        self._lib.fullbatch_record(None, 0)
        rows = sorted(buffer[:kept].numpy().tolist(), key=lambda row: row[0])
        return [(0.0, self._start_live), *(((at - self._start_ns) / 1e9, live) for at, live in rows)]
