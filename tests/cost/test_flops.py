"""Operations of an operator: torch's formulas are the reference where they are right, else what it is made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fullbatch._torch import flops_of

aten = torch.ops.aten


def _counted(target: Any, *args: Any) -> int:
    return flops_of(target, args, {}, target(*args))


def _convolution(groups: int, *, transposed: bool, mask: tuple[bool, bool], batch: int = 3) -> int:
    """The backward of a convolution of 8 channels to 8 in so many groups, as it is counted here."""
    source = torch.empty(batch, 8, 7, 6, device="meta")
    weight = torch.empty(8, 8 // groups, 3, 3, device="meta")
    rest = ([2, 2], [1, 1], [1, 1], transposed, [0, 0], groups)
    grad = aten.convolution.default(source, weight, None, *rest)
    return _counted(aten.convolution_backward.default, grad, source, weight, None, *rest, [*mask, False])


def _apart(groups: int, *, transposed: bool, mask: tuple[bool, bool], batch: int = 3) -> int:
    """The same as one ungrouped convolution for each group, by torch's counter."""
    width = 8 // groups
    source = torch.empty(batch, width, 7, 6, device="meta")
    weight = torch.empty(width, width, 3, 3, device="meta")
    rest = ([2, 2], [1, 1], [1, 1], transposed, [0, 0], 1)
    grad = aten.convolution.default(source, weight, None, *rest)
    with FlopCounterMode(display=False) as counter:
        aten.convolution_backward.default(grad, source, weight, None, *rest, [*mask, False])
    return groups * counter.get_total_flops()


@pytest.mark.parametrize("mask", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_the_backward_of_groups_is_that_of_as_many_convolutions(
    groups: int, transposed: bool, mask: tuple[bool, bool]
) -> None:
    found = _convolution(groups, transposed=transposed, mask=mask)
    assert found == _apart(groups, transposed=transposed, mask=mask) > 0


def test_attention_on_a_cpu_counts_as_its_matrix_products() -> None:
    shapes = [(2, 3, 10, 8), (2, 3, 14, 8), (2, 3, 14, 8)]
    query, key, value = (torch.randn(shape, requires_grad=True) for shape in shapes)
    with FlopCounterMode(display=False) as forward, sdpa_kernel(SDPBackend.MATH):
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert _counted(attention, query, key, value) == forward.get_total_flops() > 0

    made, sums = attention(query, key, value)
    back = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    found = flops_of(back, (made, query, key, value, made, sums, 0.0, False), {}, None)
    assert found == backward.get_total_flops() + forward.get_total_flops() // 2  # its scores are made again


def test_what_has_no_formula_counts_nothing() -> None:
    assert _counted(aten.relu.default, torch.randn(3)) == 0
