"""A group of operators compiled by TorchInductor, and what the compiled call allocates.

What a compiler allocates is its own affair: it may keep an intermediate result, or lay an output out otherwise. So
every compiled group is run once alone on zeros, under the memory counter, and beside the operators that it stands for;
what it does to memory is then known to the byte.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fullbatch import _torch
from fullbatch._errors import CompileError
from fullbatch._memory._measure import measure
from fullbatch._run._groups import Group
from fullbatch._run._record import Form
from fullbatch._run._source import Names

_PLAIN = (float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def check_compiler(device: torch.device) -> None:
    """Raises CompileError where TorchInductor would find no C++ compiler, which it needs for the CPU."""
    wanted = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if device.type == "cpu" and shutil.which(wanted) is None:
        raise CompileError.of(
            "No C++ compiler found; compile=True builds kernels for the CPU with one.",
            got=f"no {wanted} on the PATH",
            expected="$CXX, or g++ (macOS: clang++)",
            next="install a compiler (Debian: apt-get install g++), or fullbatch.Step(..., compile=False)",
        )


@dataclass(frozen=True)
class Output:
    """An output's form and bytes. `shows`: the first operand, or output behind them, in the same storage."""

    form: Form
    offset: int
    nbytes: int
    shows: int


@dataclass(frozen=True)
class Behaviour:
    """What a call does to memory: the most bytes above the start, those left at the end, and its outputs."""

    peak: int
    retained: int
    outputs: tuple[Output, ...]

    def replaces(self, other: Behaviour) -> bool:
        """Whether what follows cannot tell it from `other`: equal forms, the same aliases, and no more bytes."""
        return len(self.outputs) == len(other.outputs) and all(
            (mine.form, mine.offset, mine.shows) == (its.form, its.offset, its.shows) and mine.nbytes <= its.nbytes
            for mine, its in zip(self.outputs, other.outputs, strict=True)
        )


@dataclass(frozen=True)
class Written:
    """A group as a function of its inputs, not compiled. Two with one `key` do the same."""

    fn: Callable[..., Any]
    forms: tuple[Form, ...]
    key: Any

    @classmethod
    def of(cls, group: Group, forms: Sequence[Form], samples: int) -> Written | None:
        """The function of a group, for microbatches of so many samples; None where a constant of it is a tensor."""
        names = Names()
        at = {value: f"t{number}" for number, value in enumerate(group.inputs)}
        lines = [f"def group({', '.join(at.values())}):"]
        for task in group.tasks:
            lines.append(f"    r = {names.call(task, [at[value] for value in task.inputs], str(int(samples)))}")
            for number, out in enumerate(task.outputs):
                if out is not None:  # numbered in order, so that equal groups have equal text
                    at[out] = f"t{len(at)}"
                    lines.append(f"    {at[out]} = r" if task.single else f"    {at[out]} = r[{number}]")
        lines.append(f"    return [{', '.join(at[value] for value in group.outputs)}]")
        constants = list(names.objects.values())
        if not all(callable(constant) or isinstance(constant, _PLAIN) for constant in constants):
            return None
        text = "\n".join(lines)
        space = dict(names.objects)
        exec(compile(text, "<fullbatch group>", "exec"), space)
        key = (text, tuple(c if callable(c) else repr(c) for c in constants), tuple(forms), torch.get_num_threads())
        return cls(space["group"], tuple(forms), key)

    def behaviour(self, fn: Callable[..., Any]) -> Behaviour:
        """What `fn` does to memory on operands of these forms. Raises MeasureError while a profiler runs."""
        inputs = [form.dummy() for form in self.forms]
        fn(*inputs)  # whatever it builds once is no part of it
        found = measure(lambda: fn(*inputs), inputs[0].device)
        shown: dict[int, int] = {}
        for number, tensor in enumerate((*inputs, *found.result)):
            shown.setdefault(_torch.storage_key(tensor), number)
        outputs = tuple(
            Output(
                Form.of(tensor), tensor.storage_offset(), tensor.untyped_storage().nbytes(),
                shown[_torch.storage_key(tensor)],
            )
            for tensor in found.result
        )  # fmt: skip
        return Behaviour(found.peak, found.retained, outputs)

    def compiled(self) -> Callable[..., Any]:
        """The same function, compiled. Raises CompileError where TorchInductor fails."""
        inputs = [form.dummy() for form in self.forms]
        try:
            fn = _torch.compiled(self.fn, inputs)
            fn(*inputs)
        except Exception as error:  # of many kinds, from many places of a compiler
            raise CompileError.of(
                "TorchInductor could not compile a part of the step.",
                got=f"{type(error).__name__}: {str(error)[:2000]}",
                next="fullbatch.Step(..., compile=False)",
            ) from error
        return fn
