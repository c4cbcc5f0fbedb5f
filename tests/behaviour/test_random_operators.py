"""Every operator that draws: reproducible, the same in a recompute, one draw a sample, certified on its masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributions, nn
from torch.utils.checkpoint import checkpoint

import fullbatch
from behaviour.support import gradients, make

BATCH, WIDTH = 8, 16
Layer = Callable[[Tensor], Tensor]


def _images(h: Tensor) -> Tensor:
    return h.view(-1, 4, 2, 2)


def _drop_path(h: Tensor) -> Tensor:
    mask = h.new_empty((h.shape[0], 1)).bernoulli_(0.6)
    return h * mask.div_(0.6)


def _row_stochastic_depth(h: Tensor) -> Tensor:
    kept = 0.6 + torch.rand((h.shape[0], 1), dtype=h.dtype)
    return h.div(0.6) * kept.floor_()


def _attention(h: Tensor) -> Tensor:
    q = h.view(-1, 1, 8, 2)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.4).reshape(-1, WIDTH)


def _sampled(h: Tensor) -> Tensor:
    index = torch.multinomial(h.detach().softmax(1), 3)
    return h + h.gather(1, index).sum(1, keepdim=True)


def _action(h: Tensor) -> Tensor:
    policy = distributions.Categorical(logits=h)
    return h * policy.log_prob(policy.sample())[:, None]


def _positive(h: Tensor) -> Tensor:
    return F.softplus(h) + 0.1


# Each sample has a draw of its own.
BY_SAMPLE: dict[str, Layer] = {
    "dropout": nn.Dropout(0.4),
    "dropout inplace": lambda h: F.dropout(h * 1, 0.4, True, inplace=True),
    "dropout1d": lambda h: F.dropout1d(h.view(-1, 8, 2)).flatten(1),
    "dropout2d": lambda h: F.dropout2d(_images(h)).flatten(1),
    "dropout3d": lambda h: F.dropout3d(h.view(-1, 8, 2, 1, 1)).flatten(1),
    "alpha_dropout": nn.AlphaDropout(0.3),
    "feature_alpha_dropout": lambda h: F.feature_alpha_dropout(h.view(-1, 8, 2), 0.3, True).flatten(1),
    "attention": _attention,
    "gumbel_softmax": lambda h: F.gumbel_softmax(h),
    "gumbel_softmax hard": lambda h: F.gumbel_softmax(h, hard=True),
    "rrelu": lambda h: F.rrelu(h, training=True),
    "rrelu inplace": lambda h: F.rrelu(h * 1, training=True, inplace=True),
    "multinomial": _sampled,
    "normal": lambda h: h * torch.normal(h.detach(), 1.0),
    "normal of a shape": lambda h: h * torch.normal(0.0, 1.0, h.shape, dtype=h.dtype),
    "rand_like": lambda h: h * torch.rand_like(h),
    "randn_like": lambda h: h + h * torch.randn_like(h),
    "randint": lambda h: h * torch.randint(0, 99, h.shape),
    "bernoulli": lambda h: h * torch.bernoulli(h.detach().sigmoid()),
    "bernoulli_": lambda h: h * torch.empty_like(h).bernoulli_(0.5),
    "uniform_": lambda h: h * torch.empty_like(h).uniform_(-1, 2),
    "normal_": lambda h: h * torch.zeros_like(h).normal_(1, 2),
    "exponential_": lambda h: h * torch.empty_like(h).exponential_(),
    "geometric_": lambda h: h * torch.empty_like(h).geometric_(0.3),
    "cauchy_": lambda h: h * torch.empty_like(h).cauchy_(),
    "log_normal_": lambda h: h * torch.empty_like(h).log_normal_(),
    "poisson": lambda h: h * torch.poisson(9 * _positive(h.detach())),
    "binomial": lambda h: h * torch.binomial(torch.full_like(h, 50), h.detach().sigmoid()),
    "Normal": lambda h: distributions.Normal(h, _positive(h)).rsample(),
    "Gamma": lambda h: distributions.Gamma(_positive(h), _positive(h)).rsample(),
    "Beta": lambda h: distributions.Beta(_positive(h), _positive(h)).rsample(),
    "Dirichlet": lambda h: distributions.Dirichlet(_positive(h)).rsample(),
    "Laplace": lambda h: distributions.Laplace(h, _positive(h)).rsample(),
    "RelaxedBernoulli": lambda h: distributions.RelaxedBernoulli(torch.ones((), dtype=h.dtype), logits=h).rsample(),
    "checkpointed dropout": lambda h: checkpoint(lambda t: F.dropout(t.tanh()) + F.dropout(t), h, use_reentrant=False),
}

# Each sample has a draw of its own, of few values: some samples draw the same.
OF_FEW_VALUES: dict[str, Layer] = {
    "drop path": _drop_path,
    "stochastic depth by row": _row_stochastic_depth,
    "Categorical": _action,
}

# One draw for the batch, or one that couples its samples.
OF_THE_BATCH: dict[str, Layer] = {
    "stochastic depth of the batch": lambda h: h * (torch.rand(1) < 0.5).to(h.dtype),
    "stochastic depth by bernoulli_": lambda h: h * torch.empty([1, 1], dtype=h.dtype).bernoulli_(0.5).div_(0.5),
    "weights": lambda h: h @ nn.init.kaiming_uniform_(torch.empty(WIDTH, WIDTH, dtype=h.dtype)),
    "noise for all": lambda h: h + torch.randn(WIDTH, dtype=h.dtype),
    "mixup": lambda h: 0.7 * h + 0.3 * h[torch.randperm(h.shape[0])],
    "multinomial of the batch": lambda h: h + h[torch.multinomial(torch.ones(h.shape[0]), h.shape[0])],
}
ALL = BY_SAMPLE | OF_FEW_VALUES | OF_THE_BATCH


class Net(nn.Module):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for at, linear in enumerate(self.linears):
            x = linear(x).tanh()
            x = self.layer(x) if at in (1, 2) else x
        return x


def loss_fn(model: Any, batch: Any) -> Any:
    x, y = batch
    out = model(x)
    return F.mse_loss(out, y), out


def _built(name: str) -> tuple[Net, tuple[Tensor, Tensor]]:
    """A network with the layer in it twice, and a batch whose samples are all alike: what differs was drawn."""
    torch.manual_seed(1)
    return Net(ALL[name]).double(), (
        torch.randn(1, WIDTH).double().expand(BATCH, -1).clone(),
        torch.randn(BATCH, WIDTH),
    )


def _run(step: fullbatch.Step, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor, dict[str, Any], Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    loss, out = step(batch)
    return loss, out, gradients(model), torch.get_rng_state()


def _same(one: Any, other: Any) -> bool:
    grads = all(torch.equal(grad, other[2][name]) for name, grad in one[2].items())
    return grads and all(torch.equal(one[at], other[at]) for at in (0, 1, 3))


SEVERAL = ("dropout", "attention", "rrelu", "multinomial", "drop path", "mixup", "checkpointed dropout")


@pytest.mark.parametrize(
    ("name", "microbatch"), [*((name, 3) for name in ALL), *((name, size) for name in SEVERAL for size in (1, BATCH))]
)
def test_an_operator_that_draws(name: str, microbatch: int) -> None:
    model, batch = _built(name)
    step = make(loss_fn, model, batch, microbatch=microbatch)
    first = _run(step, model, batch)
    assert _same(first, _run(step, model, batch)), "a seed gives the same step"
    if name not in OF_THE_BATCH:  # of samples that are alike, a permutation changes nothing
        assert not torch.equal(first[1], step(batch)[1]), "the next step draws anew"
    torch.manual_seed(7)
    torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(first[3], torch.get_rng_state()), "the generator moves by one draw, whatever the plan"
    distinct = torch.unique(first[1], dim=0).shape[0]
    if name in BY_SAMPLE:
        assert distinct == BATCH, "no two samples share a draw"
    elif name not in OF_FEW_VALUES:
        assert distinct == 1, "one draw for the batch"
    certificate = step.verify(batch)
    assert certificate.ok and certificate.realised_masks, certificate


_LONG = [pytest.param(name, marks=pytest.mark.slow) for name in ("attention", "Gamma", "checkpointed dropout")]
_SHORT = [name for name in SEVERAL if name not in ("attention", "checkpointed dropout")]


@pytest.mark.parametrize("name", [*_SHORT, *_LONG, "gumbel_softmax hard", "poisson", "exponential_", "randn_like"])
def test_a_recompute_sees_the_draw_of_the_forward(name: str) -> None:
    model, batch = _built(name)
    with pytest.raises(fullbatch.BudgetError) as least:
        make(loss_fn, model, batch, memory=10, microbatch=3)
    tight = fullbatch.Step(loss_fn, model, batch, memory=least.value.smallest, microbatch=3)
    wide = fullbatch.Step(loss_fn, model, batch, memory="1GiB", microbatch=3)
    assert _same(_run(tight, model, batch), _run(wide, model, batch))


@pytest.mark.parametrize("name", ["multinomial", "Gamma", "Dirichlet", "poisson", "binomial", "rrelu", "Categorical"])
def test_an_operator_that_draws_for_each_sample_couples_none(name: str) -> None:
    model, batch = _built(name)
    assert not make(loss_fn, model, batch, microbatch=3).plan.full_batch_nodes


def test_mixup_takes_its_partner_from_the_whole_batch() -> None:
    model, x = nn.Linear(1, 1).double(), torch.arange(64.0).double()[:, None]

    def loss_fn(model: Any, x: Tensor) -> Any:
        partner = x[torch.randperm(x.shape[0])]
        return model(x + partner).sum(), partner

    _, partner = make(loss_fn, model, x, microbatch=4)(x)
    assert torch.equal(partner.sort(0).values, x), "a permutation of the batch"
    assert ((partner // 4) != (x // 4)).double().mean() > 0.8, "not of each microbatch"


def test_neighbouring_microbatches_draw_independently() -> None:
    model, x = nn.Linear(8, 1).double(), torch.ones(64, 8).double()
    step = make(lambda model, x: ((kept := F.dropout(x, 0.5)), model(kept).sum())[::-1], model, x, microbatch=1)
    masks = torch.stack([step(x)[1] != 0 for _ in range(40)]).double() - 0.5
    for apart in (1, 2, 3, 16):
        product = masks[:, :-apart] * masks[:, apart:]
        assert abs(product.mean().item()) < 5 * 0.25 / product.numel() ** 0.5
    assert abs(masks.mean().item()) < 5 * 0.5 / masks.numel() ** 0.5


def test_an_rrelu_that_does_not_train_draws_nothing() -> None:
    model, x = nn.Sequential(nn.Linear(5, 4), nn.RReLU()).double().eval(), torch.randn(6, 5).double()
    state = torch.get_rng_state()
    step = make(lambda model, x: model(x).sum(), model, x)
    step(x)
    assert torch.equal(state, torch.get_rng_state())
    assert not step.verify(x).realised_masks


def test_a_certificate_draws_what_the_step_drew_from_python() -> None:
    """Python's draws that are live at each call (random.uniform, randint) reach both steps of the comparison."""
    import random

    model, x = nn.Linear(3, 4).double(), torch.randn(6, 3).double()
    step = make(lambda model, x: (model(x) * random.uniform(1, 9)).pow(2).mean(), model, x)
    state = random.getstate()
    assert step.verify(x).ok
    assert random.getstate() == state
