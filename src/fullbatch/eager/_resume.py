"""What an eager step carries through a checkpoint: `fullbatch._resume`, and besides what was tried and found.

Limit that forced it: the microbatch and the rule of each buffer come from measurement, and code that is not traced may
draw from any generator. Shape of the answer: placements as values, and the generators of `_generators.py`. A state is
looked through as a whole first; nothing is taken over unless all of it can be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fullbatch._errors import Fault
from fullbatch._generators import Source, set_generators
from fullbatch._past import is_count
from fullbatch._resume import no_state
from fullbatch.eager._generators import generators_of
from fullbatch.eager._placement import Fields, Placement, faults_of
from fullbatch.eager._plan import listed
from fullbatch.eager._planning import Planning
from fullbatch.eager._recompute import named_modules

_FORMAT = "eager 2"  # in the first, an uneven batch was cut otherwise, which gives other bits

_FIELDS: Fields = {
    "steps": (is_count, "a number of steps"),
    "asked": (lambda value: value is None or is_count(value, 1), "a number of samples, or None"),
    "generators": (lambda value: isinstance(value, Mapping), "a dict of generators"),
    "prepared": (lambda value: isinstance(value, Mapping), "a dict of placements"),
    "shared": (lambda value: isinstance(value, Mapping), "a placement"),
}


def state_of(planning: Planning, steps: int) -> dict[str, Any]:
    """Ints, floats, strings and tensors in lists and dicts, which `torch.load(..., weights_only=True)` reads."""
    assert planning.shared is not None
    return {
        "format": _FORMAT,
        "steps": steps,
        "asked": planning.settings.microbatch,
        "shared": planning.shared.state(),
        "prepared": {form: placement.state() for form, placement in planning.prepared.items()},
        "generators": {name: source.read() for name, source in generators_of(planning.job).items()},
    }


def load_state(planning: Planning, state: Any) -> int:
    """Takes over `state`, sets the generators, and returns the steps taken.

    Raises PlanError with all that is wrong, and changes nothing then.
    """
    if not isinstance(state, Mapping) or state.get("format") != _FORMAT:
        raise no_state(state, of="a fullbatch.eager.Step")
    sources = generators_of(planning.job)
    faults = list(_faults(planning, state, sources))
    states = state.get("generators")
    set_generators(sources, states if isinstance(states, Mapping) else {}, faults)
    _adopt(planning, state)
    return int(state["steps"])


def _faults(planning: Planning, state: Mapping[str, Any], sources: Mapping[str, Source]) -> Iterator[Fault]:
    damaged = faults_of(state, "state", _FIELDS)
    yield from damaged
    places = dict(_places(state))
    broken = [fault for where, place in places.items() for fault in faults_of(place, where)]
    yield from broken
    if isinstance(state.get("generators"), Mapping):
        yield from _other_generators(state["generators"].keys(), sources.keys(), planning)
    if damaged or broken:
        return
    placements = {where: Placement.of(place) for where, place in places.items()}
    yield from _other_microbatches(planning.settings.microbatch, state["asked"], placements)
    yield from _other_model(planning, placements.values())


def _places(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if isinstance(state.get("shared"), Mapping):
        yield "state['shared']", state["shared"]
    if isinstance(state.get("prepared"), Mapping):
        for form, place in state["prepared"].items():
            yield f"state['prepared'][{form!r}]", place


def _other_generators(saved: Iterable[str], there: Iterable[str], planning: Planning) -> Iterator[Fault]:
    """A CUDA device's may be missing on either side: on another device a run goes on, to other bits."""
    saved, there = ([name for name in names if not name.startswith("cuda")] for names in (saved, there))
    for what, names in (
        ("The step draws from generators that the checkpoint has no state of.", [n for n in there if n not in saved]),
        ("The checkpoint has states of generators that the step has not.", [n for n in saved if n not in there]),
    ):
        if names:
            yield Fault(
                what, got=listed(names), expected="the generators of the run that was saved, by the same names",
                next="build model and loss_fn as that run did, generators included, before step.load_state_dict(...)",
            )  # fmt: skip


def _other_microbatches(given: int | None, asked: int | None, placements: Mapping[str, Placement]) -> Iterator[Fault]:
    """Another microbatch would draw other masks and round otherwise."""
    sizes = {asked} if asked is not None else set()
    if asked is None and given is not None:
        shared = placements["state['shared']"].choice.microbatch
        sizes = {shared} | {
            placement.choice.microbatch for placement in placements.values()
            if placement.choice.microbatch != min(given, placement.batch)
        }  # fmt: skip
    for size in sorted(sizes):
        if given is not None and size != given:
            yield Fault(
                f"The checkpoint's steps ran in microbatches of {size}.",
                got=f"a step that is asked for microbatches of {given}",
                expected="the same microbatch: another draws other dropout masks, and rounds otherwise",
                next="no microbatch=: the checkpoint's are used",
            )


def _other_model(planning: Planning, placements: Iterable[Placement]) -> Iterator[Fault]:
    there = {name for name, _ in named_modules(planning.job.model)}
    placements = list(placements)
    missing = {name: None for one in placements for name in one.choice.checkpointed if name not in there}
    if missing:
        yield Fault(
            "The checkpoint is of another model: modules that it recomputes are not there.", got=listed([*missing]),
            expected="the model of the run that was saved", next="build that model before step.load_state_dict(...)",
        )  # fmt: skip
    coupled = {fault.what: None for one in placements for fault in one.findings.coupled}
    if coupled and not planning.settings.allow_inexact:
        yield Fault(
            "The checkpoint's steps computed within microbatches what couples samples.", got=" ".join(coupled),
            expected="a step that may do so too", next="fullbatch.eager.Step(..., allow_inexact=True)",
        )  # fmt: skip


def _adopt(planning: Planning, state: Mapping[str, Any]) -> None:
    shared = Placement.of(state["shared"])
    settings = planning.settings
    if settings.memory is None and settings.microbatch is None:
        if state["asked"] is not None:
            settings.memory = shared.budget
        elif shared.budget is not None and planning.free is not None:
            # A heavier batch is then placed as the run that was saved would, unless there is less memory now.
            planning.free = min(planning.free, shared.budget)
    if settings.microbatch is None:
        settings.microbatch = state["asked"]
    planning.shared = shared
    planning.prepared = {form: Placement.of(place) for form, place in state["prepared"].items()}
