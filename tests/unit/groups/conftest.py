from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.groups.cleaned_groups import loads_back
from tests.unit.groups.group_driver import MADE

ENDS = 4
"""The number of offsets up to which a scenario's log is compacted."""

LONGEST = 400
"""The maximum number of entries of a checked log; longer logs of simulated fleets are skipped."""


@pytest.fixture(autouse=True)
def _loads_back_from_the_cleaner() -> Iterator[None]:
    """Compact each test's logs with the real cleaner, and check the state that they load to."""
    MADE.clear()
    yield
    for driver in list(MADE):
        if 0 < len(driver.log) <= LONGEST:
            loads_back(driver.log, driver.settings, most=ENDS)
    MADE.clear()
