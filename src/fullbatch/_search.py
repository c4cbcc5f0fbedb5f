"""The largest size whose bytes fit, in few evaluations: each is a capture, and takes seconds.

Bytes are nearly linear in a batch and not at all in a length, and jump where an operator chooses another algorithm. So
a line through the last two points only proposes; what counts is that a size was evaluated and fits, and that the next
one was evaluated and does not. Where lines do not halve the bracket in two evaluations, its middle is taken.
"""

from __future__ import annotations

from collections.abc import Callable

Bytes = Callable[[int], int]


def search(nbytes: Bytes, memory: int, start: int, unit: int, most: int, below: int | None = None) -> int:
    """The largest multiple of `unit`, at most `most` and less than `below`, with `nbytes(size) <= memory`; 0: none.

    Every neighbour is evaluated: where bytes grow with the size there is no larger one that fits.
    """
    least = most + 1 if below is None else min(below, most + 1)
    low, high = 0, -(-least // unit) * unit  # `low` fits or is 0, `high` does not or is too far
    known: dict[int, int] = {}
    size, widths = min(max(start // unit, 1) * unit, high - unit), [high]
    while high - low > unit:
        known[size] = nbytes(size)
        low, high = (size, high) if known[size] <= memory else (low, size)
        widths.append(high - low)
        size = _next(known, memory, low, high, unit, stuck=len(widths) > 3 and 2 * widths[-1] > widths[-3])
    return low


def _next(known: dict[int, int], memory: int, low: int, high: int, unit: int, stuck: bool) -> int:
    bounded = high in known
    size = _on_line(known, memory, low, high)
    if bounded and (stuck or size is None):
        size = (low + high) // 2
    elif size is None:
        size = 2 * low
    if not bounded:
        size = min(size, 8 * max(low, unit))  # a line through small sizes says little of large ones
    return max(low + unit, min(size // unit * unit, high - unit))


def _on_line(known: dict[int, int], memory: int, low: int, high: int) -> int | None:
    """Where a line through the two sizes nearest the bracket reaches `memory`."""
    near = sorted(known, key=lambda size: (min(abs(size - low), abs(size - high)), size))[:2]
    if len(near) < 2:
        return None
    left, right = sorted(near)
    rise = (known[right] - known[left]) / (right - left)
    return None if rise <= 0 else left + int((memory - known[left]) / rise)
