"""Whole vision networks, small: they have the layers and the wiring of the originals, not the width."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ConvNextConfig, ConvNextForImageClassification, ViTConfig, ViTForImageClassification

from . import Built, case


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def images(b: int = 8, size: int = 16, classes: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(b, 3, size, size), torch.randint(classes, (b,))


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, cin: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * self.expansion
        self.conv1, self.bn1 = nn.Conv2d(cin, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or cin != out:
            self.downsample = nn.Sequential(nn.Conv2d(cin, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, layers: list[int], width: int, classes: int = 5) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        cin, stages = width, []
        for i, depth in enumerate(layers):
            blocks = []
            for j in range(depth):
                blocks.append(Bottleneck(cin, width * 2**i, 2 if i and not j else 1))
                cin = width * 2**i * Bottleneck.expansion
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(cin, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


@case()
def mlp() -> Built:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5))
    return classify, model, images(7, 8)


@case()
def resnet50() -> Built:
    return classify, ResNet([3, 4, 6, 3], width=4), images(8, 32)


@case()
def resnet_zero_init_residual() -> Built:
    """The last scale of each block starts at zero, so most gradients are exactly zero."""
    model = ResNet([1, 1, 1, 1], width=3)
    for m in model.modules():
        if isinstance(m, Bottleneck):
            nn.init.zeros_(m.bn3.weight)
    return classify, model, images(8, 32)


class DoubleConv(nn.Sequential):
    def __init__(self, cin: int, cout: int) -> None:
        super().__init__(
            nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True),
            nn.Conv2d(cout, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True),
        )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, width: int = 4, classes: int = 3) -> None:
        super().__init__()
        self.inc, self.down1, self.down2 = (
            DoubleConv(3, width), DoubleConv(width, 2 * width), DoubleConv(2 * width, 2 * width)
        )  # fmt: skip
        self.pool = nn.MaxPool2d(2)
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.up1, self.up2 = DoubleConv(4 * width, width), DoubleConv(2 * width, width)
        self.out = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        x1 = self.inc(x)
        x2 = self.down1(self.pool(x1))
        x3 = self.down2(self.pool(x2))
        x = self.up1(torch.cat([x2, self.up(x3)], dim=1))
        up = self.up(x)
        # The usual padding to the size of the skip.
        dy, dx = x1.size(2) - up.size(2), x1.size(3) - up.size(3)
        up = F.pad(up, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        return self.out(self.up2(torch.cat([x1, up], dim=1)))


@case()
def unet_bilinear() -> Built:
    batch = (torch.randn(8, 3, 17, 16), torch.randint(3, (8, 17, 16)))
    return classify, UNet(), batch


@case()
def unet3d_instance_norm() -> Built:
    class UNet3D(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc, self.mid, self.dec = self.block(1, 3), self.block(3, 4), self.block(6, 3)
            self.up = nn.ConvTranspose3d(4, 3, 2, stride=2)
            self.out = nn.Conv3d(3, 2, 1)

        @staticmethod
        def block(cin: int, cout: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv3d(cin, cout, 3, padding=1), nn.InstanceNorm3d(cout, affine=True), nn.LeakyReLU(inplace=True)
            )

        def forward(self, x: Tensor) -> Tensor:
            skip = self.enc(x)
            return self.out(self.dec(torch.cat([self.up(self.mid(F.max_pool3d(skip, 2))), skip], 1)))

    def dice_ce(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits = model(batch[0])
        p, t = logits.softmax(1)[:, 1], batch[1].to(logits.dtype)
        # Per-sample Dice, as nnU-Net has it without batch_dice.
        dice = (2 * (p * t).sum((1, 2, 3)) + 1e-5) / (p.sum((1, 2, 3)) + t.sum((1, 2, 3)) + 1e-5)
        return F.cross_entropy(logits, batch[1]) - dice.mean()

    return dice_ce, UNet3D(), (torch.randn(7, 1, 6, 6, 6), torch.randint(2, (7, 6, 6, 6)))


def vit_config() -> ViTConfig:
    return ViTConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=16, patch_size=8,
        num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip


@case()
def hf_vit() -> Built:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["pixel_values"]).logits, batch["labels"], label_smoothing=0.1)

    x, y = images()
    return loss, ViTForImageClassification(vit_config()).double().train(), {"pixel_values": x, "labels": y}


@case()
def hf_vit_own_loss() -> Built:
    x, y = images(7)
    model = ViTForImageClassification(vit_config()).double().train()
    return (lambda m, b: m(**b).loss), model, {"pixel_values": x, "labels": y}


@case()
def hf_convnext() -> Built:
    config = ConvNextConfig(
        num_channels=3, patch_size=2, hidden_sizes=[4, 6, 8, 8], depths=[1, 1, 2, 1], num_labels=5, drop_path_rate=0.0,
        image_size=32, layer_scale_init_value=0.1,
    )  # fmt: skip
    x, y = images(8, 32)
    model = ConvNextForImageClassification(config).double().train()
    return (lambda m, b: m(**b).loss), model, {"pixel_values": x, "labels": y}


class ConvNeXtBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pw1, self.pw2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(0.1 * torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        return x + (self.gamma * self.pw2(F.gelu(self.pw1(h)))).permute(0, 3, 1, 2)


@case()
def convnext_by_hand() -> Built:
    model = nn.Sequential(
        nn.Conv2d(3, 6, 4, 4), ConvNeXtBlock(6), ConvNeXtBlock(6), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(6, 5),
    )  # fmt: skip
    return classify, model, images()


class ViT(nn.Module):
    """Patches, an expanded class token, fused attention, pre-norm."""

    def __init__(self, dim: int = 8, heads: int = 2, patch: int = 4, tokens: int = 16) -> None:
        super().__init__()
        self.heads, self.scale = heads, 1 / math.sqrt(dim // heads)
        self.embed = nn.Conv2d(3, dim, patch, patch)
        self.cls = nn.Parameter(torch.randn(1, 1, dim))
        self.pos = nn.Parameter(0.1 * torch.randn(1, tokens + 1, dim))
        self.norm1, self.norm2, self.norm = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.head = nn.Linear(dim, 5)

    def attention(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = ((q * self.scale) @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(b, n, c))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(x.shape[0], -1, -1), x), dim=1) + self.pos
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return self.head(self.norm(x)[:, 0])


@case()
def vit_by_hand() -> Built:
    return classify, ViT(), images()


@case()
def vit_by_hand_with_aux() -> Built:
    def loss(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        logits = model(batch["x"])
        hits = logits.argmax(1).eq(batch["y"])
        return F.cross_entropy(logits, batch["y"]), {"logits": logits.detach(), "hits": hits, "n_correct": hits.sum()}

    x, y = images(7)
    return loss, ViT(), {"x": x, "y": y}
