from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.txn.cleaned_txns import loads_back
from tests.unit.txn.driver import Driver, assert_same_after_compaction, sweep_crashes

ENDS = 4
"""The number of offsets up to which the real cleaner compacts a scenario's log."""


@pytest.fixture
def shard() -> Iterator[Callable[..., Driver]]:
    """Make drivers; after the test, check that their truncated and compacted logs load."""
    made: list[Driver] = []

    def make(**options: Any) -> Driver:
        made.append(Driver(**options))
        return made[-1]

    yield make
    for driver in made:
        sweep_crashes(driver)
        assert_same_after_compaction(driver)
        if driver.log:
            loads_back(driver, most=ENDS)
