"""Detection, window attention, mobile blocks, mixers and diffusion: networks known for unusual wiring."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import Built, case
from .models_vision import classify, images


def conv(cin: int, cout: int, k: int = 1, s: int = 1, g: int = 1, act: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(cin, cout, k, s, k // 2, groups=g, bias=False), nn.BatchNorm2d(cout, eps=1e-3, momentum=0.03),
        act or nn.SiLU(inplace=True),
    )  # fmt: skip


class C2f(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.cv1, self.cv2 = conv(c, c), conv(3 * c // 2, c)
        self.m = nn.Sequential(conv(c // 2, c // 2, 3), conv(c // 2, c // 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = list(self.cv1(x).chunk(2, 1))
        y.append(y[-1] + self.m(y[-1]))
        return self.cv2(torch.cat(y, 1))


class SPPF(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.cv1, self.cv2, self.m = conv(c, c // 2), conv(2 * c, c), nn.MaxPool2d(5, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cv1(x)
        y1 = self.m(x)
        y2 = self.m(y1)
        return self.cv2(torch.cat((x, y1, y2, self.m(y2)), 1))


class Yolo(nn.Module):
    """Two scales; a box, an objectness and three classes at each cell."""

    def __init__(self, c: int = 4) -> None:
        super().__init__()
        self.stem, self.stage1 = conv(3, c, 3, 2), nn.Sequential(conv(c, 2 * c, 3, 2), C2f(2 * c))
        self.stage2 = nn.Sequential(conv(2 * c, 2 * c, 3, 2), SPPF(2 * c))
        self.up, self.neck = nn.Upsample(scale_factor=2, mode="nearest"), conv(4 * c, 2 * c, 3)
        self.head = nn.ModuleList([nn.Conv2d(2 * c, 8, 1), nn.Conv2d(2 * c, 8, 1)])

    def forward(self, x: Tensor) -> Tensor:
        p3 = self.stage1(self.stem(x))
        p4 = self.stage2(p3)
        p3 = self.neck(torch.cat([self.up(p4), p3], 1))
        outs = [h(p).flatten(2).transpose(1, 2) for h, p in zip(self.head, (p3, p4), strict=True)]
        return torch.cat(outs, 1)


@case()
def yolo() -> Built:
    """The box loss is divided by the number of objects of the batch; some images have none."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        out = model(batch["image"])
        boxes, obj, cls = out.split((4, 1, 3), dim=2)
        positive = batch["positive"]
        n = positive.sum().clamp(min=1)
        box_loss = (F.smooth_l1_loss(boxes.sigmoid(), batch["boxes"], reduction="none").sum(2) * positive).sum() / n
        cls_loss = F.binary_cross_entropy_with_logits(cls, batch["classes"], reduction="none").sum(2)
        obj_loss = F.binary_cross_entropy_with_logits(obj[..., 0], positive.to(obj.dtype))
        total = box_loss * 7.5 + (cls_loss * positive).sum() / n * 0.5 + obj_loss
        return total, torch.stack([box_loss, obj_loss]).detach()

    positive = torch.rand(8, 20) < torch.tensor([0, 0.5, 0.1, 0, 0.3, 0.05, 0.9, 0.1])[:, None]
    batch = {
        "image": torch.randn(8, 3, 16, 16),
        "positive": positive,
        "boxes": torch.rand(8, 20, 4),
        "classes": F.one_hot(torch.randint(3, (8, 20)), 3).double(),
    }
    return loss, Yolo(), batch


class DETR(nn.Module):
    def __init__(self, d: int = 8, queries: int = 4) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, d, 3, 2, 1), nn.BatchNorm2d(d), nn.ReLU(), nn.Conv2d(d, d, 3, 2, 1))
        self.transformer = nn.Transformer(d, 2, 1, 1, 16, dropout=0.0)
        self.query_pos = nn.Parameter(torch.rand(queries, d))
        self.row, self.col = nn.Parameter(torch.rand(10, d // 2)), nn.Parameter(torch.rand(10, d // 2))
        self.classes, self.boxes = nn.Linear(d, 4), nn.Linear(d, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.backbone(x)
        height, width = h.shape[-2:]
        pos = torch.cat(
            [
                self.col[:width].unsqueeze(0).repeat(height, 1, 1),
                self.row[:height].unsqueeze(1).repeat(1, width, 1),
            ],
            dim=-1,
        ).flatten(0, 1)
        src = pos.unsqueeze(1) + 0.1 * h.flatten(2).permute(2, 0, 1)
        out = self.transformer(src, self.query_pos.unsqueeze(1).expand(-1, x.size(0), -1)).transpose(0, 1)
        return {"logits": self.classes(out), "boxes": self.boxes(out).sigmoid()}


@case()
def detr() -> Built:
    """Matching comes with the batch; class 3 is 'no object' and weighs less."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        out = model(batch["image"])
        weight = torch.tensor([1.0, 1.0, 1.0, 0.1], dtype=torch.float64)
        cls = F.cross_entropy(out["logits"].transpose(1, 2), batch["labels"], weight)
        matched = (batch["labels"] != 3).unsqueeze(-1)
        box = (F.l1_loss(out["boxes"], batch["boxes"], reduction="none") * matched).sum() / matched.sum()
        return cls + 5 * box

    labels = torch.randint(4, (8, 4))
    labels[3] = 3
    return loss, DETR(), {"image": torch.randn(8, 3, 8, 8), "labels": labels, "boxes": torch.rand(8, 4, 4)}


def window_partition(x: Tensor, w: int) -> Tensor:
    b, h, wd, c = x.shape
    return x.view(b, h // w, w, wd // w, w, c).permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, w * w, c)


def window_reverse(windows: Tensor, w: int, h: int, wd: int) -> Tensor:
    # Swin recovers the batch size from the number of windows; h and wd are Python ints.
    b = int(windows.shape[0] / (h * wd / w / w))
    return windows.view(b, h // w, wd // w, w, w, -1).permute(0, 1, 3, 2, 4, 5).contiguous().view(b, h, wd, -1)


class SwinBlock(nn.Module):
    """Attention in windows that are folded into the batch; shifted windows are masked."""

    def __init__(self, dim: int, size: int, window: int, shift: int, heads: int = 2) -> None:
        super().__init__()
        self.w, self.shift, self.heads, self.size = window, shift, heads, size
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.bias = nn.Parameter(0.1 * torch.randn((2 * window - 1) ** 2, heads))
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        ij = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        offset = (ij[:, :, None] - ij[:, None]).permute(1, 2, 0) + window - 1
        self.register_buffer("index", offset[..., 0] * (2 * window - 1) + offset[..., 1])
        region = torch.zeros(1, size, size, 1)
        if shift:
            region[:, -window:-shift], region[:, -shift:] = 1, 2
            region[:, :, -window:-shift] += 3
            region[:, :, -shift:] += 6
        parts = window_partition(region, window).squeeze(-1)
        self.register_buffer("mask", torch.where(parts[:, None] == parts[:, :, None], 0.0, -100.0))

    def attention(self, x: Tensor) -> Tensor:
        n_windows, n, c = x.shape
        q, k, v = self.qkv(x).reshape(n_windows, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        attn = (q * (c // self.heads) ** -0.5) @ k.transpose(-2, -1)
        attn = attn + self.bias[self.index.view(-1)].view(n, n, -1).permute(2, 0, 1).contiguous().unsqueeze(0)
        per_image = self.mask.shape[0]
        attn = attn.view(n_windows // per_image, per_image, self.heads, n, n) + self.mask.unsqueeze(1).unsqueeze(0)
        attn = attn.view(-1, self.heads, n, n).softmax(-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(n_windows, n, c))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.roll(self.norm1(x), (-self.shift, -self.shift), dims=(1, 2))
        h = window_reverse(self.attention(window_partition(h, self.w)), self.w, self.size, self.size)
        x = x + torch.roll(h, (self.shift, self.shift), dims=(1, 2))
        return x + self.mlp(self.norm2(x))


class Permute(nn.Module):
    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(*self.dims)


class PatchMerging(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.reduction = nn.LayerNorm(4 * dim), nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)
        return self.reduction(self.norm(x))


@case()
def swin() -> Built:
    model = nn.Sequential(
        nn.Conv2d(3, 6, 2, 2), Permute(0, 2, 3, 1), SwinBlock(6, 8, 4, 0), SwinBlock(6, 8, 4, 2), PatchMerging(6),
        nn.Flatten(1, 2), nn.LayerNorm(12), nn.Flatten(), nn.Linear(192, 5),
    )  # fmt: skip
    return classify, model, images()


@case()
def mlp_mixer_with_merging() -> Built:
    class Mixer(nn.Module):
        def __init__(self, tokens: int, dim: int) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
            self.token = nn.Sequential(nn.Linear(tokens, 12), nn.GELU(), nn.Linear(12, tokens))
            self.channel = nn.Sequential(nn.Linear(dim, 12), nn.GELU(), nn.Linear(12, dim))

        def forward(self, x: Tensor) -> Tensor:
            shape = x.shape
            x = x.flatten(1, 2)
            x = x + self.token(self.norm1(x).transpose(1, 2)).transpose(1, 2)
            return (x + self.channel(self.norm2(x))).reshape(shape)

    model = nn.Sequential(
        nn.Conv2d(3, 6, 4, 4), Permute(0, 2, 3, 1), Mixer(16, 6), PatchMerging(6), Mixer(4, 12), nn.Flatten(1, 2),
        Permute(0, 2, 1), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(12, 5),
    )  # fmt: skip
    return classify, model, images(7)


class SqueezeExcite(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(c, 2, 1), nn.Conv2d(2, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        s = F.adaptive_avg_pool2d(x, 1)
        return x * F.hardsigmoid(self.expand(F.relu(self.reduce(s))))


class InvertedResidual(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            conv(c, 3 * c, act=nn.Hardswish()), conv(3 * c, 3 * c, 3, g=3 * c, act=nn.ReLU6()), SqueezeExcite(3 * c),
            conv(3 * c, c, act=nn.Identity()),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


@case()
def mobilenet_squeeze_excite() -> Built:
    model = nn.Sequential(
        conv(3, 4, 3, 2), InvertedResidual(4), InvertedResidual(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Dropout(0.0), nn.Linear(4, 5),
    )  # fmt: skip
    return classify, model, images()


class DiffusionUNet(nn.Module):
    def __init__(self, c: int = 6) -> None:
        super().__init__()
        self.c = c
        self.time = nn.Sequential(nn.Linear(c, 2 * c), nn.SiLU(), nn.Linear(2 * c, c))
        self.inc, self.down = nn.Conv2d(3, c, 3, padding=1), nn.Conv2d(c, c, 3, stride=2, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(2, c), nn.GroupNorm(2, c)
        self.mid, self.attn = nn.Conv2d(c, c, 3, padding=1), nn.MultiheadAttention(c, 2, batch_first=True)
        self.up, self.out = nn.ConvTranspose2d(c, c, 2, 2), nn.Conv2d(2 * c, 3, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        half = self.c // 2
        freqs = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float64) / half)
        args = t[:, None].double() * freqs[None]
        emb = self.time(torch.cat([torch.cos(args), torch.sin(args)], dim=-1))
        skip = self.inc(x)
        h = self.down(F.silu(self.norm1(skip))) + emb[:, :, None, None]
        seq = F.silu(self.norm2(self.mid(h))).flatten(2).mT
        seq, _ = self.attn(seq, seq, seq, need_weights=False)
        h = h + seq.mT.reshape(h.shape)
        return self.out(torch.cat([self.up(h), skip], 1))


@case()
def diffusion_step() -> Built:
    """The noise is drawn outside the step and comes with the batch; min-SNR weights by timestep."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        alpha = batch["alphas_cumprod"][batch["t"]].view(-1, 1, 1, 1)
        noisy = alpha.sqrt() * batch["x0"] + (1 - alpha).sqrt() * batch["noise"]
        snr = (alpha / (1 - alpha)).flatten()
        error = F.mse_loss(model(noisy, batch["t"]), batch["noise"], reduction="none").mean(dim=(1, 2, 3))
        return (error * snr.clamp(max=5.0) / snr).mean()

    batch = {
        "x0": torch.randn(8, 3, 8, 8),
        "noise": torch.randn(8, 3, 8, 8),
        "t": torch.randint(100, (8,)),
        "alphas_cumprod": torch.linspace(0.999, 0.01, 100),
    }
    return loss, DiffusionUNet(), batch
