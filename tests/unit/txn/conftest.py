from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.txn.cleaned_txns import loads_back
from tests.unit.txn.driver import Driver, assert_same_after_compaction, sweep_crashes

ENDS = 4
"""Offsets up to which a scenario's log is compacted by the real cleaner."""


@pytest.fixture
def shard() -> Iterator[Callable[..., Driver]]:
    """Make drivers. After the test each one's log is cut at every record and compacted."""
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
