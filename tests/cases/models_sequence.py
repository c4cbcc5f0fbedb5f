"""Recurrent networks, encoders with padding, siamese networks, and batches of unusual types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BatchEncoding

from . import Built, case


class Recurrent(nn.Module):
    """Embedding, recurrent layers, and a label for the whole sequence."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 5, padding_idx=0)
        self.rnn = kind(5, 6, **options)
        self.head = nn.Linear(6 * (1 + self.rnn.bidirectional), 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.rnn.batch_first:
            out, _ = self.rnn(x)
            return self.head(out[:, -1])
        out, _ = self.rnn(x.transpose(0, 1))
        return self.head(out.mean(0))


def recurrent(kind: type[nn.RNNBase], b: int = 8, **options: Any) -> Built:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["ids"]), batch["label"])

    return loss, Recurrent(kind, **options), {"ids": torch.randint(12, (b, 5)), "label": torch.randint(4, (b,))}


@case()
def lstm_batch_first() -> Built:
    return recurrent(nn.LSTM, batch_first=True)


@case()
def lstm_time_first() -> Built:
    return recurrent(nn.LSTM, 7)


@case()
def lstm_bidirectional_two_layers() -> Built:
    return recurrent(nn.LSTM, num_layers=2, bidirectional=True, batch_first=True)


@case()
def lstm_projected() -> Built:
    """Also uses the last state, and a learned first state that is expanded to the batch."""

    class Projected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(5, 6, proj_size=3, batch_first=True)
            self.h0, self.c0 = nn.Parameter(torch.randn(1, 1, 3)), nn.Parameter(torch.randn(1, 1, 6))

        def forward(self, x: Tensor) -> Tensor:
            b = x.size(0)
            _, (h, c) = self.rnn(x, (self.h0.repeat(1, b, 1), self.c0.repeat(1, b, 1)))
            return torch.cat([h[-1], c[-1]], dim=1)

    return (lambda m, b: m(b).pow(2).mean()), Projected(), torch.randn(8, 4, 5)


@case()
def gru_batch_first() -> Built:
    return recurrent(nn.GRU, 7, batch_first=True)


@case()
def gru_time_first() -> Built:
    return recurrent(nn.GRU)


@case()
def gru_bidirectional_two_layers() -> Built:
    return recurrent(nn.GRU, num_layers=2, bidirectional=True)


@case()
def rnn_relu() -> Built:
    return recurrent(nn.RNN, nonlinearity="relu", batch_first=True)


@case()
def lstm_language_model() -> Built:
    """Loss over non-padding tokens, with logits of every step."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.rnn, self.head = nn.Embedding(12, 5), nn.LSTM(5, 5, batch_first=True), nn.Linear(5, 12)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.rnn(self.embed(ids))[0])

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids[:, :-1]).reshape(-1, 12), ids[:, 1:].reshape(-1), ignore_index=0)

    ids = torch.randint(1, 12, (8, 7))
    ids[torch.arange(7)[None] >= torch.tensor([7, 2, 1, 1, 5, 7, 3, 2])[:, None]] = 0
    return loss, Model(), ids


@case()
def gru_cell_loop() -> Built:
    """A scheduled loop in Python over the steps of a cell."""

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out = nn.GRUCell(3, 5), nn.Linear(5, 3)

        def forward(self, h: Tensor, y: Tensor) -> Tensor:
            x, outs = torch.zeros_like(y[:, 0]), []
            for _ in range(y.size(1)):
                h = self.cell(x, h)
                x = self.out(h)
                outs.append(x)
            return F.mse_loss(torch.stack(outs, dim=1), y)

    return (lambda m, b: m(*b)), Decoder(), (torch.randn(8, 5), torch.randn(8, 4, 3))


@case()
def transformer_encoder_layer_padding() -> Built:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(12, 8)
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
            self.head = nn.Linear(8, 4)

        def forward(self, ids: Tensor) -> Tensor:
            pad = ids == 0
            h = self.layer(self.embed(ids), src_key_padding_mask=pad)
            keep = (~pad).unsqueeze(-1)
            return self.head((h * keep).sum(1) / keep.sum(1))

    ids = torch.randint(1, 12, (8, 6))
    ids[torch.arange(6)[None] >= torch.tensor([6, 2, 1, 3, 5, 6, 3, 2])[:, None]] = 0
    return (lambda m, b: F.cross_entropy(m(b["ids"]), b["y"])), Encoder(), {"ids": ids, "y": torch.randint(4, (8,))}


class Seq2Seq(nn.Module):
    """nn.Transformer in [T, B, D] with a causal mask and memory padding."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed, self.options = nn.Embedding(12, 8), options
        self.net = nn.Transformer(8, 2, 1, 1, 12, dropout=0.0)
        self.head = nn.Linear(8, 12)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        mask = torch.triu(torch.full((tgt.size(1), tgt.size(1)), float("-inf"), dtype=torch.float64), diagonal=1)
        pad = torch.zeros(src.shape, dtype=torch.float64).masked_fill(src == 0, float("-inf"))
        out = self.net(
            self.embed(src).permute(1, 0, 2), self.embed(tgt).permute(1, 0, 2), tgt_mask=mask,
            src_key_padding_mask=pad, memory_key_padding_mask=pad, **self.options,
        )  # fmt: skip
        return self.head(out).permute(1, 2, 0)


def translation(**options: Any) -> Built:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        src, tgt = batch
        return F.cross_entropy(model(src, tgt[:, :-1]), tgt[:, 1:], ignore_index=0)

    src, tgt = torch.randint(1, 12, (8, 5)), torch.randint(0, 12, (8, 5))
    src[torch.arange(5)[None] >= torch.tensor([5, 2, 1, 3, 5, 4, 3, 2])[:, None]] = 0
    return loss, Seq2Seq(**options), (src, tgt)


@case()
def transformer_seq2seq_time_first() -> Built:
    return translation(tgt_is_causal=True)


# Without tgt_is_causal the decoder compares the mask with a causal one in Python: bool((mask == causal).all()).
@case("dynamo-no")
def transformer_seq2seq_mask_detected() -> Built:
    return translation()


@case()
def siamese_shared_weights() -> Built:
    """Contrastive loss of two inputs through one network with BatchNorm."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        a, b, same = batch
        d = F.pairwise_distance(model(a), model(b))
        return (same * d.pow(2) + (1 - same) * F.relu(1.0 - d).pow(2)).mean()

    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(24, 5))
    return loss, model, (torch.randn(8, 2, 8), torch.randn(8, 2, 8), torch.randint(2, (8,)).double())


@dataclass
class Samples:
    image: Tensor
    target: Tensor
    weight: Tensor


@case()
def batch_dataclass() -> Built:
    def loss(model: nn.Module, batch: Samples) -> Tensor:
        each = F.cross_entropy(model(batch.image), batch.target, reduction="none")
        return (each * batch.weight).sum() / batch.weight.sum()

    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4))
    return loss, model, Samples(torch.randn(8, 1, 6, 6), torch.randint(4, (8,)), torch.rand(8))


@case()
def batch_encoding() -> Built:
    """What a tokenizer returns: both attributes and items."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(12, 5), nn.Linear(5, 3)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            mask = attention_mask.unsqueeze(-1).to(self.embed.weight.dtype)
            return self.head((self.embed(input_ids) * mask).sum(1) / mask.sum(1).clamp(min=1e-9))

    def loss(model: nn.Module, batch: BatchEncoding) -> Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        return F.cross_entropy(logits, batch["labels"])

    mask = (torch.arange(6)[None] < torch.tensor([6, 2, 1, 3, 5, 6, 3, 2])[:, None]).long()
    data = {"input_ids": torch.randint(12, (8, 6)), "attention_mask": mask, "labels": torch.randint(3, (8,))}
    return loss, Model(), BatchEncoding(data)


@case()
def batch_dict_with_class_weights() -> Built:
    """A tensor that has no batch dimension."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"], weight=batch["class_weights"])

    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    batch = {"x": torch.randn(8, 5), "y": torch.randint(3, (8,)), "class_weights": torch.tensor([0.2, 1.0, 3.0])}
    return loss, model, batch


@case()
def batch_dict_with_numbers_and_nest() -> Built:
    """Python numbers, strings, a None and nested containers next to the tensors."""

    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        out = model(torch.cat([batch["views"][0], batch["views"][1]], dim=1))
        target = batch["meta"]["target"]
        assert batch["extra"] is None
        value = F.mse_loss(out, target) if batch["kind"] == "mse" else F.l1_loss(out, target)
        return batch["scale"] * value

    batch = {
        "views": [torch.randn(7, 3), torch.randn(7, 2)],
        "meta": {"target": torch.randn(7, 2)},
        "scale": 0.25,
        "kind": "mse",
        "extra": None,
    }
    return loss, nn.Linear(5, 2), batch
