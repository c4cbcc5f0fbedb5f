"""How a batch was placed: what was chosen and found on it, and for which others that is good. As a checkpoint has it.

Limit that forced it: a placement is found by running and measuring, on weights that are gone when a run is resumed, so
that it need not come out the same again; and another microbatch draws other masks. Shape of the answer: a placement is
a value that a checkpoint holds in ints, floats and strings, and that is looked through before it is believed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from typing import Any

from fullbatch._errors import Fault
from fullbatch._past import is_count
from fullbatch.eager._buffers import Rule
from fullbatch.eager._coupled import Findings
from fullbatch.eager._place import Choice

_LOADED = "placed as the run of the checkpoint was; nothing was tried here"


@dataclass(frozen=True)
class Placement:
    """What was chosen and found on a batch of so many samples, and how heavy they were (bytes a sample)."""

    batch: int
    choice: Choice
    findings: Findings
    compared: bool
    weight: float
    budget: int | None
    caches: tuple[str, ...]

    def fits(self, owned: int, weight: float, budget: int | None) -> bool:
        """Whether samples of that weight, beside so many bytes owned, keep to a budget."""
        return budget is None or (owned + self.choice.activations <= budget and weight <= self.weight)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it: all but the trials."""
        choice, findings = self.choice, self.findings
        return {
            "batch": self.batch,
            "microbatch": choice.microbatch,
            "checkpointed": list(choice.checkpointed),
            "activations": choice.activations,
            "chosen": [note for note in choice.notes if note != _LOADED],
            "coupled": [list(astuple(fault)) for fault in findings.coupled],
            "rules": {name: str(rule) for name, rule in findings.rules.items()},
            "found": list(findings.notes),
            "compared": self.compared,
            "weight": self.weight,
            "budget": self.budget,
            "caches": list(self.caches),
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Placement:
        """The placement that a state is of, in which `faults_of` found nothing."""
        notes = (*state["chosen"], _LOADED)
        choice = Choice(state["microbatch"], tuple(state["checkpointed"]), state["activations"], (), notes)
        rules = {name: Rule(rule) for name, rule in state["rules"].items()}
        findings = Findings([Fault(*fault) for fault in state["coupled"]], rules, list(state["found"]))
        return cls(
            state["batch"], choice, findings, state["compared"], state["weight"], state["budget"],
            tuple(state["caches"]),
        )  # fmt: skip


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _are_faults(value: Any) -> bool:
    return isinstance(value, list) and all(_are_names(item) and len(item) == 4 for item in value)


def _are_rules(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(rule, str) and rule in set(Rule) for rule in value.values())


Fields = Mapping[str, tuple[Callable[[Any], bool], str]]

_FIELDS: Fields = {
    "batch": (lambda value: is_count(value, 1), "a number of samples"),
    "microbatch": (lambda value: is_count(value, 1), "a number of samples"),
    "checkpointed": (_are_names, "a list of names"),
    "activations": (is_count, "a number of bytes"),
    "chosen": (_are_names, "a list of strings"),
    "coupled": (_are_faults, "a list of faults, four strings each"),
    "rules": (_are_rules, "a rule for each buffer"),
    "found": (_are_names, "a list of strings"),
    "compared": (lambda value: isinstance(value, bool), "True or False"),
    "weight": (lambda value: isinstance(value, float) and value >= 0, "a number of bytes, a float"),
    "budget": (lambda value: value is None or is_count(value), "a number of bytes, or None"),
    "caches": (_are_names, "a list of names"),
}


def faults_of(state: Any, where: str, fields: Fields = _FIELDS) -> list[Fault]:
    """What of a state is not as `state_dict()` makes it; `where` says which part of one it is."""
    if not isinstance(state, Mapping):
        return [_damaged(where, f"{type(state).__name__}: {state!r:.60}", f"a dict of {', '.join(fields)}")]
    faults = []
    for name, (right, expected) in fields.items():
        if name not in state:
            faults.append(_damaged(f"{where}[{name!r}]", "nothing", expected))
        elif not right(state[name]):
            faults.append(
                _damaged(f"{where}[{name!r}]", f"{type(state[name]).__name__}: {state[name]!r:.60}", expected)
            )
    return faults


def _damaged(where: str, got: str, expected: str) -> Fault:
    return Fault(
        f"{where} is not what state_dict() of a fullbatch.eager.Step returned.", got=got, expected=expected,
        next="step.load_state_dict(checkpoint['step']), from another checkpoint if this one is damaged",
    )  # fmt: skip
