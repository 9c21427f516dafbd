from __future__ import annotations

from collections.abc import Iterator

import pytest
from cleaned_groups import loads_back
from group_driver import MADE

ENDS = 4
"""Offsets up to which a scenario's log is compacted."""

LONGEST = 400
"""Entries of a log that is looked at: the simulated fleets have tens of thousands."""


@pytest.fixture(autouse=True)
def _loads_back_from_the_cleaner() -> Iterator[None]:
    """After each test the real cleaner compacts its logs, and they load back to the same state."""
    MADE.clear()
    yield
    for driver in list(MADE):
        if 0 < len(driver.log) <= LONGEST:
            loads_back(driver.log, driver.settings, most=ENDS)
    MADE.clear()
