"""Creation, growth and deletion of topics, and the placement of their replicas."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from fencepost.cluster.controller.errors import (
    InvalidConfigError,
    InvalidPartitionsError,
    InvalidReplicaAssignmentError,
    InvalidReplicationFactorError,
    InvalidRequestError,
    InvalidTopicError,
    PolicyViolationError,
    TopicAlreadyExistsError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from fencepost.cluster.controller.placement import place
from fencepost.cluster.controller.topics import CreatedTopic, NewTopic
from fencepost.cluster.record_codec import encode
from fencepost.cluster.records import ConfigRecord, PartitionRecord, RemoveTopicRecord, TopicRecord
from fencepost.cluster.topic_names import MAX_NAME_CHARACTERS
from fencepost.cluster.topic_records import TopicRecords, encode_all, without_partition_records
from fencepost.logcore.machine import DomainError
from fencepost.logcore.steps import finish
from tests.support.quick import seeds
from tests.unit.cluster.controller.cluster_driver import SETTINGS, Cluster, any_config, directory

TOPIC_ID = UUID(int=1 << 90)


def create(cluster: Cluster, topic: NewTopic, **how: Any) -> CreatedTopic:
    arguments = {
        "topic_id": TOPIC_ID,
        "draw": random.Random(1),
        "check_configs": any_config,
        **how,
    }
    return cluster.do(cluster.controller.create_topic(topic, **arguments))


def test_create_topic_writes_topic_config_and_partition_records() -> None:
    cluster = Cluster()
    end = cluster.end
    made = create(cluster, NewTopic("foo", 2, 2, configs={"retention.ms": "5"}))
    assert made == CreatedTopic("foo", TOPIC_ID, 2, 2)
    topic, config, *partitions = cluster.log[end:]
    assert topic == TopicRecord("foo", TOPIC_ID)
    assert config == ConfigRecord(2, "foo", "retention.ms", "5")
    assert [type(partition) for partition in partitions] == [PartitionRecord] * 2
    for state in cluster.image.topics["foo"].partitions:
        assert state.isr == state.replicas
        assert state.leader == state.replicas[0]
        assert (state.leader_epoch, state.partition_epoch) == (0, 0)
        assert state.directories == tuple(directory(replica) for replica in state.replicas)


@pytest.mark.parametrize("assignment", [(), [(1, [0, 2]), (0, [2, 1])]])
def test_prepared_topic_equals_topic_created_in_one_step(
    assignment: Sequence[tuple[int, Sequence[int]]],
) -> None:
    cluster, other = Cluster(), Cluster()
    wanted = NewTopic("foo", assignment=assignment) if assignment else NewTopic("foo", 7, 2)
    controller = cluster.controller
    prepared = finish(controller.prepare_topic(wanted, topic_id=TOPIC_ID, draw=random.Random(1)))
    assert prepared is not None
    assert create(cluster, wanted, prepared=prepared, draw=None) == create(other, wanted)
    assert cluster.image.topics == other.image.topics
    added = finish(controller.prepare_partitions("foo", 9, assignments=None, draw=random.Random(1)))
    for each, given in ((cluster, added), (other, None)):
        each.do(
            each.controller.create_partitions(
                "foo", 9, assignments=None, draw=random.Random(1), prepared=given
            )
        )
    assert cluster.image.topics == other.image.topics
    assert len(cluster.image.topics["foo"].partitions) == 9


def test_prepared_partitions_are_placed_again_after_broker_or_topic_change() -> None:
    cluster = Cluster()
    controller, draw = cluster.controller, random.Random(1)
    wanted = NewTopic("foo", 7, 3)
    prepared = finish(controller.prepare_topic(wanted, topic_id=TOPIC_ID, draw=draw))
    cluster.fence(1)
    create(cluster, wanted, prepared=prepared)
    assert all(1 not in state.isr for state in cluster.image.topics["foo"].partitions)
    added = finish(controller.prepare_partitions("foo", 9, assignments=None, draw=draw))
    for count in (8, 9):
        cluster.do(
            controller.create_partitions("foo", count, assignments=None, draw=draw, prepared=added)
        )
        assert len(cluster.image.topics["foo"].partitions) == count


def test_partitions_that_cannot_be_placed_are_not_prepared() -> None:
    controller, draw = Cluster().controller, random.Random(1)
    for topic in (NewTopic("foo", 1, 4), NewTopic("foo", 0, 1), NewTopic("foo", 10_001, 1)):
        assert finish(controller.prepare_topic(topic, topic_id=TOPIC_ID, draw=draw)) is None
    for count in (0, 9):
        assert (
            finish(controller.prepare_partitions("no", count, assignments=None, draw=draw)) is None
        )


def test_create_topic_uses_default_partitions_and_replication_factor() -> None:
    cluster = Cluster(settings=replace(SETTINGS, num_partitions=3, default_replication_factor=2))
    made = create(cluster, NewTopic("foo"))
    assert (made.partitions, made.replication_factor) == (3, 2)


def test_created_partition_has_fenced_replica_outside_of_isr() -> None:
    """A fenced broker gets a replica that is not in the ISR."""
    cluster = Cluster()
    cluster.fence(1)
    cluster.create("foo", [1, 0, 2])
    state = cluster.partition("foo")
    assert (state.replicas, state.isr, state.leader) == ((1, 0, 2), (0, 2), 0)


NAME = "a" * MAX_NAME_CHARACTERS


@pytest.mark.parametrize(
    ("topic", "error", "words"),
    [
        (NewTopic(""), InvalidTopicError, "empty"),
        (NewTopic(".."), InvalidTopicError, "letters"),
        (NewTopic("a b"), InvalidTopicError, "letters"),
        (NewTopic(NAME), None, ""),
        (NewTopic(NAME + "a"), InvalidTopicError, "longer"),
        (NewTopic("known.topic"), TopicAlreadyExistsError, "already exists"),
        (NewTopic("known_topic"), InvalidTopicError, "collides with existing topic: known.topic"),
        (NewTopic("a", configs={"x": None}), InvalidConfigError, "Null value"),
        (NewTopic("a", 0), InvalidPartitionsError, "non-positive"),
        (NewTopic("a", -2), InvalidPartitionsError, "non-positive"),
        (NewTopic("a", 10), None, ""),
        (NewTopic("a", 11), PolicyViolationError, "Excessively large"),
        (NewTopic("a", 1, 0), InvalidReplicationFactorError, "larger than 0"),
        (NewTopic("a", 1, 3), None, ""),
        (NewTopic("a", 1, 4), InvalidReplicationFactorError,
         "time(s): The target replication factor of 4 cannot be reached because only 3 broker(s)"),
        (NewTopic("a", 1, -1, [(0, [0])]), InvalidRequestError, "numPartitions"),
        (NewTopic("a", -1, 1, [(0, [0])]), InvalidRequestError, "replication factor"),
        (NewTopic("a", assignment=[(0, [0]), (0, [1])]), InvalidReplicaAssignmentError, "multiple"),
        (NewTopic("a", assignment=[(1, [0]), (0, [1])]), None, ""),
        (NewTopic("a", assignment=[(0, [0]), (2, [1])]), InvalidReplicaAssignmentError,
         "consecutive"),
        (NewTopic("a", assignment=[(0, [])]), InvalidReplicaAssignmentError, "empty replica list"),
        (NewTopic("a", assignment=[(0, [0, 3])]), InvalidReplicaAssignmentError, "broker 3, but"),
        (NewTopic("a", assignment=[(0, [1, 1])]), InvalidReplicaAssignmentError, "more than once"),
        (NewTopic("a", assignment=[(0, [0]), (1, [0, 1])]), InvalidReplicaAssignmentError,
         "not consistent"),
        (NewTopic("a", assignment=[(0, [2])]), InvalidReplicaAssignmentError, "are fenced or"),
        (NewTopic("a", assignment=[(index, [0]) for index in range(11)]), PolicyViolationError, ""),
    ],
)  # fmt: skip
def test_create_topic_with_invalid_fields_is_refused(
    topic: NewTopic, error: type[DomainError] | None, words: str
) -> None:
    cluster = Cluster(settings=replace(SETTINGS, max_partitions_per_request=10))
    cluster.create("known.topic", [0])
    cluster.fence(2)
    end = cluster.end
    if error is None:
        create(cluster, topic)
        return
    with pytest.raises(error) as caught:
        create(cluster, topic)
    assert words in str(caught.value)
    assert cluster.end == end


def test_create_topic_validates_configs_and_takes_from_the_quota() -> None:
    cluster = Cluster()

    def refuses(_kind: int, name: str, after: Mapping[str, str], _old: Mapping[str, str]) -> None:
        assert (name, after) == ("foo", {"x": "y"})
        raise InvalidConfigError("no")

    with pytest.raises(InvalidConfigError):
        create(cluster, NewTopic("foo", configs={"x": "y"}), check_configs=refuses)
    taken: list[int] = []
    create(cluster, NewTopic("foo", 7), charge=taken.append)
    assert taken == [7]


def test_create_topic_with_all_brokers_fenced_or_in_shutdown_is_refused() -> None:
    cluster = Cluster([0, 1])
    cluster.create("a", [0], [1])
    cluster.fence(0)
    cluster.beat(1, want_shut_down=True)
    with pytest.raises(InvalidReplicationFactorError, match="All brokers are currently fenced"):
        create(cluster, NewTopic("foo"))


# --- growing and deleting ---


def grow(
    cluster: Cluster, name: str, count: int, assignments: Sequence[Sequence[int]] | None = None
) -> int:
    return cluster.do(
        cluster.controller.create_partitions(
            name, count, assignments=assignments, draw=random.Random(1)
        )
    )


def test_create_partitions_adds_placed_or_assigned_partitions() -> None:
    cluster = Cluster()
    cluster.create("foo", [0, 1])
    assert grow(cluster, "foo", 3) == 2
    assert grow(cluster, "foo", 4, [[2, 0]]) == 1
    states = cluster.image.topics["foo"].partitions
    assert [len(state.replicas) for state in states] == [2] * 4
    assert states[3].replicas == (2, 0)


@pytest.mark.parametrize(
    ("name", "count", "assignments", "error"),
    [
        ("bar", 3, None, UnknownTopicOrPartitionError),
        ("foo", 2, None, InvalidPartitionsError),
        ("foo", 1, None, InvalidPartitionsError),
        ("foo", 4, [[0, 1]], InvalidReplicaAssignmentError),
        ("foo", 3, [[0]], InvalidReplicaAssignmentError),
        ("foo", 3, [[2, 3]], InvalidReplicaAssignmentError),
        ("foo", 2 + 10_001, None, PolicyViolationError),
    ],
)
def test_create_partitions_with_invalid_fields_is_refused(
    name: str, count: int, assignments: list[list[int]] | None, error: type[DomainError]
) -> None:
    cluster = Cluster(range(4))
    cluster.create("foo", [0, 1], [1, 0])
    cluster.fence(2, 3)
    with pytest.raises(error):
        grow(cluster, name, count, assignments)


def test_added_partition_has_fenced_replica_outside_of_isr() -> None:
    cluster = Cluster()
    cluster.create("foo", [0, 1])
    cluster.fence(1)
    grow(cluster, "foo", 3, [[1, 0], [2, 1]])
    assert [partition.isr for partition in cluster.image.topics["foo"].partitions] == [
        (0,),
        (0,),
        (2,),
    ]


def test_delete_topic_removes_its_partitions_and_configs() -> None:
    cluster = Cluster()
    topic_id = cluster.create("foo", [0, 1], [1, 0], retention_ms="1")
    taken: list[int] = []
    cluster.do(cluster.controller.delete_topic(topic_id, taken.append))
    assert taken == [2]
    assert cluster.log[-1] == RemoveTopicRecord(topic_id)
    assert cluster.image.topics == {}
    assert (2, "foo") not in cluster.image.configs
    with pytest.raises(UnknownTopicIdError):
        cluster.controller.delete_topic(topic_id)


# --- placement ---


def placed(cluster: Cluster, partitions: int, factor: int, seed: int) -> list[tuple[int, ...]]:
    return [*finish(place(cluster.controller.view, partitions, factor, random.Random(seed)))]


@pytest.mark.parametrize("seed", seeds(20))
def test_placement_distributes_leaders_evenly(seed: int) -> None:
    cluster = Cluster(range(6))
    replicas = placed(cluster, 60, 3, seed)
    assert all(len(set(assigned)) == 3 for assigned in replicas)
    assert set(Counter(assigned[0] for assigned in replicas).values()) == {10}
    assert len({frozenset(assigned) for assigned in replicas}) > 6


@pytest.mark.parametrize("seed", seeds(20))
def test_placement_spreads_replicas_over_racks(seed: int) -> None:
    racks = {0: "a", 1: "a", 2: "b", 3: "b", 4: "c", 5: "c"}
    cluster = Cluster(range(6), racks=racks)
    for replicas in placed(cluster, 30, 3, seed):
        assert {racks[replica] for replica in replicas} == {"a", "b", "c"}
    assert all(sorted(assigned) == list(range(6)) for assigned in placed(cluster, 5, 6, seed))


@pytest.mark.parametrize("seed", seeds(20))
def test_placement_puts_fenced_brokers_last_and_never_as_leader(seed: int) -> None:
    cluster = Cluster(range(5))
    cluster.fence(3, 4)
    for replicas in placed(cluster, 30, 3, seed):
        assert set(replicas) == {0, 1, 2}
    for replicas in placed(cluster, 30, 5, seed):
        assert replicas[0] < 3
        assert set(replicas) == set(range(5))


def test_placement_avoids_brokers_in_shutdown_or_with_cordoned_dirs() -> None:
    cluster = Cluster(range(4))
    cluster.create("a", [0], [1], [2])
    cluster.beat(0, want_shut_down=True)
    cluster.beat(1, cordoned_log_dirs=(directory(1),))
    assert {replica for replicas in placed(cluster, 10, 2, 3) for replica in replicas} == {2, 3}
    with pytest.raises(InvalidReplicationFactorError, match="only 2 broker"):
        placed(cluster, 1, 3, 3)


def test_placement_is_the_same_for_the_same_seed() -> None:
    cluster = Cluster(range(5))
    assert placed(cluster, 20, 3, 8) == placed(cluster, 20, 3, 8)


# --- limits, internal topics, forms ---


def test_topics_and_partitions_above_the_cluster_limits_are_refused() -> None:
    cluster = Cluster(settings=replace(SETTINGS, max_topics=2, max_partitions=5))
    create(cluster, NewTopic("a", 2, 1))
    taken: list[int] = []
    with pytest.raises(PolicyViolationError, match=r"6 .* fencepost\.max\.partitions=5"):
        create(cluster, NewTopic("b", 4, 1), topic_id=UUID(int=9), charge=taken.append)
    create(cluster, NewTopic("b", 1, 1), topic_id=UUID(int=9), charge=taken.append)
    with pytest.raises(PolicyViolationError, match=r"3 .* fencepost\.max\.topics=2"):
        create(cluster, NewTopic("c", 1, 1), topic_id=UUID(int=10), validate_only=True)
    grow = {"assignments": None, "draw": random.Random(1), "charge": taken.append}
    with pytest.raises(PolicyViolationError, match=r"fencepost\.max\.partitions=5"):
        cluster.controller.create_partitions("b", 4, **grow)
    cluster.do(cluster.controller.create_partitions("b", 3, **grow))
    assert taken == [1, 2], "what does not fit counts against no quota"


def test_validate_only_takes_from_the_quota_and_writes_nothing() -> None:
    cluster, taken = Cluster(), []
    create(cluster, NewTopic("a", 1, 1))
    how = {"draw": random.Random(1), "charge": taken.append, "validate_only": True}
    created = cluster.controller.create_topic(
        NewTopic("b", 3, 2), topic_id=TOPIC_ID, check_configs=any_config, **how
    )
    assert (created.answer.partitions, created.answer.replication_factor) == (3, 2)
    grown = cluster.controller.create_partitions("a", 5, assignments=None, **how)
    assert (grown.answer, created.records, grown.records, taken) == (4, (), (), [3, 4])


INTERNAL = replace(
    SETTINGS,
    internal_topics=frozenset({"state", "history"}),
    broker_topics=frozenset({"history"}),
    reserved_topics=frozenset({"reserved"}),
)


def test_internal_topics_cannot_be_deleted_and_state_topics_cannot_grow() -> None:
    cluster = Cluster(settings=INTERNAL)
    grow = {"assignments": None, "draw": random.Random(1)}
    for number, name in enumerate(("state", "history"), 1):
        create(cluster, NewTopic(name, 1, 1), topic_id=UUID(int=number))
        with pytest.raises(InvalidTopicError, match="holds the coordinators' state"):
            cluster.controller.delete_topic(UUID(int=number))
    with pytest.raises(InvalidTopicError, match="the number of partitions of state is fixed"):
        cluster.controller.create_partitions("state", 2, **grow)
    cluster.do(cluster.controller.create_partitions("history", 2, **grow))
    with pytest.raises(InvalidTopicError, match="reserved is the broker's own"):
        create(cluster, NewTopic("reserved", 1, 1))
    cluster.do(cluster.controller.delete_topic(UUID(int=1), allows_internal=True))
    assert set(cluster.image.topics) == {"history"}


def test_internal_topic_is_created_once_with_any_configs() -> None:
    cluster = Cluster([0], settings=replace(INTERNAL, max_topics=1))
    wanted = NewTopic("reserved", 2, 1, configs={"x": "any"})
    how = {"topic_id": TOPIC_ID, "draw": random.Random(1)}
    created = cluster.do(cluster.controller.create_internal_topic(wanted, **how))
    assert created == CreatedTopic("reserved", TOPIC_ID, 2, 1)
    assert cluster.image.topic_configs("reserved") == {"x": "any"}
    again = cluster.controller.create_internal_topic(wanted, **how)
    assert (again.answer, again.records) == (None, ())
    with pytest.raises(PolicyViolationError, match=r"fencepost\.max\.topics=1"):
        cluster.controller.create_internal_topic(replace(wanted, name="state"), **how)


@pytest.mark.parametrize("factor", [1, 2, 3])
def test_bulk_encoding_of_new_partitions_equals_encoding_of_their_records(factor: int) -> None:
    cluster = Cluster()
    topic = NewTopic("foo", 11, factor, configs={"retention.ms": "5"})
    created = cluster.controller.create_topic(
        topic, topic_id=TOPIC_ID, draw=random.Random(1), check_configs=any_config
    )
    cluster.do(created)
    grown = cluster.controller.create_partitions("foo", 16, assignments=None, draw=random.Random(2))
    numbers = []
    for outcome in (created, grown):
        assert isinstance(outcome.records, TopicRecords)
        assert encode_all(outcome.records) == [*map(encode, outcome.records)]
        assert [outcome.records[at] for at in range(len(outcome.records))] == [*outcome.records]
        assert outcome.records[-1] == outcome.records[-2:][1]
        numbers += [
            record.partition_id for record in outcome.records if isinstance(record, PartitionRecord)
        ]
    assert numbers == [*range(16)]
    assert [type(record) for record in without_partition_records(created.records)] == [
        TopicRecord,
        ConfigRecord,
    ]
