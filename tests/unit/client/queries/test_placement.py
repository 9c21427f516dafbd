"""Reassignment plans, balanced over brokers and racks with few moved replicas; plan files."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from fencepost.client.queries.moves import PlanError, plan_text, read_plan
from fencepost.client.queries.placement import TooFewBrokers, spread
from fencepost.client.queries.replicas import PartitionDescription, problems

Plan = dict[tuple[str, int], tuple[int, ...]]

TWICE = """{"partitions": [{"topic": "t", "partition": 0, "replicas": [1]},
 {"topic": "t", "partition": 0, "replicas": [2]}]}"""


def _on(*replicas: tuple[int, ...]) -> Plan:
    return {("t", index): replica for index, replica in enumerate(replicas)}


def _racks(*nodes: int) -> dict[int, str | None]:
    return dict.fromkeys(nodes)


def test_balanced_assignment_is_unchanged():
    current = _on((1, 2), (2, 3), (3, 1))
    assert spread(current, _racks(1, 2, 3)) == current


def test_new_broker_gets_its_share_and_other_replicas_stay():
    current = _on((1, 2), (2, 3), (3, 1), (1, 3), (2, 1), (3, 2))
    found = spread(current, _racks(1, 2, 3, 4))
    held = Counter(node for row in found.values() for node in row)
    assert sorted(held.values()) == [3, 3, 3, 3]
    assert sum(len(set(found[tp]) - set(current[tp])) for tp in current) == 3


def test_replicas_of_removed_broker_move_to_the_others():
    current = _on((1, 2), (2, 3), (3, 1))
    found = spread(current, _racks(1, 2))
    assert all(sorted(row) == [1, 2] for row in found.values())
    assert sorted(Counter(row[0] for row in found.values()).values()) == [1, 2]


def test_plan_with_another_replication_factor_is_balanced():
    current = _on((1,), (2,), (3,))
    found = spread(current, _racks(1, 2, 3), 2)
    assert all(row[0] == current[tp][0] for tp, row in found.items())
    assert Counter(node for row in found.values() for node in row) == {1: 2, 2: 2, 3: 2}
    assert spread(found, _racks(1, 2, 3), 1).keys() == current.keys()
    assert {len(row) for row in spread(found, _racks(1, 2, 3), 1).values()} == {1}


def test_preferred_leaders_are_spread_over_the_brokers():
    found = spread(_on((1, 2, 3), (1, 2, 3), (1, 2, 3)), _racks(1, 2, 3))
    assert sorted(row[0] for row in found.values()) == [1, 2, 3]
    assert all(sorted(row) == [1, 2, 3] for row in found.values())


def test_replicas_are_placed_on_different_racks():
    racks = {1: "a", 2: "a", 3: "b", 4: "b"}
    for row in spread(_on((1, 2), (3, 4), (1, 2), (3, 4)), racks).values():
        assert len({racks[node] for node in row}) == 2


def test_plan_with_too_few_brokers_is_refused():
    with pytest.raises(TooFewBrokers):
        spread(_on((1, 2, 3)), _racks(1, 2))
    with pytest.raises(TooFewBrokers):
        spread(_on((1,)), {})


def test_random_plans_are_balanced_and_stable():
    for seed in range(200):
        draw = random.Random(seed)
        nodes = list(range(1, draw.randint(2, 9)))
        factor = draw.randint(1, len(nodes))
        current = _on(*(tuple(draw.sample(range(1, 12), factor)) for _ in range(20)))
        found = spread(current, _racks(*nodes))
        held = Counter(node for row in found.values() for node in row)
        assert all(len(set(row)) == factor and set(row) <= set(nodes) for row in found.values())
        assert max(held.values()) - min(held[node] for node in nodes) <= 1, seed
        again = spread(found, _racks(*nodes))
        assert {tp: set(row) for tp, row in again.items()} == {
            tp: set(row) for tp, row in found.items()
        }


def test_written_plan_is_read_back_unchanged():
    plan = _on((1, 2), (2, 3))
    assert read_plan(plan_text(plan)) == plan
    theirs = '{"version":1,"partitions":[{"topic":"t","partition":0,"replicas":[1,2],"log_dirs":'
    assert read_plan(theirs + '["any","any"]}]}') == _on((1, 2))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"version": 2, "partitions": []}',
        '{"partitions": [{"topic": "t", "partition": 0}]}',
        '{"partitions": [{"topic": "t", "partition": 0, "replicas": []}]}',
        '{"partitions": [{"topic": "t", "partition": 0, "replicas": [1, 1]}]}',
        '{"partitions": [{"topic": "t", "partition": "x", "replicas": [1]}]}',
        TWICE,
    ],
)
def test_invalid_plan_is_refused(text):
    with pytest.raises(PlanError):
        read_plan(text)


def _state(leader: int, isr: tuple[int, ...]) -> PartitionDescription:
    return PartitionDescription("t", 0, leader, 3, (1, 2, 3), isr, (), (), ())


@pytest.mark.parametrize(
    ("state", "found"),
    [
        (_state(1, (1, 2, 3)), []),
        (_state(1, (1, 2)), ["under replicated"]),
        (_state(1, (1,)), ["under min ISR", "under replicated"]),
        (_state(-1, (1,)), ["offline", "under min ISR", "under replicated"]),
    ],
)
def test_partition_problems_depend_on_its_leader_and_isr(state, found):
    assert problems(state, 2) == found
    assert problems(_state(1, (1, 2)), 2, adding=[3]) == []
