"""The search against trying every size, on memory that is no line."""

from __future__ import annotations

import itertools

import pytest

from fullbatch._search import search

MEMORY = {
    "a line": lambda n: 1000 + 37 * n,
    "the square of a length": lambda n: 1000 + n * n,
    "a cube": lambda n: n**3,
    "another algorithm from 100": lambda n: 1000 + 37 * n + (5000 if n > 100 else 0),
    "less than a line": lambda n: 40 * int(n**0.7) + n,
    "steps of eight": lambda n: 1000 + 64 * (n // 8) * 8,
    "nothing": lambda n: 1000,
}


@pytest.mark.parametrize("name", MEMORY)
def test_finds_what_trying_every_size_finds(name: str) -> None:
    nbytes, evaluations = MEMORY[name], 0
    for memory, start, unit, below in itertools.product(
        (500, 1001, 3000, 20_000, 10**6), (1, 7, 64), (1, 3, 32), (None, 50)
    ):
        seen: list[int] = []
        found = search(lambda n, seen=seen: seen.append(n) or nbytes(n), memory, start, unit, 1000, below)
        sizes = range(unit, min(1000, (below or 1001) - 1) + 1, unit)
        assert found == max((n for n in sizes if nbytes(n) <= memory), default=0)
        assert len(set(seen)) == len(seen)
        assert set(seen) <= set(sizes)
        evaluations = max(evaluations, len(seen))
    assert evaluations <= 2 * 10 + 4  # at worst a halving for every other evaluation


def test_a_line_needs_few() -> None:
    seen: list[int] = []
    assert search(lambda n: seen.append(n) or 10**6 + 12_345 * n, 2 * 10**7, 16, 1, 4096) == 1539
    assert len(seen) <= 5
