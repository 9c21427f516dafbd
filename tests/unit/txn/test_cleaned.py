"""``__transaction_state`` loads back to the same transactions after the real cleaner.

These tests compact a log up to each of its offsets. After every other test, conftest.py compacts
the test's logs up to a few offsets.
"""

from __future__ import annotations

import random

import pytest

from tests.support.quick import seeds
from tests.unit.txn.cleaned_txns import loads_back
from tests.unit.txn.driver import Driver


@pytest.mark.parametrize("seed", seeds(5))
def test_compacted_log_of_random_transactions_loads_the_same_state(seed: int) -> None:
    """Several ids with transactions of every outcome and both versions, and expired ids."""
    rng, driver = random.Random(seed), Driver()
    names = [f"id-{number}" for number in range(4)]
    while len(driver.log) < 50:
        name = rng.choice(names)
        identity = driver.started(transactional_id=name)
        tv = rng.choice((1, 2))
        if rng.random() < 0.8:
            driver.add(identity, ("t", rng.randrange(3)), tv=tv, transactional_id=name)
            if rng.random() < 0.7:
                driver.end(identity, commit=rng.random() < 0.5, tv=tv, transactional_id=name)
        driver.advance(rng.choice((0, 10, 70_000)))
    assert loads_back(driver) > len(driver.log)
