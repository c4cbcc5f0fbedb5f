"""Random numbers of one run given to another.

The planned step draws a mask for each microbatch; the plain one would draw others. To compare them the plain step is
handed the planned one's draws, put together over the microbatches, wherever it asks for random numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fullbatch import _torch
from fullbatch._axis._operator import draws_with
from fullbatch._errors import VerifyError
from fullbatch._ir import Program, Task
from fullbatch._plan._schedule import ALL
from fullbatch._run._executor import paste

_PAIRS = ("native_dropout", "rrelu_with_noise")  # operators that return a result and what they drew


@dataclass(frozen=True)
class _Seed:
    """What an operator drew that does not return it (attention with dropout): it ran under this seed, as a whole."""

    value: int


class Draws:
    """What the random operators of a planned step drew, for the whole batch, in the order of the forward."""

    def __init__(self) -> None:
        self._parts: dict[int, dict[int, Any]] = {}
        self._seeds: dict[int, _Seed] = {}
        self._whole: list[torch.Tensor | _Seed] = []

    def __bool__(self) -> bool:
        return bool(self._parts)

    def record(self, task: int, microbatch: int, results: Any) -> None:
        """Called by the executor for each run of a random task; a recompute draws the same again."""
        self._parts.setdefault(task, {})[microbatch] = results
        self._seeds[task] = _Seed(torch.initial_seed())  # the executor has seeded this run

    def forget(self) -> None:
        """The step begins again."""
        self._parts, self._seeds = {}, {}

    def join(self, program: Program, samples: tuple[int, ...]) -> None:
        """Puts the microbatches' draws together."""
        for ident in sorted(self._parts):
            self._whole.append(self._drawn(program, program.by_id[ident], self._parts[ident], samples))

    def _drawn(
        self, program: Program, task: Task, parts: dict[int, Any], samples: tuple[int, ...]
    ) -> torch.Tensor | _Seed:
        if task.single:
            pick = [results for _, results in sorted(parts.items())]
        elif any(name in task.origin.op for name in _PAIRS):
            pick = [results[1] for _, results in sorted(parts.items())]
        else:
            return self._seeds[task.id]
        return pick[0] if ALL in parts else _joined(program, task, pick, samples)

    def at(self, place: int, operator: object) -> torch.Tensor | _Seed:
        """What the random operator number `place` of the forward drew."""
        if not 0 <= place < len(self._whole):
            raise VerifyError.of(
                f"The plain step draws random numbers that the planned one does not: {operator}.",
                expected="the same random operators in both", next="step.verify() with the model in eval mode",
            )  # fmt: skip
        return self._whole[place]


def _joined(program: Program, task: Task, parts: list[torch.Tensor], samples: tuple[int, ...]) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    known = next(out for out in task.outputs if out is not None)
    item = program.values[known]
    assert item.layout is not None
    whole = parts[0].new_empty(item.shape)
    begin = 0
    for part, count in zip(parts, samples, strict=True):
        paste(whole, part, item.layout, begin, begin + count, program.batch)
        begin += count
    return whole


_BASE = 1 << 40


class Replay(_torch.DispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its mode untyped
    """While it is entered, random operators return `draws` in order.

    The place in that order is the seed of the default generator. So what puts the generator back to where it was puts
    the order back too: a checkpoint of the user's, whose recompute must see the draws of its forward.
    """

    def __init__(self, draws: Draws) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws, self._active = draws, bool(draws)

    def __enter__(self) -> Any:
        if self._active:
            torch.manual_seed(_BASE)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._active or torch.Tag.nondeterministic_seeded not in func.tags or not draws_with(func, args, kwargs):
            return func(*args, **kwargs)
        place = torch.initial_seed() - _BASE
        draw = self._draws.at(place, func)
        try:
            if isinstance(draw, _Seed):
                torch.manual_seed(draw.value)
                return func(*args, **kwargs)
            return _given(str(func).split(".")[1], draw, args, kwargs)
        finally:
            torch.manual_seed(_BASE + place + 1)


def _given(name: str, draw: torch.Tensor, args: Any, kwargs: Any) -> Any:
    """What the operator returns where it draws `draw`."""
    if name == "native_dropout":
        source, p = args[0], args[1]
        return source * draw * (1.0 / (1.0 - p)), draw
    if name.startswith("rrelu_with_noise"):
        result = args[0] * args[1].copy_(draw)  # the noise is written into an argument; 1 where the input is positive
        return args[0].copy_(result) if name.endswith("_") else result
    if kwargs.get("out") is not None:
        return kwargs["out"].copy_(draw)
    if name.endswith("_"):
        return args[0].copy_(draw)
    return draw.to(kwargs.get("dtype") or draw.dtype)
