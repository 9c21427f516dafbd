"""``__consumer_offsets`` after the real cleaner loads back to the same groups and offsets.

These tests compact a log up to each of its offsets. After every other test, conftest.py compacts
the test's logs up to a few offsets.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.unit.groups.cleaned_groups import loads_back
from tests.unit.groups.group_driver import Driver
from tests.unit.groups.test_consumer_churn import SCENARIOS as CONSUMER
from tests.unit.groups.test_consumer_churn import Churn as ConsumerChurn
from tests.unit.groups.test_conversion import there_and_back
from tests.unit.groups.test_group_churn import SCENARIOS as CLASSIC
from tests.unit.groups.test_group_churn import Churn as ClassicChurn

pytestmark = pytest.mark.slow

SCENARIOS: dict[str, Callable[[], Driver]] = {
    **{f"classic, {name}": make for name, make in CLASSIC.items()},
    **{f"consumer, {name}": make for name, make in CONSUMER.items()},
    "migration, there and back": there_and_back,
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_cleaned_log_of_every_scenario_loads_to_the_same_state(name: str) -> None:
    driver = SCENARIOS[name]()
    assert loads_back(driver.log, driver.settings) >= len(driver.log)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ClassicChurn, ConsumerChurn])
def test_cleaned_log_of_a_random_history_loads_to_the_same_state(
    kind: type[ClassicChurn | ConsumerChurn],
) -> None:
    """Joins, leaves, plain and transactional commits, deletions, expirations, crashes."""
    variants = 0
    for seed in range(8):
        rng, churn = random.Random(seed), kind()
        while len(churn.driver.log) < 50:
            churn.step(rng.randrange(64), rng.randrange(6), rng.randrange(2))
        # An open transaction would stop the cleaner.
        for entry in list(churn.driver.log):
            if entry.stamp is not None:
                churn.driver.marker(entry.stamp.producer_id, commit=seed % 2 == 0)
        variants += loads_back(churn.driver.log, churn.driver.settings)
    assert variants > 400
