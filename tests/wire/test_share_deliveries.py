"""Deliveries to share groups as in Apache Kafka's ShareConsumerTest, by raw requests.

That class is not in the published jars of Apache Kafka's tests. The following list has its methods
that test the broker, each with our scenarios for it. "Sessions" and "groups" stand for
``test_share_sessions.py`` and ``test_share_groups.py``; scenarios without a file are in this
module:

* MultipleConsumersInGroup*, ConsumerCloseInGroup*, MultipleConsumersInGroupFailure*: sessions
  ``test_two_members_share_a_partition``, ``test_final_epoch_releases_the_records_…``,
  ``test_closed_connection_releases_its_acquired_records``; many members: ``tests/lives/``
* MultipleConsumersWithDifferentGroupIds, …InMultipleGroups…:
  ``test_share_groups_of_one_topic_are_independent``
* ExplicitAcknowledge*, ImplicitAcknowledge*, …CommitAsync*: sessions
  ``test_records_are_acquired_and_accepted``, ``test_released_records_are_delivered_again``,
  ``test_impossible_acknowledgements_are_refused``,
  ``test_renew_acknowledgement_is_accepted_only_without_fetching``; groups
  ``test_librdkafka_gets_each_record_once_and_a_released_one_again``
* AcknowledgementSentOnSubscriptionChange:
  ``test_acknowledgement_of_a_forgotten_partition_is_applied``
* AcquisitionLockTimeoutOnConsumer, …CallbackInvalidRecordStateException:
  ``test_expired_acquisition_lock_redelivers_the_record``
* PollRecordsGreaterThanMaxBytes, FetchRecordLargerThan…: sessions
  ``test_bytes_are_split_between_partitions``
* MaxPollRecords, PollInBatchOptimizedMode, PollInRecordLimitMode: sessions
  ``test_batch_optimized_fetch_acquires_whole_batches``,
  ``test_record_limit_mode_acquires_exactly_max_records``
* …InRecordLimitMode: ``test_released_and_new_records_share_a_record_limit``
* ControlRecordsSkipped, ReadUncommittedIsolationLevel:
  ``test_read_uncommitted_delivers_aborted_records``
* ReadCommittedIsolationLevel: sessions ``test_read_committed_leaves_out_aborted_records``
* Alter…IsolationLevel*: ``test_changed_isolation_level_applies_to_released_records``
* ShareAutoOffsetReset*, SubscriptionAndPoll*: ``test_share_group_starts_at_its_reset_policy``;
  …InvalidFormat: ``tests/oracle/test_group_settings.py``
* LsoMovementByRecordsDeletion: sessions ``test_deleted_records_are_not_acquired``
* SubscriptionFollowedByTopicCreation: ``test_topic_is_assigned_once_it_is_created``
* SubscriptionAndPollFollowedByTopicDeletion:
  ``test_deleted_topic_does_not_stop_deliveries_of_another``
* DeliveryCount*, BehaviorOnDeliveryCountBoundary:
  ``test_closed_session_keeps_the_delivery_counts``,
  ``test_record_is_archived_at_the_delivery_limit``
* ShareGroupMaxSizeConfigExceeded: ``tests/unit/coordinator/services/test_share_groups.py``;
  ShareGroupShareSessionCacheIsFull: ``tests/unit/coordinator/handlers/test_share_fetch.py``
* ShareConsumerAfterCoordinatorMovement, ComplexShareConsumer: three brokers in
  ``tests/unit/testing/test_share_cluster.py``, ``tests/oracle/test_mixed_share_groups.py``

The other methods only test Java's client: refused calls, callbacks, interrupts, deserializers,
headers.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

import pytest

from tests.support.batches import batch
from tests.support.cluster import GROUP, Cluster, unique
from tests.support.share import (
    ACCEPT,
    FINAL,
    RELEASE,
    Member,
    acquired,
    configure,
    initialize,
    parts_of,
)
from tests.support.waits import until
from tests.wire.test_share_groups import assigned, beat
from tests.wire.test_share_sessions import transaction

RECORD_LIMIT = 1
HOUR_MS = 3_600_000
UNKNOWN = -1
"""The start offset of a state if the reset policy determines where reading begins."""


@pytest.fixture
def client(bootstrap: str) -> Iterator[Cluster]:
    with Cluster(bootstrap) as connected:
        connected.coordinator(unique("g"), GROUP)
        yield connected


@pytest.fixture
def topic(client: Cluster) -> str:
    return client.create_topic(unique("t"))


@pytest.fixture
def topic_id(client: Cluster, topic: str) -> uuid.UUID:
    return client.topic_id(topic)


@pytest.fixture
def group(client: Cluster, topic_id: uuid.UUID) -> str:
    name = unique("g")
    initialize(client, name, topic_id)
    return name


def offsets(member: Member, topic_id: uuid.UUID, **fields: int) -> list[tuple[int, int]]:
    """Fetch, and return each acquired offset of partition 0 with its delivery count."""
    topics = {} if member.epoch else {topic_id: {0: []}}
    part = parts_of(member.fetch(topics, **fields)).get(0)
    if part is None:
        return []
    assert part["error_code"] == "none"
    return [
        (offset, count)
        for first, last, count in acquired(part)
        for offset in range(first, last + 1)
    ]


def acknowledge(member: Member, topic_id: uuid.UUID, kind: int, *ranges: tuple[int, int]) -> None:
    answer = member.acknowledge({topic_id: {0: [(*span, kind) for span in ranges]}})
    assert parts_of(answer)[0]["error_code"] == "none"


@pytest.mark.parametrize(
    ("policy", "first"),
    [
        ("", 3),
        ("latest", 3),
        ("earliest", 0),
        ("by_duration:PT1H", 1),
        ("by_duration:PT3H", 0),
    ],
    ids=["default", "latest", "earliest", "one-hour", "three-hours"],
)
def test_share_group_starts_at_its_reset_policy(
    client: Cluster, topic: str, topic_id: uuid.UUID, policy: str, first: int
) -> None:
    group, now_ms = unique("g"), time.time_ns() // 1_000_000
    for age_ms in (2 * HOUR_MS, HOUR_MS // 2, 0):
        client.produce(topic, batch([b"x"], timestamp_ms=now_ms - age_ms))
    if policy:
        configure(client, group, share_auto_offset_reset=policy)
    initialize(client, group, topic_id, start_offset=UNKNOWN)
    member = Member(client, group)
    found = offsets(member, topic_id, max_wait=1_000) + offsets(member, topic_id, max_wait=500)
    client.produce(topic, batch([b"new"], timestamp_ms=now_ms))
    found += offsets(member, topic_id)
    assert found == [(offset, 1) for offset in range(first, 4)]


def test_reset_policy_earliest_starts_at_the_log_start_offset(
    client: Cluster, topic: str, topic_id: uuid.UUID
) -> None:
    group = unique("g")
    for _ in range(4):
        client.produce(topic, [b"x"])
    topics = [{"name": topic, "partitions": [{"partition_index": 0, "offset": 2}]}]
    client.call("delete_records", 2, topics=topics, timeout=10_000)
    configure(client, group, share_auto_offset_reset="earliest")
    initialize(client, group, topic_id, start_offset=UNKNOWN)
    assert offsets(Member(client, group), topic_id) == [(2, 1), (3, 1)]


def test_share_groups_of_one_topic_are_independent(
    client: Cluster, topic: str, topic_id: uuid.UUID, group: str
) -> None:
    other = unique("g")
    initialize(client, other, topic_id)
    client.produce(topic, [b"a", b"b", b"c"])
    for name in (group, other):
        member = Member(client, name)
        assert offsets(member, topic_id) == [(0, 1), (1, 1), (2, 1)]
        acknowledge(member, topic_id, ACCEPT, (0, 2))


def test_released_and_new_records_share_a_record_limit(
    client: Cluster, topic: str, topic_id: uuid.UUID, group: str
) -> None:
    client.produce(topic, [b"x"] * 20)
    member = Member(client, group)

    def taken(count: int) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        while len(found) < count:
            most = count - len(found)
            some = offsets(member, topic_id, max_records=most, share_acquire_mode=RECORD_LIMIT)
            assert 0 < len(some) <= most
            found += some
        return found

    assert taken(10) == [(offset, 1) for offset in range(10)]
    for offset in range(10):
        acknowledge(member, topic_id, RELEASE if offset % 2 else ACCEPT, (offset, offset))
    released = [(offset, 2) for offset in range(1, 10, 2)]
    assert taken(10) == [*released, *((offset, 1) for offset in range(10, 15))]
    acknowledge(member, topic_id, ACCEPT, *((offset, offset) for offset, _ in released), (10, 14))
    assert taken(5) == [(offset, 1) for offset in range(15, 20)]


def test_closed_session_keeps_the_delivery_counts(
    client: Cluster, topic: str, topic_id: uuid.UUID, group: str
) -> None:
    for _ in range(2):
        client.produce(topic, [b"x"])
    member = Member(client, group)
    assert offsets(member, topic_id) == [(0, 1), (1, 1)]
    acknowledge(member, topic_id, RELEASE, (0, 0))
    member.epoch = FINAL
    assert member.acknowledge({})["error_code"] == "none"
    follower, again = Member(client, group), list[tuple[int, int]]()

    def is_delivered() -> bool:
        again.extend(offsets(follower, topic_id, max_wait=500))
        return len(again) >= 2

    until(is_delivered, "both records")
    assert again == [(0, 2), (1, 2)]


def test_record_is_archived_at_the_delivery_limit(
    client: Cluster, topic: str, topic_id: uuid.UUID, group: str
) -> None:
    configure(client, group, share_delivery_count_limit="2")
    client.produce(topic, [b"x"])
    member = Member(client, group)
    for count in (1, 2):
        assert offsets(member, topic_id) == [(0, count)]
        acknowledge(member, topic_id, RELEASE, (0, 0))
    client.produce(topic, [b"y"])
    assert offsets(member, topic_id) == [(1, 1)]
    assert offsets(member, topic_id, max_wait=0) == []


def test_read_uncommitted_delivers_aborted_records(
    client: Cluster, topic: str, topic_id: uuid.UUID, group: str
) -> None:
    """The markers are acquired as well; clients report them as gaps."""
    for committed in (True, False):
        transaction(client, unique("tx"), topic, 2, committed=committed)
    assert offsets(Member(client, group), topic_id) == [(offset, 1) for offset in range(6)]


@pytest.mark.parametrize("becomes", ["read_committed", "read_uncommitted"])
def test_changed_isolation_level_applies_to_released_records(
    client: Cluster, topic: str, topic_id: uuid.UUID, group: str, becomes: str
) -> None:
    """Offsets 0 and 4 are committed records, 2 and 6 aborted records, and the others markers."""
    records, aborted = {0, 2, 4, 6}, {2, 6}
    levels = {"read_committed": records - aborted, "read_uncommitted": records}
    (before,) = levels.keys() - {becomes}
    configure(client, group, share_isolation_level=before)
    member = Member(client, group)
    for committed in (True, False):
        transaction(client, unique("tx"), topic, 1, committed=committed)
    found = {offset for offset, _ in offsets(member, topic_id)}
    assert found & records == levels[before] & {0, 2}
    acknowledge(member, topic_id, RELEASE, *((offset, offset) for offset in sorted(found)))
    configure(client, group, share_isolation_level=becomes)
    for committed in (True, False):
        transaction(client, unique("tx"), topic, 1, committed=committed)

    # An aborted record that was left out is never delivered.
    wanted = levels[becomes] - (aborted & {2})
    again: set[int] = set()

    def is_delivered() -> bool:
        again.update(offset for offset, _ in offsets(member, topic_id, max_wait=500))
        return again >= wanted

    until(is_delivered, f"the records under {becomes}")
    assert offsets(member, topic_id, max_wait=0) == []
    assert again & records == wanted


def test_acknowledgement_of_a_forgotten_partition_is_applied(
    client: Cluster, topic: str, topic_id: uuid.UUID, group: str
) -> None:
    client.produce(topic, [b"x"])
    member = Member(client, group)
    assert offsets(member, topic_id) == [(0, 1)]
    answer = member.fetch({topic_id: {0: [(0, 0, ACCEPT)]}}, forget={topic_id: [0]}, max_wait=0)
    (part,) = parts_of(answer).values()
    assert (part["error_code"], part["acknowledge_error_code"]) == ("none", 0)
    assert offsets(Member(client, group), topic_id, max_wait=1_000) == []


def test_topic_is_assigned_once_it_is_created(client: Cluster) -> None:
    group, member, topic = unique("g"), str(uuid.uuid4()), unique("later")
    configure(client, group, share_auto_offset_reset="earliest")
    answer = beat(client, group, member, 0, topic)
    assert answer["error_code"] == "none"
    assert not answer["assignment"]["topic_partitions"]
    topic_id = client.topic_id(client.create_topic(topic))
    client.produce(topic, [b"x"])
    _, rows = assigned(client, group, member, topic)
    assert [(row["topic_id"], list(row["partitions"])) for row in rows] == [(str(topic_id), [0])]
    assert offsets(Member(client, group, member), topic_id) == [(0, 1)]


def test_deleted_topic_does_not_stop_deliveries_of_another(
    client: Cluster, topic: str, topic_id: uuid.UUID, group: str
) -> None:
    doomed = client.create_topic(unique("doomed"))
    doomed_id = client.topic_id(doomed)
    initialize(client, group, doomed_id)
    member = Member(client, group)
    member.fetch({topic_id: {0: []}, doomed_id: {0: []}}, max_wait=500)
    client.call("delete_topics", 5, topic_names=[doomed], timeout=10_000)
    client.produce(topic, [b"x"])

    def received() -> list[tuple[int, int, int]]:
        topics = member.fetch({}, max_wait=500)["responses"]
        return [
            row
            for owned in topics
            if owned["topic_id"] == str(topic_id)
            for part in owned["partitions"]
            for row in acquired(part)
        ]

    assert until(received, "the record of the other topic") == [(0, 0, 1)]


@pytest.mark.slow
def test_expired_acquisition_lock_redelivers_the_record(
    client: Cluster, topic: str, topic_id: uuid.UUID, group: str
) -> None:
    configure(client, group, share_record_lock_duration_ms="15000")
    client.produce(topic, [b"x"])
    first, second = Member(client, group), Member(client, group)
    assert offsets(first, topic_id) == [(0, 1)]
    again = until(lambda: offsets(second, topic_id), "the record is delivered again", deadline_s=40)
    assert again == [(0, 2)]
    answer = first.acknowledge({topic_id: {0: [(0, 0, ACCEPT)]}})
    assert parts_of(answer)[0]["error_code"] == "invalid_record_state"
    acknowledge(second, topic_id, ACCEPT, (0, 0))
