"""Share groups: waits for their in-flight records, the clock, and faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from confluent_kafka import AcknowledgeType, KafkaException, ShareConsumer
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from fencepost.testing import Cluster, Kafka, KafkaUnderTest, Record, ShareRecords
from tests.support.waits import until

pytestmark = pytest.mark.kafka(topics=["orders"])

LOCK_MS = 30_000
"""``share.record.lock.duration.ms``, by default."""


def group(kafka: KafkaUnderTest, name: str, **settings: str) -> str:
    """Let a share group begin with the first record; return the group's name."""
    wanted = {"share.auto.offset.reset": "earliest"}
    wanted |= {f"share.{key.replace('_', '.')}": value for key, value in settings.items()}
    alter(kafka, name, wanted)
    return name


def alter(kafka: KafkaUnderTest, name: str, wanted: Mapping[str, str]) -> None:
    """Set settings of a group."""
    resource = ConfigResource(
        ResourceType.GROUP,
        name,
        incremental_configs=[
            ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET)
            for key, value in wanted.items()
        ],
    )
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    admin.incremental_alter_configs([resource])[resource].result(20)


@contextmanager
def consumer(kafka: KafkaUnderTest, name: str, *topics: str) -> Iterator[ShareConsumer]:
    """Return a share consumer with explicit acknowledgements."""
    member = ShareConsumer(
        {
            "bootstrap.servers": kafka.bootstrap,
            "group.id": name,
            "share.acknowledgement.mode": "explicit",
            "log_level": 0,
        }
    )
    try:
        member.subscribe(list(topics))
        yield member
    finally:
        member.close()


def polled(member: ShareConsumer) -> list[Any]:
    """Poll until records are returned, and return them."""
    return until(lambda: list(member.poll(0.2)), "records are delivered")


def rows(shares: list[ShareRecords]) -> list[tuple[Any, ...]]:
    return [(share.first, share.last, share.state, share.delivery_count) for share in shares]


def test_shares_shows_state_owner_count_and_lock(kafka: Kafka) -> None:
    kafka.clock.auto = False
    kafka.produce("orders", "a", "b", "c")
    workers = group(kafka, "workers")
    with consumer(kafka, workers, "orders") as member:
        first, second, third = polled(member)
        (share,) = kafka.shares(workers)
        assert (share.topic, share.partition, share.first, share.last) == ("orders", 0, 0, 2)
        assert (share.state, share.delivery_count, share.is_pending) == ("ACQUIRED", 1, False)
        assert share.locked_until_ms == kafka.clock.now_ms() + LOCK_MS
        (described,) = kafka.wait_for_group(workers, members=1).members
        assert share.member == described.member_id
        member.acknowledge(first, AcknowledgeType.RELEASE)
        member.acknowledge(second, AcknowledgeType.ACCEPT)
        member.acknowledge(third, AcknowledgeType.REJECT)
        assert set(member.commit_sync(10).values()) == {None}
        assert rows(kafka.shares(workers))[1:] == [
            (1, 1, "ACKNOWLEDGED", 1),
            (2, 2, "ARCHIVED", 1),
        ]
        (again,) = polled(member)
        assert again.delivery_count() == 2
        member.acknowledge(again, AcknowledgeType.ACCEPT)
        member.commit_sync(10)
        assert kafka.wait_for_shares(workers) == []
        kafka.wait_for_group(workers, lag=0)


def test_written_states_are_shown_after_the_last_session(kafka: Kafka) -> None:
    kafka.produce("orders", "a", "b", "c")
    workers = group(kafka, "workers")
    with consumer(kafka, workers, "orders") as member:
        first, second, third = polled(member)
        member.acknowledge(first, AcknowledgeType.ACCEPT)
        member.acknowledge(second, AcknowledgeType.RELEASE)
        member.acknowledge(third, AcknowledgeType.REJECT)
        member.commit_sync(10)
    kafka.wait_for_group(workers, members=0)
    kafka.restart()
    seen = kafka.wait_for_shares(workers, ("orders", 0, 1), until="AVAILABLE")
    assert rows(seen)[0][:3] == (1, 1, "AVAILABLE")
    assert rows(seen)[1:] == [(2, 2, "ARCHIVED", 1)]
    assert {(share.member, share.locked_until_ms) for share in seen} == {(None, None)}


def test_advancing_the_clock_ends_locks_until_the_record_is_archived(kafka: Kafka) -> None:
    kafka.clock.auto = False
    (tea,) = kafka.produce("orders", "tea")
    workers = group(kafka, "workers", delivery_count_limit="2")
    with consumer(kafka, workers, "orders") as member:
        assert polled(member)[0].delivery_count() == 1
        fired = kafka.clock.advance(ms=LOCK_MS)
        assert [
            (deadline.what, deadline.who) for deadline in fired if deadline.what == "share-lock"
        ] == [("share-lock", workers)]
    # The first consumer's lock has expired. The limit allows one more delivery, the second one.
    with consumer(kafka, workers, "orders") as member:
        assert polled(member)[0].delivery_count() == 2
        seen = kafka.wait_for_shares(workers, tea, until="ACQUIRED", delivery_count=2)
        assert rows(seen) == [(0, 0, "ACQUIRED", 2)]
        kafka.clock.advance(ms=LOCK_MS)
        kafka.wait_for_shares(workers, tea, until="ARCHIVED", delivery_count=2)
        kafka.wait_for_shares(workers)
    (event,) = [entry for entry in kafka.history(workers) if entry.what == "share-records-given-up"]
    assert (event.detail["delivery_count"], event.why) == (
        2,
        "acquisition lock expired, delivery limit 2",
    )


def test_wait_on_an_accepted_record_ends_at_once(kafka: Kafka) -> None:
    (tea,) = kafka.produce("orders", "tea")
    workers = group(kafka, "workers")
    with consumer(kafka, workers, "orders") as member:
        member.acknowledge(polled(member)[0], AcknowledgeType.ACCEPT)
        member.commit_sync(10)
        kafka.wait_for_shares(workers, tea)
        kafka.wait_for_shares(workers, tea, until="ACKNOWLEDGED")
        with pytest.raises(TimeoutError, match=r"its delivery has ended \(start offset 1\)"):
            kafka.wait_for_shares(workers, tea, until="ARCHIVED", timeout=0.1)


def test_records_below_the_start_offset_have_their_state_from_the_history(kafka: Kafka) -> None:
    records = kafka.produce("orders", *"abcdef")
    workers = group(kafka, "workers")
    with consumer(kafka, workers, "orders") as member:
        for message in polled(member):
            rejected = message.offset() in {1, 4}
            member.acknowledge(
                message, AcknowledgeType.REJECT if rejected else AcknowledgeType.ACCEPT
            )
        member.commit_sync(10)
        assert kafka.wait_for_shares(workers) == []
        for record in records:
            state = "ARCHIVED" if record.offset in {1, 4} else "ACKNOWLEDGED"
            kafka.wait_for_shares(workers, record, until=state, timeout=10)


@pytest.mark.parametrize(
    ("name", "record", "conditions", "complaint"),
    [
        ("workers", None, {}, r"nothing in flight .* orders:0:0-1 is ACQUIRED by \S+, delivery 1"),
        ("workers", ("orders", 0, 0), {"delivery_count": 2}, "delivered 2 times .* delivery 1"),
        ("workers", ("orders", 0, 7), {}, "orders:0:7 ended .*: it was not fetched"),
        ("workers", ("ordrs", 0, 0), {}, "no state of ordrs:0, but of orders:0"),
        ("worker", None, {}, "no record of it was fetched; did you mean workers"),
    ],
)
def test_wait_that_fails_describes_the_states(
    kafka: Kafka,
    name: str,
    record: tuple[str, int, int] | None,
    conditions: dict[str, Any],
    complaint: str,
) -> None:
    kafka.produce("orders", "a", "b")
    workers = group(kafka, "workers")
    with consumer(kafka, workers, "orders") as member:
        polled(member)
        with pytest.raises(TimeoutError, match=complaint):
            kafka.wait_for_shares(name, record, timeout=0.1, **conditions)


@pytest.mark.parametrize(
    ("call", "error", "complaint"),
    [
        (lambda k: k.wait_for_shares("g", until="ARCHIVED"), ValueError, "of a record: name it"),
        (
            lambda k: k.wait_for_shares("g", ("t", 0, 0), until="ARCHIVD"),
            ValueError,
            "not 'ARCHIVD'; did you mean ARCHIVED",
        ),
        (lambda k: k.wait_for_shares("g", ("t", 0)), TypeError, "record is a record, or"),
        (lambda k: k.wait_for_shares("g", ("t", 0, -1)), ValueError, "an offset is 0 or more"),
        (lambda k: k.wait_for_shares("g", ("t", 0, 0), delivery_count=0), ValueError, "1 or more"),
        (lambda k: k.shares(""), ValueError, "group is empty"),
    ],
)
def test_invalid_arguments_are_refused(
    kafka: Kafka, call: Callable[[Kafka], object], error: type[Exception], complaint: str
) -> None:
    with pytest.raises(error, match=complaint):
        call(kafka)
    assert kafka.shares("g") == []


def test_acknowledgement_with_a_lost_response_counts(kafka: Kafka) -> None:
    (tea,) = kafka.produce("orders", "tea")
    workers = group(kafka, "workers")
    with consumer(kafka, workers, "orders") as member:
        member.acknowledge(polled(member)[0], AcknowledgeType.ACCEPT)
        lost = kafka.faults.add(api="ShareAcknowledge", close="after", match={"group": workers})
        outcomes = member.commit_sync(10)
        lost.wait()
        assert [error is None for error in outcomes.values()] == [False]
        kafka.wait_for_shares(workers, tea, until="ACKNOWLEDGED")


def test_refused_acknowledgement_leaves_the_record_to_its_lock(kafka: Kafka) -> None:
    kafka.clock.auto = False
    (tea,) = kafka.produce("orders", "tea")
    workers = group(kafka, "workers")
    with consumer(kafka, workers, "orders") as member:
        member.acknowledge(polled(member)[0], AcknowledgeType.ACCEPT)
        refused = kafka.faults.add(api="ShareAcknowledge", error="INVALID_RECORD_STATE")
        outcomes = member.commit_sync(10)
        assert refused.hits == 1
        assert [type(error) for error in outcomes.values()] == [KafkaException]
        assert rows(kafka.shares(workers)) == [(0, 0, "ACQUIRED", 1)]
        kafka.clock.advance(ms=LOCK_MS)
        assert polled(member)[0].delivery_count() == 2
        kafka.wait_for_shares(workers, tea, until="ACQUIRED", delivery_count=2)


def test_faults_of_fetches_and_heartbeats_only_delay_records(kafka: Kafka) -> None:
    kafka.produce("orders", "tea")
    workers = group(kafka, "workers")
    faults = [
        kafka.faults.add(api="ShareGroupHeartbeat", error="COORDINATOR_NOT_AVAILABLE"),
        kafka.faults.add(api="ShareFetch", error="SHARE_SESSION_NOT_FOUND"),
        kafka.faults.add(api="ShareFetch", error="NOT_LEADER_OR_FOLLOWER"),
        kafka.faults.add(api="ShareFetch", close="before"),
        kafka.faults.add(api="ShareFetch", delay_ms=50),
    ]
    with consumer(kafka, workers, "orders") as member:
        assert [message.value() for message in polled(member)] == [b"tea"]
    assert [fault.hits for fault in faults] == [1] * len(faults)


@pytest.mark.kafka(topics={"orders": 3})
def test_shares_of_a_cluster_come_from_all_leaders(kafka_cluster: Cluster) -> None:
    workers = group(kafka_cluster, "workers")
    for index in range(3):
        kafka_cluster.produce("orders", "tea", partition=index)
    with consumer(kafka_cluster, workers, "orders") as member:
        acquired: set[int] = set()
        while len(acquired) < 3:
            for message in polled(member):
                acquired.add(message.partition())
                member.acknowledge(message, AcknowledgeType.ACCEPT)
                kafka_cluster.wait_for_shares(
                    workers, ("orders", message.partition(), 0), until="ACQUIRED"
                )
        member.commit_sync(10)
        kafka_cluster.wait_for_shares(workers)


@pytest.mark.kafka(topics=["orders"])
def test_clock_moves_records_at_their_limit_into_the_dead_letter_queue(kafka: Kafka) -> None:
    kafka.clock.auto = False
    kafka.feature("share.version", 2)
    kafka.topic("dlq.orders", config={"errors.deadletterqueue.group.enable": True})
    (job,) = kafka.produce("orders", "a")
    workers = group(kafka, "workers", delivery_count_limit="2")
    queue = {"topic.name": "dlq.orders", "copy.record.enable": "true"}
    alter(kafka, workers, {f"errors.deadletterqueue.{key}": text for key, text in queue.items()})
    for count in (1, 2):
        with consumer(kafka, workers, "orders") as member:
            assert polled(member)[0].delivery_count() == count
            kafka.clock.advance(ms=LOCK_MS)
    (letter,) = kafka.records("dlq.orders", at_least=1)
    kafka.wait_for_shares(workers, job)
    assert letter.value == b"a"
    assert dict(letter.headers)["__dlq.errors.offset"] == b"0"
    reason = b"Offset delivery count exceeded the threshold."
    assert dict(letter.headers)["__dlq.errors.message"] == reason


@pytest.mark.kafka(config={"errors.deadletterqueue.auto.create.topics.enable": True})
def test_dead_letter_queue_on_another_broker(kafka_cluster: Cluster) -> None:
    """The controller creates the queue. Queue and source have different leaders."""
    kafka = kafka_cluster
    kafka.feature("share.version", 2)
    workers = group(kafka, "workers")
    source = kafka.leader("orders")
    for number in range(20):
        name = f"dlq.orders-{number}"
        alter(kafka, workers, {"errors.deadletterqueue.topic.name": name})
        kafka.produce("orders", "a")
        with consumer(kafka, workers, "orders") as member:
            (message,) = polled(member)
            member.acknowledge(message, AcknowledgeType.REJECT)
            member.commit_sync(10)
        (letter,) = kafka.records(name, at_least=1)
        kafka.wait_for_shares(workers)
        if kafka.leader(name) != source:
            break
    else:
        raise AssertionError(f"all queues are led by broker {source}")
    found = dict(letter.headers)
    assert (found["__dlq.errors.topic"], found["__dlq.errors.offset"]) == (
        b"orders",
        b"%d" % number,
    )
    (event,) = [
        entry
        for entry in kafka.history(workers)
        if entry.what == "share-records-dead-lettered" and entry.detail["queue"] == name
    ]
    assert (event.detail["first"], event.detail["last"]) == (number, number)


@pytest.mark.slow
def test_dead_letter_survives_the_death_of_both_leaders(kafka_cluster: Cluster) -> None:
    """The next leader finds the record in state ARCHIVING, and sends the record (KAFKA-20672)."""
    kafka = kafka_cluster
    kafka.feature("share.version", 2)
    workers, source = group(kafka, "workers"), kafka.leader("orders")
    for number in range(20):
        enable = {"errors.deadletterqueue.group.enable": True}
        queue = kafka.topic(f"dlq.orders-{number}", 1, enable, replicas=1)
        if kafka.leader(queue) != source:
            break
    else:
        raise AssertionError(f"all queues are led by broker {source}")
    keeper = kafka.leader(queue)
    alter(kafka, workers, {"errors.deadletterqueue.topic.name": queue})
    (job,) = kafka.produce("orders", "a")
    with consumer(kafka, workers, "orders") as member:
        (message,) = polled(member)
        kafka.kill(keeper)
        member.acknowledge(message, AcknowledgeType.REJECT)
        member.commit_sync(30)
        kafka.wait_for_shares(workers, job, until="ARCHIVING", timeout=30)
        kafka.kill(source)
        kafka.restart(keeper)
        kafka.restart(source)
    with consumer(kafka, workers, "orders") as member:

        def sent() -> list[Record]:
            assert not list(member.poll(0.2))
            return kafka.records(queue)

        (letter,) = until(sent, "the record is in the queue")
        kafka.wait_for_shares(workers, job)
    assert dict(letter.headers)["__dlq.errors.message"] == b"Offset rejected by client."
