"""One rule that makes a configuration small, by the names of its numbers.

A configuration of `transformers` is a tree of named numbers. Sizes that mean the same have the same names in hundreds
of models, and a model runs where its sizes agree with each other. So the rule has three strengths: each width becomes a
constant; each width is divided by one power of two; or widths stay. Layers, experts, vocabularies and images are small
in all of them. The first strength at which plain PyTorch runs the model is used.
"""

from __future__ import annotations

import math
import re
from typing import Any

STRENGTHS = ("constants", "divided", "kept")

_OFF = re.compile(r"drop|mask_(time|feature)_prob|apply_spec_augment|jitter|router_.*noise|noise_std|layer_?drop")
_LAYERS = re.compile(
    r"(num|n)_?.*(layers|blocks|layer|block)$|^n_layers?$|(^|_)layers$|(^|_)depth$|num_hidden_layers|num_.*_depth$|"
    r"h_cycles|l_cycles"
)
_NOT_LAYERS = re.compile(r"feature_layer|out_|norm|types?$|moe_layer|conv_layers|num_feat|patch|share")
_WIDTHS = re.compile(
    r"(hidden|embed|embedding|model|projection|proj|output|emb|kv|text|vision|audio|fusion|decoder|encoder|feature|"
    r"codebook|mask|conv|ssm|attention|lru|qformer|upsample|downsample|pooler|prompt|latent|neck|channel|entity|"
    r"fpn|backbone|trunk|head|bottleneck|quantization|mamba|word|query).*_?(dim|size|width|channels|hidden|embed)s?$"
    r"|^(d_model|dim|n_embd|width|embed_dim|hidden|d_embed|d_latents|d_proj|emb_dim|lru_width|neck_hidden_sizes|"
    r"conv_dim|hidden_channels|hidden_sizes|channels|d_inner|q_lora_rank|kv_lora_rank|bottleneck_size|num_filters|"
    r"attention_hidden_size|word_embed_proj_dim|embedding_size|d_state|tdnn_dim)$"
)
_NOT_WIDTHS = re.compile(
    r"vocab|image|patch|kernel|window|chunk|block_size|head_dim|stride|batch|num_channels|max_|ratio|in_channels|"
    r"group|codebook_size|memory_size|n_heads|num_"
)
_WIDE = re.compile(
    r"intermediate|ffn_(dim|hidden|size)|ffn_dim|d_ff|mlp_dim|n_inner|feedforward|mlp_hidden|dim_feedforward"
)
_HEADS = re.compile(
    r"(num|n)_.*heads?$|^heads$|attention_heads$|^n_head$|^num_heads$|num_key_value_heads|n_heads|_heads$"
)
_HEAD = re.compile(r"head_dim$|^d_kv$|^d_head$|^attention_head_size$|head_size$|^kv_channels$")
_EXPERTS = re.compile(r"(num|n)_.*experts$|num_experts$|^num_local_experts$")
_PER_TOKEN = re.compile(r"experts_per_tok(en)?$|top_?k(_experts)?$|moe_topk|topk_group|n_group$")
_SHORT = re.compile(
    r"num_queries|num_query_tokens|num_latents|num_(object|.*)_?queries$|num_codebooks|num_frames|^frames_per"
)
_POSITIONS = re.compile(
    r"max_.*position|n_positions|n_ctx|max_seq_len|max_sequence_length|seq_length$|max_source|max_target"
)
_IDS = re.compile(r"_(token|id|index|idx)(_id)?s?$|token_ids?$|_token_id$|_token_index$")
_STAGES = re.compile(r"out_features|out_indices|^stage_names$|^per_layer_config$")
_DEPTHS = re.compile(
    r"^depths$|stage.*(layers|blocks|depths?)|num_blocks|layers_per|layer_depths|(encoder|decoder)_depths|^layers$|"
    r"^depth$|num_layers"
)


def shrink(config: dict[str, Any], strength: str) -> dict[str, Any]:
    """The configuration `config` (as `to_dict` gives it) made small."""
    return _tree(config, strength, _factor(config))


def _factor(config: Any) -> int:
    """A power of two that brings the largest width to about 64."""
    widths = [v for k, v in _items(config) if isinstance(v, int) and not isinstance(v, bool) and _is_width(k)]
    factor = 1
    while widths and max(widths) // factor > 96:
        factor *= 2
    return factor


def _items(config: Any) -> list[tuple[str, Any]]:
    found = []
    for key, value in config.items():
        found += _items(value) if isinstance(value, dict) else [(str(key), value)]
    return found


def _is_width(key: str) -> bool:
    return bool(_WIDTHS.search(key)) and not _NOT_WIDTHS.search(key) and not _WIDE.search(key)


def _tree(config: dict[str, Any], strength: str, factor: int) -> dict[str, Any]:
    kept = _kinds(config)
    out: dict[str, Any] = {}
    for key, value in config.items():
        name = str(key)
        if _STAGES.search(name):  # names of layers that are no longer there: the default follows from those that are
            continue
        if isinstance(value, dict):
            out[key] = _tree(value, strength, factor)
        elif value is None and name == "prediction_length":
            out[key] = 4
        elif isinstance(value, bool):
            out[key] = False if _OFF.search(name) or name == "use_cache" else value
        elif isinstance(value, (int, float)):
            out[key] = _number(name, value, strength, factor, len(kept))
        elif isinstance(value, (list, tuple)) and kept and len(value) == _count(config):
            out[key] = [value[at] for at in kept]
        elif isinstance(value, (list, tuple)) and value and all(type(item) is int for item in value):
            out[key] = type(value)(_list(name, list(value), strength, factor))
        else:
            out[key] = value
    return out


def _count(config: dict[str, Any]) -> int:
    return next(
        (v for k, v in config.items() if k in ("num_hidden_layers", "n_layer", "num_layers") and isinstance(v, int)), -1
    )


def _kinds(config: dict[str, Any]) -> list[int]:
    """Where layers are of several kinds: one layer of each, at most four."""
    count = _count(config)
    lists = [v for k, v in config.items() if isinstance(v, (list, tuple)) and len(v) == count > 0 and "type" in str(k)]
    first: dict[Any, int] = {}
    for at, kinds in enumerate(zip(*lists, strict=True)):
        first.setdefault(kinds, at)
    found = sorted(first.values())[:4]
    return found if len(found) != 1 else [0, 1]


def _number(name: str, value: int | float, strength: str, factor: int, layers: int) -> int | float:
    if _OFF.search(name) and isinstance(value, float):
        return 0.0
    if isinstance(value, float) or value <= 1:
        return value
    if name in ("num_hidden_layers", "n_layer", "num_layers") and layers:
        return layers
    for pattern, small in (("vocab_size", 128), ("vocab", 128)):
        if pattern in name and "size" in name:
            return min(value, small)
    if name.endswith("image_size") or name == "img_size":
        return min(value, 64)
    if "patch_size" in name and strength == "constants":
        return min(value, 8) if value % 8 == 0 else min(value, 14)
    if _IDS.search(name):
        return value if value < 100 else 100 + value % 20
    if _POSITIONS.search(name):
        return min(value, 128)
    if _EXPERTS.search(name):
        return min(value, 4)
    if _PER_TOKEN.search(name):
        return min(value, 2)
    if _SHORT.search(name):
        return min(value, 4)
    if _LAYERS.search(name) and not _NOT_LAYERS.search(name):
        return min(value, 2)
    return _width(name, value, strength, factor)


def _width(name: str, value: int, strength: str, factor: int) -> int:
    if strength == "kept":
        return value
    if name.endswith("window_size"):
        return min(value, 2)
    if name.endswith("chunk_size"):  # a text of twelve would be padded to it
        return min(value, 8)
    if strength == "divided":
        sized = _is_width(name) or _WIDE.search(name) or _HEAD.search(name)
        return max(value // factor, 2) if sized else value
    if _HEAD.search(name) or name == "rotary_dim":
        return 8
    if _WIDE.search(name):
        return min(value, 64)
    if _HEADS.search(name):
        return min(value, 2 if re.search("key_value|kv", name) else 4)
    return min(value, 32) if _is_width(name) else value


def _list(name: str, values: list[int], strength: str, factor: int) -> list[int]:
    if _DEPTHS.search(name):
        return [min(v, 1 if len(values) > 2 else 2) for v in values]
    if name.endswith("image_size"):
        return [min(v, 64) for v in values]
    if name.endswith("mrope_section") and strength == "constants":
        return [2, 1, 1]  # of the four frequencies of a head of eight
    if _HEADS.search(name) and strength == "constants":
        return [v // math.gcd(*values) for v in values]
    if _is_width(name) and strength != "kept":
        while max(values) > 64 and all(v % 2 == 0 for v in values):
            values = [v // 2 for v in values]
    return values
