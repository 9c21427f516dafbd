"""Exactly-once holds in random runs in which any broker may fail over at any step."""

from __future__ import annotations

import pytest

from tests.unit.txn.failover import World

SEEDS = 60
MANY = 2_000


def run(seed: int, *bugs: str) -> World:
    world = World(seed, bugs=frozenset(bugs))
    world.run()
    world.check()
    return world


def test_failover_at_any_step_keeps_exactly_once() -> None:
    epochs = acknowledged = 0
    for seed in range(SEEDS):
        world = run(seed)
        epochs += world.leader.epoch
        acknowledged += sum(ledger.acknowledged for ledger in world.ledgers)
    # The random runs must include leader changes and successful transactions.
    assert epochs > SEEDS * 3
    assert acknowledged > SEEDS * 2


@pytest.mark.slow
def test_failover_at_any_step_keeps_exactly_once_in_many_histories() -> None:
    for seed in range(SEEDS, MANY):
        run(seed)


@pytest.mark.parametrize(
    "bug",
    [
        "effects",  # markers are sent before the decision is committed
        "stale",  # refused markers are treated as written
        "truncate",  # a new leader lacks committed records
        pytest.param("guard", marks=pytest.mark.slow),  # EndTxn overtakes a verified batch
    ],
)
def test_planted_bugs_are_found(bug: str) -> None:
    for seed in range(5_000):
        try:
            run(seed, bug)
        except Exception:  # noqa: BLE001 - a failed check of the machine or of the history
            return
    pytest.fail(f"{bug} was not found")
