"""The file of costs: where it is, what is wrong with it, and that a step never is for that."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fullbatch._cost import _cache, _keys
from fullbatch._cost._probe import Prober

from .small_programs import Captured, Fresh, bytes_of, heard


def _saved(folder: Path) -> dict[str, Any]:
    entries: dict[str, Any] = json.loads((folder / _cache.NAME).read_text())["entries"]
    return entries


@pytest.fixture
def reference(network: Captured, fresh: Fresh) -> list[Any]:
    """Bytes that were measured with no file at all."""
    found = bytes_of(network)
    assert fresh.sessions == 1
    return found


def test_a_second_process_measures_nothing(
    network: Captured, fresh: Fresh, reference: list[Any], tmp_path: Path
) -> None:
    assert _saved(tmp_path / "cache")
    fresh.forget()
    assert bytes_of(network) == reference
    assert fresh.sessions == 0


BROKEN = {
    "empty": b"",
    "half": b'{"version": 1, "entries": {"a": "[',
    "binary": bytes(range(256)),
    "another kind": b"[1, 2]",
    "another version": b'{"version": 2, "costs": []}',
    "no entries": b'{"version": 1, "entries": 3}',
    "deep": b"[" * 200_000,
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_file_is_measured_anew_with_one_warning(
    content: bytes, network: Captured, fresh: Fresh, reference: list[Any], tmp_path: Path
) -> None:
    path = tmp_path / "cache" / _cache.NAME
    path.write_bytes(content)
    fresh.forget()
    with heard() as warnings:
        assert bytes_of(network) == reference
        assert bytes_of(network) == reference
    assert fresh.sessions == 1
    (warning,) = warnings
    assert all(word in str(warning.message) for word in (str(path), "cannot be read", "FULLBATCH_CACHE=off"))
    fresh.forget()
    with heard() as warnings:
        assert bytes_of(network) == reference
    assert (warnings, fresh.sessions) == ([], 0)


ENTRIES = ["[", '"x"', "[1]", "[-1,[]]", '[8,[[[2],[1],"float33","cpu",8,null]]]', '[8,[[[2],[1],"int8","cpu",8,99]]]']


@pytest.mark.parametrize("entry", [*ENTRIES, 7, ["a"]], ids=str)
def test_an_entry_that_makes_no_sense_is_measured_anew(
    entry: Any, network: Captured, fresh: Fresh, reference: list[Any], tmp_path: Path
) -> None:
    path = tmp_path / "cache" / _cache.NAME
    path.write_text(json.dumps({"version": 1, "entries": dict.fromkeys(_saved(path.parent), entry)}))
    fresh.forget()
    with heard() as warnings:
        assert bytes_of(network) == reference
    assert len(warnings) == 1
    assert str(path) in str(warnings[0].message)
    fresh.forget()
    assert bytes_of(network) == reference
    assert fresh.sessions == 0


def _raises(code: int) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return refuse


@pytest.mark.parametrize(("owner", "name"), [(_cache.tempfile, "mkstemp"), (os, "fsync"), (os, "replace")])
@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC], ids=["denied", "read-only", "full"])
def test_a_folder_that_cannot_be_written(
    owner: Any, name: str, code: int, network: Captured, fresh: Fresh, reference: list[Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path = tmp_path / "cache" / _cache.NAME
    path.write_text('{"version": 1, "entries": {"of another": "1"}}')
    before = path.read_bytes()
    fresh.forget()
    with monkeypatch.context() as patch, heard() as warnings:
        patch.setattr(owner, name, _raises(code))
        assert bytes_of(network) == reference
        assert bytes_of(network, frozenset({1, 4}))
    (warning,) = warnings
    for word in (str(path), "cannot be written", os.strerror(code), "Set FULLBATCH_CACHE"):
        assert word in str(warning.message)
    assert path.read_bytes() == before
    assert not list(path.parent.glob("*.tmp"))


def test_a_path_below_a_file(network: Captured, fresh: Fresh, reference: list[Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    fresh.forget()
    with pytest.MonkeyPatch.context() as patch, heard() as warnings:
        patch.setenv("FULLBATCH_CACHE", str(tmp_path / "file" / "below"))
        assert bytes_of(network) == reference
    assert len(warnings) == 1
    assert os.strerror(errno.ENOTDIR) in str(warnings[0].message)


@pytest.mark.parametrize("change", ["torch", "threads", "processor", "variable", "source", "dtype"])
def test_what_was_measured_elsewhere_is_another_key(
    change: str, network: Captured, fresh: Fresh, reference: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _saved(tmp_path / "cache")
    fresh.forget()
    with monkeypatch.context() as patch, heard() as warnings:
        threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
        try:
            if change == "torch":
                patch.setattr(torch, "__version__", "99.0")
            elif change == "processor":
                patch.setattr(_keys, "_processor", lambda: "another")
            elif change == "variable":
                patch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
            elif change == "source":
                patch.setattr(_keys, "_source", lambda: "another")
            elif change == "threads":
                torch.set_num_threads(threads + 1)
            else:
                torch.set_default_dtype(torch.float64)
            bytes_of(network)
        finally:
            torch.set_num_threads(threads)
            torch.set_default_dtype(dtype)
    assert fresh.sessions == 1
    assert warnings == []
    after = _saved(tmp_path / "cache")
    assert before.items() < after.items()  # neither took the other's place
    fresh.forget()
    assert bytes_of(network) == reference
    assert fresh.sessions == 0


@pytest.mark.parametrize("value", ["", "off", "OFF", " off "])
def test_off(value: str, network: Captured, fresh: Fresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLBATCH_CACHE", value)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.chdir(tmp_path)
    assert _cache.cost_file() is None
    found = bytes_of(network)
    fresh.forget()
    assert bytes_of(network) == found
    assert fresh.sessions == 1
    assert list(tmp_path.rglob("*")) == []


def test_where_the_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def path() -> Path | None:
        file = _cache.cost_file()
        return None if file is None else file.path

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FULLBATCH_CACHE", str(tmp_path / "named"))
    assert path() == tmp_path / "named" / "costs-v1.json"
    monkeypatch.setenv("FULLBATCH_CACHE", "~/named")
    assert path() == tmp_path / "named" / "costs-v1.json"
    monkeypatch.delenv("FULLBATCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert path() == tmp_path / "xdg" / "fullbatch" / "costs-v1.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert path() == tmp_path / ".cache" / "fullbatch" / "costs-v1.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert path() == tmp_path / ".cache" / "fullbatch" / "costs-v1.json"


def test_the_oldest_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cache, "MOST_ENTRIES", 4)
    for keys in ("abc", "de", "b"):
        file = _cache.CostFile(tmp_path / _cache.NAME)
        for key in keys:
            file.put(key, key.upper())
        file.flush()
    assert _saved(tmp_path) == {"c": '"C"', "d": '"D"', "e": '"E"', "b": '"B"'}


def test_a_full_file_is_read_fast(tmp_path: Path) -> None:
    entry = [123456, [[[16, 64, 112, 112], [802816, 12544, 112, 1], "float32", "cpu", 51380224, None]] * 2]
    writer = _cache.CostFile(tmp_path / _cache.NAME)
    for at in range(_cache.MOST_ENTRIES):
        writer.put(f"{at:032x}", entry)
    writer.flush()
    seconds = []
    for _ in range(3):
        file, begin = _cache.CostFile(tmp_path / _cache.NAME), time.perf_counter()
        assert file.get(f"{7:032x}") == entry
        seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 0.3


def test_known_costs_need_no_counter(network: Captured, fresh: Fresh, reference: list[Any]) -> None:
    """Under a profiler nothing can be measured; what is on disk need not be."""
    fresh.forget()
    with torch.profiler.profile():
        assert bytes_of(network) == reference
        prober = Prober(*network)
        assert prober.costs(frozenset({1})) is None
    assert prober.notes == ("operators were not measured: a profiler is running",)
    assert fresh.sessions == 1
