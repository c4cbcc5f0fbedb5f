"""What an operator's cost depends on, as text that is the same in every process.

Costs that are kept on disk are found again by this text, so that it may hold no address of an object, and must hold
all that changes what an operator allocates: the operator, its arguments, the form of each tensor, the settings of
torch, the machine, and the source of this package, whose own kernels are among the operators.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
from enum import Enum
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

import torch

from fullbatch import _torch
from fullbatch._ir import Layout, Program, Ref, Scaled, Task

# Operators of others can change between two processes without torch's version saying so.
_NAMESPACES = {"aten", "prims"}
_PACKAGES = {"torch", "fullbatch"}
_BUILTINS = {"builtins", "math", "operator", "_operator"}
# Variables that libraries under torch read: they choose algorithms, and with them workspaces.
_VARIABLES = ("ATEN_", "CUBLAS", "CUDNN", "DNNL_", "MKL_", "NVIDIA_TF32", "ONEDNN_", "PYTORCH_")
_SWITCHES = (
    "mkldnn.enabled", "mkldnn.deterministic", "mkldnn.fp32_precision", "mkldnn.conv.fp32_precision",
    "mkldnn.matmul.fp32_precision", "cudnn.enabled", "cudnn.benchmark", "cudnn.deterministic",
    "cudnn.conv.fp32_precision", "cuda.matmul.fp32_precision", "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction", "fp32_precision",
)  # fmt: skip


HERE = "here "
"""What the key of an operator begins with that has no name: no other process could recognise it."""


class _NoName(Exception):
    """A value has no identity that another process would know."""


def digest(*parts: str) -> str:
    """A key of 32 hexadecimal digits for these texts together."""
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def operator_text(task: Task, program: Program, samples: int) -> str | None:
    """The operator that `task` runs for a microbatch of `samples`, with its arguments; None where it has no name.

    Arguments that grow with the microbatch are written as the numbers that they become.
    """
    if task.kernel is None:
        (value,) = task.outputs
        assert value is not None
        shape = program.values[value].shape
        return f"{task.kind.value} {task.layout} {task.reduction.value} {shape} {samples} of {program.batch}"
    used = "".join("_" if out is None else "x" for out in task.outputs)
    parts = (task.kernel.fn, task.kernel.args, task.kernel.kwargs)
    try:
        named, args, kwargs = (_text(part, samples) for part in parts)
    except _NoName:
        return None
    return f"{named} {args} {kwargs} {used} {task.single}"


def _text(value: Any, samples: int) -> str:
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return repr(value)
    if isinstance(value, Ref):
        return f"t{value.index}"
    if isinstance(value, Scaled):
        return str(samples * value.per_sample)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join([_text(item, samples) for item in value])}]"
    if isinstance(value, dict):
        return f"{{{', '.join(sorted(f'{key}: {_text(item, samples)}' for key, item in value.items()))}}}"
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format, Layout)):
        return str(value)
    if isinstance(value, Enum):
        return f"{type(value).__module__}.{value}"
    return _function(value, samples)


def _function(fn: Any, samples: int) -> str:
    if isinstance(fn, _torch.OpOverload):
        if fn.namespace not in _NAMESPACES:
            raise _NoName
        return str(fn)
    if isinstance(fn, functools.partial):
        return f"partial {_text([fn.func, fn.args, fn.keywords], samples)}"
    if isinstance(fn, (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)):
        owner = getattr(fn, "__objclass__", None)
        module = getattr(owner, "__module__", None) or fn.__module__
        bound = getattr(fn, "__self__", None)
        if (module or "").split(".")[0] not in _PACKAGES | _BUILTINS or isinstance(bound, torch.Tensor):
            raise _NoName
        return f"{module}.{fn.__qualname__}"
    if isinstance(fn, FunctionType):
        return _python(fn, samples)
    raise _NoName


def _python(fn: FunctionType, samples: int) -> str:
    """A function by its name; one made inside another also by its line and by what it remembers."""
    if fn.__module__.split(".")[0] not in _PACKAGES or fn.__name__ == "<lambda>":
        raise _NoName
    cells = [cell.cell_contents for cell in fn.__closure__ or ()]
    held = _text([cells, fn.__defaults__, fn.__kwdefaults__], samples)
    line = fn.__code__.co_firstlineno if "<locals>" in fn.__qualname__ else ""
    return f"{fn.__module__}.{fn.__qualname__}:{line} {held}"


def settings(device: torch.device, threads: int) -> str:
    """What can be set while a process runs and changes what operators allocate or take."""
    kind = device.type
    values: list[object] = [
        threads, torch.get_default_dtype(), torch.get_deterministic_debug_mode(),
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        *(_switch(name) for name in _SWITCHES),
    ]  # fmt: skip
    return " ".join(map(str, values))


def _switch(name: str) -> object:
    found: Any = torch.backends
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except Exception:  # torch refuses to read a setting where its older and newer forms were mixed
        return "?"
    return found


def machine(device: torch.device) -> str:
    """torch, the processor or the accelerator, the variables that libraries read, and the source of this package."""
    variables = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(_VARIABLES))
    return "\n".join([_hardware(device), _source(), *variables])


@functools.cache
def _hardware(device: torch.device) -> str:
    parts = [torch.__version__, str(torch.version.git_version), str(torch.version.cuda), platform.machine()]
    parts += [_processor(), torch.backends.cpu.get_cpu_capability()]
    if device.type == "cuda":
        parts += [torch.cuda.get_device_name(device), str(torch.backends.cudnn.version())]
    return "\n".join(parts)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


@functools.cache
def _source() -> str:
    root = Path(__file__).resolve().parent.parent
    found = hashlib.blake2b(digest_size=16)
    for path in sorted(root.rglob("*.py")):
        with contextlib.suppress(OSError):  # an editor's, gone meanwhile
            found.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()
