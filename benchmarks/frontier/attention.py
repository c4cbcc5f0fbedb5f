"""Transformers: ViT by hand as a chain, GPT-2 and Llama of `transformers`, and a contrastive pair of towers.

Weights are random and there is no dropout. Attention is torch's scaled_dot_product_attention everywhere.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from built import Built, classify, images, next_token


class Block(nn.Module):
    """Attention and a two-layer network, each after a LayerNorm and beside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, width = x.shape
        split = self.qkv(self.norm1(x)).view(n, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(split[0], split[1], split[2])
        x = x + self.out(attended.transpose(1, 2).reshape(n, tokens, width))
        return x + self.mlp(self.norm2(x))


class Patches(nn.Module):
    """(N, 3, H, W) to (N, 1 + patches, width): patches and a class token, with their positions added."""

    def __init__(self, side: int, patch: int, width: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + (side // patch) ** 2, width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.cut(x).flatten(2).transpose(1, 2)
        return torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions


class Words(nn.Module):
    """(N, T) to (N, T, width): embeddings, with their positions added."""

    def __init__(self, words: int, length: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.positions = nn.Parameter(0.02 * torch.randn(1, length, width))

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids) + self.positions


class FirstToken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


def tower(enter: nn.Module, width: int, layers: int, outputs: int) -> nn.Sequential:
    """Blocks, a LayerNorm, and a linear map of the first token."""
    blocks = [Block(width, max(1, width // 64)) for _ in range(layers)]
    return nn.Sequential(enter, *blocks, nn.LayerNorm(width), FirstToken(), nn.Linear(width, outputs))


def vit(batch: int, side: int, width: int = 384, layers: int = 12, patch: int = 16, classes: int = 1000) -> Built:
    """A vision transformer as deep as ViT-B."""
    model = tower(Patches(side, patch, width), width, layers, classes)
    return classify, model, (images(batch, side), torch.randint(0, classes, (batch,)))


class Pair(nn.Module):
    """A tower for images, a tower for texts, and the temperature between them."""

    def __init__(self, side: int, patch: int, words: int, length: int, width: int, layers: int) -> None:
        super().__init__()
        self.image = tower(Patches(side, patch, width), width, layers, width)
        self.text = tower(Words(words, length, width), width, layers, width)
        self.scale = nn.Parameter(torch.tensor(2.659))  # log(1 / 0.07), as in Radford et al. 2021

    def forward(self, pictures: Tensor, ids: Tensor) -> Tensor:
        image, text = F.normalize(self.image(pictures), dim=-1), F.normalize(self.text(ids), dim=-1)
        return self.scale.exp() * image @ text.T


def info_nce(model: Any, batch: Any) -> Tensor:
    """Each image against all texts and each text against all images of the whole batch."""
    logits = model(batch[0], batch[1])
    here = torch.arange(logits.shape[0], device=logits.device)
    return (F.cross_entropy(logits, here) + F.cross_entropy(logits.T, here)) / 2


def clip(
    batch: int, side: int, width: int = 256, layers: int = 6, patch: int = 8, length: int = 32, words: int = 4000
) -> Built:
    """A pair of LayerNorm towers under InfoNCE."""
    model = Pair(side, patch, words, length, width, layers)
    return info_nce, model, (images(batch, side), torch.randint(0, words, (batch, length)))


def gpt2(batch: int, length: int, layers: int = 12, width: int = 256, words: int = 8000) -> Built:
    """GPT-2 of the `transformers` package: narrow layers, a short vocabulary."""
    from transformers import GPT2Config, GPT2LMHeadModel

    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    size = {"n_layer": layers, "n_embd": width, "n_head": max(1, width // 64), "n_positions": length}
    model = GPT2LMHeadModel(GPT2Config(**size, vocab_size=words, use_cache=False, **off))
    return next_token, model, torch.randint(0, words, (batch, length))


def llama(batch: int, length: int, layers: int = 4, width: int = 256, words: int = 32000) -> Built:
    """Llama of the `transformers` package: few layers under a vocabulary of 32,000, so that logits dominate."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = max(1, width // 64)
    config = LlamaConfig(
        vocab_size=words, hidden_size=width, intermediate_size=width * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=max(1, heads // 2), max_position_embeddings=length,
        use_cache=False,
    )  # fmt: skip
    return next_token, LlamaForCausalLM(config), torch.randint(0, words, (batch, length))
