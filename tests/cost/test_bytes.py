"""What is known without running an operator is what running it says, and dummies are what they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fullbatch import _torch, measure
from fullbatch._cost import _probe
from fullbatch._cost._forms import Meta
from fullbatch._cost._operator import SAME_FORM, without_running
from fullbatch._cost._probe import Prober
from fullbatch._ir import Ref

from .small_programs import Captured, Fresh, bytes_of, one_operator, sharded

aten = torch.ops.aten
ONE = frozenset({1})

LAYOUTS = {
    "vector": lambda dtype: torch.ones(70_001, dtype=dtype),
    "matrix": lambda dtype: torch.ones(33, 65, dtype=dtype),
    "transposed": lambda dtype: torch.ones(65, 33, dtype=dtype).t(),
    "images": lambda dtype: torch.ones(3, 8, 31, 17, dtype=dtype),
    "channels last": lambda dtype: torch.ones(3, 8, 31, 17, dtype=dtype).contiguous(memory_format=torch.channels_last),
    "permuted": lambda dtype: torch.ones(5, 7, 64, 9, dtype=dtype).permute(0, 2, 3, 1),
    "large": lambda dtype: torch.ones(1100, 1000, dtype=dtype),
}


def _arguments(fn: Any) -> list[Any]:
    refs: list[Any] = [Ref(at) for at in range(SAME_FORM[fn])]
    return [*refs, 0] if fn is aten.threshold_backward.default else refs


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_element_wise_operators_do_as_their_kind_says(
    layout: str, dtype: torch.dtype, threads: int, fresh: Fresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for fn, count in SAME_FORM.items():
            x = LAYOUTS[layout](dtype)
            captured = one_operator(fn, _arguments(fn), [x] * count)
            known = Prober(*captured)
            cost = known.costs(ONE)
            assert cost is not None
            assert fresh.sessions == 0, fn
            with monkeypatch.context() as patch:
                patch.setattr(_probe, "without_running", lambda task, metas: None)
                fresh.forget()
                measured = Prober(*captured)
                truth = measured.costs(ONE)
                assert truth is not None
                assert fresh.sessions == 1, fn
            (task,) = captured[0].tasks
            assert cost(task, 1) == truth(task, 1), fn
            assert known._metas == measured._metas, fn
            fresh.forget()
    finally:
        torch.set_num_threads(before)


def _declined() -> dict[str, Captured]:
    x = torch.ones(8, 16)
    two = [Ref(0), Ref(1)]
    return {
        "broadcast": one_operator(aten.add.Tensor, two, [x, torch.ones(16)]),
        "two layouts": one_operator(aten.add.Tensor, two, [x, torch.ones(16, 8).t()]),
        "two dtypes": one_operator(aten.add.Tensor, two, [x, x.double()]),
        "integers": one_operator(aten.div.Tensor, two, [x.int(), x.int()]),
        "half": one_operator(aten.tanh.default, [Ref(0)], [x.bfloat16()]),
        "a number": one_operator(aten.add.Tensor, [Ref(0), 1.5], [x]),
        "a gap": one_operator(aten.relu.default, [Ref(0)], [torch.ones(8, 32)[:, :16]]),
        "expanded": one_operator(aten.relu.default, [Ref(0)], [torch.ones(8, 1).expand(8, 16)]),
        "one long": one_operator(aten.relu.default, [Ref(0)], [torch.ones(8, 1)]),
        "empty": one_operator(aten.relu.default, [Ref(0)], [torch.ones(0, 4)]),
        "scalar": one_operator(aten.relu.default, [Ref(0)], [torch.ones(())]),
        "others": one_operator(aten.cumsum.default, [Ref(0), 0], [x]),
    }


@pytest.mark.parametrize("name", _declined())
def test_all_else_is_run(name: str, fresh: Fresh) -> None:
    program, inputs = _declined()[name]
    assert without_running(program.tasks[0], [Meta.of(x) for x in inputs.values()]) is None
    bytes_of((program, inputs), ONE)
    assert fresh.sessions == 1


def test_bytes_are_those_of_the_operator_itself(fresh: Fresh) -> None:
    """A product of transposed halves allocates more than its output; a slice allocates nothing."""
    x = torch.ones(12, 300)
    captured = sharded(aten.cumsum.default, [Ref(0), 1], x)
    for _, size, cost in bytes_of(captured, frozenset({3, 12}))[2:4]:
        alone = measure(lambda n=size: aten.cumsum.default(x[:n], 1)).peak
        assert (cost.peak, cost.outs[0].nbytes) == (alone, size * 300 * 4)
    assert bytes_of(captured, frozenset({3}))[0][2].peak == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("size", [0, 3, 1000])
def test_a_dummy_has_the_form_and_is_zero(dtype: torch.dtype, size: int) -> None:
    for tensor in (torch.ones(size, 512, dtype=dtype), torch.ones(512, size, dtype=dtype).t()):
        dummy = Meta.of(tensor).dummy()
        assert Meta.of(dummy) == Meta.of(tensor)
        assert dummy.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()
        assert not _torch.is_view(dummy)
        assert not dummy.to(torch.complex128).any()
    gap = torch.ones(1000, 700, dtype=dtype)[:, :512]
    assert Meta.of(Meta.of(gap).dummy()) == Meta.of(gap)


def test_a_large_dummy_takes_no_memory_of_torch() -> None:
    meta = Meta.of(torch.empty(4000, 1000, device="cpu"))
    assert measure(meta.dummy).peak == 0
    assert measure(meta.filled).peak == 16_000_000


def test_a_limit_on_address_space_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("fullbatch._cost._forms.mmap.mmap", refuse)
    meta = Meta.of(torch.ones(1000, 1000))
    assert Meta.of(meta.dummy()) == meta


def test_an_interrupted_probe_leaves_nothing_half_known(network: Captured, fresh: Fresh) -> None:
    whole = bytes_of(network)
    fresh.forget()
    prober = Prober(*network)
    run, calls = prober._run, []

    def interrupted(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 20:
            raise KeyboardInterrupt
        return run(*args)

    prober._run = interrupted  # type: ignore[method-assign]
    # Forget the file too: what is tested is what stays in the process.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLBATCH_CACHE", "off")
        with pytest.raises(KeyboardInterrupt):
            prober.costs(frozenset({2, 3, 6}))
        cost = prober.costs(frozenset({2, 3, 6}))
        assert cost is not None
        assert [cost(task, size) for task, size in ((network[0].by_id[at], size) for at, size, _ in whole)] == [
            found for _, _, found in whole
        ]
