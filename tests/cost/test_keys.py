"""Names of operators: the same in every process, and different wherever the cost may be."""

from __future__ import annotations

import functools
import operator
from typing import Any

import pytest
import torch

from fullbatch._axis._expand import _first_of, _normalise, _summed
from fullbatch._axis._kernels import filled, then_nothing
from fullbatch._cost._keys import HERE, operator_text
from fullbatch._cost._probe import Prober
from fullbatch._ir import Kernel, Kind, Layout, Origin, Program, Ref, Scaled, Task, Value

from .small_programs import Captured, Fresh, bytes_of, one_operator

aten = torch.ops.aten


def text_of(fn: Any, *args: Any, samples: int = 2, **kwargs: Any) -> str | None:
    program = Program(8, [Value(0, "x", (8,), 4)], [], {}, [])
    return operator_text(Task(0, Kind.LOCAL, (0,), (0,), Origin(), Kernel(fn, args, kwargs)), program, samples)


@torch.library.custom_op("fullbatch_tests::twice", mutates_args=())
def _twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_kernels_of_this_package_and_of_torch_have_names() -> None:
    assert text_of(aten.add.Tensor, Ref(0), 2.5) == "aten.add.Tensor [t0, 2.5] {} x True"
    assert text_of(filled, [2, 3], 0, dtype=torch.bool) == (
        "fullbatch._axis._kernels.filled: [[], None, None] [[2, 3], 0] {dtype: torch.bool} x True"
    )
    for fn in (torch.pow, torch.Tensor.to, _normalise, operator.mul, then_nothing(aten._assert_async.default)):
        found = text_of(fn)
        assert found is not None
        assert " at 0x" not in found


def test_what_another_process_may_know_differently_has_no_name() -> None:
    tensor = torch.ones(2)

    def holds() -> torch.Tensor:
        return tensor

    for fn in (lambda x: x, holds, tensor.add, torch.ops.fullbatch_tests.twice.default, functools.partial(holds)):
        assert text_of(fn) is None
    assert text_of(aten.add.Tensor, Ref(0), object()) is None


def test_a_closure_is_named_with_what_it_remembers() -> None:
    operators = aten.nll_loss_forward.default, aten.nll_loss2d_forward.default
    texts = [text_of(made(operator)) for made in (_first_of, _summed) for operator in operators]
    assert len({*texts}) == 4
    assert None not in texts
    assert text_of(_first_of(operators[0])) == texts[0]


def test_numbers_that_grow_with_the_microbatch_are_written_out() -> None:
    first, second = (text_of(aten.view.default, Ref(0), [Scaled(3), 5], samples=samples) for samples in (2, 4))
    assert first == "aten.view.default [t0, [6, 5]] {} x True"
    assert second == "aten.view.default [t0, [12, 5]] {} x True"


@pytest.mark.parametrize(("one", "other"), [(1, 1.0), (1, True), (0.0, -0.0), (None, "None"), ([1, 2], [12])])
def test_arguments_that_look_alike_differ(one: Any, other: Any) -> None:
    assert text_of(aten.add.Tensor, Ref(0), one) != text_of(aten.add.Tensor, Ref(0), other)


def test_a_cut_is_named_by_the_batch_that_it_cuts() -> None:
    def text(batch: int, samples: int, layout: Layout) -> str | None:
        program = Program(batch, [Value(0, "x", (12,), 4)], [], {}, [])
        return operator_text(Task(0, Kind.SLICE, (0,), (0,), Origin(), layout=layout), program, samples)

    cases = [(4, 2, Layout(0)), (6, 2, Layout(0)), (4, 1, Layout(0)), (4, 2, Layout(0, 2)), (4, 2, Layout(0, 1, 2))]
    assert len({text(*case) for case in cases}) == len(cases)


def test_no_key_of_a_whole_program_holds_an_address(network: Captured) -> None:
    program, _ = network
    texts = [operator_text(task, program, 2) for task in program.tasks]
    assert not [text for text in texts if text is not None and "0x" in text]
    unnamed = [task for task, text in zip(program.tasks, texts, strict=True) if text is None]
    assert all(task.view and not task.inputs for task in unnamed)  # tensors that the graph carries


def test_an_operator_without_a_name_is_measured_and_stays_here(fresh: Fresh) -> None:
    """Two programs, each with a lambda of its own: neither may take the other's bytes."""
    x = torch.ones(100)
    small, large = one_operator(lambda x: x + 1, [Ref(0)], [x]), one_operator(lambda x: x.repeat(3), [Ref(0)], [x])
    for captured, nbytes in ((small, 400), (large, 1200), (small, 400)):
        (_, _, cost), *_ = bytes_of(captured, frozenset({1}))
        assert cost.outs[0].nbytes == nbytes
    assert fresh.sessions == 3
    prober = Prober(*small)
    assert prober.timed(frozenset({1})) is not None
    assert all(key.startswith(HERE) for key in prober._keys.values())
