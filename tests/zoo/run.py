"""Every model type, each in a process of its own: `python -m zoo.run --out results.json` (in the folder `tests`).

A process is forked from one that has imported torch and warmed up, so that a model costs its own seconds only; it is
stopped after `--limit` seconds of processor time.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from . import compare
from .models import names

WARM = ("vit", "t5", "resnet")  # between them they touch most of what torch and transformers import late


Judge = Callable[[str], dict[str, Any]]


def _warm_up(judge: Judge, warm: tuple[str, ...]) -> None:
    for name in warm:
        judge(name)
        torch._dynamo.reset()
    gc.collect()
    gc.freeze()  # or a child would copy the pages that its collector visits


def _child(judge: Judge, name: str, pipe: Connection, limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))  # processor time: others may use the machine
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    try:
        pipe.send(judge(name))
    except BaseException as error:
        pipe.send({"name": name, "kind": "crashed", "refusal": type(error).__name__, "detail": repr(error)[:1500]})
    finally:
        pipe.close()
        os._exit(0)


def run(
    chosen: list[str],
    jobs: int,
    limit: float,
    seen: Callable[[dict[str, Any]], None],
    judge: Judge = compare.judge,
    warm: tuple[str, ...] = WARM,
) -> dict[str, dict[str, Any]]:
    """The outcome of each of the models `chosen`, by name."""
    _warm_up(judge, warm)
    context = multiprocessing.get_context("fork")
    waiting, running = list(reversed(chosen)), {}
    results: dict[str, dict[str, Any]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop()
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(judge, name, sender, round(limit)))
            process.start()
            sender.close()
            running[receiver] = (name, process, time.monotonic())
        wait(list(running), timeout=1.0)
        for receiver, (name, process, began) in list(running.items()):
            if receiver.poll() or not process.is_alive():
                results[name] = _received(receiver, name, process, limit)
            else:
                continue
            process.join()
            receiver.close()
            del running[receiver]
            _say(results[name], time.monotonic() - began)
            seen(results[name])
    return dict(sorted(results.items()))


def _received(receiver: Connection, name: str, process: Any, limit: float) -> dict[str, Any]:
    try:
        found: dict[str, Any] = receiver.recv()
    except EOFError:
        process.join()
        found = {"name": name, "kind": "crashed", "refusal": "exit", "detail": f"exit code {process.exitcode}"}
        if process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL):
            found = {"name": name, "kind": "too slow", "detail": f"more than {limit:.0f} s of processor time"}
    return found


def _say(found: dict[str, Any], seconds: float) -> None:
    detail = found.get("detail") or f"error {found.get('error'):.1e}, {found.get('stages')} stages"
    line = f"{found['name']:34s} {found['kind']:12s} {seconds:5.1f} s  {found.get('refusal', '')} {detail}"
    print(line.replace("\n", " ")[:400], file=sys.stderr, flush=True)


def main(names: Callable[[], list[str]] = names, judge: Judge = compare.judge, warm: tuple[str, ...] = WARM) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", nargs="*", help="models; all where none is named")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of processor time for a model")
    parser.add_argument("--out", type=Path, help="a JSON file to write; results of other models in it stay")
    asked = parser.parse_args()
    found = json.loads(asked.out.read_text()) if asked.out is not None and asked.out.exists() else {}

    def keep(outcome: dict[str, Any]) -> None:
        found[outcome["name"]] = outcome
        if asked.out is not None:
            asked.out.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")

    run(asked.names or names(), asked.jobs, asked.limit, keep, judge, warm)


if __name__ == "__main__":
    main()
