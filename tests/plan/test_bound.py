"""The least time that is printed beside a plan: below what any schedule takes, and above nothing where it can be."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cases.watched import Watched
from fullbatch._plan._bound import least_time
from fullbatch._plan._simulate import simulate
from fullbatch._plan._sizes import microbatch_sizes


def _step(norm: type[nn.Module] | None, batch: int = 12, *tokens: int) -> Watched:
    torch.manual_seed(0)
    layers = [m for _ in range(5) for m in (nn.Linear(64, 64), *([norm(64)] if norm else []), nn.Tanh())]
    return Watched(
        lambda m, b: m(b).square().mean(), nn.Sequential(*layers), torch.randn(batch, *tokens, 64), microbatch=1
    )


@pytest.mark.parametrize(("norm", "batch"), [(None, 12), (None, 7), (nn.BatchNorm1d, 12), (nn.BatchNorm1d, 7)])
def test_no_schedule_of_any_microbatch_takes_less(norm: type[nn.Module] | None, batch: int) -> None:
    """Also none of a size that is not among those that were looked at: 5 of 12, or 6 of 7 with one left over.

    Of 7 in 4 and 3 the second finds the sums of the first beside it, but is smaller: both have as much as fits.
    """
    step = _step(norm, batch, *([96] if batch == 7 and norm is None else []))
    planner = step.captured._planner
    assert 5 not in microbatch_sizes(12)
    tried = 0
    for size in range(1, batch):
        side = planner._split
        room = side.hold_all(size).peak
        for share in (1.0, 0.8, 0.6):
            for candidate in side.fit(size, int(share * room), side.estimate):
                taken = candidate.time / planner.plain_time - 1
                peak = simulate(side.program, candidate.schedule, side.estimate).peak
                assert planner._bound(peak, size) <= taken + 1e-9, (size, share)
                tried += 1
    assert tried > (40 if batch == 12 else 20)


def test_it_counts_the_weights_that_smaller_microbatches_read_again() -> None:
    """Where only single samples fit, all weights are read twelve times, and no plan can help it."""
    step = _step(None)
    planner, batch = step.captured._planner, step.plan.batch
    split = planner._split
    sizes = [size for size in microbatch_sizes(batch) if size < batch]
    room = split.hold_all(1).peak
    least, most = least_time(split, sizes, room), split.hold_all(1).time
    assert split.work + split.shared * 5 < least <= most
    assert least_time(split, sizes, 10 * room) <= split.work + 2 * split.shared + split.hold_all(6).launched


def test_it_knows_what_one_operator_has_at_work() -> None:
    """A value that nothing has to be held beside is in the room for what is held all the same."""
    step = _step(None, batch=1)
    whole = step.captured._planner._whole
    operand = 64 * 4
    weights = 5 * (64 * 64 + 64) * 4  # their gradients, all there at the end
    assert least_time(whole, [1], weights + 20 * operand) == pytest.approx(whole.hold_all(1).time)
    assert least_time(whole, [1], 2 * operand) == float("inf")
