"""`timed=True`: the same proposals, their times from operators that were run on this machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import fullbatch
from fullbatch import _captured
from fullbatch._cost import _time
from fullbatch._plan._plan import TIMED
from propose.proposed import CASES, MEMORY


@pytest.fixture(autouse=True)
def _nothing_timed_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No seconds from before, and time for every operator, however slow the machine."""
    monkeypatch.setattr(_time, "_SECONDS", {})
    monkeypatch.setattr(_captured, "_SECONDS", 600.0)


def _proposed(timed: bool) -> fullbatch.Proposals:
    """Of the case whose plans are the same whatever an operator takes: all of the batch at once, nothing made again."""
    case = CASES["wide"]()
    memory = MEMORY["wide"]
    return fullbatch.propose(case.loss_fn, case.model, case.batch, memory=memory, optimizer=case.optimizer, timed=timed)


def _times(found: fullbatch.Proposals) -> dict[str, float]:
    assert found.rows
    assert all(row.time is not None for row in found.rows)
    return {row.what: row.time for row in found.rows if row.time is not None}


def test_the_same_is_proposed_by_seconds_that_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: list[float] = []
    measure = _time.seconds_of

    def kept(*given: Any) -> float:
        seconds.append(measure(*given))
        return seconds[-1]

    monkeypatch.setattr(_time, "seconds_of", kept)
    estimated = _proposed(timed=False)
    assert seconds == []
    found = _proposed(timed=True)
    assert len(seconds) > 5 and min(seconds) > 0
    assert min(_times(found).values()) > 0
    assert [replace(row, time=None, plan=None) for row in found.rows] == [
        replace(row, time=None, plan=None) for row in estimated.rows
    ]
    assert (found.peak, found.planned, found.least) == (estimated.peak, estimated.planned, estimated.least)
    for one, said in ((found, "seconds of operators timed alone"), (estimated, "operations and bytes")):
        assert one.timed == (one is found)
        assert f"predicted from {said}" in " ".join(str(one).split())
        assert one.plan is not None
        assert (TIMED in one.plan.notes) == (one is found)


def test_a_ratio_is_of_the_seconds_that_operators_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each takes a second, half the bytes are no less time, and more operators are more."""
    estimated = _times(_proposed(timed=False))
    monkeypatch.setattr(_time, "seconds_of", lambda *_: 1.0)
    found = _times(_proposed(timed=True))
    assert found["weights in bfloat16"] == pytest.approx(1.0, abs=1e-12)
    assert estimated["weights in bfloat16"] < 0.95
    assert found["autocast to bfloat16"] > 1.1
