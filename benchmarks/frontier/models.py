"""The steps that are measured, by name; `python models.py` prints how large each is and how long it takes.

    python benchmarks/frontier/models.py [NAME ...] [--size full] [--threads 2]

Sizes are chosen so that what a plain step allocates is at least 70 % of its whole peak, parameters and batch included:
else there is little that a planner could save.
"""

from __future__ import annotations

import argparse

import torch
from rich.console import Console
from rich.table import Table

from attention import clip, gpt2, llama, vit
from built import SIZES, Model
from convnets import convnext, resnet50
from detector import yolo
from measuring import Plain, operations
from unets import unet, unet3d

_CONV, _DETECTOR, _UNET = ("Bottleneck", "ConvNeXtBlock"), ("Unit", "C2f", "Pyramid", "Head"), ("Twice",)
_TINY_TEXT = {"length": 64, "layers": 2, "width": 32, "words": 300}
_TINY_CHAIN = {"side": 64, "width": 4, "depths": (1, 1, 1, 1), "classes": 10}
_TINY_VIT = {"side": 64, "width": 32, "layers": 2, "patch": 8, "classes": 10}

MODELS: dict[str, Model] = {
    "resnet50": Model(
        resnet50, _CONV, additive=False, batch=64, full={"side": 160}, small={"side": 128, "width": 32},
        tiny=_TINY_CHAIN,
    ),
    "yolo": Model(
        yolo, _DETECTOR, additive=False, batch=64, full={"side": 256}, small={"side": 128},
        tiny={"side": 64, "width": 4},
    ),
    "unet": Model(
        unet, _UNET, additive=False, batch=64, full={"side": 112}, small={"side": 96, "width": 16, "levels": 4},
        tiny={"side": 32, "width": 4, "levels": 3},
    ),
    "unet3d": Model(
        unet3d, _UNET, additive=True, full={"side": 48}, small={"side": 16},
        tiny={"side": 16, "width": 4, "levels": 2},
    ),
    "convnext": Model(
        convnext, _CONV, additive=True, batch=64, full={"side": 96}, small={"side": 64, "width": 48}, tiny=_TINY_CHAIN
    ),
    "vit": Model(
        vit, ("Block",), additive=True, batch=64, full={"side": 224, "width": 256}, small={"side": 64, "width": 192},
        tiny=_TINY_VIT,
    ),
    "gpt2": Model(
        gpt2, ("GPT2Block",), additive=True, batch=64, full={"length": 128},
        small={"length": 128, "width": 128, "words": 2000}, tiny=_TINY_TEXT,
    ),
    "llama": Model(
        llama, ("LlamaDecoderLayer",), additive=True, batch=64, full={"length": 128},
        small={"length": 32, "width": 128, "layers": 2}, tiny=_TINY_TEXT,
    ),
    "clip": Model(
        clip, ("Block",), additive=False, batch=64, full={"side": 64}, small={"side": 64, "width": 128, "layers": 4},
        tiny={"side": 32, "width": 16, "layers": 1, "patch": 4, "length": 16, "words": 50},
    ),
    "gpt2-one": Model(
        gpt2, ("GPT2Block",), additive=True, batch=1, full={"length": 1536}, small={"length": 512, "width": 128},
        tiny={**_TINY_TEXT, "length": 128},
    ),
    "unet3d-one": Model(
        unet3d, _UNET, additive=True, batch=1, full={"side": 96, "width": 12}, small={"side": 48},
        tiny={"side": 32, "width": 4, "levels": 2},
    ),
    "vit-one": Model(
        vit, ("Block",), additive=True, batch=1, full={"side": 640, "width": 256}, small={"side": 320, "width": 192},
        tiny={**_TINY_VIT, "side": 128},
    ),
}  # fmt: skip


def add_options(parser: argparse.ArgumentParser, default: list[str] | None = None) -> None:
    """The arguments that all benchmarks share."""
    parser.add_argument("models", nargs="*", default=default or list(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--size", choices=SIZES, default="full", help="how large the models are")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", help="where to write the results as JSON")


def check_names(parser: argparse.ArgumentParser, names: list[str]) -> None:
    if unknown := [name for name in names if name not in MODELS]:
        parser.error(f"no model {', '.join(unknown)}; there are {', '.join(MODELS)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    options = parser.parse_args()
    check_names(parser, options.models)
    torch.set_num_threads(options.threads)
    table = Table(title=f"plain steps, {options.threads} threads")
    for column in ("model", "batch", "parameters MB", "batch MB", "allocated MB", "of the peak", "GFLOP", "seconds"):
        table.add_column(column, justify="right")
    for name in options.models:
        plain = Plain(*MODELS[name].make(options.size))
        parameters = sum(parameter.nbytes for parameter in plain.model.parameters())
        table.add_row(
            name, str(plain.samples), f"{parameters / 1e6:,.0f}", f"{plain.batch_bytes / 1e6:,.1f}",
            f"{plain.peak / 1e6:,.0f}", f"{plain.peak / (plain.peak + plain.owned):.0%}",
            f"{operations(plain) / 1e9:,.0f}", f"{plain.seconds():.2f}",
        )  # fmt: skip
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
