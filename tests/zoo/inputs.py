"""Inputs of a model, from the names of its forward's arguments and the sizes in its configuration.

Several sets are offered, the fullest first; the first that plain PyTorch takes is used. All are for a batch of four
samples that differ, texts of unequal lengths.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

BATCH = 4
LENGTH = 12
_LENGTHS = (12, 9, 12, 7)

Inputs = dict[str, Tensor]


class Sizes:
    """Numbers of a configuration or of its parts, by name."""

    def __init__(self, config: Any) -> None:
        self._tree = config.to_dict()

    def find(self, *names: str, default: Any = None, within: str = "") -> Any:
        """The first number with one of these names, in the part `within` before others, outer parts before inner."""
        for name in names:
            found = sorted(_found(self._tree, name, ()), key=lambda item: (within not in item[0], len(item[0])))
            if found:
                return found[0][1]
        return default

    def square(self, *names: str, default: int, within: str = "") -> tuple[int, int]:
        size = self.find(*names, default=default, within=within)
        if isinstance(size, dict):
            size = [size.get("height", default), size.get("width", default)]
        return (int(size[0]), int(size[-1])) if isinstance(size, (list, tuple)) else (int(size), int(size))


def _found(tree: Any, name: str, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in tree.items():
        if key == name and value is not None and not isinstance(value, bool):
            yield path, value
        if isinstance(value, dict):
            yield from _found(value, name, (*path, str(key)))


def _ids(sizes: Sizes, within: str = "", length: int = LENGTH) -> Tensor:
    vocabulary = sizes.find("vocab_size", "text_vocab_size", "n_vocab", default=100, within=within)
    vocabulary = vocabulary[0] if isinstance(vocabulary, (list, tuple)) else vocabulary
    return torch.randint(3, max(4, min(int(vocabulary), 99)), (BATCH, length))


def _mask(length: int = LENGTH) -> Tensor:
    lengths = torch.tensor(_LENGTHS) * length // LENGTH
    return (torch.arange(length)[None] < lengths[:, None]).long()


def _images(sizes: Sizes) -> Tensor:
    height, width = sizes.square(
        "image_size", "img_size", "input_size", "pretrain_image_size", default=64, within="vision_config"
    )
    channels = sizes.find(
        "num_channels", "in_channels", "in_chans", "image_channels", default=3, within="vision_config"
    )
    return torch.randn(BATCH, channels if isinstance(channels, int) else 3, height, width)


def _boxes(length: int = LENGTH) -> Tensor:
    corner = torch.randint(0, 50, (BATCH, length, 2))
    return torch.cat([corner, corner + torch.randint(1, 40, (BATCH, length, 2))], dim=-1)


def _sound(sizes: Sizes, channels_first: bool, length: int = 64) -> Tensor:
    bins = sizes.find(
        "num_mel_bins", "n_mels", "input_feat_per_channel", "feature_projection_input_dim", "feature_size",
        "num_mel_channels", "input_feat_size", "input_size", "mel_bins", default=80,
    )  # fmt: skip
    longest = sizes.find("max_source_positions", default=0, within="audio_config")
    length = 2 * longest if longest and channels_first else length
    length = sizes.find("max_length", default=length) if not channels_first else length
    length = min(length, 256)
    return torch.randn(BATCH, bins, length) if channels_first else torch.randn(BATCH, length, bins)


def _series(sizes: Sizes, name: str) -> Tensor:
    context = sizes.find("context_length", default=16)
    lags = sizes.find("lags_sequence", default=[])
    past = context + (max(lags) if lags else 0)
    length = past if name.startswith("past") else sizes.find("prediction_length", default=4)
    if name.endswith("time_features"):
        return torch.randn(BATCH, length, sizes.find("num_time_features", default=1))
    width = sizes.find("num_input_channels", "input_size", default=1)
    shape = (BATCH, length) if width == 1 and lags else (BATCH, length, width)
    return torch.ones(shape) if name.endswith("mask") else torch.randn(shape)


_Maker = Callable[[Sizes, int], Tensor]  # the second number: which of two layouts

_MAKERS: dict[str, _Maker] = {
    "input_ids": lambda s, k: _ids(s, "text_config"),
    "attention_mask": lambda s, k: _mask(),
    "decoder_input_ids": lambda s, k: _ids(s, "decoder", 8),
    "pixel_values": lambda s, k: _images(s),
    "pixel_values_videos": lambda s, k: _video(s),
    "bbox": lambda s, k: _boxes(),
    "input_features": lambda s, k: _sound(s, k == 0),
    "audio_features": lambda s, k: _sound(s, k == 0),
    "input_values": lambda s, k: _waves(s, k),
    "past_values": lambda s, k: _series(s, "past_values"),
    "past_time_features": lambda s, k: _series(s, "past_time_features"),
    "past_observed_mask": lambda s, k: _series(s, "past_observed_mask"),
    "future_values": lambda s, k: _series(s, "future_values"),
    "future_time_features": lambda s, k: _series(s, "future_time_features"),
    "image": lambda s, k: _images(s),
    "visual_feats": lambda s, k: torch.randn(BATCH, 3, s.find("visual_feat_dim", "visual_embedding_dim", default=32)),
    "visual_embeds": lambda s, k: torch.randn(BATCH, 3, s.find("visual_embedding_dim", default=32)),
    "visual_pos": lambda s, k: torch.rand(BATCH, 3, s.find("visual_pos_dim", default=4)),
    "spectrogram": lambda s, k: _sound(s, False),
    "states": lambda s, k: torch.randn(BATCH, 5, s.find("state_dim", default=17)),
    "actions": lambda s, k: torch.randn(BATCH, 5, s.find("act_dim", default=4)),
    "rewards": lambda s, k: torch.randn(BATCH, 5, 1),
    "returns_to_go": lambda s, k: torch.randn(BATCH, 5, 1),
    "timesteps": lambda s, k: torch.arange(5).expand(BATCH, 5).contiguous(),
    "prompt_pixel_values": lambda s, k: _images(s),
    "prompt_masks": lambda s, k: _images(s),
    "qformer_input_ids": lambda s, k: _ids(s, "qformer_config"),
    "query_embeds": lambda s, k: torch.randn(BATCH, 4, s.find("hidden_size", default=32)),
    "inputs": lambda s, k: _ids(s),
    "hidden_states": lambda s, k: torch.randn(BATCH, LENGTH, s.find("hidden_size", default=32)),
    "task_inputs": lambda s, k: _ids(s),
    "input_points": lambda s, k: torch.rand(BATCH, 1, 2, 2) * 30,
    "image_sizes": lambda s, k: torch.tensor([[64, 64]] * BATCH),
}


def _video(sizes: Sizes) -> Tensor:
    frames = sizes.find("num_frames", "frames_per_clip", default=4)
    image = _images(sizes)
    return torch.randn(BATCH, frames, *image.shape[1:])


def _waves(sizes: Sizes, layout: int) -> Tensor:
    if sizes.find("num_mel_bins") and sizes.find("frequency_stride"):
        return _sound(sizes, False)
    return torch.randn(BATCH, 3200) if layout == 0 else torch.randn(BATCH, 1, 3200)


def candidates(model: nn.Module, config: Any) -> Iterator[Inputs]:
    """Sets of inputs to try, the fullest first."""
    sizes = Sizes(config)
    parameters = inspect.signature(model.forward).parameters
    required = [
        name for name, p in parameters.items()
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]  # fmt: skip
    known = [name for name in parameters if name in _MAKERS]
    main = [model.main_input_name] if getattr(model, "main_input_name", "") in parameters else []
    video = {"pixel_values"} if "pixel_values" in known and sizes.find("num_frames", "tubelet_size") else set()
    text = {"input_ids", "attention_mask", "decoder_input_ids", "bbox"}
    unusual = {"inputs", "hidden_states", "image_sizes", "query_embeds", "input_points", "pixel_values_videos"}
    seen: list[list[str]] = []
    for names in (
        [n for n in known if n in required or n in main or n not in unusual],
        [*required, *main, *(n for n in known if n in ("attention_mask", "decoder_input_ids"))],
        [*required, *main],
        [*required, *(n for n in known if n in text)],
        ["input_ids", *(["decoder_input_ids"] if "decoder_input_ids" in known else [])],
        [n for n in known if n in ("pixel_values", "pixel_values_videos")],
    ):
        chosen = [n for n in dict.fromkeys(names) if n in _MAKERS]
        if not chosen or chosen in seen or any(n not in _MAKERS for n in required):
            continue
        seen.append(chosen)
        for layout in (0, 1):
            yield from _made(model, sizes, chosen, layout, video)


def _made(model: nn.Module, sizes: Sizes, names: list[str], layout: int, video: set[str]) -> Iterator[Inputs]:
    torch.manual_seed(1)
    inputs = {name: (_video(sizes) if name in video else _MAKERS[name](sizes, layout)) for name in names}
    text = next((n for n in ("input_ids", "bbox") if n in inputs), None)
    if text is None and "attention_mask" in inputs:
        media = next((v for n, v in inputs.items() if n != "attention_mask"))
        inputs["attention_mask"] = _mask(media.shape[-1 if media.dim() == 2 or layout == 0 else 1])
    if "input_ids" in inputs and ("pixel_values" in inputs or "input_features" in inputs):
        placed = _with_media(model, sizes, inputs)
        if placed is not None:
            yield placed
    if layout == 0 or any(n in inputs for n in ("input_features", "input_values", "audio_features")):
        yield inputs


def _with_media(model: nn.Module, sizes: Sizes, inputs: Inputs) -> Inputs | None:
    """Texts with as many places for an image (a sound) as the model makes features of one."""
    for name, method, tokens in (
        ("pixel_values", "get_image_features", ("image_token_id", "image_token_index")),
        ("input_features", "get_audio_features", ("audio_token_id", "audio_token_index")),
    ):
        token = sizes.find(*tokens)
        if name not in inputs or token is None or not hasattr(model, method):
            continue
        try:
            with torch.no_grad():
                found = getattr(model, method)(**{name: inputs[name]})
        except Exception:  # the model wants more than this: another set of inputs may serve
            return None
        features = _features(found)
        if features is None or features % BATCH:
            return None
        ids = inputs["input_ids"]
        places = torch.full((BATCH, features // BATCH), int(token))
        ids = torch.cat([ids[:, :2], places, ids[:, 2:]], dim=1)
        return {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return None


def _features(found: Any) -> int | None:
    for name in ("pooler_output", "last_hidden_state"):
        value = getattr(found, name, None)
        if value is not None:
            found = value
            break
    if isinstance(found, (list, tuple)):
        return sum(int(item.shape[:-1].numel()) for item in found if isinstance(item, Tensor))
    return int(found.shape[:-1].numel()) if isinstance(found, Tensor) else None
