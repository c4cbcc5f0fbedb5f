"""A small model of each family of vision, with images, and the scalar that is differentiated.

A name says the package and the model: `timm/resnet10t`. Each is offered in several sizes, the smallest first; the first
that plain PyTorch runs is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zoo.models import Built, CannotRun, check, distance, prepared, whole

from .packages import import_packages

BATCH = 4
LARGEST = 60_000_000

Inputs = dict[str, Tensor]
Loss = Callable[..., Any] | tuple[Callable[..., Any], Callable[..., Any]]


def outputs(model: Any, batch: Inputs) -> Any:
    """What the model gives for the images."""
    return model(*(value for key, value in batch.items() if key.startswith("image")))


def loss_fn(model: Any, batch: Inputs) -> Tensor:
    """The scalar of all outputs."""
    return distance(outputs(model, batch))


def images(*sizes: int, channels: int = 3) -> Inputs:
    """A batch of images, of films or of volumes."""
    return {"image": torch.randn(BATCH, channels, *sizes)}


@dataclass(frozen=True)
class Offer:
    """One way to make a model."""

    said: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Inputs]
    loss: Loss | Callable[[nn.Module], Loss] = field(default=loss_fn)
    of_model: bool = False  # whether `loss` makes the loss of a model
    options: dict[str, Any] = field(default_factory=dict)


def names() -> list[str]:
    """All models, by package."""
    from . import offers

    return sorted(f"{package}/{name}" for package, source in offers.SOURCES.items() for name in source.names())


def build(name: str) -> Built:
    """The model `name`. Raises CannotRun, with what each offer of it ran into."""
    import_packages()
    from . import offers

    package, _, model = name.partition("/")
    failures: list[str] = []
    for offer in offers.SOURCES[package].offers(model):
        try:
            return _built(offer)
        except Exception as error:
            failures.append(f"{offer.said}: {type(error).__name__}: {_first_line(error)}")
    raise CannotRun(" | ".join(dict.fromkeys(failures)) or "no offer is small enough")


def _built(offer: Offer) -> Built:
    torch.manual_seed(0)
    model = offer.build()
    parameters = sum(p.numel() for p in model.parameters())
    if parameters > LARGEST:
        raise CannotRun(f"{parameters:,} parameters")
    model = prepared(model.to(torch.float64))
    for module in model.modules():
        if isinstance(getattr(module, "drop_rate", None), float):  # of a dropout that is a function
            module.drop_rate = 0.0
    torch.manual_seed(1)
    batch = offer.batch()
    loss: Any = offer.loss(model) if offer.of_model else offer.loss
    check(model, batch, whole(loss))
    return Built(model, batch, offer.said, parameters, loss, offer.options)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:200]


def sides(*sides: int) -> Iterator[tuple[str, Callable[[], Inputs]]]:
    """Square images of several sides, and what to call them."""
    for side in sides:
        yield f"{side}x{side}", lambda side=side: images(side, side)
