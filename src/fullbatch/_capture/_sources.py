"""Where a refused step takes its randomness from, and how to hand it in instead.

Dynamo refuses what would be frozen at capture in words of its own ("missing as_proxy()"), which do not say that it was
a generator. Shape of the answer: what it was, by name, and the line that passes the draw in the batch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import fx


@dataclass(frozen=True)
class Source:
    """Random numbers that are not from torch's default generators: the reason of a refusal, and what to write."""

    reason: str
    next: str


_FROZEN = "loss_fn draws random numbers from {}: captured, every step would see the same ones."
_PASS = "draw before the step and pass it in the batch: step((batch, {}))"

_SEEDS = (
    r"`(manual_seed|[gs]et_rng_state|seed)(_all)?`|initial_seed|fork_rng",
    "loss_fn seeds torch's generators, or reads their state: captured, that would not happen.",
    "torch.manual_seed(n) before step(batch); within a step a recompute sees the same draws by itself",
)

# What Dynamo says, and what it means. The first that matches holds.
_SOURCES = (
    (
        r"use_numpy_random_stream|RandomState|default_rng|of class `Generator`|numpy\S*random",
        _FROZEN.format("NumPy (numpy.random)"),
        _PASS.format("torch.as_tensor(rng.random(n))"),
    ),
    (
        r"UserDefinedObjectVariable\(Generator\)|torch\._C\.Generator|torch\.Generator",
        _FROZEN.format("a torch.Generator of its own"),
        _PASS.format("torch.rand(shape, generator=g)") + "; or draw with torch's default generator: torch.rand(shape)",
    ),
    (
        r"_randbelow_with_getrandbits|SystemRandom|urandom|\bsecrets\b",
        _FROZEN.format("the operating system (os.urandom, secrets)"),
        _PASS.format("torch.tensor(secrets.randbelow(n))"),
    ),
    (
        r"\bRandom\.\w+|class `Random`|random\.Random\(\)",
        _FROZEN.format("Python's random"),
        _PASS.format("torch.tensor(random.random())"),
    ),
    _SEEDS,
    (
        r"Tensor\.random_\b",
        "Tensor.random_ cannot be captured.",
        "torch.randint(low, high, x.shape), which draws from the same generator",
    ),
)  # fmt: skip


SEEDS = Source(*_SEEDS[1:])
"""What is wrong with a step that calls torch.seed()."""


def source_of(refusal: str) -> Source | None:
    """What a refusal of Dynamo's has to do with randomness; None where it has not.

    Read without the traceback of the user's code, whose names (a file called random.py) say nothing.
    """
    words = refusal.split("from user code:")[0]
    for pattern, reason, advice in _SOURCES:
        if re.search(pattern, words):
            return Source(reason, advice)
    return None


def seeds(graph: fx.GraphModule) -> fx.Node | None:
    """A node that seeds the default generators anew, which Dynamo captures and which would do nothing."""
    wanted = {torch.seed, torch.random.seed}
    return next((node for node in graph.graph.nodes if node.op == "call_function" and node.target in wanted), None)
