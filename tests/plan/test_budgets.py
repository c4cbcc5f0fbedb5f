"""Every step at every budget: the bits of a step without one, within the room, as predicted, and never another error.

What a plan decides (which program, what is held, what runs again) must not be seen in the result. So each step is run
at budgets from nearly all that it would take down to the least that works, and each run is held against the run of
the same microbatch without a budget, against plain PyTorch in float64, and against what the plan says of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fullbatch
from cases import all_cases
from cases.reference import Result, buffers_of, collect, compare, modules, plain
from cases.watched import Watched

# A step that draws keeps two states of the generator, and may need less: `RANDOM_BYTES` of the executor.
_DRAWS = 2 * 5056

NETS: dict[str, Callable[[], tuple[Any, Any, Any]]] = {}


def net(build: Callable[[], tuple[Any, Any, Any]]) -> Callable[[], tuple[Any, Any, Any]]:
    """Names a builder of (loss_fn, model, batch)."""
    NETS[build.__name__] = build
    return build


def _square(model: Any, batch: Any) -> Tensor:
    return model(batch).square().mean()


def _classify(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class _Lambda(nn.Module):
    """Modules and a forward that uses them."""

    def __init__(self, forward: Callable[..., Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.parts, self._forward = nn.ModuleList(parts), forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(x, *self.parts)


@net
def unet_with_skips() -> tuple[Any, Any, Any]:
    def block(before: int, after: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())

    def forward(x: Tensor, down: nn.Module, middle: nn.Module, up: nn.Module, last: nn.Module) -> Tensor:
        skip = down(x)
        wide = up(middle(F.max_pool2d(skip, 2)))
        return last(torch.cat([wide, skip], 1))

    model = _Lambda(forward, block(3, 8), block(8, 16), nn.ConvTranspose2d(16, 8, 2, 2), block(16, 4))
    return _classify, model, (torch.randn(6, 3, 8, 8), torch.randint(4, (6, 8, 8)))


@net
def barriers_in_parallel_branches() -> tuple[Any, Any, Any]:
    def branch(depth: int) -> nn.Module:
        return nn.Sequential(*[part for _ in range(depth) for part in (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())])

    def forward(x: Tensor, *branches: nn.Module) -> Tensor:
        joined = torch.cat([branch(x) for branch in branches], 1)
        return (joined - joined.mean(0)) / (joined.std(0) + 1e-3)

    def loss(model: Any, batch: Any) -> Tensor:
        return model(batch).exp().mean()

    return loss, _Lambda(forward, branch(1), branch(2)), torch.randn(7, 8)


@net
def dropout_within_checkpoints() -> tuple[Any, Any, Any]:
    def forward(x: Tensor, *parts: nn.Module) -> Tensor:
        for part in parts:
            x = x + checkpoint(part, x, use_reentrant=False)
        return x

    parts = [nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.3), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)]
    return _square, _Lambda(forward, *parts), torch.randn(6, 5, 8)


@net
def a_gradient_within_the_forward() -> tuple[Any, Any, Any]:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def loss(m: Any, x: Tensor) -> Tensor:
        named = dict(m.named_parameters())
        slope = torch.func.grad(lambda at: torch.func.functional_call(m, named, (at,)).sum())(x)
        out = m(x + 0.1 * slope / (slope.norm() + 1e-3))
        return (out / (out.std() + 1e-2)).exp().mean()

    return loss, model, torch.randn(6, 8)


@net
def views_over_normalised_transposes() -> tuple[Any, Any, Any]:
    def forward(x: Tensor, norm: nn.Module, *mixes: nn.Module) -> Tensor:
        for mix in mixes:
            a, b, c = mix(x).chunk(3, -1)
            left, right = (c @ (a.transpose(1, 2) @ b).softmax(-1)).split([3, 5], -1)
            x = norm((x + torch.cat([right.sigmoid(), left.tanh()], -1)).transpose(1, 2)).transpose(1, 2)
        return x

    mixes = [nn.Linear(8, 24) for _ in range(2)]
    return _square, _Lambda(forward, nn.BatchNorm1d(8), *mixes), torch.randn(4, 5, 8)


@net
def operators_of_several_results() -> tuple[Any, Any, Any]:
    def forward(x: Tensor, *parts: nn.Module) -> Tensor:
        for mix, norm in zip(parts[::2], parts[1::2], strict=True):
            h = norm(mix(x))
            q = h.view(*h.shape[:2], 2, 4).transpose(1, 2)
            a = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).reshape(h.shape)
            x = x + a * h.max(-1, keepdim=True)[0] + h.sort(-1)[0].cumsum(-1) * 0.1
        return x

    parts = [part for _ in range(2) for part in (nn.Linear(8, 8), nn.LayerNorm(8))]
    return _square, _Lambda(forward, *parts), torch.randn(4, 6, 8)


@net
def a_large_view_of_few_bytes() -> tuple[Any, Any, Any]:
    """Read by shape, the expanded mean is more than the room; it is no reason not to measure operators."""

    def loss(model: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            top = x.mean((1, 2))[:, None].expand(-1, 20_000).amax(1)
        return (model(x).sort(-1)[0].cumsum(-1) * top[:, None, None]).square().mean()

    return loss, nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)), torch.randn(4, 20, 16)


class _Halves(nn.Module):
    """One gradient, of which each parameter's is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(0.1 * torch.randn(60, 30)), nn.Parameter(0.1 * torch.randn(60, 30))

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.cat([self.left, self.right], 1)


@net
def gradients_that_are_views_of_one() -> tuple[Any, Any, Any]:
    return _square, _Halves(), torch.randn(4, 60)


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(40, 8), nn.LSTM(8, 8, batch_first=True)
        self.out = nn.Linear(8, 40, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(self.embed(x))[0]).transpose(1, 2)


@net
def tied_embeddings_around_an_lstm() -> tuple[Any, Any, Any]:
    return _classify, _Tied(), (torch.randint(40, (4, 3)), torch.randint(40, (4, 3)))


@net
def work_on_parameters_between_samples() -> tuple[Any, Any, Any]:
    def forward(x: Tensor, first: nn.Linear, second: nn.Linear) -> Tensor:
        h = torch.tanh(first(x))
        c = h.T @ h / len(h)
        for _ in range(3):
            c = torch.tanh(c @ second.weight + c)
        return h @ c

    weighted = nn.utils.parametrizations.weight_norm(nn.Linear(8, 16))
    return _square, _Lambda(forward, weighted, nn.Linear(16, 16)), torch.randn(6, 8)


@net
def in_place_and_partly_frozen() -> tuple[Any, Any, Any]:
    def forward(x: Tensor, norm: nn.Module, fixed: nn.Module, *mixes: nn.Module) -> Tensor:
        h = x.clone()
        for mix in mixes:
            h = mix(h)
            h.mul_(0.5).add_(x)
            h[:, 3].zero_()
            h = F.relu(norm(fixed(h)), inplace=True)
        return h

    fixed = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval().requires_grad_(False)
    return _square, _Lambda(forward, nn.BatchNorm1d(8), fixed, nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(7, 8)


@net
def a_single_sample() -> tuple[Any, Any, Any]:
    def forward(x: Tensor, *convs: nn.Module) -> Tensor:
        for conv in convs:
            x = x + F.silu(F.group_norm(conv(x), 2))
        return x

    return _square, _Lambda(forward, *[nn.Conv2d(4, 4, 3, padding=1) for _ in range(6)]), torch.randn(1, 4, 8, 8)


class _Budgets:
    """One step, run at many budgets from the same state and seed."""

    def __init__(self, loss_fn: Any, model: Any, batch: Any) -> None:
        self.loss_fn, self.model, self.batch = loss_fn, model, batch
        self.plain = plain(loss_fn, model, batch)
        self.step = Watched(loss_fn, model, batch, microbatch=1)
        self._state = buffers_of(model)
        self._free: dict[int, Result] = {}

    def _go(self, memory: int | None, microbatch: int | None) -> tuple[Result, int, Tensor]:
        """The result, the measured peak, and the state of the generator behind it."""
        self.step._memory, self.step._microbatch = memory, microbatch
        self.reset()
        self.step(self.batch)  # plans: operators cannot be measured while the step is
        self.reset()
        measured = fullbatch.measure(lambda: self.step(self.batch))
        return collect(measured.result, self.model), measured.peak, torch.get_rng_state()

    def reset(self) -> None:
        """No gradients, the buffers of the beginning, one seed."""
        for prefix, module in modules(self.model).items():
            module.zero_grad()
            for name, buffer in module.named_buffers():
                buffer.copy_(self._state[prefix + name])
        torch.manual_seed(5)

    def free(self, microbatch: int) -> fullbatch.Plan:
        """The plan of this microbatch without a budget; its result is what others are held against."""
        self._free[microbatch], peak, self._generator = self._go(None, microbatch)
        self._held_to(peak)
        return self.step.plan

    def at(self, memory: int, microbatch: int | None, tolerance: float) -> fullbatch.Plan:
        """Runs at a budget, and checks all that must hold. Raises BudgetError."""
        result, peak, generator = self._go(memory, microbatch)
        plan = self.step.plan
        assert peak <= memory - plan.owned, (plan.activations, plan.whole)
        self._held_to(peak)
        if plan.microbatch not in self._free:
            self.free(plan.microbatch)
        _same_bits(result, self._free[plan.microbatch])
        assert torch.equal(generator, self._generator), "the generator ends elsewhere"
        assert 0 <= plan.bound <= plan.overhead
        draws = _DRAWS if self.step.captured.random else 0
        planner = self.step.captured._planner
        bound = planner._bound(plan.activations - draws, plan.microbatch)
        assert bound <= plan.overhead + 1e-9, "what ran is below the bound"
        if not draws:
            errors = compare(result, self.plain)
            assert errors.within(tolerance), errors
        return plan

    def _held_to(self, peak: int) -> None:
        predicted = self.step.plan.activations
        draws = _DRAWS if self.step.captured.random else 0
        assert peak <= predicted <= max(peak + draws, 1.01 * peak), self.step.plan


def _same_bits(one: Result, other: Result) -> None:
    leaves = [torch.utils._pytree.tree_leaves((r.loss, r.aux, r.grads, r.buffers)) for r in (one, other)]
    assert len(leaves[0]) == len(leaves[1])
    for a, b in zip(*leaves, strict=True):
        if isinstance(a, Tensor):
            assert torch.equal(a, b)
        else:
            assert a == b


def _check(budgets: _Budgets, sizes: list[int | None], shares: tuple[float, ...], tolerance: float) -> None:
    batch = budgets.step.plan.batch
    for size in sizes:
        free = budgets.free(size or batch)
        with pytest.raises(fullbatch.BudgetError) as caught:
            budgets.at(free.owned + 1, size, tolerance)
        smallest = caught.value.smallest
        plan = budgets.at(smallest, size, tolerance)
        for share in shares:
            memory = free.owned + int(share * free.activations)
            try:
                budgets.at(memory, size, tolerance)
            except fullbatch.BudgetError as error:
                assert memory < smallest
                assert error.smallest == smallest  # noqa: PT017
    budgets.reset()
    again = fullbatch.Step(budgets.loss_fn, budgets.model, budgets.batch, memory=smallest, microbatch=size)
    assert again.plan.order == plan.order, "planning is deterministic, whatever was planned before"


_LONG = {"tied_embeddings_around_an_lstm", "dropout_within_checkpoints"}  # a minute or more of planning


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in _LONG else name for name in NETS]
)
def test_every_budget_gives_the_same_bits_within_its_room(name: str) -> None:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        budgets = _Budgets(*NETS[name]())
        batch = budgets.step.plan.batch
        _check(budgets, [None, *sorted({3, batch - 1})] if batch > 3 else [None], (0.7, 0.3), 1e-9)
    finally:
        torch.set_default_dtype(default)


# Those that TorchDynamo captures.
_CASES = [case for group in ("models", "coupled") for case in all_cases(group) if "dynamo-no" not in case.tags]


@pytest.mark.slow
@pytest.mark.parametrize("case", _CASES, ids=str)
def test_every_budget_of_the_cases(case: Any) -> None:
    budgets = _Budgets(*case.build())
    batch = budgets.step.plan.batch
    sizes = [None, 1, batch]
    _check(budgets, list(dict.fromkeys(sizes)), (0.7, 0.3, 0.1), max(1e-9, case.tolerance))
