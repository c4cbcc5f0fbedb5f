"""What a program was planned for: it decides the microbatch of the program's next step.

Limit that forced it: a sum of gradients is rounded by the microbatches it is taken in, and masks are drawn by them. The
microbatch follows from the form of the batch, from what is owned (gradients that are there leave less room), and from
earlier plans, since one that fits nearly as much room serves again. Shape of the answer: by program, the rooms that
were planned for and the microbatch of each, in ints that a checkpoint holds. A resumed run looks there first, in the
budget that the saved run had: so it takes the microbatch that the saved run would have taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

T = TypeVar("T")

KEPT = 16
"""Plans that are remembered of one program."""


def is_count(value: Any, least: int = 0) -> bool:
    """Whether it is an int, and no bool, from `least` on."""
    return type(value) is int and value >= least


def serves(room: int, planned: int, peak: int) -> bool:
    """Whether a plan made for `planned` bytes is as good for `room` bytes: it fits, and that is nearly as much."""
    return peak <= room and abs(room - planned) <= 0.02 * max(room, planned)


def newest(known: Iterable[T], one: T) -> list[T]:
    """The last of `known`, with `one` at their end."""
    return [*(other for other in known if other is not one), one][-KEPT:]


@dataclass(frozen=True)
class Decision:
    """A room in bytes above what was owned, and what was planned for it: its peak in bytes, in samples at once."""

    room: int
    peak: int
    microbatch: int


@dataclass
class Past:
    """Decisions for one program of `batch` samples, the newest last.

    `budget` in bytes is the one that they were made in, and where `pinned` (by a checkpoint) the next are made in.
    `first` is a microbatch to try where none is decided. `loss` are bytes of a loss that is not captured, as measured
    when it first ran: the most that it took, and what it keeps.
    """

    batch: int
    budget: int
    pinned: bool = False
    first: int | None = None
    loss: tuple[int, int] | None = None
    decisions: list[Decision] = field(default_factory=list)

    def decided(self, room: int) -> Decision | None:
        """The newest decision that is good for `room`, from now on the newest of all."""
        for one in reversed(self.decisions):
            if serves(room, one.room, one.peak):
                self.add(one)
                return one
        return None

    def add(self, decision: Decision) -> None:
        """One more; of many the newest are kept."""
        self.decisions = newest(self.decisions, decision)

    def ran(self, loss: tuple[int, int]) -> None:
        """What a loss that is not captured took: plans made without that are none any more."""
        if loss != self.loss:
            self.loss, self.decisions = loss, []

    def state(self) -> dict[str, Any]:
        """Ints in lists and dicts."""
        return {
            "batch": self.batch,
            "budget": self.budget,
            "loss": None if self.loss is None else list(self.loss),
            "decisions": [asdict(one) for one in self.decisions],
        }


def past_of(state: Any) -> Past | None:
    """The past that `Past.state` gave; None where it is none."""
    names = {"batch": _is_size, "budget": is_count, "loss": _is_loss, "decisions": _are_decisions}
    if not _has(state, names):
        return None
    loss = None if state["loss"] is None else (state["loss"][0], state["loss"][1])
    decisions = [Decision(**one) for one in state["decisions"]]
    return Past(state["batch"], state["budget"], pinned=True, loss=loss, decisions=decisions)


def _has(state: Any, names: Mapping[str, Callable[[Any], bool]]) -> bool:
    return isinstance(state, Mapping) and state.keys() == names.keys() and all(
        right(state[name]) for name, right in names.items()
    )  # fmt: skip


def _is_size(value: Any) -> bool:
    return is_count(value, 1)


def _is_loss(value: Any) -> bool:
    return value is None or (isinstance(value, (list, tuple)) and len(value) == 2 and all(map(is_count, value)))


def _are_decisions(value: Any) -> bool:
    names = {one.name: _is_size if one.name == "microbatch" else is_count for one in fields(Decision)}
    return isinstance(value, list) and all(_has(one, names) for one in value)
