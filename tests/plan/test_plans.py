"""Plans: they fit, they are the fastest found, they are remembered, and no budget changes a bit of the result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fullbatch
from cases import all_cases
from cases.reference import grads_of, modules
from cases.watched import Watched
from fullbatch._plan._polish import Polish
from fullbatch._plan._schedule import Do, microbatches
from fullbatch._plan._sizes import microbatch_sizes


def _built(name: str) -> Any:
    return next(case for case in all_cases("models") if case.name == name).build()


@pytest.mark.parametrize("name", ["resnet50", "unet_bilinear", "yolo"])
def test_at_one_microbatch_every_budget_gives_bitwise_the_same_gradients(name: str) -> None:
    loss_fn, model, batch = _built(name)
    free = fullbatch.Step(loss_fn, model, batch, microbatch=2)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    results = []
    for share in (1.0, 0.85, 0.7):
        model.load_state_dict(state)
        for module in modules(model).values():
            module.zero_grad()
        budget = free.plan.owned + int(share * free.plan.activations)
        try:
            step = fullbatch.Step(loss_fn, model, batch, memory=budget, microbatch=2)
        except fullbatch.BudgetError:
            continue
        loss = step(batch)
        results.append((share, loss[0] if isinstance(loss, tuple) else loss, grads_of(model), dict(model.state_dict())))
        results[-1][3].update({key: value.clone() for key, value in model.state_dict().items()})
    assert len(results) >= 2
    _, loss, grads, buffers = results[0]
    for share, other, other_grads, other_buffers in results[1:]:
        assert torch.equal(loss, other), share
        assert all(torch.equal(grads[key], other_grads[key]) for key in grads if grads[key] is not None), share
        assert all(torch.equal(buffers[key], other_buffers[key]) for key in buffers), share


def test_a_single_sample_is_recomputed_within_its_stage() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.Tanh())], nn.Linear(64, 1))
    batch = torch.randn(1, 400, 64)

    def loss(m: Any, b: Any) -> torch.Tensor:
        return m(b).square().mean()

    free = fullbatch.Step(loss, model, batch, microbatch=1)
    free(batch)
    grads = grads_of(model)
    model.zero_grad()
    step = fullbatch.Step(loss, model, batch, memory=free.plan.predicted_peak - free.plan.activations // 3)
    assert step.plan.recomputed > 0
    step(batch)
    assert all(torch.equal(grads[name], grad) for name, grad in grads_of(model).items())
    model.zero_grad()
    measured = fullbatch.measure(lambda: step(batch)).peak
    assert measured <= step.plan.activations <= free.plan.activations * 2 // 3 + 1


def test_a_count_of_labels_is_no_reason_to_hold_across_stages() -> None:
    """The targets of a loss are read in two stages; the activations of a language model are not."""
    loss_fn, model, batch = _built("gpt2_no_padding")
    step = Watched(loss_fn, model, batch, microbatch=1)
    assert step.plan.stages == 2
    assert not step.captured.side(1).across
    budget = step.plan.owned + int(0.8 * step.plan.activations)
    assert fullbatch.Step(loss_fn, model, batch, memory=budget).plan.recomputed > 0


@pytest.mark.parametrize("name", ["resnet50", "unet_bilinear"])
def test_overhead_is_at_least_the_bound_and_grows_as_the_budget_falls(name: str) -> None:
    loss_fn, model, batch = _built(name)
    free = fullbatch.Step(loss_fn, model, batch, microbatch=7)
    seen = []
    for share in (1.05, 0.8, 0.6):
        budget = free.plan.owned + int(share * free.plan.activations)
        plan = fullbatch.Step(loss_fn, model, batch, memory=budget).plan
        assert 0 <= plan.bound <= plan.overhead
        assert plan.gap == plan.overhead - plan.bound
        seen.append(plan)
    assert seen[0].recomputed == 0
    assert seen[-1].recomputed > 0
    assert seen[0].bound <= seen[1].bound <= seen[2].bound


def _chain(layers: int) -> Any:
    """Equal layers with BatchNorm, held over barriers: the split side of the captured step."""
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(layers) for layer in (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())])
    batch = torch.randn(12, 8)
    return Watched(lambda m, b: m(b).square().mean(), model, batch, microbatch=3).captured.side(3)


def test_the_bound_of_a_chain_falls_with_the_room_and_is_met_by_what_is_chosen() -> None:
    side = _chain(6)
    problem = side.problem(3)
    assert side.across
    assert side.segments.count == 8  # the forward, where the backward begins, and the six stages behind it
    seen = []
    for share in (1.0, 0.5, 0.25, 0.1):
        limits = [share * sum(side.reduced.sizes.values())] * side.segments.count
        holding = problem.choose(limits)
        assert holding is not None
        polish = Polish(problem, holding.held, limits)
        rounded = polish.cost
        polish.improve(1000)
        assert problem.bound(limits) - 1e-6 <= polish.cost <= rounded
        for segment, held in enumerate(polish.held):
            assert sum(side.reduced.sizes[value] for value in held) <= limits[segment]
        seen.append((problem.bound(limits), polish.cost))
    assert seen[0] == (0, 0)
    assert [bound for bound, _ in seen] == sorted(bound for bound, _ in seen)
    assert seen[-1][0] > 0


def test_what_holds_nothing_makes_each_value_where_it_is_read() -> None:
    """Layer i of a chain is made again for the backward of each layer above it: a triangle of runs."""
    side = _chain(4)
    nothing = tuple(frozenset() for _ in range(side.segments.count))
    everything = side.hold_all(3)
    candidate = side.hold_nothing(3, side.estimate)
    assert candidate.held == nothing
    assert candidate.schedule.recomputes(side.program) > 4 * everything.schedule.recomputes(side.program)
    assert everything.schedule.recomputes(side.program) == 0
    assert candidate.peak < everything.peak


def test_the_walk_of_one_microbatch_is_that_of_all() -> None:
    """The search's walk sees one microbatch of each stage; it must not be below the walk over all actions."""
    from fullbatch._plan._simulate import simulate

    for name in ("resnet50", "unet_bilinear", "gpt2_no_padding", "yolo"):
        step = Watched(*_built(name), microbatch=2)
        side = step.captured.side(2)
        for size in (1, 2, 3):
            candidate = side.hold_all(size)
            exact = simulate(side.program, candidate.schedule, side.estimate).peak
            assert exact <= candidate.peak <= 1.1 * exact, (name, size)


def test_microbatches() -> None:
    assert microbatches(10, 4) == (4, 4, 2)
    assert microbatches(8, 8) == (8,)
    assert microbatch_sizes(1) == [1]
    sizes = microbatch_sizes(64)
    assert sizes[0] == 64
    assert sizes[-1] == 1
    assert sizes == sorted(sizes, reverse=True)


def test_schedule_frees_what_it_makes() -> None:
    loss_fn, model, batch = _built("unet_bilinear")
    step = Watched(loss_fn, model, batch, microbatch=3)
    program, schedule = step.captured.program, step.plan.schedule
    wanted = set(program.outputs)
    alive: set[tuple[int, int]] = set()
    for action in schedule.actions:
        if action.do is Do.RUN:
            outs = program.by_id[action.subject].outputs
            alive |= {(out, action.microbatch) for out in outs if out is not None and program.values[out].local}
        elif action.do is Do.FREE:
            alive.discard((action.subject, action.microbatch))
    assert not {slot for slot in alive if slot[0] not in wanted}


def test_plans_are_reused_where_the_step_owns_a_little_more() -> None:
    """A tensor of varying size that nothing reads must not make every call a plan."""
    model = nn.Linear(64, 64)
    batch = torch.randn(8, 64), torch.randn(8, 64)

    def loss(m: Any, b: Any) -> torch.Tensor:
        return F.mse_loss(m(b[0]), b[1])

    step = Watched(loss, model, (*batch, torch.zeros(1)), memory="1GiB")
    for size in range(1, 30):
        model.zero_grad()
        step((*batch, torch.zeros(1, size, 4)))
    assert len(step.captured._planned) == 1
    assert step.plan.owned == sum(p.numel() * 4 for p in model.parameters()) + 2 * 8 * 64 * 4 + 29 * 16
