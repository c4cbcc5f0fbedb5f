"""Random numbers of one run given to another.

The planned step draws a mask for each microbatch; the plain one would draw others. To compare them the plain step is
handed the planned one's draws, put together over the microbatches, wherever it asks for random numbers.
"""

from __future__ import annotations

from typing import Any

import torch

from fullbatch import _torch
from fullbatch._errors import VerifyError
from fullbatch._ir import Program, Task
from fullbatch._plan._schedule import ALL
from fullbatch._run._executor import paste


class Draws:
    """What the random operators of a planned step drew, for the whole batch, in the order of the forward."""

    def __init__(self) -> None:
        self._parts: dict[int, dict[int, Any]] = {}
        self._whole: list[torch.Tensor] = []

    def __bool__(self) -> bool:
        return bool(self._parts)

    def record(self, task: int, microbatch: int, results: Any) -> None:
        """Called by the executor for each run of a random task; a recompute draws the same again."""
        self._parts.setdefault(task, {})[microbatch] = results

    def join(self, program: Program, samples: tuple[int, ...]) -> None:
        """Puts the microbatches' draws together."""
        for ident in sorted(self._parts):
            task, parts = program.by_id[ident], self._parts[ident]
            # Of dropout the mask is the draw, of everything else the result.
            which = 1 if not task.single else 0
            pick = [results if task.single else results[which] for _, results in sorted(parts.items())]
            self._whole.append(pick[0] if ALL in parts else _joined(program, task, pick, samples))

    def next(self, operator: object) -> torch.Tensor:
        """The draws of the next random operator."""
        if not self._whole:
            raise VerifyError.of(
                f"The plain step draws random numbers that the planned one does not: {operator}.",
                expected="the same random operators in both", next="step.verify() with the model in eval mode",
            )  # fmt: skip
        return self._whole.pop(0)


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


class Replay(_torch.DispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its mode untyped
    """While it is entered, random operators return `draws` in order."""

    def __init__(self, draws: Draws) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws, self._active = draws, bool(draws)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._active or torch.Tag.nondeterministic_seeded not in func.tags or _draws_nothing(func, args, kwargs):
            return func(*args, **kwargs)
        draw = self._draws.next(func)
        name = str(func).split(".")[1]
        if name == "native_dropout":
            source, p = args[0], args[1]
            return source * draw * (1.0 / (1.0 - p)), draw
        if name.endswith("_"):
            return args[0].copy_(draw)
        return draw.to(kwargs.get("dtype") or draw.dtype)


def _draws_nothing(func: Any, args: Any, kwargs: Any) -> bool:
    """Attention without dropout is tagged random, and draws nothing."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return "dropout_p" in names and not given.get("dropout_p", 0.0)
