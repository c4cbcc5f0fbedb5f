"""Language models of transformers with tiny random configurations."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from . import Built, case

VOCAB = 20


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def next_token(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Causal loss written by the user, over the labels that are not -100."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask")).logits
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), batch["labels"][:, 1:].reshape(-1))


def text(b: int = 8, time: int = 6, pad_left: bool = False) -> dict[str, Tensor]:
    """Samples of different lengths; one has a single token, hence no next token to predict."""
    lengths = torch.tensor([time, 3, 1, time, 2, 5, 4, 2][:b])
    mask = (torch.arange(time)[None] < lengths[:, None]).long()
    if pad_left:
        mask = mask.flip(1)
    ids = torch.randint(2, VOCAB, (b, time))
    return {
        "input_ids": torch.where(mask.bool(), ids, 0),
        "attention_mask": mask,
        "labels": torch.where(mask.bool(), ids, -100),
    }


def without(batch: dict[str, Tensor], *keys: str) -> dict[str, Tensor]:
    return {k: v for k, v in batch.items() if k not in keys}


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """The RMS norms of Llama and T5 compute in float32 whatever their input: use the float64 one of PyTorch."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ in ("LlamaRMSNorm", "T5LayerNorm"):
                norm = nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(parent, name, norm)
    return model.double().train()


def gpt2(**options: Any) -> PreTrainedModel:
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=8, n_embd=8, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=1, eos_token_id=1, **options,
    )  # fmt: skip
    return in_float64(GPT2LMHeadModel(config))


def bert_config(**options: Any) -> BertConfig:
    return BertConfig(
        vocab_size=VOCAB, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **options,
    )  # fmt: skip


def llama(**options: Any) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, use_cache=False, **options,
    )  # fmt: skip
    return in_float64(LlamaForCausalLM(config))


@case()
def gpt2_padded() -> Built:
    return next_token, gpt2(use_cache=False), text()


@case()
def gpt2_no_padding() -> Built:
    return next_token, gpt2(use_cache=False), without(text(7), "attention_mask")


# transformers takes the logits of a causal model to float32 before its loss.
@case("float32")
def gpt2_own_loss() -> Built:
    model = gpt2(use_cache=False)
    model.config.loss_type = model.loss_type = "ForCausalLM"
    return own_loss, model, text()


# Left alone, GPT2LMHeadModel has no loss type and warns through a logger, which Dynamo alone refuses to trace.
@case("float32")
def gpt2_own_loss_warning() -> Built:
    return own_loss, gpt2(use_cache=False), text()


@case()
def gpt2_own_loss_replaced() -> Built:
    """The hook that transformers gives for another loss, here one without the float32."""

    def causal(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
        labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
        return F.cross_entropy(logits.view(-1, vocab_size), labels)

    model = gpt2(use_cache=False)
    model.loss_function = causal
    return own_loss, model, text()


@case()
def gpt2_eager_attention() -> Built:
    return next_token, gpt2(use_cache=False, attn_implementation="eager"), text()


@case()
def gpt2_checkpointed() -> Built:
    model = gpt2(use_cache=False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return next_token, model, text()


def masked_text() -> dict[str, Tensor]:
    batch = text()
    masked = (torch.rand(batch["labels"].shape) < 0.3) & batch["attention_mask"].bool()
    batch["labels"] = torch.where(masked, batch["labels"], -100)
    batch["input_ids"] = torch.where(masked, 1, batch["input_ids"])
    return batch


@case()
def bert_masked_lm_own_loss() -> Built:
    """Each sample has another number of masked tokens; some have none."""
    return own_loss, BertForMaskedLM(bert_config()).double().train(), masked_text()


@case()
def bert_masked_lm_eager() -> Built:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return F.cross_entropy(logits.view(-1, VOCAB), batch["labels"].view(-1), reduction="sum") / 8

    model = BertForMaskedLM(bert_config(attn_implementation="eager")).double().train()
    return loss, model, masked_text()


@case()
def bert_classification_own_loss() -> Built:
    model = BertForSequenceClassification(bert_config(num_labels=3, problem_type="single_label_classification"))
    return own_loss, model.double().train(), text() | {"labels": torch.randint(3, (8,))}


@case()
def bert_frozen_body() -> Built:
    """Only the classifier is trained; regression."""
    model = BertForSequenceClassification(bert_config(num_labels=1, problem_type="regression")).double().train()
    model.bert.requires_grad_(False)
    return own_loss, model, text(7) | {"labels": torch.randn(7)}


@case()
def llama_padded() -> Built:
    return next_token, llama(), text()


@case()
def llama_left_padded_with_positions() -> Built:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        mask = batch["attention_mask"]
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = model(batch["input_ids"], attention_mask=mask, position_ids=positions).logits
        each = F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], reduction="none")
        valid = batch["labels"][:, 1:] != -100
        # The mean of each sequence, then the mean of those.
        return ((each * valid).sum(1) / valid.sum(1).clamp(min=1)).mean()

    return loss, llama(), text(pad_left=True)


@case("float32")
def llama_own_loss() -> Built:
    return own_loss, llama(), text()


@case()
def llama_tied() -> Built:
    return next_token, llama(tie_word_embeddings=True), without(text(7), "attention_mask")


def t5() -> PreTrainedModel:
    config = T5Config(
        vocab_size=VOCAB, d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2, dropout_rate=0.0, use_cache=False,
        relative_attention_num_buckets=8, relative_attention_max_distance=16, decoder_start_token_id=0, pad_token_id=0,
        initializer_factor=0.3,
    )  # fmt: skip
    return in_float64(T5ForConditionalGeneration(config))


@case()
def t5_own_loss() -> Built:
    return own_loss, t5(), text()


@case()
def t5_label_smoothing() -> Built:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = model(**batch).logits
        value = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), label_smoothing=0.1)
        return value, (batch["labels"] != -100).sum()

    return loss, t5(), text(7)


class TinyGPT(nn.Module):
    """nanoGPT: fused qkv, a causal mask as a buffer, tied head, GELU."""

    def __init__(self, dim: int = 8, heads: int = 2, time: int = 6) -> None:
        super().__init__()
        self.heads = heads
        self.tok, self.pos = nn.Embedding(VOCAB, dim), nn.Embedding(time, dim)
        self.ln1, self.ln2, self.ln = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc, self.out = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.head = nn.Linear(dim, VOCAB, bias=False)
        self.tok.weight = self.head.weight
        self.register_buffer("bias", torch.tril(torch.ones(time, time)).view(1, 1, time, time), persistent=False)

    def attention(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = (z.view(b, t, self.heads, c // self.heads).transpose(1, 2) for z in self.qkv(x).split(c, dim=2))
        att = (q @ k.transpose(-2, -1)) * (1.0 / k.size(-1) ** 0.5)
        att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf")).softmax(-1)
        return self.proj((att @ v).transpose(1, 2).contiguous().view(b, t, c))

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tok(ids) + self.pos(torch.arange(ids.size(1)))
        x = x + self.attention(self.ln1(x))
        x = x + self.out(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))
        logits = self.head(self.ln(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1), logits


@case()
def nano_gpt() -> Built:
    ids = torch.randint(VOCAB, (8, 7))
    targets = ids[:, 1:].clone()
    targets[:3, 1:] = -1
    return (lambda m, b: m(b["ids"], b["targets"])), TinyGPT(), {"ids": ids[:, :-1], "targets": targets}
