"""How people move axes about: views, folds of time and heads into the batch, splits and expansions."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import Built, LossFn, case


def small(loss_fn: LossFn, b: int = 8, out: int = 5) -> Built:
    """A two-layer network on [B, 6] with labels."""
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, out))
    return loss_fn, model, {"x": torch.randn(b, 6), "y": torch.randint(out, (b,))}


def sequence(loss_fn: LossFn, model: nn.Module | None = None, b: int = 8) -> Built:
    """A network on [B, T=4, D=6]."""
    return loss_fn, model or nn.Linear(6, 6), {"x": torch.randn(b, 4, 6), "y": torch.randn(b, 4, 6)}


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv(x)), 1)
        x = x.view(x.size(0), -1)
        return self.fc(x)


@case()
def view_size0_minus1() -> Built:
    batch = (torch.randn(7, 3, 6, 6), torch.randint(5, (7,)))
    return (lambda m, b: F.cross_entropy(m(b[0]), b[1])), Conv(), batch


@case()
def view_minus1_numbers() -> Built:
    """The batch is the -1."""

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        h = m(b["x"]).view(-1, 24).reshape(-1, 2, 12).transpose(1, 2).reshape(-1, 24)
        return (h - b["y"].flatten(1)).square().mean()

    return sequence(loss)


@case()
def reshape_whole_batch_to_vector() -> Built:
    return sequence(lambda m, b: F.mse_loss(m(b["x"]).view(-1), b["y"].view(-1)))


@case()
def einsum_attention() -> Built:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        q, k, v = m(b["x"]).chunk(3, dim=-1)
        weights = torch.einsum("btd,bsd->bts", q, k).softmax(-1)
        out = torch.einsum("bts,bsd->btd", weights, v)
        return torch.einsum("btd,btd->", out, out) / torch.numel(out)

    return sequence(loss, nn.Linear(6, 18))


@case()
def einsum_bilinear() -> Built:
    class Bilinear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.bilinear = nn.Parameter(torch.randn(6, 4, 6)), nn.Bilinear(6, 6, 4)

        def forward(self, a: Tensor, c: Tensor) -> Tensor:
            return torch.einsum("...i,iok,...k->...o", a, self.w, c) + self.bilinear(a, c)

    return sequence(lambda m, b: m(b["x"], b["y"]).tanh().mean(), Bilinear())


class HeadsInBatch(nn.Module):
    """Fairseq-style attention: [B * H, T, d] and bmm."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        h = 2
        q, k, v = (f(x).view(b, t, h, d // h).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k, v = (z.reshape(b * h, t, d // h) for z in (q, k, v))
        scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(d // h)
        causal = torch.tril(torch.ones(t, t, dtype=torch.bool))
        probs = scores.masked_fill(~causal, float("-inf")).softmax(-1)
        return self.o(torch.bmm(probs, v).view(b, h, t, d // h).transpose(1, 2).reshape(b, t, d))


@case()
def heads_folded_into_batch() -> Built:
    return sequence(lambda m, b: F.mse_loss(m(b["x"]), b["y"]), HeadsInBatch(), b=7)


@case()
def heads_folded_padding_mask_repeat_interleave() -> Built:
    """The mask of each sample, repeated for each head."""

    class Masked(HeadsInBatch):
        def forward(self, x: Tensor) -> Tensor:
            b, t, _ = x.shape
            lengths = x[:, :, 0].gt(0).sum(1).clamp(min=1)
            pad = torch.arange(t)[None] >= lengths[:, None]
            q, k = (f(x).view(b, t, 2, 3).transpose(1, 2).contiguous().view(-1, t, 3) for f in (self.q, self.k))
            bias = torch.zeros(b, 1, t, dtype=x.dtype).masked_fill(pad[:, None], -1e9).repeat_interleave(2, dim=0)
            probs = torch.baddbmm(bias, q, k.mT).softmax(-1).view(b, 2, t, t).mean(1)
            return self.o(probs @ self.v(x))

    return sequence(lambda m, b: F.mse_loss(m(b["x"]), b["y"]), Masked())


@case()
def time_distributed() -> Built:
    """A CNN of frames: [B, T, ...] is flattened to [B * T, ...], through BatchNorm as well."""

    class TimeDistributed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cnn = nn.Sequential(nn.Conv1d(1, 3, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4))
            self.rnn = nn.GRU(4, 6, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            b, t = x.shape[:2]
            frames = self.cnn(x.reshape(b * t, 1, *x.shape[2:]))
            return self.rnn(frames.view(b, t, -1))[0]

    return sequence(lambda m, b: F.mse_loss(m(b["x"]), b["y"]), TimeDistributed())


@case()
def multiple_choice() -> Built:
    """Four choices to a sample, scored as one batch of 4B and viewed back."""

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        flat = b["x"].view(-1, b["x"].size(-1))
        return F.cross_entropy(m(flat).view(-1, 4), b["choice"])

    loss_fn, model, batch = sequence(loss, nn.Linear(6, 1))
    return loss_fn, model, batch | {"choice": torch.randint(4, (8,))}


@case()
def sequence_first_permute() -> Built:
    class SequenceFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.norm = nn.MultiheadAttention(6, 2), nn.LayerNorm(6)

        def forward(self, x: Tensor) -> Tensor:
            x = x.permute(1, 0, 2)
            out, weights = self.attn(x, x, x)
            return self.norm(x + out).permute(1, 0, 2), weights

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        out, weights = m(b["x"])
        return F.mse_loss(out, b["y"]) - 0.1 * (weights * weights.log()).sum(-1).mean()

    return sequence(loss, SequenceFirst())


@case()
def batch_last() -> Built:
    """Features first, samples as columns."""

    class Columns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.b = nn.Parameter(torch.randn(5, 6)), nn.Parameter(torch.randn(5, 1))

        def forward(self, x: Tensor) -> Tensor:
            return (self.w @ x.T + self.b).T

    loss_fn, _, batch = small(lambda m, b: F.cross_entropy(m(b["x"]), b["y"]))
    return loss_fn, Columns(), batch


@case()
def stack_unbind_split_narrow() -> Built:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        h = m(b["x"])
        first, rest = h.split([2, 4], dim=-1)
        steps = torch.unbind(rest, dim=1)
        again = torch.stack([s * (i + 1) for i, s in enumerate(steps)], dim=1)
        left, right = again.chunk(2, dim=-1)
        out = torch.cat([first, left * right, again.narrow(-1, 1, 2)], dim=-1)
        return F.mse_loss(torch.hstack([out.flatten(1), out[:, 0]]).view(8, 5, 6)[:, :4], b["y"])

    return sequence(loss)


@case()
def unbind_the_batch() -> Built:
    """Iterates over the samples of the batch in Python."""

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        return sum(F.cross_entropy(m(x[None]), y[None]) for x, y in zip(b["x"], b["y"], strict=True)) / 8

    return small(loss)


@case()
def cls_token_expand_cat() -> Built:
    class Cls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cls, self.mask_token = nn.Parameter(torch.randn(1, 1, 6)), nn.Parameter(torch.randn(1, 1, 6))
            self.pos = nn.Parameter(torch.randn(5, 6))
            self.layer = nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            b, t, _ = x.shape
            hide = (x[..., :1] > 0.5).to(x.dtype)
            x = x * (1 - hide) + self.mask_token.expand(b, t, -1) * hide
            return self.layer(torch.cat([self.cls.expand(b, -1, -1), x], 1) + self.pos)[:, 1:]

    return sequence(lambda m, b: F.mse_loss(m(b["x"]), b["y"]), Cls())


@case()
def masked_autoencoder_shuffle() -> Built:
    """MAE: keep a random part of the tokens of each sample by argsort of noise, restore the order with gather."""

    class MAE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc, self.dec, self.mask_token = nn.Linear(6, 5), nn.Linear(5, 6), nn.Parameter(torch.randn(1, 1, 5))

        def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
            n, length, d = x.shape
            shuffle = torch.argsort(noise, dim=1)
            restore = torch.argsort(shuffle, dim=1)
            kept = torch.gather(x, 1, shuffle[:, :2].unsqueeze(-1).repeat(1, 1, d))
            h = self.enc(kept)
            h = torch.cat([h, self.mask_token.repeat(n, length - 2, 1)], dim=1)
            h = torch.gather(h, 1, restore.unsqueeze(-1).repeat(1, 1, h.shape[2]))
            mask = torch.ones([n, length], dtype=x.dtype)
            mask[:, :2] = 0
            return self.dec(h + h.mean(1, keepdim=True)), torch.gather(mask, 1, restore)

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        pred, mask = m(b["x"], b["noise"])
        return (((pred - b["x"]) ** 2).mean(-1) * mask).sum() / mask.sum()

    loss_fn, model, batch = sequence(loss, MAE())
    return loss_fn, model, batch | {"noise": torch.rand(8, 4)}


@case()
def repeat_and_repeat_interleave() -> Built:
    """Several augmented copies of each sample: [B] -> [3B], averaged over copies afterwards."""

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        x = b["x"].repeat_interleave(3, dim=0) * torch.tensor([1.0, 0.5, 2.0]).double().repeat(len(b["x"]))[:, None]
        probs = m(x).softmax(-1).view(-1, 3, 5).mean(1)
        tiled = m(b["x"].repeat(2, 1)).log_softmax(-1)
        return F.nll_loss(probs.log(), b["y"]) + F.nll_loss(tiled, b["y"].repeat(2))

    return small(loss)


@case()
def meshgrid_positions() -> Built:
    """CoordConv: a grid of positions expanded to the batch."""

    class Coord(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(5, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            b, _, h, w = x.shape
            ys, xs = torch.meshgrid(torch.linspace(-1, 1, h), torch.linspace(-1, 1, w), indexing="ij")
            grid = torch.stack([xs, ys]).to(x).unsqueeze(0).expand(b, -1, -1, -1)
            return self.conv(torch.cat([x, grid], 1)).amax((2, 3))

    batch = (torch.randn(8, 3, 5, 5), torch.randint(4, (8,)))
    return (lambda m, b: F.cross_entropy(m(b[0]), b[1])), Coord(), batch


@case()
def outer_products_between_samples() -> Built:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        z = m(b["x"])
        gram = z @ z.T
        pairs = z.unsqueeze(1) - z.unsqueeze(0)
        same = (b["y"].unsqueeze(1) == b["y"].unsqueeze(0)).to(z.dtype)
        return ((gram.sigmoid() - same) ** 2).mean() + 0.1 * (pairs.abs().sum(-1) * same).sum() / z.shape[0] ** 2

    return small(loss)


@case()
def bmm_and_broadcast_matmul() -> Built:
    class Broadcast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.basis, self.vector = nn.Parameter(torch.randn(3, 6, 6)), nn.Parameter(torch.randn(6))

        def forward(self, x: Tensor) -> Tensor:
            h = torch.matmul(x.unsqueeze(1), self.basis)
            g = torch.bmm(x.transpose(1, 2), x)
            return h.mean(1) @ g + (x @ self.vector).unsqueeze(-1) + torch.matmul(g, self.vector).unsqueeze(1)

    return sequence(lambda m, b: (m(b["x"]) - b["y"]).tanh().pow(2).mean(), Broadcast(), b=7)


@case()
def pairs_of_neighbours_in_batch() -> Built:
    """Even and odd samples are pairs: strides over the batch, and a view that splits it."""

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        z = m(b["x"])
        odd_even = F.cosine_similarity(z[0::2], z[1::2]).mean()
        halves = z.view(2, -1, z.size(-1))
        return odd_even + F.mse_loss(halves[0], halves[1])

    return small(loss)


@case()
def unflatten_movedim_swapaxes() -> Built:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        h = m(b["x"]).unflatten(-1, (2, 3)).movedim(1, -1).swapaxes(1, 2)
        h = torch.flatten(h, 1, 2).contiguous()
        return (h.softmax(1) * b["y"].mT.as_strided(h.shape, h.stride())).sum((1, 2)).logsumexp(0)

    return sequence(loss)
