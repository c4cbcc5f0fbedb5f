"""Budgets that are no sizes, too small, or more than the machine has: said at once, with what works instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fullbatch
from fullbatch._memory import _total
from fullbatch._memory._total import total_bytes
from fullbatch._run._executor import RANDOM_BYTES
from fullbatch._size import parse_bytes

CPU = torch.device("cpu")


def _loss(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.mix(x).mean(1))


def _norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))


def _plain() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 4))


def _dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.ReLU(), nn.Linear(64, 4))


def _one_sample() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 900, 4))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "norm": (_norm, (12, 1, 8, 8)),
    "plain": (_plain, (24, 64)),
    "dropout": (_dropout, (12, 64)),
    "attention": (_Attention, (6, 12, 16)),
    "one sample": (_one_sample, (1, 1, 32, 32)),
}


def _built(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    create, shape = MODELS[name]
    return create(), (torch.randn(shape), torch.arange(shape[0]) % 4)


_LONG = {"attention"}  # a minute or more of planning


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in _LONG else name for name in MODELS]
)
def test_the_least_budget_is_stated_works_and_is_kept_to(name: str) -> None:
    model, batch = _built(name)
    with pytest.raises(fullbatch.BudgetError) as caught:
        fullbatch.Step(_loss, model, batch, memory=1000)
    smallest = caught.value.smallest
    text = str(caught.value)
    assert f"at least {smallest:,} bytes" in text
    assert f"memory={smallest}" in text
    assert "the peak is at aten." in text, "the moment that sets it"
    with pytest.raises(fullbatch.BudgetError):
        fullbatch.Step(_loss, model, batch, memory=smallest - 1)
    step = fullbatch.Step(_loss, model, batch, memory=smallest)
    step(batch)
    model.zero_grad()
    peak = fullbatch.measure(lambda: step(batch)).peak
    assert peak + step.plan.owned <= smallest
    slack = smallest - peak - step.plan.owned
    assert slack <= max(0.02 * smallest, RANDOM_BYTES), "and it is no more than this plan needs"


def test_the_moment_that_sets_the_least_budget_is_named_with_its_module_and_line() -> None:
    model, batch = _built("norm")
    with pytest.raises(fullbatch.BudgetError) as caught:
        fullbatch.Step(_loss, model, batch, memory=1000)
    where = str(caught.value).split("the peak is at ")[1].splitlines()[0]
    assert any(f"in {name}," in where for name, _ in model.named_modules() if name), where
    assert "test_bad_budgets.py:" in where


SIZES = [
    0, -1, -(2**40), True, False, 0.0, 1.5, 2e9, float("inf"), float("nan"), "", " ", "GiB", "6 Gigs", "-2GiB", "0MiB",
    "0.1B", "1e999GiB", "1,000", "0x10", "six", b"1GiB", [2**30], {"cpu": 2**30}, torch.tensor(2**30), 3j,
]  # fmt: skip


@pytest.mark.parametrize("size", SIZES, ids=repr)
def test_what_is_no_size_is_shown_with_what_is(size: Any) -> None:
    model, batch = _built("plain")
    with pytest.raises(fullbatch.MemorySizeError) as caught:
        fullbatch.Step(_loss, model, batch, memory=size)
    (fault,) = caught.value.faults
    assert repr(size) in fault.got
    assert "6GiB" in fault.expected
    assert "memory=" in fault.next


def test_a_share_of_a_number_is_told_how_to_become_bytes() -> None:
    with pytest.raises(fullbatch.MemorySizeError, match=r"memory=int\(1610612736\.5\)"):
        parse_bytes(0.75 * 2**31 + 0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "expected"), [("1.5GiB", 3 * 2**29), ("2e3MB", 2 * 10**9), ("7", 7), (2**40, 2**40)])
def test_sizes(size: int | str, expected: int) -> None:
    assert parse_bytes(size) == expected


def test_a_budget_above_the_machine_is_refused_with_both_numbers() -> None:
    model, batch = _built("plain")
    total = total_bytes(CPU)
    assert total is not None
    with pytest.raises(fullbatch.MemorySizeError) as caught:
        fullbatch.Step(_loss, model, batch, memory=total + 1)
    (fault,) = caught.value.faults
    assert f"{total + 1:,} bytes" in fault.got
    assert f"{total:,} bytes" in fault.expected
    assert "cpu" in fault.expected
    line = int(fault.next.split("memory=")[1].split(",")[0])
    assert fullbatch.Step(_loss, model, batch, memory=line).plan.budget == line, "the line to type works"
    assert fullbatch.Step(_loss, model, batch, memory=total).plan.budget == total


def test_every_wrong_argument_is_named_at_once() -> None:
    model, batch = _built("plain")
    with pytest.raises(fullbatch.MemorySizeError) as caught:
        fullbatch.Step(_loss, model, batch, memory="6Gig", microbatch=99, plan="/nowhere/plan.json")
    assert len(caught.value.faults) == 3
    assert all(text in str(caught.value) for text in ("'6Gig'", "microbatch=99", "/nowhere/plan.json"))
    broken: Any = "m"
    with pytest.raises(fullbatch.ModelError) as both:
        fullbatch.Step(_loss, broken, batch, memory=-1)
    assert len(both.value.faults) == 2
    with pytest.raises(fullbatch.MemorySizeError) as large:
        fullbatch.Step(_loss, model, batch, memory="900TiB", microbatch=0)
    assert len(large.value.faults) == 2


# ---- how much there is


def _group(root: Path, path: str, name: str, limit: str) -> None:
    folder = root / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(limit + "\n")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(_total, "_GROUPS", tmp_path)
    monkeypatch.setattr(_total, "_MEMBERSHIP", tmp_path / "membership")
    return tmp_path


def test_the_limit_of_a_container_is_what_there_is(groups: Path) -> None:
    physical = total_bytes(CPU)
    assert physical is not None
    (groups / "membership").write_text("0::/jobs/mine\n")
    _group(groups, "jobs", "memory.max", str(2**30))
    _group(groups, "jobs/mine", "memory.max", "max")
    assert total_bytes(CPU) == 2**30, "the group above has a limit"
    _group(groups, "jobs/mine", "memory.max", str(2**29))
    assert total_bytes(CPU) == 2**29
    _group(groups, "jobs/mine", "memory.max", str(2**70))
    _group(groups, "jobs", "memory.max", "max")
    assert total_bytes(CPU) == physical


def test_the_first_version_of_control_groups_has_a_folder_of_its_own(groups: Path) -> None:
    (groups / "membership").write_text("9:name=systemd:/\n4:cpu,memory:/jobs\n0::/\n")
    _group(groups, "memory/jobs", "memory.limit_in_bytes", str(2**28))
    assert total_bytes(CPU) == 2**28


def test_a_container_that_sees_its_group_as_the_root(groups: Path) -> None:
    (groups / "membership").write_text("0::/not/here\n")
    _group(groups, ".", "memory.max", str(2**27))
    assert total_bytes(CPU) == 2**27


def test_a_budget_above_the_limit_of_the_container_is_refused(groups: Path) -> None:
    (groups / "membership").write_text("0::/\n")
    _group(groups, ".", "memory.max", str(2**30))
    model, batch = _built("plain")
    with pytest.raises(fullbatch.MemorySizeError, match="1,073,741,824 bytes"):
        fullbatch.Step(_loss, model, batch, memory="2GiB")


def test_a_device_of_no_known_size_has_no_limit() -> None:
    assert total_bytes(torch.device("meta")) is None
