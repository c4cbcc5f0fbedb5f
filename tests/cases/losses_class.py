"""Classification losses: who is counted in the denominator, and where a loss is not a mean of sample losses."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import Built, LossFn, case

CLASSES = 5


def classifier(loss_fn: LossFn, b: int = 8) -> Built:
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, CLASSES))
    return loss_fn, model, (torch.randn(b, 6), torch.randint(CLASSES, (b,)))


def binary(loss_fn: LossFn, outputs: int = 3) -> Built:
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, outputs))
    return loss_fn, model, (torch.randn(8, 6), torch.randint(2, (8, outputs)).double())


class Tagger(nn.Module):
    """Logits per token, [B, T, V]."""

    def __init__(self, vocab: int = 11, dim: int = 6) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(vocab, dim), nn.Linear(dim, dim), nn.Linear(dim, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        return self.head(torch.tanh(self.mix(h) + h.mean(1, keepdim=True)))


def tokens(loss_fn: LossFn, lengths: list[int], time: int = 6) -> Built:
    """Labels are -100 after the length of each sample."""
    ids, labels = torch.randint(11, (2, len(lengths), time))
    labels[torch.arange(time) >= torch.tensor(lengths)[:, None]] = -100
    return loss_fn, Tagger(), {"input_ids": ids, "labels": labels}


def token_loss(model: nn.Module, batch: dict[str, Tensor], **options: Any) -> Tensor:
    logits = model(batch["input_ids"])
    return F.cross_entropy(logits.view(-1, logits.size(-1)), batch["labels"].view(-1), **options)


@case()
def ce_mean() -> Built:
    return classifier(lambda m, b: F.cross_entropy(m(b[0]), b[1]))


@case()
def ce_sum() -> Built:
    return classifier(lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum"), 7)


@case()
def ce_none_then_mean() -> Built:
    return classifier(lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none").mean())


@case()
def ce_ignore_index_uneven() -> Built:
    return tokens(token_loss, [6, 1, 3, 2, 0, 5, 1, 4])


@case()
def ce_ignore_index_empty_microbatch() -> Built:
    """No valid token at all in the first half."""
    return tokens(token_loss, [0, 0, 0, 0, 5, 1, 6, 2])


@case()
def ce_token_lengths_10_1_1_1() -> Built:
    """A mean over tokens: microbatch means must be weighed 10 : 1 : 1 : 1."""
    return tokens(token_loss, [10, 1, 1, 1], time=10)


@case()
def ce_ignore_index_zero() -> Built:
    """Another index than -100: zero is padding."""

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(m(b["input_ids"]).transpose(1, 2), b["labels"].clamp(min=0), ignore_index=0)

    return tokens(loss, [6, 1, 3, 2, 0, 5, 1, 4])


@case()
def ce_ignore_index_sum_over_count() -> Built:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        return token_loss(m, b, reduction="sum") / (b["labels"] != -100).sum().clamp(min=1)

    return tokens(loss, [6, 1, 3, 2, 0, 5, 1, 4])


@case()
def ce_shifted_labels() -> Built:
    """Next-token prediction."""

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        logits = m(b["input_ids"])[..., :-1, :].contiguous()
        return F.cross_entropy(logits.view(-1, 11), b["labels"][..., 1:].contiguous().view(-1), ignore_index=-100)

    return tokens(loss, [6, 1, 3, 2, 0, 5, 1, 4])


@case()
def ce_class_weights() -> Built:
    """The denominator is the sum of the weights of the classes that occur."""
    weight = torch.tensor([0.1, 1.0, 2.0, 5.0, 0.5], dtype=torch.float64)
    return classifier(lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=weight))


@case()
def ce_class_weights_module() -> Built:
    """The criterion holds the weights as a buffer and is part of the model."""
    loss, model, batch = classifier(lambda m, b: m[1](m[0](b[0]), b[1]), 7)
    return loss, (model, nn.CrossEntropyLoss(weight=torch.rand(CLASSES) + 0.1)), batch


@case()
def ce_label_smoothing() -> Built:
    return classifier(lambda m, b: F.cross_entropy(m(b[0]), b[1], label_smoothing=0.1))


@case()
def ce_label_smoothing_ignore_index() -> Built:
    return tokens(lambda m, b: token_loss(m, b, label_smoothing=0.1), [0, 0, 0, 4, 5, 1, 6, 2])


@case()
def ce_label_smoothing_weights_ignore_index() -> Built:
    weight = torch.rand(11) + 0.1
    return tokens(lambda m, b: token_loss(m, b, label_smoothing=0.2, weight=weight), [6, 1, 3, 2, 0, 5, 1, 4])


@case()
def ce_label_smoothing_weights_sum() -> Built:
    weight = torch.rand(CLASSES) + 0.1
    return classifier(lambda m, b: F.cross_entropy(m(b[0]), b[1], weight, label_smoothing=0.2, reduction="sum"))


@case()
def ce_probabilities() -> Built:
    loss, model, (x, _) = classifier(lambda m, b: F.cross_entropy(m(b[0]), b[1]))
    return loss, model, (x, torch.randn(8, CLASSES).softmax(-1))


@case()
def ce_probabilities_weights_smoothing() -> Built:
    weight = torch.rand(CLASSES) + 0.1
    loss, model, (x, _) = classifier(lambda m, b: F.cross_entropy(m(b[0]), b[1], weight, label_smoothing=0.1))
    return loss, model, (x, torch.randn(8, CLASSES).softmax(-1))


def segmentation(loss_fn: LossFn) -> Built:
    model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 1))
    labels = torch.randint(4, (8, 6, 6))
    labels[torch.rand(8, 6, 6) < torch.linspace(0, 0.9, 8)[:, None, None]] = 255
    labels[2] = 255
    return loss_fn, model, {"image": torch.randn(8, 3, 6, 6), "mask": labels}


@case()
def ce_segmentation_ignore() -> Built:
    return segmentation(lambda m, b: F.cross_entropy(m(b["image"]), b["mask"], ignore_index=255))


@case()
def ce_segmentation_weights_ignore() -> Built:
    weight = torch.rand(4) + 0.1
    return segmentation(lambda m, b: F.cross_entropy(m(b["image"]), b["mask"], weight, ignore_index=255))


@case()
def nll_mean() -> Built:
    return classifier(lambda m, b: F.nll_loss(F.log_softmax(m(b[0]), dim=-1), b[1]))


@case()
def nll_weights_ignore() -> Built:
    weight = torch.rand(CLASSES) + 0.1
    return classifier(lambda m, b: F.nll_loss(m(b[0]).log_softmax(1), b[1], weight, ignore_index=0))


@case()
def nll_segmentation() -> Built:
    return segmentation(lambda m, b: F.nll_loss(m(b["image"]).log_softmax(1), b["mask"], ignore_index=255))


@case()
def bce_probabilities() -> Built:
    return binary(lambda m, b: F.binary_cross_entropy(torch.sigmoid(m(b[0])), b[1]))


@case()
def bce_with_logits() -> Built:
    return binary(lambda m, b: F.binary_cross_entropy_with_logits(m(b[0]).squeeze(1), b[1].squeeze(1)), 1)


@case()
def bce_with_logits_pos_weight() -> Built:
    pos_weight = torch.tensor([1.0, 7.0, 0.3], dtype=torch.float64)
    return binary(lambda m, b: F.binary_cross_entropy_with_logits(m(b[0]), b[1], pos_weight=pos_weight))


@case()
def bce_with_logits_weight() -> Built:
    """A weight for each element, in the batch."""
    loss, model, batch = binary(lambda m, b: F.binary_cross_entropy_with_logits(m(b[0]), b[1], weight=b[2]))
    return loss, model, (*batch, torch.rand(8, 3))


@case()
def multi_margin() -> Built:
    return classifier(lambda m, b: F.multi_margin_loss(m(b[0]), b[1], margin=0.7))


@case()
def soft_margin() -> Built:
    return binary(lambda m, b: F.soft_margin_loss(m(b[0]), 2 * b[1] - 1))


@case()
def multilabel_soft_margin() -> Built:
    return binary(lambda m, b: F.multilabel_soft_margin_loss(m(b[0]), b[1]))


@case()
def multilabel_soft_margin_weight_sum() -> Built:
    weight = torch.tensor([1.0, 7.0, 0.3], dtype=torch.float64)
    return binary(lambda m, b: F.multilabel_soft_margin_loss(m(b[0]), b[1], weight, reduction="sum"))


@case()
def focal_multiclass() -> Built:
    def focal(m: nn.Module, b: tuple[Tensor, Tensor]) -> Tensor:
        ce = F.cross_entropy(m(b[0]), b[1], reduction="none")
        pt = torch.exp(-ce)
        return (0.25 * (1 - pt) ** 2 * ce).mean()

    return classifier(focal)


@case()
def focal_normalised_by_positives() -> Built:
    """RetinaNet: the sum is divided by the number of positives of the batch."""

    def focal(m: nn.Module, b: tuple[Tensor, Tensor]) -> Tensor:
        logits, target = m(b[0]), b[1]
        p = torch.sigmoid(logits)
        ce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        p_t = p * target + (1 - p) * (1 - target)
        alpha_t = 0.25 * target + 0.75 * (1 - target)
        return (alpha_t * ce * (1 - p_t) ** 2).sum() / torch.clamp(target.sum(), min=1.0)

    return binary(focal)


# F.ctc_loss is left out: the shape of an output of aten._ctc_loss depends on the values of the target lengths.
