"""Steps whose loss no graph can hold, as `(forward, loss)`, and their comparison with plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

import fullbatch
from cases.reference import collect, compare, plain

BATCH = 7
Function = Callable[[Any, Any], Any]
Case = tuple[Function, Function, Any, Any]
CASES: dict[str, Callable[[], Case]] = {}


def case(build: Callable[[], Case]) -> Callable[[], Case]:
    """Names a builder of (forward, loss, model, batch)."""
    CASES[build.__name__] = build
    return build


def convnet(out: int = 4) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8),
        nn.ReLU(), nn.Conv2d(8, out, 1),
    )  # fmt: skip


def images(size: int = BATCH) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randn(size, 3, 8, 8), torch.rand(size, 8, 8)


def first(model: Any, batch: Any) -> Any:
    return model(batch[0])


@case
def boolean_mask() -> Case:
    def loss(outputs: Tensor, batch: Any) -> Tensor:
        return outputs.movedim(1, -1)[batch[1] > 0.4].square().mean()

    return first, loss, convnet(), images()


@case
def item_weight_and_branch() -> Case:
    def loss(outputs: Tensor, batch: Any) -> Any:
        weight = outputs.detach().abs().max().item()
        value = outputs.sum(1).std() * weight
        if weight > 0:
            value = value + (outputs[:, 0] * batch[1]).mean()
        return value, {"weight": torch.tensor(weight), "chosen": outputs.sum(1)[batch[1] < 0.1]}

    return first, loss, convnet(), images()


@case
def hungarian_matching() -> Case:
    """Each sample's predicted points are matched to its own number of targets."""

    class Points(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Sequential(convnet(8), nn.ReLU()), nn.Linear(8 * 64, 6 * 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x).flatten(1)).view(-1, 6, 2)

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        total = outputs.new_zeros(())
        for points, wanted, count in zip(outputs, batch["points"], batch["count"].tolist(), strict=True):
            cost = torch.cdist(points.detach(), wanted[:count], p=1)
            rows, columns = linear_sum_assignment(cost.numpy())
            total = total + F.l1_loss(points[rows], wanted[columns], reduction="sum")
        return total / batch["count"].sum().item()

    torch.manual_seed(1)
    model = Points()
    batch = {"x": images()[0], "points": torch.rand(BATCH, 5, 2), "count": torch.randint(1, 6, (BATCH,))}
    return lambda model, batch: model(batch["x"]), loss, model, batch


@case
def nest_with_unused_and_integer_outputs() -> Case:
    def forward(model: Any, batch: Any) -> Any:
        found = model(batch[0])
        return {"found": [found, found.mean((2, 3))], "class": found.argmax(1), "name": "net", "rate": 0.5}

    def loss(outputs: Any, batch: Any) -> Tensor:
        assert outputs["name"] == "net"
        chosen = outputs["found"][0].movedim(1, -1)[outputs["class"] == 2]
        return chosen.square().sum() * outputs["rate"] / max(len(chosen), 1)

    return forward, loss, convnet(), images()


@case
def coupled_outputs_and_loss() -> Case:
    """A forward that compares samples, and a loss that mines the hardest of them."""

    def forward(model: Any, batch: Any) -> Any:
        features = F.normalize(model(batch[0]).mean((2, 3)), dim=1)
        return features, features @ features.T

    def loss(outputs: Any, batch: Any) -> Tensor:
        features, similarity = outputs
        hard = similarity[similarity > similarity.median().item()]
        return hard.logsumexp(0) + features.square()[:, 0].mean()

    return forward, loss, convnet(), images()


@case
def parameter_among_the_outputs() -> Case:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.weights = convnet(), nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(model: Any, batch: Any) -> Any:
        return model.body(batch[0]), model.weights * 1.5

    def loss(outputs: Any, batch: Any) -> Tensor:
        found, weights = outputs
        terms = torch.stack([found[found > 0].mean(), found[found <= 0].square().mean()])
        return (terms * torch.exp(-weights) + weights).sum()

    torch.manual_seed(1)
    return forward, loss, Weighted(), images()


@case
def parameter_returned_as_it_is() -> Case:
    _, loss, model, batch = parameter_among_the_outputs()
    return lambda model, batch: (model.body(batch[0]), model.weights), loss, model, batch


@case
def heads_that_the_loss_may_not_reach() -> Case:
    """Plain PyTorch leaves no gradient where the loss reads no output of a head, and one of zeros where it is zero."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = convnet(8)
            self.one, self.two, self.rounded = (nn.Conv2d(8, 2, 1) for _ in range(3))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            found = self.body(x)
            both = self.one(found) + found[:, :2]
            return {"one": both, "two": self.two(found), "rounded": self.rounded(found).round(), "sum": both.sum(1)}

    def loss(outputs: Any, batch: Any) -> Tensor:
        value = outputs["one"].movedim(1, -1)[batch[1] > 0.4].square().mean() + outputs["rounded"].sum()
        if outputs["two"].max().item() > 1e9:
            value = value + outputs["two"].sum()
        return value

    torch.manual_seed(1)
    return first, loss, Heads(), images()


def composed(forward: Function, loss: Function) -> Function:
    """The plain step."""
    return lambda model, batch: loss(forward(model, batch), batch)


def step_of(case: Case, **options: Any) -> fullbatch.Step:
    forward, loss, model, batch = case
    return fullbatch.Step((forward, loss), model, batch, **options)


def agrees(step: fullbatch.Step, case: Case, batch: Any = None, tolerance: float = 1e-10) -> Any:
    """Asserts that one call, from no gradient, does to the model what plain PyTorch does; returns its result."""
    forward, loss, model, example = case
    batch = example if batch is None else batch
    model.zero_grad(set_to_none=True)
    reference = plain(composed(forward, loss), copy.deepcopy(model), batch)
    out = step(batch)
    errors = compare(collect(out, model), reference)
    assert errors.within(tolerance), errors
    return out
