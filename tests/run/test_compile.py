"""compile=True: the same step to rounding, within the peak that was predicted without it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fullbatch
from cases.reference import buffers_of, grads_of
from fullbatch._errors import CompileError
from fullbatch._run import _fuse, _inductor
from fullbatch._run._executor import Executor
from fullbatch._run._source import Fused
from run.support import Watched, build


@pytest.fixture(autouse=True)
def _however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors of a few elements no compiled call repays itself."""
    monkeypatch.setattr(_fuse, "_CALL", 0)


class _Block(nn.Module):
    """Layer norm, a written-out activation and a residual: what there is to fuse between matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Any) -> Any:
        h = self.up(self.norm(x))
        return x + self.down(0.5 * h * (1.0 + torch.tanh(0.8 * (h + 0.04 * h.pow(3)))))


def _blocks() -> tuple[Any, Any]:
    return nn.Sequential(_Block(), _Block(), nn.Linear(8, 3)), (torch.randn(7, 5, 8), torch.randint(0, 3, (7,)))


def _norms() -> tuple[Any, Any]:
    model = nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.SiLU(), nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6))
    return nn.Sequential(model, nn.SiLU(), nn.Flatten(2), nn.Linear(16, 3)), (
        torch.randn(7, 2, 8, 8), torch.randint(0, 3, (7,)),
    )  # fmt: skip


def _draws() -> tuple[Any, Any]:
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.4), nn.LayerNorm(16), nn.SiLU(), nn.Linear(16, 3))
    return model, (torch.randn(7, 5, 8), torch.randint(0, 3, (7,)))


MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {"layer norm": _blocks, "batch norm": _norms, "dropout": _draws}


def _loss(model: Any, batch: Any) -> Any:
    return F.cross_entropy(model(batch[0]).mean(1), batch[1])


def _fused(step: Watched) -> list[Fused]:
    return [item for items in step.executor._generated._items for item in items if isinstance(item, Fused)]


def _state(step: Any, model: Any, batch: Any) -> dict[str, torch.Tensor]:
    """What one step from the same seed returns and leaves behind."""
    start = {name: buffer.clone() for name, buffer in buffers_of(model).items()}
    model.zero_grad()
    torch.manual_seed(5)
    found = {
        "loss": step(batch),
        **{f"grad {name}": grad for name, grad in grads_of(model).items()},
        **buffers_of(model),
    }
    for name, buffer in model.named_buffers():
        buffer.copy_(start[name])
    return found


def _close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Each to 1e-12 of the largest of its kind: a gradient that cancels to nothing has no relative error."""
    assert a.keys() == b.keys()
    largest = max(float(value.abs().max()) for name, value in b.items() if name.startswith("grad"))
    for name, value in a.items():
        scale = largest if name.startswith("grad") else max(float(b[name].abs().max()), 1e-300)
        assert float((value - b[name]).abs().max()) <= 1e-12 * scale, name


@pytest.mark.parametrize("name", MODELS)
def test_equal_to_rounding_and_within_the_predicted_peak(name: str) -> None:
    model, batch = MODELS[name]()
    plain = Watched(_loss, model, batch, microbatch=3)
    step = Watched(_loss, model, batch, microbatch=3, compile=True)
    first = _state(step, model, batch)
    assert len(_fused(step)) >= 2
    assert all(len(group.tasks) >= 2 for group in _fused(step))
    expected = _state(plain, model, batch)
    _close(first, expected)
    _close(_state(step, model, batch), expected)
    peaks = []
    for each in (step, plain):
        model.zero_grad()
        peaks.append(fullbatch.measure(lambda each=each: each(batch)).peak)
    assert peaks[0] <= peaks[1] <= plain.plan.activations == step.plan.activations


def test_batch_normalisation_is_fused_with_its_activation() -> None:
    model, batch = _norms()
    step = Watched(_loss, model, batch, microbatch=3, compile=True)
    step(batch)
    names = [{step.executor.program.by_id[task].kernel.name for task in group.tasks} for group in _fused(step)]
    assert any("_normalise" in group and "aten.silu.default" in group for group in names)
    assert not any(re.search("convolution|mm", kernel) for group in names for kernel in group)


def test_the_certificate_is_that_of_the_compiled_step() -> None:
    model, batch = _blocks()
    step = Watched(_loss, model, batch, microbatch=3, compile=True)
    step(batch)
    found = step.verify()
    assert found.ok
    assert found.gradient_error <= 1e-12
    assert step._twin_step(model, batch, 3)._compile


def test_the_plan_says_so() -> None:
    model, batch = _blocks()
    assert _fuse.NOTE in Watched(_loss, model, batch, microbatch=3, compile=True).plan.notes
    assert _fuse.NOTE not in Watched(_loss, model, batch, microbatch=3).plan.notes


@pytest.mark.parametrize("change", ["more bytes at work", "more bytes left", "other strides", "an alias less"])
def test_a_group_that_would_not_keep_the_budget_stays_as_it_is(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = _blocks()
    found = build(_loss, model, batch, microbatch=3)
    asked: list[str] = []

    def compiled(written: Any) -> Any:
        real = written.behaviour(written.fn)
        first = real.outputs[0]
        asked.append(change)
        if change == "more bytes at work":
            return written.fn, replace(real, peak=real.peak + 10**9)
        if change == "more bytes left":
            other = replace(first, nbytes=first.nbytes + 8)
        elif change == "other strides":
            other = replace(first, form=replace(first.form, stride=tuple(2 * step for step in first.form.stride)))
        else:
            other = replace(first, shows=first.shows + 1)
        return written.fn, replace(real, outputs=(other, *real.outputs[1:]))

    monkeypatch.setattr(_fuse, "_compiled", compiled)
    executor = Executor(found.program, found.schedule, compile=True)
    results = executor.run(found.inputs)
    assert asked
    assert not [item for items in executor._generated._items for item in items if isinstance(item, Fused)]
    expected = Executor(found.program, found.schedule).run(found.inputs)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_a_group_too_small_to_repay_its_call_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    sizes = {}
    for width in (8, 4096):
        model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.SiLU(), nn.Linear(width, 3))
        found = build(_loss, model, (torch.randn(4, 5, 8), torch.randint(0, 3, (4,))), microbatch=2)
        monkeypatch.setattr(_fuse, "_compiled", lambda written: (written.fn, written.behaviour(written.fn)))
        executor = Executor(found.program, found.schedule, compile=True)
        executor.run(found.inputs)
        fused = [item for items in executor._generated._items for item in items if isinstance(item, Fused)]
        sizes[width] = len(fused)
    assert sizes[8] == 0 < sizes[4096]


def test_while_a_profiler_runs_nothing_is_compiled_and_later_it_is() -> None:
    model, batch = _blocks()
    step = Watched(_loss, model, batch, microbatch=3, compile=True)
    fullbatch.measure(lambda: step(batch))
    assert not _fused(step)
    step(batch)
    assert _fused(step)


@pytest.mark.parametrize("settings", [{"PATH": ""}, {"CXX": "no-such-compiler"}], ids=str)
def test_without_a_compiler_it_says_what_to_install(settings: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = _blocks()
    monkeypatch.delenv("CXX", raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CompileError, match=r"apt-get install g\+\+") as caught:
        fullbatch.Step(_loss, model, batch, microbatch=3, compile=True)
    assert isinstance(caught.value, fullbatch.FullbatchError)
    assert fullbatch.Step(_loss, model, batch, microbatch=3)(batch).isfinite()


def test_a_compiler_that_fails_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = _draws()
    step = Watched(_loss, model, batch, microbatch=3, compile=True)

    def fails(fn: Any, inputs: Any) -> Any:
        raise RuntimeError("internal compiler error")

    before = torch.get_rng_state()
    with monkeypatch.context() as patched:
        patched.setattr(_inductor._torch, "compiled", fails)
        patched.setattr(_fuse, "_COMPILED", {})
        with pytest.raises(CompileError, match="internal compiler error"):
            step(batch)
    assert torch.equal(before, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    assert step(batch).isfinite()
    assert _fused(step)


def test_blocks_that_repeat_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for depth in (4, 8):
        model = nn.Sequential(*[_Block() for _ in range(depth)], nn.Linear(8, 3))
        batch = torch.randn(6, 5, 8), torch.randint(0, 3, (6,))
        found = build(_loss, model, batch, microbatch=2)
        keys: list[Any] = []

        def noted(written: Any, keys: list[Any] = keys) -> Any:
            keys.append(written.key)
            return written.fn, written.behaviour(written.fn)

        monkeypatch.setattr(_fuse, "_compiled", noted)
        Executor(found.program, found.schedule, compile=True).run(found.inputs)
        counts.append((len(keys), len(set(keys))))
    assert counts[1][0] > counts[0][0]
    assert counts[1][1] - counts[0][1] <= 2 < counts[1][0] - counts[0][0]  # where the segments of a body meet


def test_an_error_in_a_group_names_its_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = _blocks()
    found = build(_loss, model, batch, microbatch=3)

    def breaks(*tensors: Any) -> Any:
        raise ValueError("broken group")

    monkeypatch.setattr(_fuse, "_compiled", lambda written: (breaks, written.behaviour(written.fn)))
    executor = Executor(found.program, found.schedule, compile=True)
    with pytest.raises(ValueError, match="broken group") as caught:
        executor.run(found.inputs)
    (note,) = caught.value.__notes__
    assert "the compiled group of" in note
    assert "test_compile.py:" in note
