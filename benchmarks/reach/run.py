"""The largest batch at a fixed amount of memory, for the plain step, the exact remedies and fullbatch.

    python benchmarks/reach/run.py [NAME ...] [--fits 4] [--cap BYTES] [--most 512] [--out reach.json]

The cap bounds what a step owns (parameters, buffers, batch) plus what it allocates. Without --cap it is what the plain
step takes at a batch of --fits. README.md says how each largest batch is found.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "frontier"))

import fullbatch
from built import Model
from measuring import Action, Plain, interleaved, peak, ratio, save
from models import MODELS, add_options, check_names
from techniques import Technique, accumulate, per_block

NAMES = ["gpt2", "clip", "unet", "yolo", "resnet50"]


@dataclass
class Tried:
    """One batch that was tried: whether it is within the cap and the time, and if not what stands in the way."""

    batch: int
    fits: bool
    peak: int = 0
    slower: float = 0.0
    bound: str = ""
    more: dict[str, Any] = field(default_factory=dict)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, NAMES)
    parser.set_defaults(size="small")
    parser.add_argument("--cap", type=int, help="in bytes")
    parser.add_argument("--fits", type=int, default=4, help="without a cap: the batch that the plain step has room for")
    parser.add_argument("--most", type=int, default=512, help="the largest batch to try")
    parser.add_argument(
        "--slowest", type=float, default=1.5, help="times plain's seconds a sample that fullbatch may take"
    )
    parser.add_argument("--repeats", type=int, default=3, help="interleaved pairs a time")
    options = parser.parse_args()
    check_names(parser, options.models)
    torch.set_num_threads(options.threads)
    results = []
    for name in options.models:
        model = MODELS[name]
        cap = options.cap or cap_of(model, options.size, options.fits)
        reach = Reach(model, options.size, cap, options.most, options.slowest, options.repeats)
        results.append({"model": name, **reach.all()})
        Console(width=140).print(show(results[-1]))
        save(options.out, "reach", options.size, options.repeats, results)


def cap_of(model: Model, size: str, batch: int) -> int:
    """What the plain step takes at that batch and half a sample more."""
    less, more = (Plain(*model.make(size, count)) for count in (batch, batch + 1))
    return less.owned + less.peak + (more.owned + more.peak - less.owned - less.peak) // 2


def largest(attempt: Callable[[int], Tried], start: int, most: int) -> tuple[Tried | None, Tried | None]:
    """The largest batch that fits and the smallest found that does not, to within an eighth, by doubling and bisection.

    A batch is doubled until one does not fit, or would be above `most`; then the gap between the two is halved.
    """
    best, worst, batch = None, None, start
    while worst is None and batch <= most:
        tried = attempt(batch)
        best, worst = (tried, worst) if tried.fits else (best, tried)
        batch = min(2 * batch, most) if batch < most else most + 1
    while worst is not None and worst.batch - (low := best.batch if best else 0) > max(1, low // 8):
        tried = attempt((low + worst.batch) // 2)
        best, worst = (tried, worst) if tried.fits else (best, tried)
    return best, worst


class Reach:
    """The largest batches of one model under one cap."""

    def __init__(self, model: Model, size: str, cap: int, most: int, slowest: float, repeats: int) -> None:
        self.model, self.size, self.cap, self.most = model, size, cap, most
        self.slowest, self.repeats = slowest, repeats
        self.base: Plain | None = None  # the plain step at its largest batch: times are compared with its

    def all(self) -> dict[str, Any]:
        """A row for each way to run the step."""
        best, worst = largest(self.plain, 1, self.most)
        if best is None:
            raise SystemExit(f"The plain step does not fit {self.cap:,} bytes at a batch of 1; give a larger --cap.")
        self.base = Plain(*self.model.make(self.size, best.batch))
        best.slower = 1.0
        rows = [_row("plain", best, worst)]
        ways = [("checkpoint", self.checkpoint), ("accumulation", self.accumulation), ("fullbatch", self.fullbatch)]
        for name, attempt in ways:
            if name != "accumulation" or self.model.additive:
                rows.append(_row(name, *largest(attempt, best.batch, self.most)))
        return {"cap": self.cap, "most": self.most, "slowest": self.slowest, "rows": rows}

    def plain(self, batch: int) -> Tried:
        """The step as it is written."""
        plain = self._build(batch)
        return self._within(plain, plain.owned + plain.peak)

    def checkpoint(self, batch: int) -> Tried:
        """torch.utils.checkpoint around each block."""
        plain = self._build(batch)
        return self._timed(plain, next(per_block(self.model, plain)))

    def accumulation(self, batch: int) -> Tried:
        """Plain accumulation, in as few equal microbatches as are within the cap."""
        plain = self._build(batch)
        tried = Tried(batch, False, bound="no equal microbatches")
        for parts in (parts for parts in range(1, batch + 1) if batch % parts == 0):
            if batch // parts <= self._base.samples:
                tried = self._timed(plain, accumulate(plain, parts))
            if tried.fits:
                break
        return tried

    def fullbatch(self, batch: int) -> Tried:
        """fullbatch with the cap as its budget, which may take `slowest` times plain's seconds a sample."""
        plain = self._build(batch)
        try:
            step = fullbatch.Step(plain.loss_fn, plain.model, plain.batch, memory=self.cap)
        except fullbatch.BudgetError as error:
            return Tried(batch, False, bound=str(error))
        tried = self._timed(plain, Technique("fullbatch", "", lambda: step(plain.batch), plain.model))
        tried.more = {"microbatch": step.plan.microbatch, "overhead": step.plan.overhead}
        if tried.fits and tried.slower > self.slowest:
            tried.fits, tried.bound = False, f"time: {tried.slower:.2f} x plain's seconds a sample"
        return tried

    @property
    def _base(self) -> Plain:
        assert self.base is not None
        return self.base

    def _build(self, batch: int) -> Plain:
        return Plain(*self.model.make(self.size, batch))

    def _within(self, plain: Plain, total: int) -> Tried:
        bound = "" if total <= self.cap else f"memory: {total:,} bytes"
        return Tried(plain.samples, not bound, total, bound=bound)

    def _timed(self, plain: Plain, technique: Technique) -> Tried:
        tried = self._within(plain, plain.owned + peak(technique.run, technique.model))
        if tried.fits:
            base, copies = self._base, max(1, plain.samples // self._base.samples)
            actions = [(_repeated(base, copies), base.model), (technique.run, technique.model)]
            scale = base.samples * copies / plain.samples
            tried.slower = scale * ratio(interleaved(actions, self.repeats), 1, 0)
            if tried.slower > self.slowest:  # one disturbed round must not end the search
                tried.slower = scale * ratio(interleaved(actions, 3 * self.repeats), 1, 0)
        return tried


def _repeated(plain: Plain, copies: int) -> Action:
    """The plain step so many times: as many samples as the step that it is compared with has, or nearly."""

    def run() -> None:
        for _ in range(copies):
            plain.run()
            plain.model.zero_grad()

    return run


def _row(name: str, best: Tried | None, worst: Tried | None) -> dict[str, Any]:
    row: dict[str, Any] = {"way": name, "batch": best.batch if best else 0}
    if best is not None:
        row |= {"peak": best.peak, "slower": best.slower, **best.more}
    if worst is not None:
        row |= {"failed": worst.batch, "bound": worst.bound}
    return row


def show(result: dict[str, Any]) -> Table:
    """The rows of one model as a table."""
    table = Table(title=f"{result['model']}: the largest batch within {result['cap']:,} bytes", show_lines=True)
    for column in ("way", "batch", "peak / cap", "seconds a sample / plain", "what bounds it"):
        table.add_column(column, justify="right" if column not in ("way", "what bounds it") else "left")
    for row in result["rows"]:
        most, ran = "failed" not in row, "peak" in row
        table.add_row(
            row["way"], f"{'at least ' if most else ''}{row['batch']}",
            f"{row['peak'] / result['cap']:.1%}" if ran else "-", f"{row['slower']:.2f}" if ran else "-",
            "nothing up to --most" if most else f"at {row['failed']}: {row['bound']}",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    main()
