"""A plan that was found is used again; whatever is wrong with what was remembered, it is searched for anew."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fullbatch
from fullbatch._cost import _cache
from fullbatch._plan import _remembered
from fullbatch._plan._planner import Planner


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def _model(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs in (3, width, width):
        layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("FULLBATCH_CACHE", str(tmp_path))
    _cache._open.clear()
    yield tmp_path
    _cache._open.clear()


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The rooms that were searched."""
    rooms: list[int | None] = []
    choose: Callable[..., Any] = Planner.choose

    def counted(self: Planner, room: int | None, *rest: Any) -> Any:
        rooms.append(room)
        return choose(self, room, *rest)

    monkeypatch.setattr(Planner, "choose", counted)
    return rooms


BATCH = torch.randn(8, 3, 24, 24)


def _step(memory: int, model: nn.Module | None = None, **options: Any) -> fullbatch.Step:
    return fullbatch.Step(_loss, model or _model(), BATCH, memory=memory, **options)


def _tight() -> int:
    """A budget between the least and that of the plain step."""
    with pytest.raises(fullbatch.BudgetError) as caught:
        _step(1000)
    return (caught.value.smallest + _step(1 << 30).plan.plain_peak) // 2


def _as_another_process() -> None:
    _cache._open.clear()
    torch._dynamo.reset()


def test_the_same_step_is_planned_once(searches: list[int | None]) -> None:
    memory = _tight()
    first = _step(memory)
    first(BATCH)
    gradients = [parameter.grad for parameter in first._model.parameters()]
    searches.clear()
    _as_another_process()
    again = _step(memory)
    assert searches == []
    again(BATCH)
    assert all(map(torch.equal, gradients, [parameter.grad for parameter in again._model.parameters()]))
    one, other = first.plan, again.plan
    assert (one.order, one.microbatch, one.overhead, one.bound, one.predicted_peak, one.exact) == (
        other.order, other.microbatch, other.overhead, other.bound, other.predicted_peak, other.exact,
    )  # fmt: skip
    assert one.recomputed > 0


def test_what_is_different_is_searched(searches: list[int | None]) -> None:
    memory = _tight()
    _step(memory)
    for change in (
        lambda: _step(memory + 1000),
        lambda: _step(memory, microbatch=2),
        lambda: _step(memory, _model().eval()),
        lambda: _step(memory + 4096, _model(9)),
    ):
        searches.clear()
        change()
        assert len(searches) == 1


def test_other_threads_search_anew(searches: list[int | None]) -> None:
    memory = _tight()
    _step(memory)
    searches.clear()
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        _step(memory)
    finally:
        torch.set_num_threads(threads)
    assert len(searches) == 1


def _edit(folder: Path, change: Callable[[list[Any]], Any]) -> None:
    path = folder / _cache.PLANS
    kept = json.loads(path.read_text())
    for key, text in kept["entries"].items():
        kept["entries"][key] = json.dumps(change(json.loads(text)))
    path.write_text(json.dumps(kept))


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: None,
        lambda entry: entry[:3],
        lambda entry: [*entry[:4], [body[:-1] for body in entry[4]]],
        lambda entry: [*entry[:4], [["x"], *entry[4][1:]]],
        lambda entry: [entry[0], 0, *entry[2:]],
        lambda entry: [entry[0], "8", *entry[2:]],
    ],
    ids=["nothing", "too short", "tasks are missing", "no task", "no samples", "no number"],
)
def test_an_entry_that_makes_no_sense_is_searched(
    folder: Path, searches: list[int | None], change: Callable[[list[Any]], Any]
) -> None:
    memory = _tight()
    _step(memory)
    _edit(folder, change)
    _as_another_process()
    searches.clear()
    step = _step(memory)
    assert len(searches) == 1
    assert step.verify().ok


def test_a_remembered_plan_that_does_not_fit_is_not_used(
    searches: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = _tight()
    monkeypatch.setattr(_remembered, "digest", lambda *parts: "always the same")
    _step(1 << 30)
    searches.clear()
    assert _step(memory).plan.predicted_peak <= memory
    assert len(searches) == 1


def test_off_remembers_nothing(searches: list[int | None], monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("FULLBATCH_CACHE", "off")
    memory = _tight()
    _step(memory)
    searches.clear()
    _step(memory)
    assert len(searches) == 1
    assert not (folder / _cache.PLANS).exists()
