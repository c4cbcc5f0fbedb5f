"""A small base model of each type in `transformers`, with inputs, and the scalar that is differentiated."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .in_float64 import read_in_float64
from .inputs import Inputs, candidates
from .shrink import STRENGTHS, shrink

LARGEST = 40_000_000
"""Parameters of a model at most: above, another strength of the rule is tried."""


class CannotRun(Exception):
    """Plain PyTorch does not run the model from a configuration alone: it is not counted."""


@dataclass
class Built:
    """A model in train mode, a batch, and how it was made."""

    model: nn.Module
    batch: Inputs
    strength: str
    parameters: int
    loss: Callable[..., Any] | tuple[Callable[..., Any], Callable[..., Any]] = field(default_factory=lambda: loss_fn)
    options: dict[str, Any] = field(default_factory=dict)  # of fullbatch.Step


LORA = "llama + LoRA (peft)"
"""A name for a frozen model with trained low-rank updates."""


def names() -> list[str]:
    """Model types, one for each class of base model."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    by_class: dict[Any, str] = {}
    for kind, cls in MODEL_MAPPING_NAMES.items():
        by_class.setdefault(cls, kind)
    return [*sorted(by_class.values()), LORA]


def loss_fn(model: nn.Module, batch: Inputs) -> Tensor:
    """The scalar of what the model gives for its named inputs."""
    return distance(model(**batch))


def distance(nest: Any) -> Tensor:
    """Half the mean square distance of each output to a fixed wave along its last dimension, added up.

    A mean of squares alone would have no gradient below a final normalisation.
    """
    outputs = [_real(leaf) for leaf in _tensors(nest) if leaf.is_floating_point() or leaf.is_complex()]
    return sum((_distance(output) for output in outputs), torch.zeros((), dtype=torch.float64))


def _real(output: Tensor) -> Tensor:
    return torch.view_as_real(output) if output.is_complex() else output


def _distance(output: Tensor) -> Tensor:
    width = output.shape[-1] if output.dim() else 1
    wave = torch.sin(torch.arange(1.0, width + 1.0, dtype=torch.float64))
    return 0.5 * (output - wave).square().mean()


def _tensors(nest: Any) -> list[Tensor]:
    if isinstance(nest, Tensor):
        return [nest]
    items = list(nest.values()) if isinstance(nest, dict) else nest if isinstance(nest, (tuple, list)) else []
    return [leaf for item in items for leaf in _tensors(item)]


def build(name: str) -> Built:
    """The model type `name`. Raises CannotRun, with what each strength of the rule ran into."""
    read_in_float64()
    if name == LORA:
        return _with_lora(build("llama"))
    import transformers

    with contextlib.redirect_stdout(io.StringIO()):
        default = transformers.AutoConfig.for_model(name) if name in transformers.CONFIG_MAPPING else None
    if default is None:
        raise CannotRun("no configuration of this type")
    failures: list[str] = []
    for strength in STRENGTHS:
        try:
            model = _model(default, strength)
        except Exception as error:
            failures.append(f"{strength}: {type(error).__name__}: {_first_line(error)}")
            continue
        for batch in _offered(model, failures):
            try:
                check(model, batch)
            except Exception as error:
                failures.append(f"{strength}, {'+'.join(batch)}: {type(error).__name__}: {_first_line(error)}")
                continue
            return Built(model, batch, strength, sum(p.numel() for p in model.parameters()))
    raise CannotRun(" | ".join(dict.fromkeys(failures)) or "no argument of its forward is known")


def _with_lora(built: Built) -> Built:
    import peft

    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    built.model = peft.get_peft_model(built.model, settings).to(torch.float64).train()
    return built


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:300]


def _offered(model: nn.Module, failures: list[str]) -> Iterator[Inputs]:
    try:
        yield from candidates(model, model.config)
    except Exception as error:
        failures.append(f"inputs: {type(error).__name__}: {_first_line(error)}")


def _model(default: Any, strength: str) -> nn.Module:
    import transformers

    config = type(default).from_dict(shrink(default.to_dict(), strength))
    with torch.device("meta"):
        if sum(p.numel() for p in transformers.AutoModel.from_config(config).parameters()) > LARGEST:
            raise CannotRun("too many parameters")
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config, dtype=torch.float64).to(torch.float64)
    with contextlib.suppress(Exception):  # the default loops over the experts that were chosen, by number
        model.set_experts_implementation("batched_mm")
    return prepared(model)


def prepared(model: nn.Module) -> nn.Module:
    """In train mode, without dropout, and without parameters of zeros."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    with torch.no_grad():
        for parameter in model.parameters():  # zeros (a layer scale, a gate) would hide what is behind them
            if parameter.is_floating_point() and not parameter.any():
                parameter.normal_(std=0.1)
    return model.train()


def whole(loss: Any) -> Callable[..., Any]:
    """The plain step of a loss, or of the pair (forward, loss)."""
    if not isinstance(loss, tuple):
        return loss  # type: ignore[no-any-return]
    forward, last = loss
    return lambda model, batch: last(forward(model, batch), batch)


def check(model: nn.Module, batch: Inputs, loss_fn: Callable[..., Any] = loss_fn) -> None:
    """Raises where the plain step does not run, or its loss or a gradient is not finite."""
    state = {key: value.clone() for key, value in model.named_buffers()}
    loss = loss_fn(model, batch)
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    if not gradients or not all(bool(g.isfinite().all()) for g in gradients) or not bool(loss.isfinite()):
        raise CannotRun("the loss or a gradient is not finite, or there is none")
    for key, value in model.named_buffers():
        if key in state and value.shape == state[key].shape:
            value.copy_(state[key])
