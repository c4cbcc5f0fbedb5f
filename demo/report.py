"""Starts the demo's three runs one after the other, compares them, prints one table and draws one picture.

PyTorch has no per-run count of CPU memory, so each run is a process of its own under its own counting allocator, and
tells of its progress in lines of JSON on stdout.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from fullbatch._memory._cap import available
from fullbatch._size import format_bytes

CAP_SHARE = 0.57
"""The cap as a share of plain PyTorch's peak: well below what it needs, well above its parameters and batch."""
SLACK = 2.0
"""How many times as far from the float64 gradient fullbatch may be as plain float32 is: both round, in two orders."""
CURVE_TOLERANCE = 5e-3
"""Relative difference of two loss curves after some steps, which amplify rounding. A gradient averaged over parts of
the batch, which is not the full batch's, gives several times this."""


@dataclass
class Run:
    name: str
    died: str = ""
    plan: str = ""
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak: int = 0
    timeline: list[tuple[float, int]] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def out_of_memory(self) -> bool:
        """Whether that is what it died of: a child that dies of anything else proves nothing about the cap."""
        return any(sign in self.died for sign in ("OutOfMemoryError", "can't allocate", "could not create a primitive"))


def compare(script: Path, out: Path, steps: int, extra: list[str]) -> int:
    """Runs all three and reports; 0 if fullbatch trained under the cap to the same losses, else 1."""
    out.mkdir(parents=True, exist_ok=True)
    console = Console()
    if (reason := available()) is not None:
        console.print(f"[yellow]No exact cap:[/] {reason}")
        if "--quick" in extra:
            console.print("Without it, only the full demo is large enough to be told from the interpreter's memory.")
            return 1
        console.print("RLIMIT_DATA stands in for it, and peaks are of the resident set: both are approximate.")
    columns = (TextColumn("{task.description:28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=console) as progress:

        def run(name: str, kind: str, cap: int | None) -> Run:
            task = progress.add_task(name, total=1 if kind == "float64" else steps, note="")
            command = [sys.executable, str(script), "--child", kind, *extra]
            command += ["--cap", str(cap)] if cap is not None else []
            return follow(name, command, out / f"{name.replace(' ', '-').replace(',', '')}.json", progress, task)

        plain = run("plain, no cap", "plain", None)
        if plain.died:
            console.print(f"The uncapped run failed: {plain.died}", style="red")
            return 1
        exact = run("plain, float64, one step", "float64", None)
        if exact.died:
            console.print(f"The float64 run failed: {exact.died}", style="red", markup=False)
            return 1
        cap = int(plain.peak * CAP_SHARE)
        capped = run("plain, capped", "plain", cap)
        ours = run("fullbatch, capped", "fullbatch", cap)
    if ours.plan:
        console.print(ours.plan, markup=False, highlight=False, soft_wrap=True)
    console.print(table([plain, capped, ours], exact, cap))
    picture = out / "segmentation.png"
    draw(plain, ours, cap, picture)
    console.print(f"picture: {picture}")
    return verdict(console, plain, exact, capped, ours, cap)


def follow(name: str, command: list[str], out: Path, progress: Progress, task: TaskID) -> Run:
    """Runs a child to its end, shows each of its lines, and reads the results it left."""
    run = Run(name)
    for stale in (out, out.with_suffix(".pt")):
        stale.unlink(missing_ok=True)
    errors = out.with_suffix(".stderr.txt")
    with (
        errors.open("w", encoding="utf-8") as log,
        subprocess.Popen(
            [*command, "--out", str(out)], stdout=subprocess.PIPE, stderr=log, text=True, env=environment()
        ) as child,
    ):
        assert child.stdout is not None
        for line in child.stdout:
            fact = read_fact(line)
            if "plan" in fact:
                run.plan = fact["plan"]
            if "prepared" in fact:
                progress.update(task, note=f"prepared in {fact['prepared']:.1f} s")
            if "step" in fact:
                note = f"loss {fact['loss']:.6f}, {fact['seconds']:.1f} s a step"
                progress.update(task, completed=fact["step"], note=note)
    if child.returncode != 0 or not out.exists():
        lines = errors.read_text(encoding="utf-8").strip().splitlines()
        run.died = lines[-1] if lines else f"exit status {child.returncode}"
        progress.update(task, note=f"[red]died: {run.died.split(':')[0]}[/]")
        progress.stop_task(task)
        return run
    result = json.loads(out.read_text(encoding="utf-8"))
    run.losses, run.seconds, run.peak = result["losses"], result["seconds"], result["peak"]
    run.timeline = [(at, live) for at, live in result["timeline"]]
    run.gradients = torch.load(out.with_suffix(".pt"), weights_only=True)
    return run


def environment() -> dict[str, str]:
    """A child's environment: where the operating system sets the cap, glibc must not keep freed tensors for later."""
    tight = {} if available() is None else {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
    return {**os.environ, **tight}


def read_fact(line: str) -> dict[str, Any]:
    try:
        fact = json.loads(line)
    except ValueError:
        return {}  # a library's chatter
    return fact if isinstance(fact, dict) else {}


def gradient_difference(one: Run, other: Run) -> float:
    """The largest difference of any parameter's first gradient, relative to the largest entry of ``one``'s."""
    return max(float((other.gradients[n] - g).abs().max() / g.abs().max()) for n, g in one.gradients.items())


def loss_difference(one: Run, other: Run) -> float:
    return max(abs(a - b) / abs(a) for a, b in zip(one.losses, other.losses, strict=True))


def table(runs: list[Run], exact: Run, cap: int) -> Table:
    result = Table(title=f"the same training, three times; the cap is {cap:,} bytes ({format_bytes(cap)})")
    for heading in ("run", "peak bytes", "s/step", "grad. vs plain", "grad. vs float64", "loss vs plain"):
        wraps = " vs " in heading
        # "vs plain" is the largest relative difference to that run: its own is 0.
        result.add_column(heading, justify="left" if heading == "run" else "right", no_wrap=not wraps)
    for run in runs:
        if run.died:
            words = (f"> {cap:,}", "[red]died[/]") if run.out_of_memory else ("-", "[red]failed[/]")
            result.add_row(run.name, *words, "-", "-", "-")
            continue
        off = [f"{gradient_difference(one, run):.1e}" for one in (runs[0], exact)]
        result.add_row(
            run.name, f"{run.peak:,}", f"{median(run.seconds):.2f}", *off, f"{loss_difference(runs[0], run):.1e}"
        )
    return result


def draw(plain: Run, ours: Run, cap: int, path: Path) -> None:
    """Left: the memory of one step of both; right: both loss curves."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    memory, curve = figure.subplots(1, 2)
    for run, colour in ((plain, "tab:red"), (ours, "tab:blue")):
        if run.timeline:
            times, levels = zip(*run.timeline, strict=True)
            memory.step(
                times, [level / 2**30 for level in levels], where="post", linewidth=1, color=colour, label=run.name
            )
    memory.axhline(cap / 2**30, color="black", linestyle="--", linewidth=1, label=f"cap, {cap / 2**30:.2f} GiB")
    memory.set(
        title="one training step", xlabel="seconds", ylabel="GiB of tensors alive", ylim=(0, 1.4 * plain.peak / 2**30)
    )
    memory.legend(loc="upper right")
    for run, style in ((plain, "tab:red"), (ours, "tab:blue")):
        marker = "-" if run is plain else "o"
        curve.plot(range(1, len(run.losses) + 1), run.losses, marker, color=style, fillstyle="none", label=run.name)
    curve.set(title="training loss", xlabel="step", ylabel="cross entropy")
    curve.legend()
    figure.savefig(path, dpi=130)


def verdict(console: Console, plain: Run, exact: Run, capped: Run, ours: Run, cap: int) -> int:
    console.print(f"plain PyTorch under the cap: {capped.died or 'did not die'}", markup=False, highlight=False)
    if ours.died:
        console.print(f"fullbatch under the cap died: {ours.died}", style="red", markup=False)
        return 1
    near = gradient_difference(exact, ours) <= SLACK * gradient_difference(exact, plain)
    good = capped.out_of_memory and near and loss_difference(plain, ours) < CURVE_TOLERANCE
    if available() is None:
        good = good and ours.peak <= cap
    console.print(
        "the runs agree" if good else "the runs do NOT agree as they should", style="green" if good else "red"
    )
    return 0 if good else 1
