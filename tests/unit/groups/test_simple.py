"""The assignor ``simple``: balanced, shared and sticky assignments."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from fencepost.groups.assignors.simple import assign
from tests.support.quick import seeds

T, U = b"T" * 16, b"U" * 16


def places(topic_id: bytes, count: int) -> list[tuple[bytes, int]]:
    return [(topic_id, index) for index in range(count)]


@pytest.mark.parametrize(("members", "partitions"), [(1, 1), (3, 7), (7, 3), (4, 4), (10, 4)])
def test_partitions_are_assigned_evenly_and_shared_by_excess_members(
    members: int, partitions: int
) -> None:
    topic_ids = {f"m{index:02}": frozenset({T}) for index in range(members)}
    found = assign(topic_ids, places(T, partitions), {})
    sizes = [len(mine) for mine in found.values()]
    shared = Counter(place for mine in found.values() for place in mine)
    sharing = -(-members // partitions)
    assert max(sizes) - min(sizes) <= 1
    assert set(shared) == set(places(T, partitions)), "every partition has a member"
    assert max(shared.values()) <= sharing
    assert min(sizes) >= 1, "every member has a partition"


def test_members_keep_their_partitions_where_balance_allows() -> None:
    members = {"a": frozenset({T}), "b": frozenset({T})}
    former = assign(members, places(T, 6), {})
    three = {**members, "c": frozenset({T})}
    found = assign(three, places(T, 6), former)
    assert {name: len(mine) for name, mine in found.items()} == {"a": 2, "b": 2, "c": 2}
    assert found["a"] < former["a"]
    assert found["b"] < former["b"]
    assert assign(three, places(T, 6), found) == found, "nothing moves without a reason"


def test_different_subscriptions_are_balanced_topic_by_topic() -> None:
    topic_ids = {"a": frozenset({T}), "b": frozenset({U}), "c": frozenset({T, U})}
    found = assign(topic_ids, places(T, 4) + places(U, 4), {})
    of_topic = {name: Counter(place[0] for place in mine) for name, mine in found.items()}
    assert of_topic == {"a": {T: 2}, "b": {U: 2}, "c": {T: 2, U: 2}}


def test_member_without_subscription_or_partitions_gets_an_empty_assignment() -> None:
    assert assign({"a": frozenset()}, places(T, 2), {}) == {"a": frozenset()}
    assert assign({"a": frozenset({T})}, [], {"a": frozenset({(T, 0)})}) == {"a": frozenset()}


@pytest.mark.parametrize("seed", seeds(30))
def test_random_changes_keep_the_assignment_complete_and_balanced(seed: int) -> None:
    rng = random.Random(seed)
    held: dict[str, frozenset[tuple[bytes, int]]] = {}
    for _ in range(20):
        count = rng.randint(1, 12)
        names = rng.sample([f"m{index:02}" for index in range(15)], rng.randint(1, 15))
        topics = [frozenset({T}), frozenset({U}), frozenset({T, U})]
        is_same = rng.random() < 0.5
        topic_ids = {name: topics[2] if is_same else rng.choice(topics) for name in names}
        free = places(T, count) + places(U, 3)
        found = assign(topic_ids, free, held)
        assert found.keys() == topic_ids.keys()
        for name, mine in found.items():
            assert {topic_id for topic_id, _ in mine} <= topic_ids[name]
        wanted = {
            place for place in free if any(place[0] in topic_id for topic_id in topic_ids.values())
        }
        assert set().union(*found.values()) == wanted, "every subscribed partition has a member"
        if is_same:
            sizes = [len(mine) for mine in found.values()]
            assert max(sizes) - min(sizes) <= 1
        held = found
