"""What was learnt outlives the process: costs in one JSON file, plans in another.

Running each operator once and searching for a plan takes seconds for a large network, at every start of a training
script. What was learnt is kept in `costs-v1.json` and `plans-v1.json`, in `$FULLBATCH_CACHE`, else
`$XDG_CACHE_HOME/fullbatch`, else `~/.cache/fullbatch`. Keys name all that an entry depends on (`_keys`), so that
another torch or machine finds none of them. Whatever is wrong with a file, its entries are made anew and the step goes
on; one warning a process says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows: there writers do not wait for each other, and the last one wins
    fcntl = None  # type: ignore[assignment]

VERSION = 1
NAME = f"costs-v{VERSION}.json"
PLANS = f"plans-v{VERSION}.json"
MOST_ENTRIES = 20_000
"""Costs that a file keeps, of about 200 bytes each; the oldest make room."""
MOST_PLANS = 100
"""The same for plans, of about 10 KB each."""
_WAIT = 2.0
"""Seconds to wait for another process that is writing."""

_open: dict[Path, CostFile] = {}
_warned = False


def cost_file() -> CostFile | None:
    """The file of this process; None where FULLBATCH_CACHE is empty or `off`, or there is no home folder."""
    return _file(NAME, MOST_ENTRIES)


def plan_file() -> CostFile | None:
    """The same for plans."""
    return _file(PLANS, MOST_PLANS)


def _file(name: str, most: int) -> CostFile | None:
    path = _path(name)
    return None if path is None else _open.setdefault(path, CostFile(path, most))


def _path(name: str) -> Path | None:
    chosen = os.environ.get("FULLBATCH_CACHE")
    if chosen is not None:
        return None if chosen.strip().lower() in ("", "off") else Path(os.path.expanduser(chosen)).absolute() / name
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the XDG specification has a relative one ignored
        return Path(base) / "fullbatch" / name
    folder = os.path.expanduser("~")
    return Path(folder) / ".cache" / "fullbatch" / name if os.path.isabs(folder) else None


class CostFile:
    """What a file holds, read at the first question; `put` values are written by `flush`."""

    def __init__(self, path: Path, most: int | None = None) -> None:
        self.path, self._most = path, MOST_ENTRIES if most is None else most
        self._entries: dict[str, Any] | None = None
        self._fresh: dict[str, str] = {}
        self._writable = True

    def get(self, key: str) -> Any:
        """The value under `key`, or None."""
        if self._entries is None:
            self._entries = self._read()
        text = self._fresh.get(key, self._entries.get(key))
        if text is None:
            return None
        try:
            return json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            self.reject(key, _cause(error))
            return None

    def put(self, key: str, value: Any) -> None:
        """Keeps a value that JSON can hold."""
        # As text: twenty thousand strings are read in a tenth of the time of as many lists.
        self._fresh[key] = json.dumps(value, separators=(",", ":"))

    def reject(self, key: str, cause: str) -> None:
        """Forgets a value that makes no sense to the one who asked for it."""
        for entries in (self._entries, self._fresh):
            if entries is not None:
                entries.pop(key, None)
        self._complain("read", cause)

    def flush(self) -> None:
        """Writes what was put, together with what other processes have written meanwhile."""
        if not self._fresh or not self._writable:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _alone(self.path.with_suffix(".lock")):
                merged = self._read()
                for key, value in self._fresh.items():
                    merged.pop(key, None)  # what is written again becomes the newest
                    merged[key] = value
                for key in list(merged)[: max(len(merged) - self._most, 0)]:
                    del merged[key]
                _replace(self.path, merged)
        except OSError as error:
            self._writable = False
            self._complain("written", _cause(error))
            return
        self._entries, self._fresh = merged, {}

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self.path.read_bytes())
            if not isinstance(found, dict) or "version" not in found:
                raise ValueError("it is no file of fullbatch")
            if found["version"] != VERSION:
                raise ValueError(f"it is of version {found['version']!r}, not {VERSION}")
            entries = found.get("entries")
            if not isinstance(entries, dict):
                raise ValueError("it holds no entries")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            self._complain("read", _cause(error))
            return {}
        return entries

    def _complain(self, done: str, cause: str) -> None:
        global _warned
        if _warned:
            return
        _warned = True
        next = {
            "read": "The file is written anew; if this comes again, delete it or set FULLBATCH_CACHE=off.",
            "written": "Set FULLBATCH_CACHE to a folder with room that you may write, or FULLBATCH_CACHE=off.",
        }
        warnings.warn(
            f"fullbatch: the measured costs or plans in {self.path} cannot be {done} ({cause}). "
            f"Nothing is wrong with the step: they are measured or made anew. {next[done]}",
            RuntimeWarning,
            stacklevel=2,
        )


def _cause(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}"


def _replace(path: Path, entries: dict[str, Any]) -> None:
    """Writes under another name and moves it into place, so that no one reads half a file."""
    text = json.dumps({"version": VERSION, "entries": entries}, separators=(",", ":"))
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Holds off other writers, who would drop what is written between their read and their write.

    Where another one holds it for too long, or the file system knows no locks, the file is written all the same: at
    worst some costs are measured once more.
    """
    with open(lock, "a") as file:
        if fcntl is not None:
            until = time.monotonic() + _WAIT
            while time.monotonic() < until:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.01)
                except OSError:
                    break
        yield
