"""What a user reads prints as a table, with `print` as with rich."""

from __future__ import annotations

from abc import ABC, abstractmethod

from rich.console import Console
from rich.table import Table

_WIDTH = 110  # columns; a plan names modules and source lines


class Printed(ABC):
    """Base of values with a table: `__rich__` makes it, `str` is that table without colours."""

    @abstractmethod
    def __rich__(self) -> Table:
        """The value as a table."""

    def __str__(self) -> str:
        console = Console(width=_WIDTH, no_color=True)
        with console.capture() as capture:
            console.print(self)
        return "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines())
