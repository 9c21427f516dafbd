"""ShareFetch and ShareAcknowledge by raw requests, on either broker."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests.support.batches import batch
from tests.support.cluster import Cluster, unique
from tests.support.share import (
    ACCEPT,
    FINAL,
    GAP,
    REJECT,
    RELEASE,
    RENEW,
    WAIT_MS,
    Member,
    acquired,
    configure,
    initialize,
    parts_of,
    values,
)
from tests.support.waits import until


@pytest.fixture
def client(bootstrap: str) -> Iterator[Cluster]:
    with Cluster(bootstrap) as connected:
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


def test_records_are_acquired_and_accepted(
    client: Cluster, topic: str, topic_id: uuid.UUID, group: str
) -> None:
    client.produce(topic, [b"a", b"b", b"c"])
    member = Member(client, group)
    answer = member.fetch({topic_id: {0: []}})
    assert answer["error_code"] == "none"
    assert answer["acquisition_lock_timeout"] == 30_000
    (part,) = parts_of(answer).values()
    assert values(part) == [b"a", b"b", b"c"]
    assert acquired(part) == [(0, 2, 1)]
    answer = member.acknowledge({topic_id: {0: [(0, 2, ACCEPT)]}})
    assert parts_of(answer)[0]["error_code"] == "none"
    assert parts_of(member.fetch({}, max_wait=0)) == {}


def test_released_records_are_delivered_again(
    client: Cluster, topic: str, topic_id: uuid.UUID, group: str
) -> None:
    client.produce(topic, [b"a", b"b", b"c"])
    member = Member(client, group)
    member.fetch({topic_id: {0: []}})
    answer = member.fetch({topic_id: {0: [(0, 0, ACCEPT), (1, 1, RELEASE), (2, 2, REJECT)]}})
    part = parts_of(answer)[0]
    assert part["acknowledge_error_code"] == 0
    assert acquired(part) in ([], [(1, 1, 2)])
    if not acquired(part):
        part = parts_of(member.fetch({}))[0]
        assert acquired(part) == [(1, 1, 2)]
    # The response has the whole batch; the client drops records that it has not acquired.
    assert values(part) == [b"a", b"b", b"c"]


def test_batch_optimized_fetch_acquires_whole_batches(
    client: Cluster, topic: str, topic_id: uuid.UUID, group: str
) -> None:
    client.produce(topic, [b"x"] * 50)
    client.produce(topic, [b"y"] * 50)
    member = Member(client, group)
    part = parts_of(member.fetch({topic_id: {0: []}}, max_records=5))[0]
    assert acquired(part) == [(0, 49, 1)]
    assert values(part) == [b"x"] * 50


def test_record_limit_mode_acquires_exactly_max_records(
    client: Cluster, topic: str, topic_id: uuid.UUID, group: str
) -> None:
    client.produce(topic, [b"x"] * 50)
    member = Member(client, group)
    part = parts_of(member.fetch({topic_id: {0: []}}, max_records=5, share_acquire_mode=1))[0]
    assert acquired(part) == [(0, 4, 1)]
    part = parts_of(member.fetch({}, max_records=5, share_acquire_mode=1))[0]
    assert acquired(part) == [(5, 9, 1)]


def test_two_members_share_a_partition(
    client: Cluster, bootstrap: str, topic: str, topic_id: uuid.UUID, group: str
) -> None:
    client.produce(topic, [b"a"])
    first = Member(client, group)
    assert acquired(parts_of(first.fetch({topic_id: {0: []}}))[0]) == [(0, 0, 1)]
    client.produce(topic, [b"b"])
    with Cluster(bootstrap) as other:
        second = Member(other, group)
        assert acquired(parts_of(second.fetch({topic_id: {0: []}}))[0]) == [(1, 1, 1)]
        answer = second.acknowledge({topic_id: {0: [(0, 0, ACCEPT)]}})
        part = parts_of(answer)[0]
        assert part["error_code"] == "invalid_record_state"


def test_fetch_waits_for_records(
    client: Cluster, bootstrap: str, topic: str, topic_id: uuid.UUID, group: str
) -> None:
    member = Member(client, group)
    member.fetch({topic_id: {0: []}}, max_wait=500)
    member.send_fetch({}, max_wait=WAIT_MS)
    with Cluster(bootstrap) as other:
        other.produce(topic, [b"late"])
    assert values(parts_of(member.receive())[0]) == [b"late"]


def test_fetch_waits_for_released_records(
    client: Cluster, bootstrap: str, topic: str, topic_id: uuid.UUID, group: str
) -> None:
    client.produce(topic, [b"a"])
    first = Member(client, group)
    first.fetch({topic_id: {0: []}})
    with Cluster(bootstrap) as other:
        second = Member(other, group)
        second.fetch({topic_id: {0: []}}, max_wait=100)
        second.send_fetch({}, max_wait=WAIT_MS)
        first.acknowledge({topic_id: {0: [(0, 0, RELEASE)]}})
        assert acquired(parts_of(second.receive())[0]) == [(0, 0, 2)]


def test_fetch_without_records_ends_with_max_wait(
    client: Cluster, topic_id: uuid.UUID, group: str
) -> None:
    """As in Kafka, only the first response of a session contains partitions without records."""
    member = Member(client, group)
    (part,) = parts_of(member.fetch({topic_id: {0: []}}, max_wait=20)).values()
    assert (part["error_code"], part["records"], acquired(part)) == ("none", b"", [])
    answer = member.fetch({}, max_wait=20)
    assert (answer["error_code"], parts_of(answer)) == ("none", {})


def test_closed_connection_releases_its_acquired_records(
    client: Cluster, bootstrap: str, topic: str, topic_id: uuid.UUID, group: str
) -> None:
    client.produce(topic, [b"a"])
    with Cluster(bootstrap) as other:
        Member(other, group).fetch({topic_id: {0: []}})
        member = Member(client, group)
        assert acquired(parts_of(member.fetch({topic_id: {0: []}}, max_wait=100))[0]) == []
    assert acquired(parts_of(member.fetch({}, max_wait=WAIT_MS))[0]) == [(0, 0, 2)]


def test_final_epoch_releases_the_records_and_ends_the_session(
    client: Cluster, topic: str, topic_id: uuid.UUID, group: str
) -> None:
    client.produce(topic, [b"a"])
    member = Member(client, group)
    member.fetch({topic_id: {0: []}})
    member.epoch = FINAL
    assert member.fetch({})["error_code"] == "none"
    assert member.fetch({})["error_code"] == "share_session_not_found"
    again = Member(client, group)
    part = parts_of(again.fetch({topic_id: {0: []}}, max_wait=WAIT_MS))[0]
    assert acquired(part) == [(0, 0, 2)]


def test_invalid_share_session_epoch_is_refused(
    client: Cluster, topic_id: uuid.UUID, group: str
) -> None:
    member = Member(client, group)
    member.epoch = 1
    assert member.fetch({})["error_code"] == "share_session_not_found"
    member.epoch = 0
    asked = {topic_id: {0: [(0, 0, ACCEPT)]}}
    assert member.fetch(asked)["error_code"] == "invalid_request"
    assert member.acknowledge(asked)["error_code"] == "invalid_share_session_epoch"
    assert member.fetch({topic_id: {0: []}}, max_wait=0)["error_code"] == "none"
    member.epoch = 3
    assert member.fetch({})["error_code"] == "invalid_share_session_epoch"
    assert member.acknowledge({})["error_code"] == "invalid_share_session_epoch"


def test_invalid_group_or_member_id_is_refused(
    client: Cluster, topic_id: uuid.UUID, group: str
) -> None:
    asked = {topic_id: {0: []}}
    for fields in ({"group_id": None}, {"member_id": ""}, {"member_id": "x" * 37}):
        member = Member(client, group)
        assert member.fetch(asked, **fields)["error_code"] == "invalid_request"
        assert member.acknowledge(asked, **fields)["error_code"] == "invalid_request"


def test_end_of_an_error_that_opened_a_session_is_not_reported(
    client: Cluster, topic_id: uuid.UUID
) -> None:
    group = unique("g")
    member = Member(client, group)
    part = parts_of(member.fetch({topic_id: {0: []}}))[0]
    assert part["error_code"] == "unknown_server_error"
    initialize(client, group, topic_id)
    assert parts_of(member.fetch({}, max_wait=1_000)) == {}


def test_unknown_topic_id_and_partition_get_their_errors(
    client: Cluster, topic_id: uuid.UUID, group: str
) -> None:
    member = Member(client, group)
    unknown = uuid.uuid4()
    answer = member.fetch({unknown: {0: []}, topic_id: {7: []}})
    codes = {
        (uuid.UUID(str(topic["topic_id"])), part["partition_index"]): part["error_code"]
        for topic in answer["responses"]
        for part in topic["partitions"]
    }
    assert codes == {
        (unknown, 0): "unknown_topic_id",
        (topic_id, 7): "unknown_topic_or_partition",
    }


def test_uninitialized_group_is_an_unknown_server_error(
    client: Cluster, topic_id: uuid.UUID
) -> None:
    """As in Kafka, the state of a group cannot be read before a member has joined it."""
    answer = Member(client, unique("new")).fetch({topic_id: {0: []}}, max_wait=WAIT_MS)
    assert parts_of(answer)[0]["error_code"] == "unknown_server_error"


@pytest.mark.parametrize(
    "batches",
    [
        [(1, 0, ACCEPT)],
        [(0, 1)],
        [(0, 2, ACCEPT, ACCEPT)],
        [(0, 0, 5)],
        [(0, 0, -1)],
        [(0, 0, RENEW)],
        [(1, 2, ACCEPT), (0, 0, ACCEPT)],
    ],
)
def test_impossible_acknowledgements_are_refused(
    client: Cluster, topic: str, topic_id: uuid.UUID, group: str, batches: list[tuple[int, ...]]
) -> None:
    client.produce(topic, [b"a", b"b", b"c"])
    member = Member(client, group)
    member.fetch({topic_id: {0: []}})
    part = parts_of(member.acknowledge({topic_id: {0: batches}}))[0]
    assert (part["error_code"], part["error_message"]) == ("invalid_request", None)
    part = parts_of(member.acknowledge({topic_id: {0: [(0, 1, ACCEPT), (1, 2, GAP)]}}))[0]
    assert part["error_code"] == "invalid_record_state"
    part = parts_of(member.acknowledge({topic_id: {0: [(0, 1, ACCEPT), (2, 2, GAP)]}}))[0]
    assert part["error_code"] == "none"


def test_partition_without_ranges_has_a_result_only_beside_an_acknowledged_one(
    client: Cluster,
) -> None:
    name, group = client.create_topic(unique("t"), 2), unique("g")
    known, unknown = client.topic_id(name), uuid.UUID(int=7)
    initialize(client, group, known, (0, 1))
    client.produce(name, [b"a", b"b", b"c"])
    member = Member(client, group)
    member.fetch({known: {0: []}})
    # The leader has not read the state of partition 1.
    answer = member.acknowledge({known: {0: [(0, 0, ACCEPT)], 1: []}})
    assert [part["error_code"] for part in parts_of(answer).values()] == ["none", "none"]
    for batches in ([], [(1, 0, ACCEPT)]):
        # An unknown topic id is reported before its ranges are checked.
        answer = member.acknowledge({known: {0: []}, unknown: {0: batches}})
        (row,) = answer["responses"]
        assert row["topic_id"] == str(unknown)
        assert row["partitions"][0]["error_code"] == "unknown_topic_id"
    answer = member.fetch({known: {0: [(1, 1, ACCEPT)], 1: []}}, max_wait=0)
    parts = parts_of(answer)
    assert {index: part["acknowledge_error_code"] for index, part in parts.items()} == {0: 0, 1: 0}
    answer = member.fetch({known: {0: [(2, 1, ACCEPT)], 1: []}}, max_wait=0)
    assert parts_of(answer)[0]["acknowledge_error_code"] == 42


def test_renew_acknowledgement_is_accepted_only_without_fetching(
    client: Cluster, topic: str, topic_id: uuid.UUID, group: str
) -> None:
    client.produce(topic, [b"a"])
    member = Member(client, group)
    member.fetch({topic_id: {0: []}})
    renewal = {topic_id: {0: [(0, 0, RENEW)]}}
    answer = member.fetch(renewal, is_renew_ack=True)
    assert answer["error_code"] == "invalid_request"
    nothing = {"max_bytes": 0, "min_bytes": 0, "max_records": 0, "max_wait": 0}
    answer = member.fetch(renewal, is_renew_ack=True, **nothing)
    assert (answer["error_code"], parts_of(answer)[0]["acknowledge_error_code"]) == ("none", 0)
    answer = member.acknowledge(renewal, is_renew_ack=True)
    assert parts_of(answer)[0]["error_code"] == "none"


def test_acknowledgement_below_the_start_offset_is_no_error(
    client: Cluster, topic: str, topic_id: uuid.UUID, group: str
) -> None:
    client.produce(topic, [b"a"])
    member = Member(client, group)
    member.fetch({topic_id: {0: []}})
    for _ in range(2):
        answer = member.acknowledge({topic_id: {0: [(0, 0, ACCEPT)]}})
        assert parts_of(answer)[0]["error_code"] == "none"


def test_deleted_records_are_not_acquired(
    client: Cluster, topic: str, topic_id: uuid.UUID, group: str
) -> None:
    for _ in range(3):
        client.produce(topic, [b"a", b"b"])
    member = Member(client, group)
    partitions = [{"partition_index": 0, "offset": 4}]
    topics = [{"name": topic, "partitions": partitions}]
    client.call("delete_records", 2, topics=topics, timeout=10_000)
    part = parts_of(member.fetch({topic_id: {0: []}}))[0]
    if not part["acquired_records"]:  # Apache Kafka's leader learns of the deletion only now
        part = parts_of(member.fetch({}))[0]
    assert acquired(part) == [(4, 5, 1)]


def test_forgotten_partition_is_not_fetched(
    client: Cluster, topic: str, topic_id: uuid.UUID, group: str
) -> None:
    member = Member(client, group)
    member.fetch({topic_id: {0: []}}, max_wait=500)
    client.produce(topic, [b"a"])
    assert parts_of(member.fetch({}, forget={topic_id: [0]}, max_wait=0)) == {}


def test_deleted_topic_completes_a_waiting_share_fetch(
    client: Cluster, bootstrap: str, topic: str, topic_id: uuid.UUID, group: str
) -> None:
    member = Member(client, group)
    member.fetch({topic_id: {0: []}}, max_wait=500)
    member.send_fetch({}, max_wait=WAIT_MS)
    with Cluster(bootstrap) as other:
        other.call("delete_topics", 5, topic_names=[topic], timeout=10_000)
    # In Apache Kafka some waits end only after MaxWaitMs, and the partition is then missing.
    codes = {part["error_code"] for part in parts_of(member.receive()).values()}
    assert codes <= {"not_leader_or_follower", "unknown_topic_or_partition"}


def test_acknowledgement_for_a_deleted_topic_is_answered_kafka_20052(
    client: Cluster, topic: str, topic_id: uuid.UUID, group: str
) -> None:
    client.produce(topic, [b"a", b"b"])
    member = Member(client, group)
    assert acquired(parts_of(member.fetch({topic_id: {0: []}}))[0]) == [(0, 1, 1)]
    client.call("delete_topics", 5, topic_names=[topic], timeout=10_000)

    def is_refused() -> bool:
        part = parts_of(member.acknowledge({topic_id: {0: [(0, 0, ACCEPT)]}}))[0]
        return part["error_code"] in {"unknown_topic_id", "unknown_topic_or_partition"}

    until(is_refused, "the topic is deleted")


def test_read_committed_leaves_out_aborted_records(
    client: Cluster, topic: str, topic_id: uuid.UUID, group: str
) -> None:
    """As observed with Kafka, markers are acquired, and the client reports them as gaps."""
    configure(client, group, share_isolation_level="read_committed")
    tid = unique("tx")
    for committed, count in ((True, 3), (False, 4), (True, 2)):
        transaction(client, tid, topic, count, committed=committed)
    pid, epoch = client.init_producer(tid)
    data = batch([b"x"], producer_id=pid, producer_epoch=epoch, sequence=0, transactional=True)
    client.produce(topic, data, version=12, transactional_id=tid)
    member = Member(client, group)
    part = parts_of(member.fetch({topic_id: {0: []}}))[0]
    assert acquired(part) == [(0, 3, 1), (8, 11, 1)]


def transaction(client: Cluster, tid: str, topic: str, count: int, *, committed: bool) -> None:
    pid, epoch = client.init_producer(tid)
    records = batch(
        [b"x"] * count, producer_id=pid, producer_epoch=epoch, sequence=0, transactional=True
    )
    part = client.produce(topic, records, version=12, transactional_id=tid)
    assert part["error_code"] == "none"
    answer = client.call(
        "end_txn",
        4,
        transactional_id=tid,
        producer_id=pid,
        producer_epoch=epoch,
        committed=committed,
    )
    assert answer["error_code"] == "none"
    client.settle(topic)


def test_bytes_are_split_between_partitions(client: Cluster, group: str) -> None:
    name = client.create_topic(unique("two"), 2)
    topic_id = client.topic_id(name)
    initialize(client, group, topic_id, (0, 1))
    member = Member(client, group)
    member.fetch({topic_id: {0: [], 1: []}}, max_wait=1_000)  # both states are read
    for partition in (0, 1):
        for _ in range(4):
            client.produce(name, [b"x" * 1000], partition=partition)
    parts = parts_of(member.fetch({}, max_bytes=4400))
    assert {index: acquired(part)[-1][1] for index, part in parts.items()} == {0: 1, 1: 1}
    parts = parts_of(member.fetch({}, max_bytes=1))
    (part,) = parts.values()
    assert acquired(part) == [(2, 2, 1)]
