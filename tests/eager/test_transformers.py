"""Models of transformers: their key/value cache, and their blocks under checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fullbatch
from eager.support import agrees, squeezed

transformers = pytest.importorskip("transformers")


# LlamaRMSNorm computes in float32 whatever the model's dtype is.
TOLERANCE = {"gpt2": 1e-10, "llama": 1e-6}


def tiny(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=50,
            n_positions=32,
            n_embd=16,
            n_layer=4,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        return transformers.GPT2LMHeadModel(config).double().train()
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double().train()


def next_token(model: Any, batch: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    ids, targets = batch
    if ids.max().item() >= 50:  # branches on data
        raise ValueError("no such token")
    logits = model(input_ids=ids, **kwargs).logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, targets[:, 1:].flatten(), reduction="sum"), (targets[:, 1:] != -100).sum()


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 50, (4, 24), generator=torch.Generator().manual_seed(0))
    targets = ids.clone()
    targets[1, 3:] = -100
    return ids, targets


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_blocks_are_checkpointed_and_the_cache_is_off(kind: str) -> None:
    model, example = tiny(kind), batch()
    assert model.config.use_cache is True
    step = squeezed(next_token, model, example)
    assert len(step.plan.checkpointed) >= 4
    assert any("key/value cache off" in note for note in step.plan.notes)
    agrees(step, next_token, model, example, TOLERANCE[kind])
    assert model.config.use_cache is True


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_cache_that_loss_fn_asks_for_is_not_filled_twice(kind: str) -> None:
    """The cache is an object among the arguments of each block: the recompute finds it as the forward did."""

    def loss_fn(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
        cache = transformers.DynamicCache()
        result = next_token(model, batch, use_cache=True, past_key_values=cache)
        held.append(cache)
        return result

    held: list[Any] = []
    model, example = tiny(kind), batch()
    step = squeezed(loss_fn, model, example)
    held.clear()
    agrees(step, loss_fn, model, example, TOLERANCE[kind])
    assert {cache.get_seq_length() for cache in held} == {24}


def test_microbatches_of_a_padded_batch() -> None:
    model, example = tiny("gpt2"), batch()
    step = fullbatch.eager.Step(next_token, model, example, microbatch=3)
    agrees(step, next_token, model, example)
