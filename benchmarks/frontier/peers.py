"""fullbatch beside the usual remedies, each at the very memory that the remedy takes.

    python benchmarks/frontier/peers.py [NAME ...] [--peers checkpoint compile] [--backend inductor] [--out peers.json]

For each point of a peer its peak is measured, a plan is made for that peak, and plain step, peer and plan run in turn
in the same process.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import fullbatch
from measuring import Plain, difference, gradients, interleaved, peak, ratio, save
from models import MODELS, add_options, check_names
from techniques import PEERS, Technique, default_backend, points

COLUMNS = (
    "peer",
    "setting",
    "its peak",
    "its time",
    "gradient off",
    "fullbatch peak",
    "fullbatch time",
    "fullbatch / peer",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--backend", help="torch.compile's; inductor where there is a C++ compiler")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved rounds a row")
    options = parser.parse_args()
    check_names(parser, options.models)
    torch.set_num_threads(options.threads)
    backend = options.backend or default_backend()
    results = []
    for name in options.models:
        results.append(compare(name, options.size, options.peers, backend, options.repeats))
        Console(width=140).print(show(results[-1]))
        save(options.out, "peers", options.size, options.repeats, results)


def compare(name: str, size: str, peers: list[str], backend: str, repeats: int) -> dict[str, Any]:
    """One row for each point of each peer. Bytes and seconds."""
    plain = Plain(*MODELS[name].make(size))
    rows = []
    for peer in peers:
        for technique in points(peer, MODELS[name], plain, backend):
            rows.append(_row(plain, technique, repeats))
    return {
        "model": name, "batch": plain.samples, "owned": plain.owned, "plain_peak": plain.peak, "rows": rows
    }  # fmt: skip


def _row(plain: Plain, technique: Technique, repeats: int) -> dict[str, Any]:
    theirs = peak(technique.run, technique.model)
    row: dict[str, Any] = {
        "peer": technique.peer, "setting": technique.setting, "peak": theirs, "peak_share": theirs / plain.peak
    }  # fmt: skip
    row["gradient_off"] = difference(gradients(technique.run, technique.model), gradients(plain.run, plain.model))
    actions = [(plain.run, plain.model), (technique.run, technique.model)]
    try:
        step = fullbatch.Step(plain.loss_fn, plain.model, plain.batch, memory=plain.owned + theirs)
    except fullbatch.BudgetError as error:
        rounds = interleaved(actions, repeats)
        return row | {
            "time": ratio(rounds, 1, 0),
            "seconds": rounds,
            "least": (error.smallest - plain.owned) / plain.peak,
        }

    def planned() -> object:
        return step(plain.batch)

    ours = peak(planned, plain.model)
    rounds = interleaved([*actions, (planned, plain.model)], repeats)
    return row | {
        "time": ratio(rounds, 1, 0),
        "ours_peak": ours,
        "ours_peak_share": ours / plain.peak,
        "ours_time": ratio(rounds, 2, 0),
        "ours_over_peer": ratio(rounds, 2, 1),
        "microbatch": step.plan.microbatch,
        "seconds": rounds,
    }


def show(result: dict[str, Any]) -> Table:
    """The rows of one model as a table; peaks and times are shares of the plain step's."""
    title = f"{result['model']}, batch {result['batch']}: the plain step allocates {result['plain_peak']:,} bytes"
    table = Table(title=f"{title}, {torch.get_num_threads()} threads")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("peer", "setting") else "right")
    for row in result["rows"]:
        ours = (f"least {row['least']:.1%}", "-", "-") if "least" in row else (
            f"{row['ours_peak_share']:.1%}", f"{row['ours_time']:.2f}", f"{row['ours_over_peer']:.2f}"
        )  # fmt: skip
        table.add_row(
            row["peer"],
            row["setting"],
            f"{row['peak_share']:.1%}",
            f"{row['time']:.2f}",
            f"{row['gradient_off']:.0e}",
            *ours,
        )
    return table


if __name__ == "__main__":
    main()
