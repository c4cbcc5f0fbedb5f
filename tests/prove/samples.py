"""Calls that torch's own sample inputs leave out: operators they never reach, folded batches, coinciding sizes.

Each sample is a function that runs operators on small tensors. It runs beneath a `Prover`, which sees the ATen
operators, and with gradients those of the backward as well. Sizes are such that several dimensions agree with the batch
that is being claimed, and such that a dimension has several factors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from prove.prover import direct

aten = torch.ops.aten
Sample = Callable[[], Any]
SAMPLES: dict[str, Sample] = {}


def sample(fn: Sample) -> Sample:
    """Decorator: `fn` is run, and what it returns is differentiated."""
    SAMPLES[fn.__name__] = fn
    return fn


def new(*shape: int, dtype: torch.dtype = torch.float64, grad: bool = True) -> torch.Tensor:
    """Random values that need a gradient."""
    tensor = torch.randn(shape, dtype=dtype)
    return tensor.requires_grad_() if grad and (dtype.is_floating_point or dtype.is_complex) else tensor


def index(high: int, *shape: int) -> torch.Tensor:
    """Random indices below `high`."""
    return torch.randint(high, shape)


# ---- element by element


@sample
def pointwise_broadcasts() -> Any:
    x, row, column, scalar = new(6, 4, 6), new(6), new(6, 1, 1), new()
    outs = [x * row + column - scalar, torch.where(x > 0, x, row), torch.maximum(x, column), x.clamp(row, column)]
    outs += [new(6, 1) + new(1, 6), new(4, 6) * new(6, 4, 6), torch.lerp(x, row, column), x.double().to(torch.float32)]
    outs += [torch.addcmul(x, row, column), torch.addcdiv(x, row, column), torch.nan_to_num(x), aten.contiguous(x)]
    return outs


@sample
def pointwise_named() -> Any:
    x, mask = new(6, 4), torch.rand(6, 4) > 0.5
    z = torch.view_as_complex(new(6, 4, 2))
    aten.isin(x.detach(), new(6, grad=False))
    aten.isin(index(3, 6), index(3, 4))
    aten.isin.Scalar_Tensor(1, index(3, 6))
    aten._fake_quantize_learnable_per_tensor_affine(x.detach(), torch.ones(1), torch.zeros(1), 0, 255)
    aten.native_dropout(x.detach(), 0.5, True), aten.rand_like(x.detach()), aten.randn_like(x.detach())
    aten.randint_like(x.detach(), 5), aten.normal.Tensor_float(x.detach(), 1.0), aten.uniform(x.detach())
    aten.rrelu_with_noise_functional(x.detach(), x.detach(), 0.1, 0.3, True)
    aten.rrelu_with_noise_functional(x.detach(), x.detach(), 0.1, 0.3, False)
    aten.rrelu_with_noise_backward(x.detach(), x.detach(), x.detach(), 0.1, 0.3, True, False)
    aten._standard_gamma_grad(x.detach().abs(), x.detach().abs()), aten._dirichlet_grad(*3 * [x.detach().sigmoid()])
    aten.multinomial(new(6, 4, grad=False).abs(), 2), aten.multinomial(new(4, 6, grad=False).abs(), 3, True)
    for rates in (x.detach().abs(), new(6, 4, 3, grad=False).abs(), new(4, 6, 3, grad=False).abs()):
        aten.poisson(rates), aten.binomial(rates.ceil(), rates.sigmoid()), aten._standard_gamma(rates)
        aten._sample_dirichlet(rates)
    aten._neg_view(x.detach()), aten.resolve_conj(z.detach().conj()), aten.conj_physical(z.detach())
    aten._conj_physical(z.detach()), aten.real(z.detach()), aten.imag(z.detach()), aten.exponential(x.detach().abs())
    aten.where.ScalarOther(mask, x.detach(), 1.0), aten.masked_fill.Tensor(x.detach(), mask, torch.zeros(()))
    aten.masked_fill.Scalar(x.detach(), mask[0], 0.0), aten.masked_fill.Scalar(x.detach()[0], mask, 0.0)
    direct(aten.conj_physical.default, z.detach()), direct(aten.resolve_conj.default, z.detach())
    (
        direct(aten.real.default, z.detach()),
        direct(aten.imag.default, z.detach()),
        direct(aten.contiguous.default, x.detach().t()),
    )
    aten.native_dropout_backward(x.detach(), mask, 2.0), aten.bernoulli(torch.rand(6, 4)), aten.logical_not(mask)
    aten.isin(torch.randperm(6), torch.randperm(6), assume_unique=True)
    outs = [F.prelu(new(4, 6), new(6)), F.prelu(new(6, 6, 3), new(6)), F.prelu(new(6, 4), new(1)), z.real, z.imag]
    outs += [F.glu(new(6, 8, 6), 1), F.glu(new(6, 6), -1), F.glu(new(4, 6), 0), F.logsigmoid(x), F.mish(x), z.conj()]
    outs += [F.dropout(x, 0.5), torch.polar(new(6, 4).abs(), x), torch.complex(x, new(6, 4)), F.rrelu(x, training=True)]
    return outs


# ---- reductions


@sample
def reductions() -> Any:
    x = new(6, 4, 6)
    outs = []
    for dims in ([0], [1], [2], [0, 2], [-1, 0], [0, 1, 2], []):
        for keep in (False, True):
            outs += [
                x.sum(dims, keep),
                x.mean(dims, keep),
                x.var(dims, keepdim=keep),
                torch.linalg.vector_norm(x, 2, dims, keep),
            ]
            outs += [
                x.amax(dims or 0, keep),
                torch.logsumexp(x, dims or 0, keep),
                torch.linalg.vector_norm(x, 3, dims, keep),
            ]
            outs += [torch.var_mean(x, dims, correction=2, keepdim=keep)[0], aten.std.correction(x, dims, keepdim=keep)]
            aten.any.dims(x.detach() > 1, dims, keep), aten.all.dims(x.detach() > -1, dims, keep)
            aten.norm.ScalarOpt_dim(x.detach(), 2, dims, keep)
            aten.norm.ScalarOpt_dim_dtype(x.detach(), 2, dims, keep, dtype=torch.float64)
            aten.linalg_vector_norm(x.detach().float(), 2, dims, keep, dtype=torch.float64)
    for dim in range(3):
        for keep in (False, True):
            outs += [x.max(dim, keep)[0], x.median(dim, keep)[0], x.prod(dim, keep), x.kthvalue(2, dim, keep)[0]]
            aten.argmax(x.detach(), dim, keep), aten.any.dim(x.detach() > 1, dim, keep)
            values, where = x.detach().max(dim, keep)
            direct(aten.value_selecting_reduction_backward.default, values, dim, where, [6, 4, 6], keep)
            direct(aten.var.dim, x.detach(), [dim], True, keep), direct(aten.std.dim, x.detach(), [dim], False, keep)
            torch.aminmax(x.detach(), dim=dim, keepdim=keep)
        aten.count_nonzero.dim_IntList(x.detach() > 0, [dim])
        outs += [
            x.cumsum(dim),
            x.sort(dim)[0],
            x.topk(2, dim)[0],
            x.softmax(dim),
            x.log_softmax(dim),
            x.renorm(2, dim, 0.5),
        ]
        direct(aten.argsort.default, x.detach(), dim), aten._safe_softmax(x.detach(), dim)
        outs += [x.cumprod(dim), x.cummax(dim)[0], x.logcumsumexp(dim)]
    aten.count_nonzero(x.detach() > 0), aten.argmax(x.detach()), aten.sum(x.detach()), aten.mean(x.detach())
    aten.var.correction(x.detach(), [0], correction=0.5), aten.var.correction(torch.complex(x, x).detach(), [0])
    (
        aten.mean.dim(index(9, 6, 4), [0], dtype=torch.float64),
        aten.sum.dim_IntList(index(9, 6, 4), [0], dtype=torch.float64),
    )
    aten.nansum(torch.where(x.detach() > 1, torch.nan, x.detach()), [0]), aten.var.default(x.detach(), False)
    return outs


@sample
def halves() -> Any:
    """What a half-precision sum of a large batch cannot hold, a mean can."""
    for reduction in ("mean", "sum"):
        scores = new(64, 4, dtype=torch.bfloat16)
        F.nll_loss(scores.log_softmax(1), index(4, 64), reduction=reduction).backward()
    x = torch.full((4096, 2), 60.0, dtype=torch.float16)
    aten.mean.dim(x, [0]), aten.mean.default(x), aten.linalg_vector_norm(x[:2048] * 4, 2, [0])


# ---- matrix products


@sample
def products() -> Any:
    square, tall = new(6, 6), new(6, 4)
    outs = [square @ square, square @ tall, tall @ tall.mT, tall.mT @ square, torch.addmm(new(6), square, square)]
    outs += [torch.addmm(new(6, 6), tall, tall.mT, beta=0.5, alpha=2), torch.addmm(new(6, 1), square, square)]
    outs += [torch.bmm(new(6, 6, 6), new(6, 6, 6)), torch.bmm(new(4, 6, 2), new(4, 2, 6))]
    outs += [torch.baddbmm(new(6, 6, 6), new(6, 6, 4), new(6, 4, 6)), torch.baddbmm(new(6), new(6, 6, 4), new(6, 4, 6))]
    outs += [square @ new(6), torch.dot(new(6), new(6))]
    outs += [torch.vdot(new(6, dtype=torch.complex128), new(6, dtype=torch.complex128))]
    outs += [torch.cdist(new(6, 4, 3), new(6, 6, 3)), torch.cdist(new(4, 6, 3), new(4, 6, 3), p=1.0)]
    outs += [
        torch.cdist(new(6, 3), new(6, 3)),
        torch.cdist(new(6, 3), new(4, 6, 3), p=3.0),
        torch.cdist(new(6, 6, 3), new(6, 3), p=1.5),
    ]
    outs += [torch.cdist(new(6, 1, 4, 3), new(6, 4, 3), p=1.0)]
    left, right = new(6, 3, grad=False), new(4, 3, grad=False)
    aten._euclidean_dist(left, right), aten._euclidean_dist(new(4, 6, 3, grad=False), new(4, 4, 3, grad=False))
    return outs


@sample
def matrices() -> Any:
    a = new(4, 3, 4, 4)
    spd = a @ a.mT + 4 * torch.eye(4, dtype=torch.float64)
    outs = [torch.linalg.inv(spd), torch.linalg.cholesky(spd), torch.linalg.det(spd), torch.linalg.slogdet(spd)[1]]
    outs += [torch.linalg.solve(spd, new(4, 3, 4, 2)), torch.linalg.eigvalsh(spd), torch.linalg.svdvals(a)]
    outs += [torch.linalg.svd(a)[1], torch.linalg.matrix_exp(a), torch.linalg.qr(a)[1], torch.linalg.lu_factor(spd)[0]]
    # Right-hand sides whose leading dimension is a row and only happens to have the batch's extent.
    b, vector = new(4, 4), new(4, 4)
    m = spd[:, 0]
    outs += [
        torch.linalg.solve(m, b[:, :2]),
        torch.linalg.solve(m, vector),
        torch.linalg.solve_triangular(m, b, upper=True),
    ]
    outs += [
        torch.cholesky_solve(b[:, :2], torch.linalg.cholesky(m)),
        torch.linalg.solve_triangular(m, new(4, 4, 2), upper=False),
    ]
    outs += [torch.linalg.lu_solve(*torch.linalg.lu_factor(m), b[:, :2]), torch.linalg.solve(m[0], new(4, 4, 4))]
    outs += [torch.cholesky_inverse(torch.linalg.cholesky(m)), torch.linalg.pinv(m)]
    aten.triangular_solve(b.detach(), m.detach()), aten.linalg_solve_triangular(m.detach(), b.detach(), upper=True)
    aten.triangular_solve(new(4, 4, 4, grad=False), m.detach())
    aten._linalg_det(m.detach()), aten._linalg_slogdet(m.detach()), aten._linalg_solve_ex(m.detach(), b.detach()[:, :2])
    aten.cholesky_solve(b.detach()[:, :2], m.detach()), aten.linalg_lu(m.detach()), aten._linalg_eigh(m.detach())
    aten._linalg_svd(m.detach(), False, False), aten._linalg_solve_ex(m.detach(), vector.detach())
    aten.linalg_pinv(m.detach()), aten.linalg_qr(m.detach(), "r")
    return outs


# ---- shapes


@sample
def views() -> Any:
    x = new(12, 4, 6)
    outs = [x.view(12, 24), x.view(48, 6), x.view(3, 4, 4, 6), x.view(2, 6, 2, 12), x.view(-1), x.view(12, 1, 4, 6)]
    outs += [x.view(6, 2, 24), x.view(12, 2, 2, 6), x.view(1, 12, 24, 1), x.view(4, 3, 24), x.view(288, 1)]
    outs += [new(6, 6, 6).view(36, 6), new(6, 6, 6).view(6, 36), new(4, 1, 6).view(4, 6), new(2, 3, 2).view(6, 2)]
    outs += [
        x.permute(2, 0, 1),
        x.permute(-1, 1, 0),
        x.transpose(0, 1),
        x.mT,
        new(4, 6).t(),
        new(6).t(),
        x.unsqueeze(0),
    ]
    outs += [x.unsqueeze(-1), x.unsqueeze(1), new(6, 1, 4).squeeze(), new(6, 1, 4).squeeze(0), new(1, 6, 1).squeeze(-1)]
    outs += [new(6, 1, 4, 1).squeeze((0, 1)), new(6, 1, 4).squeeze((1,)), new(6, 4).squeeze((0, 1)), new(6).squeeze()]
    outs += [
        new(6, 1).expand(6, 4),
        new(6).expand(4, 6),
        new(1, 6).expand(6, 6),
        new(6, 4).expand(6, 6, 4),
        new(6, 1).expand(-1, 6),
    ]
    outs += [new(6, 4).repeat(2, 3), new(6).repeat(2, 6), new(6, 6).repeat(1, 1), new(4, 6).repeat(3, 1, 2)]
    aten.repeat(new(6, 4, grad=False), [0, 1]), direct(aten.numpy_T.default, new(6, 4, grad=False))
    for dim in range(2):
        direct(aten.repeat_interleave.self_int, new(6, 4, grad=False), 3, dim)
        direct(aten.repeat_interleave.self_int, new(6, 4, grad=False), 3, dim, output_size=18 if dim == 0 else 12)
    direct(aten.repeat_interleave.self_int, new(6, grad=False), 2)
    aten._unsafe_view(new(6, 4, grad=False), [12, 2])
    aten.view.dtype(new(6, 4, grad=False), torch.float32), aten.view.dtype(new(6, 4, grad=False).float(), torch.float64)
    aten.view.dtype(new(6, 4, grad=False), torch.int64), aten.view_as_complex(new(6, 2, 2, grad=False))
    aten.view_as_real(torch.view_as_complex(new(6, 2, 2, grad=False)))
    return outs


@sample
def joins() -> Any:
    x = new(6, 4)
    outs = [torch.cat([x, x]), torch.cat([x, new(12, 4), x]), torch.cat([x, x], 1), torch.cat([new(6, 6), x], -1)]
    outs += [torch.cat([x, new(3, 4)]), torch.cat([new(0), x]), torch.cat([new(6, 6), new(6, 6)]), torch.cat([x])]
    outs += [
        torch.stack([x, x]),
        torch.stack([x, x], 1),
        torch.stack([x, x], -1),
        torch.stack([new(6), new(6), new(6)]),
    ]
    aten.stack([x.detach(), x.detach()], 1), aten.stack([x.detach()] * 6), aten.cat([x.detach(), x.detach()], -2)
    y = new(12, 8)
    for dim in range(2):
        outs += [
            *y.split(4, dim),
            *y.split(5, dim),
            *y.chunk(2, dim),
            *y.unbind(dim),
            *y.split([4, y.shape[dim] - 4], dim),
        ]
        (
            direct(aten.chunk.default, y.detach(), 4, dim),
            aten.split_with_sizes_copy(y.detach(), [4, y.shape[dim] - 4], dim),
        )
        aten.split.Tensor(y.detach(), 2, dim), aten.split_with_sizes(y.detach(), [2, 2, y.shape[dim] - 4], dim)
    return outs


@sample
def cuts() -> Any:
    x = new(12, 6, 4)
    outs = [x[:6], x[6:], x[4:8], x[::2], x[:, 1:3], x[-6:], x[:, :, -1], x[:, 2], x[3], x[1:7], x[:0]]
    base, part = new(12, 6, grad=False), new(6, 6, grad=False)
    for dim, (start, end, step) in [
        (0, (0, 6, 1)),
        (0, (6, 12, 1)),
        (0, (0, 12, 2)),
        (1, (0, 3, 1)),
        (0, (-6, None, 1)),
    ]:
        piece = aten.slice.Tensor(base, dim, start, end, step)
        aten.slice_backward(piece, [12, 6], dim, start, 12 if end is None else end, step)
        aten.slice_scatter(base, piece.clone(), dim, start, end, step)
    aten.slice.Tensor(base), aten.slice.Tensor(base, 1), aten.slice_scatter(part, part)
    for dim in range(2):
        (
            aten.select_backward(base.select(dim, 1), [12, 6], dim, 1),
            aten.select_scatter(base, base.select(dim, 1).clone(), dim, 2),
        )
        aten.select_scatter(part, part.select(dim, 1).clone(), dim, -1)
        outs += [
            new(6, 6).unfold(dim, 2, 2),
            new(6, 8, 6).unfold(dim, 6, 1),
            new(6, 6).flip(dim),
            new(6, 6).roll(2, dim),
        ]
        aten.unfold_backward(new(6, 6, grad=False).unfold(dim, 2, 2), [6, 6], dim, 2, 2)
        aten.unfold_backward(new(6, 6, grad=False).unfold(dim, 6, 1), [6, 6], dim, 6, 1)
    outs += [
        new(6, 6, 6).diagonal(),
        new(6, 6, 6).diagonal(0, -2, -1),
        new(6, 6, 6).diagonal(1, 0, 2),
        torch.diag_embed(new(6, 6)),
    ]
    (
        aten.diagonal_backward(new(6, 6, grad=False), [6, 6, 6], 0, 1, 2),
        aten.diagonal_copy(new(6, 4, 4, grad=False), 0, 1, 2),
    )
    aten.diagonal_backward(new(6, 6, grad=False), [6, 6, 6], 0, 0, 1), aten.diag_embed(new(6, 6, grad=False), 0, 1, 2)
    (
        aten.diag_embed(new(6, 4, 6, grad=False)),
        aten.diag_embed(new(6, 6, grad=False), 0, 0, 1),
        aten.diag_embed(new(6, grad=False)),
    )
    outs += [new(6, 6).roll(1), new(6, 6).roll((1, 2), (0, 1)), new(6, 6, 6).rot90(1, (1, 2)), new(6, 6).rot90()]
    outs += [
        F.pad(new(6, 6), (1, 2)),
        F.pad(new(6, 6), (0, 0, 1, 1)),
        F.pad(new(6, 4, 6), (-1, 0, 0, 1)),
        F.pad(new(6, 4), (1, 1, 0, 0)),
    ]
    outs += [new(6, 6, 6).tril(), new(6, 6).triu(1)]
    return outs


# ---- indexing


@sample
def gathers() -> Any:
    x = new(6, 6, 4)
    outs = [
        x.gather(1, index(6, 6, 3, 4)),
        x.gather(0, index(6, 6, 6, 4)),
        x.gather(2, index(4, 3, 6, 4)),
        x.gather(0, index(6, 2, 6, 4)),
    ]
    outs += [
        x.index_select(0, index(6, 6)),
        x.index_select(1, index(6, 12)),
        x[index(6, 6)],
        x[:, index(6, 4)],
        x[index(6, 6), index(6, 6)],
    ]
    outs += [
        x[index(6, 6, 1), index(6, 1, 6)],
        x[:, :, index(4, 6)],
        x[index(6, 6), :, index(4, 6)],
        x[index(6, 6, 6)],
        x[x > 0],
    ]
    outs += [
        x[index(6, 6), 0],
        x[index(6, 1)],
        x[:, index(6, 6, 6)],
        x[index(6, 12)],
        F.embedding(index(6, 6, 6), new(6, 4)),
    ]
    outs += [
        F.embedding(index(6, 12), new(6, 4), padding_idx=1),
        F.embedding(index(6, 6), new(6, 6), scale_grad_by_freq=True),
    ]
    y = x.detach()
    aten._unsafe_index.Tensor(y, [None, index(6, 6)]), aten._unsafe_index.Tensor(y, [index(6, 6)])
    aten._unsafe_masked_index(y, torch.rand(6, 6, 4) > 0.5, [index(6, 6, 1, 1), index(6, 6, 1), index(4, 4)], 0.0)
    aten.embedding_dense_backward(new(6, 6, 4, grad=False), index(6, 6, 6), 6, -1, False)
    aten.embedding_dense_backward(new(12, 6, grad=False), index(6, 12), 6, 2, False)
    return outs


@sample
def scatters() -> Any:
    x, src = new(6, 6, grad=False), new(6, 6, grad=False)
    zeros = torch.zeros(6, 6, dtype=torch.float64)
    for dim in range(2):
        for target in (x, zeros):
            at = index(6, 6, 6)
            unique = torch.stack([torch.randperm(6) for _ in range(6)], 1 - dim)
            (
                aten.scatter.src(target, dim, unique, src),
                aten.scatter.value(target, dim, at, 2.0),
                aten.scatter_add(target, dim, at, src),
            )
            (
                aten.scatter.src(target, dim, unique[:4], new(6, 6, grad=False)),
                aten.scatter_add(target, dim, at[:, :4], src),
            )
            aten.scatter_add(
                target, dim, index(6, 12 if dim == 0 else 6, 12 if dim == 1 else 6), new(12, 12, grad=False)
            )
            (
                aten.scatter_reduce.two(target, dim, at, src, "amax"),
                aten.scatter_reduce.two(target, dim, at, src, "mean", include_self=False),
            )
            (
                aten.scatter.reduce(target, dim, at, src, reduce="multiply"),
                aten.scatter.value_reduce(target, dim, at, 2.0, reduce="add"),
            )
            (
                aten.index_add(target, dim, index(6, 6), src),
                aten.index_add(target, dim, index(6, 12), new(12 if dim == 0 else 6, 12 if dim else 6, grad=False)),
            )
            (
                aten.index_copy(target, dim, torch.randperm(6), src),
                aten.index_reduce(target, dim, index(6, 6), src, "amax"),
            )
            aten.index_fill.int_Scalar(target, dim, index(6, 6), 1.0)
            aten.index_fill.int_Tensor(target, dim, index(6, 6), torch.ones((), dtype=torch.float64))
    return None


@sample
def puts() -> Any:
    x, zeros = new(6, 6, 4, grad=False), torch.zeros(6, 6, 4, dtype=torch.float64)
    mask = torch.rand(6, 6, 4) > 0.5
    one = torch.ones((), dtype=torch.float64)
    for target in (x, zeros):
        for put in (aten.index_put, aten._unsafe_index_put):
            put(target, [index(6, 6)], new(6, 6, 4, grad=False), True), put(target, [index(6, 6)], one, True)
            (
                put(target, [None, index(6, 6)], new(6, 6, 4, grad=False), True),
                put(target, [torch.randperm(6)], new(6, 6, 4, grad=False)),
            )
            (
                put(target, [None, torch.randperm(6)], new(6, 6, 4, grad=False)),
                put(target, [None, index(6, 12)], one, True),
            )
            (
                put(target, [index(6, 6), index(6, 6)], new(6, 4, grad=False), True),
                put(target, [index(6, 6, 1), index(6, 1, 6)], new(6, 6, 4, grad=False), True),
            )
            (
                put(target, [index(6, 6), None, index(4, 6)], new(6, 6, grad=False), True),
                put(target, [index(6, 12)], new(12, 1, 4, grad=False), True),
            )
            (
                put(target, [index(6, 6)], new(6, 4, grad=False), True),
                put(target, [index(6, 6)], new(1, 6, 4, grad=False), True),
            )
        (
            aten.index_put(target, [mask], one),
            aten.index_put(target, [mask[:, :, 0]], one),
            aten.index_put(target, [mask[0, :, 0]], one),
        )
    return None


# ---- layers


@sample
def convolutions() -> Any:
    outs = []
    for bias in (True, False):
        for groups in (1, 2):
            w1, w2, w3 = new(4, 6 // groups, 3), new(4, 6 // groups, 3, 2), new(4, 6 // groups, 2, 3, 1)
            b = new(4) if bias else None
            outs += [F.conv1d(new(6, 6, 6), w1, b, groups=groups), F.conv2d(new(6, 6, 5, 6), w2, b, 2, 1, 1, groups)]
            outs += [
                F.conv3d(new(4, 6, 3, 4, 3), w3, b, groups=groups),
                F.conv2d(new(6, 6, 5, 6), w2, b, dilation=2, groups=groups),
            ]
            t1, t2 = new(6, 4 // groups, 3), new(6, 4 // groups, 3, 2)
            outs += [
                F.conv_transpose1d(new(6, 6, 4), t1, b, groups=groups),
                F.conv_transpose2d(new(4, 6, 3, 4), t2, b, 2, 1, 1, groups),
            ]
            outs += [F.conv_transpose3d(new(4, 6, 2, 3, 2), new(6, 4 // groups, 2, 2, 1), b, groups=groups)]
    outs += [
        F.conv2d(new(6, 5, 6), new(6, 6, 3, 3)),
        F.conv1d(new(6, 6), new(6, 6, 3)),
        F.conv2d(new(6, 6, 6, 6), new(6, 1, 3, 3), groups=6),
    ]
    outs += [
        F.conv2d(new(4, 6, 6, 5).to(memory_format=torch.channels_last), new(6, 6, 3, 3)),
        F.conv2d(new(4, 1, 6, 6), new(4, 1, 1, 1)),
    ]
    x, w, gy = new(4, 6, 6, 6, grad=False), new(6, 6, 3, 3, grad=False), new(4, 6, 4, 4, grad=False)
    common = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    for mask in ([True, False, False], [False, True, False], [False, False, True], [True, True, True]):
        aten.convolution_backward(gy, x, w, [6], *common, mask)
    return outs


@sample
def other_convolutions() -> Any:
    x, w = new(4, 6, 6, 6, dtype=torch.float32, grad=False), new(6, 6, 3, 3, dtype=torch.float32, grad=False)
    aten.mkldnn_convolution(x, w, None, [0, 0], [1, 1], [1, 1], 1)
    return None


@sample
def pools() -> Any:
    x1, x2, x3 = new(6, 6, 8), new(6, 6, 8, 6), new(4, 6, 4, 6, 4)
    outs = [F.max_pool1d(x1, 2), F.avg_pool1d(x1, 2), F.adaptive_avg_pool1d(x1, 3), F.adaptive_max_pool1d(x1, 3)]
    outs += [
        F.max_pool2d(x2, 2),
        F.max_pool2d(x2, 3, 2, 1),
        F.avg_pool2d(x2, 2),
        F.adaptive_avg_pool2d(x2, (2, 3)),
        F.adaptive_max_pool2d(x2, 2),
    ]
    outs += [F.max_pool3d(x3, 2), F.avg_pool3d(x3, 2), F.adaptive_avg_pool3d(x3, 2), F.adaptive_max_pool3d(x3, 2)]
    outs += [
        F.max_pool2d(x1, 2),
        F.avg_pool2d(x1, 2),
        F.adaptive_avg_pool2d(x1, 2),
        F.adaptive_max_pool2d(x1, 2),
        F.max_pool3d(x2, 2),
    ]
    outs += [
        F.adaptive_max_pool3d(x2, 2),
        F.adaptive_avg_pool3d(x2, 2),
        F.avg_pool3d(x2, 2),
        F.fractional_max_pool2d(x2, 2, 3),
    ]
    y1, y2, y3 = x1.detach(), x2.detach(), x3.detach()
    (
        direct(aten.avg_pool1d.default, y1, [2]),
        direct(aten.adaptive_avg_pool1d.default, y1, [3]),
        direct(aten.adaptive_max_pool1d.default, y1, [3]),
    )
    out, where = aten.max_pool2d_with_indices(y2, [2, 2])
    aten.max_pool2d_with_indices_backward(out, y2, [2, 2], [2, 2], [0, 0], [1, 1], False, where)
    out, where3 = aten.max_pool3d_with_indices(y3, [2, 2, 2])
    aten.max_pool3d_with_indices_backward(out, y3, [2] * 3, [2] * 3, [0] * 3, [1] * 3, False, where3)
    aten.max_unpool2d(aten.max_pool2d_with_indices(y2, [2, 2])[0], where, [8, 6])
    outs += [F.max_unpool2d(F.max_pool2d(x2, 2), where, 2)]
    aten.fractional_max_pool2d(y2, [2, 2], [3, 3], torch.rand(6, 6, 2, dtype=torch.float64))
    aten.fractional_max_pool2d(y1, [2, 2], [3, 3], torch.rand(1, 6, 2, dtype=torch.float64))
    return outs


@sample
def pads_and_shuffles() -> Any:
    x1, x2, x3 = new(6, 6, 6), new(6, 8, 4, 6), new(4, 6, 3, 4, 3)
    outs = []
    for mode in ("reflect", "replicate"):
        outs += [
            F.pad(x1, (1, 2), mode=mode),
            F.pad(x2, (1, 2, 2, 1), mode=mode),
            F.pad(x3, (1, 1, 2, 1, 1, 2), mode=mode),
        ]
        outs += [F.pad(new(6, 6), (1, 2), mode=mode), F.pad(x1, (1, 1, 1, 1), mode=mode)]
    outs += [
        F.pixel_shuffle(x2, 2),
        F.pixel_unshuffle(x2, 2),
        F.channel_shuffle(x2, 2),
        F.unfold(x2, 2),
        F.fold(new(6, 24, 6), (3, 4), 2),
    ]
    outs += [
        F.pixel_shuffle(new(8, 4, 4), 2),
        F.pixel_unshuffle(new(4, 4, 4), 2),
        F.unfold(new(6, 4, 4), 2),
        F.fold(new(8, 6), (3, 4), 2),
    ]
    y = x2.detach()
    aten.pixel_shuffle(y, 2), aten.pixel_shuffle(new(8, 4, 4, grad=False), 2), aten.pixel_unshuffle(y, 2)
    aten.pixel_unshuffle(new(4, 4, 4, grad=False), 2), aten.pixel_shuffle(new(4, 6, 8, 2, 2, grad=False), 2)
    aten.channel_shuffle(y, 2), aten.channel_shuffle(new(4, 6, 4, grad=False), 2)
    (
        aten.im2col(new(6, 4, 4, grad=False), [1, 1], [1, 1], [0, 0], [1, 1]),
        aten.im2col(new(4, 4, 4, grad=False), [2, 2], [1, 1], [0, 0], [1, 1]),
    )
    return outs


@sample
def resampling() -> Any:
    x1, x2, x3 = new(6, 4, 6), new(6, 6, 4, 6), new(4, 2, 4, 4, 4)
    outs = []
    for mode in ("nearest", "nearest-exact", "linear"):
        outs += [F.interpolate(x1, scale_factor=2, mode=mode), F.interpolate(x1, size=9, mode=mode)]
    for mode in ("nearest", "nearest-exact", "bilinear", "bicubic"):
        outs += [F.interpolate(x2, scale_factor=1.5, mode=mode), F.interpolate(x2, size=(3, 7), mode=mode)]
    for mode in ("bilinear", "bicubic"):
        outs += [F.interpolate(x2, size=(3, 4), mode=mode, antialias=True, align_corners=True)]
    for mode in ("nearest", "nearest-exact", "trilinear"):
        outs += [F.interpolate(x3, size=(3, 5, 2), mode=mode)]
    aten._upsample_lanczos2d_aa(x2.detach(), [3, 4], False)
    grid, grid3 = new(6, 3, 4, 2).tanh(), new(4, 2, 3, 2, 3).tanh()
    outs += [
        F.grid_sample(x2, grid, align_corners=False),
        F.grid_sample(x2, grid, "nearest", "border"),
        F.grid_sample(x3, grid3),
    ]
    outs += [F.affine_grid(new(6, 2, 3), [6, 3, 4, 5]), F.affine_grid(new(4, 3, 4), [4, 3, 2, 4, 3])]
    aten.affine_grid_generator(new(6, 2, 3, grad=False), [6, 6, 4, 6], True)
    return outs


@sample
def norms() -> Any:
    x = new(6, 6, 6)
    outs = [
        F.layer_norm(x, (6,), new(6), new(6)),
        F.layer_norm(x, (6, 6), new(6, 6)),
        F.layer_norm(new(4, 3, 6), (6,)),
        F.layer_norm(new(6, 6), (6,), new(6)),
    ]
    outs += [F.rms_norm(x, (6,), new(6)), F.rms_norm(new(6, 4), (4,))]
    outs += [
        F.group_norm(x, 3, new(6), new(6)),
        F.group_norm(new(6, 6, 4, 2), 2),
        F.group_norm(new(4, 6), 2, new(6)),
        F.group_norm(new(6, 6), 6),
    ]
    y = x.detach()
    gy, weight = new(6, 6, 6, grad=False), new(6, grad=False)
    _, mean, rstd = aten.native_layer_norm(y, [6], weight, weight, 1e-5)
    for mask in ([True, True, True], [True, False, False], [False, True, True]):
        aten.native_layer_norm_backward(gy, y, [6], mean, rstd, weight, weight, mask)
        aten.native_layer_norm_backward(gy, y, [6], mean, rstd, None, None, [mask[0], False, False])
        _, gmean, grstd = aten.native_group_norm(y, weight, weight, 6, 6, 6, 2, 1e-5)
        aten.native_group_norm_backward(gy, y, gmean, grstd, weight, 6, 6, 6, 2, mask)
    (
        direct(aten._fused_rms_norm.default, y, [6], y[0, 0], 1e-5),
        direct(aten._fused_rms_norm.default, y, [6, 6], y[0], None),
    )
    return outs


@sample
def batch_norms() -> Any:
    outs = []
    for x in (new(6, 6), new(6, 6, 4), new(4, 6, 4, 6), new(1, 12, 4, 3)):
        channels = x.shape[1]
        weight, bias, mean, var = (
            new(channels),
            new(channels),
            new(channels, grad=False),
            torch.rand(channels, dtype=torch.float64) + 0.5,
        )
        y, gy = x.detach(), new(*x.shape, grad=False)
        for w, b in ((weight.detach(), bias.detach()), (None, None)):
            aten._native_batch_norm_legit_functional(y, w, b, mean, var, True, 0.1, 1e-5)
            aten._native_batch_norm_legit_functional(y, w, b, mean, var, False, 0.1, 1e-5)
            aten._batch_norm_with_update_functional(y, w, b, mean, var, 0.1, 1e-5)
            aten._native_batch_norm_legit.no_stats(y, w, b, True, 0.1, 1e-5)
            aten._native_batch_norm_legit_no_training(y, w, b, mean, var, 0.1, 1e-5)
            aten.native_batch_norm(y, w, b, mean, var, False, 0.1, 1e-5)
            _, save, inv = aten.native_batch_norm(y, w, b, None, None, True, 0.1, 1e-5)
            for mask in ([True, True, True], [True, False, False], [False, True, True]):
                aten.native_batch_norm_backward(gy, y, w, mean, var, save, inv, True, 1e-5, mask)
                aten.native_batch_norm_backward(gy, y, w, mean, var, save, inv, False, 1e-5, mask)
        outs += [F.batch_norm(x, mean, var, weight, bias), F.batch_norm(x, None, None, weight, bias, True)]
    outs += [F.instance_norm(new(4, 6, 6)), F.instance_norm(new(6, 6, 4), weight=new(6), bias=new(6))]
    return outs


@sample
def attention() -> Any:
    outs = []
    masks: tuple[torch.Tensor | None, ...] = (
        None,
        new(4, 4, grad=False),
        new(4, 1, 4, 4, grad=False),
        new(1, 1, 4, 4, grad=False),
        new(4, 4, 4, 4, grad=False),
    )
    for mask in masks:
        q, k, v = new(4, 4, 4, 8), new(4, 4, 4, 8), new(4, 4, 4, 8)
        outs.append(F.scaled_dot_product_attention(q, k, v, mask))
    outs.append(
        F.scaled_dot_product_attention(
            new(6, 2, 4, 8), new(6, 2, 6, 8), new(6, 2, 6, 8), torch.rand(6, 1, 4, 6, dtype=torch.float64)
        )
    )
    outs.append(F.scaled_dot_product_attention(new(6, 6, 6, 8), new(6, 6, 6, 8), new(6, 6, 6, 8), is_causal=True))
    return outs


@sample
def transforms() -> Any:
    x = new(6, 6, 4)
    outs = [
        torch.fft.fft(x),
        torch.fft.fft(x, dim=0),
        torch.fft.rfft(x, dim=1),
        torch.fft.irfft(torch.fft.rfft(x, dim=1), n=6, dim=1),
    ]
    outs += [torch.fft.fft2(x, dim=(0, 1)), torch.fft.fft2(x, dim=(1, 2)), torch.fft.fftn(x), torch.fft.ifft(x, dim=1)]
    return outs


@sample
def losses() -> Any:
    outs = []
    for reduction in ("none", "mean", "sum"):
        for weight in (None, torch.rand(4, dtype=torch.float64)):
            target = index(4, 6)
            target[1] = -100
            outs.append(F.nll_loss(new(6, 4).log_softmax(1), target, weight, reduction=reduction))
            outs.append(
                F.nll_loss(
                    new(4, 4, 4, 3).log_softmax(1), index(4, 4, 4, 3), weight, ignore_index=1, reduction=reduction
                )
            )
            outs.append(F.nll_loss(new(4, 4).log_softmax(1), index(4, 4), weight, reduction=reduction))
    return outs


@sample
def loss_head() -> Any:
    from fullbatch import linear_cross_entropy

    outs = []
    for bias, smoothing in ((None, 0.0), (new(4), 0.1)):
        for hidden, weight, target in ((new(6, 4), new(4, 4), index(4, 6)), (new(4, 6, 3), new(4, 3), index(4, 4, 6))):
            options = {"label_smoothing": smoothing, "reduction": "none", "slice": 2}
            outs.append(linear_cross_entropy(hidden, weight, target, bias, ignore_index=1, **options))
    return outs
