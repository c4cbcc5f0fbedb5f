"""Writes `docs/zoo.md` from results: `python -m zoo.table results.json` (in the folder `tests`)."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

DOCS = Path(__file__).resolve().parents[2] / "docs" / "zoo.md"
RESULTS = Path(__file__).with_name("results.json")
VISION = Path(__file__).resolve().parents[1] / "zoo_vision" / "results.json"

Outcome = dict[str, Any]

# Kinds of refusal: what its message contains, its name, and what it means.
REFUSALS: tuple[tuple[str, str, str], ...] = (
    (
        r"A (shape|number) in the step depends|nonzero|dynamic shape|unbacked|data.dependent|item\(\)|tolist",
        "data decides",
        "A shape, a number or a branch follows from the values of a tensor (`x[mask]`, `.item()`, `if tensor:`).",
    ),
    (
        r"numpy draws|random\.Random|generator",
        "other random numbers",
        "Python's or NumPy's draws would be frozen in the captured graph.",
    ),
    (
        r"dropout between its layers",
        "recurrent dropout",
        "Torch leaves the dropout between recurrent layers out when traced.",
    ),
    (
        r"backward of the step cannot be traced",
        "backward not traced",
        "AOTAutograd cannot trace the backward of an operator.",
    ),
    (
        r"in place",
        "changed in place",
        "The step changes a tensor in place that it must not, or that shares its memory.",
    ),
    (
        r"loss_fn raises",
        "raises when traced",
        "The forward raises an exception as captured that it does not raise in plain PyTorch.",
    ),
    (r"", "not tensor arithmetic", "The forward does something that TorchDynamo cannot express."),
)


def kind_of(outcome: Outcome) -> tuple[str, str]:
    """The name of a refusal's kind, and its meaning."""
    return next((name, why) for pattern, name, why in REFUSALS if re.search(pattern, outcome["detail"], re.IGNORECASE))


_HEAD = """# The zoo

Each model of `transformers` that plain PyTorch runs from a small random configuration, without pretrained weights and
without any package besides: the step in microbatches of 1 and of 3 (uneven) of a batch of 4, in float64, against the
plain step. The error is the largest of those of the loss, of all gradients and of all buffers, each divided by the
largest value of its kind. Exact is at most 1e-9. This page is written by `python -m zoo.table` from what
`python -m zoo.run` found (both in `tests`).
"""

_HOW = """How the models are made (`tests/zoo`): widths, layers, experts, vocabularies and images are made small by one
rule over the names in the configuration; dropout is 0; the model is in train mode; the loss is the mean square distance
of every output to a fixed wave. Mixtures of experts run `experts_implementation="batched_mm"`: their default loops over
the experts that the data chose. What a model computes in float32 by name is computed in float64.
"""

_UNCOUNTED = """model types are not counted: plain PyTorch
does not run them so (they need another package, or inputs that do not follow from the names of arguments)."""


_ELSEWHERE = """
Of these, {names}
are in [the zoo of vision](zoo-vision.md) instead, each with a backbone that needs no package and with its own loss."""


def counted(results: Iterable[Outcome]) -> list[Outcome]:
    """Models that plain PyTorch runs."""
    return [outcome for outcome in results if outcome["kind"] != "not counted"]


@dataclass(frozen=True)
class Page:
    """The words of a page: what is in it, with which packages, what is not counted, how models are made."""

    head: str
    versions: str
    uncounted: str
    how: str


def _transformers(results: dict[str, Outcome]) -> Page:
    import transformers

    names = elsewhere(results)
    uncounted = _UNCOUNTED + (_ELSEWHERE.format(names=", ".join(f"`{name}`" for name in names)) if names else "")
    return Page(_HEAD, f"torch {torch.__version__}, transformers {transformers.__version__}.", uncounted, _HOW)


def elsewhere(results: dict[str, Outcome]) -> list[str]:
    """Model types that are not counted, and that the zoo of vision found exact."""
    import transformers

    vision = counted(json.loads(VISION.read_text()).values())
    found = [re.fullmatch(r"transformers/([A-Za-z0-9]+)", one["name"]) for one in vision if one["kind"] == "exact"]
    types = [getattr(transformers, f"{one[1]}Config").model_type for one in found if one]
    return sorted(name for name in types if name in results and results[name]["kind"] == "not counted")


def markdown(results: dict[str, Outcome], page: Page | None = None) -> str:
    """The page `docs/zoo.md`, or another one."""
    page = page or _transformers(results)
    models = counted(results.values())
    kinds = Counter(outcome["kind"] for outcome in models)
    exact = kinds["exact"] + kinds["random"]
    share = exact / max(len(models), 1)
    lines = [
        page.head,
        page.versions,
        "",
        "| outcome | models |",
        "|---|---|",
        f"| exact | {exact} ({share:.1%}) |",
        f"| refused by name | {kinds['refused']} |",
        f"| different | {kinds['different']} |",
        f"| another exception | {kinds['crashed']} |",
        f"| not finished in the time limit | {kinds['too slow']} |",
        f"| all | {len(models)} |",
        "",
        f"{kinds['random']} of the exact ones draw random numbers; they are compared by `step.verify()`, on the",
        f"numbers that the step drew. Another {len(results) - len(models)} {page.uncounted}",
        "",
        page.how,
        *_refused(models),
        "## All models",
        "",
        "Stages: how often all microbatches meet, plus one. At full batch: operators that run on the whole batch.",
        "Seconds: processor time to capture and plan, once a step, on a shared machine.",
        "",
        "| model | error | stages | at full batch | seconds | inputs |",
        "|---|---|---|---|---|---|",
        *[_row(outcome) for outcome in models],
    ]
    return "\n".join(lines) + "\n"


def _refused(models: list[Outcome]) -> list[str]:
    groups: dict[tuple[str, str], list[str]] = {}
    for outcome in models:
        if outcome["kind"] == "refused":
            groups.setdefault(kind_of(outcome), []).append(outcome["name"])
    rows = [
        f"| {name} | {why} | {', '.join(found)} |"
        for (name, why), found in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]
    return ["## Refused", "", "| kind | what it is | models |", "|---|---|---|", *rows, ""] if rows else []


def _row(outcome: Outcome) -> str:
    name = outcome["name"]
    if outcome["kind"] in ("exact", "random", "different"):
        said = {"exact": "", "random": " (draws)", "different": " **different**"}[outcome["kind"]]
        error = f"{outcome['error']:.1e}{said}"
        cells = (error, outcome["stages"], outcome["full_batch"], outcome["seconds"], ", ".join(outcome["inputs"]))
        return f"| {name} | {' | '.join(map(str, cells))} |"
    if outcome["kind"] == "refused":
        first = re.sub(r"\s+", " ", outcome["detail"].split("\n")[0]).replace("|", "/")[:160]
        return f"| {name} | refused: {kind_of(outcome)[0]} ({outcome['refusal']}: {first}) | | | | |"
    said = outcome.get("refusal") or outcome.get("detail", "")[:80]
    return f"| {name} | {outcome['kind']}: {said} | | | | |"


def main() -> None:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    DOCS.write_text(markdown(json.loads(source.read_text())))


if __name__ == "__main__":
    main()
