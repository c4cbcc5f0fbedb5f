"""No test reads or writes the costs that the user's own steps have left on disk, unless it names a folder for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _no_costs_on_disk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLBATCH_CACHE", "off")
        yield
