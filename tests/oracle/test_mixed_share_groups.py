"""Share groups in a cluster of one broker of Apache Kafka and one of Fencepost.

Each of three roles can be at either broker: group coordinator, share coordinator (the leader of a
partition of ``__share_group_state``) and leader of the data partition. The data's leader and the
group coordinator send states to the share coordinator, so the brokers send each other requests in
both directions.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import AcknowledgeType, Producer

from tests.oracle.desk import Tools, tools_at_hand
from tests.oracle.tool_scenes import CONSOLE_SHARE_CONSUMER
from tests.support import requests
from tests.support.cluster import GROUP, unique
from tests.support.pair import BOTH, GROUPS, KAFKAS, OURS, Pair
from tests.support.raw import Answer
from tests.support.share import (
    ACCEPT,
    REJECT,
    RELEASE,
    SHARE,
    Member,
    acquired,
    configure,
    initialize,
    kafka_id,
    parts_of,
)
from tests.support.share_work import at_work, share_consumer, starts_at_the_beginning
from tests.support.waits import until

pytestmark = [pytest.mark.oracle, pytest.mark.timeout(600)]

STATES = "__share_group_state"
SETTINGS = {
    "share.coordinator.state.topic.num.partitions": "1",
    "share.coordinator.state.topic.replication.factor": "2",
    "share.coordinator.state.topic.min.isr": "1",
    "group.share.heartbeat.interval.ms": "300",
    "group.share.min.heartbeat.interval.ms": "300",
    "group.share.record.lock.duration.ms": "5000",
    "group.share.min.record.lock.duration.ms": "1000",
}
PAIRINGS = list(itertools.product(BOTH, repeat=3))
"""The brokers that are group coordinator, share coordinator and leader."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    brokers = Pair(tmp_path_factory.mktemp("pair"), SETTINGS)
    try:
        brokers.start()
        brokers.create(STATES, [BOTH], {"cleanup.policy": "delete", "min.insync.replicas": "1"})
        yield brokers
    finally:
        brokers.stop()
        for node in brokers.all_nodes:  # helps to analyse a failure
            print("\n".join(node.child.lines[-60:]) if node.child else "")


@pytest.fixture(scope="module")
def tools() -> Iterator[Tools]:
    with tools_at_hand() as started:
        yield started


def other(node_id: int) -> int:
    return BOTH[node_id == KAFKAS]


def coordinated(pair: Pair, topic: str, node_id: int) -> None:
    """Make a broker the coordinator of a kind, as the leader of the coordinators' partition."""
    if pair.leader(topic) != node_id:
        pair.elect(topic, node_id)


def states_served(pair: Pair, node_id: int, group: str, topic_id: uuid.UUID) -> None:
    """Wait until both brokers name this share coordinator."""
    key = f"{group}:{kafka_id(topic_id)}:0"

    def does() -> bool:
        answers = [
            pair.call(broker_id, "find_coordinator", 6, key_type=SHARE, coordinator_keys=[key])
            for broker_id in pair.running
        ]
        rows = [row for answer in answers for row in answer["coordinators"]]
        return all(row["error_code"] == "none" and row["node_id"] == node_id for row in rows)

    until(does, f"{node_id} is the share coordinator", poll_s=0.05)


def topic_id(pair: Pair, topic: str) -> uuid.UUID:
    return pair.connection(pair.running[0]).topic_id(topic)


def produce(pair: Pair, topic: str, count: int, first: int = 0) -> None:
    producer = Producer({"bootstrap.servers": pair.bootstrap, "acks": "all", "log_level": 0})
    for number in range(first, first + count):
        producer.produce(topic, b"%d" % number, partition=0)
    assert producer.flush(30) == 0


def offsets(
    pair: Pair, node_id: int, group: str, topic: tuple[str, list[int]] | None = None
) -> dict[int, tuple[int, int]]:
    """Return each partition's start offset and lag, as the group coordinator describes them.

    The coordinator describes the partitions of ``topic``, or without it all partitions that the
    group has initialized.
    """
    body = requests.describe_share_group_offsets(group, topic)
    (found,) = pair.call(node_id, "describe_share_group_offsets", 1, **body)["groups"]
    return {
        row["partition_index"]: (row["start_offset"], row["lag"])
        for topic in found["topics"]
        for row in topic["partitions"]
    }


@pytest.mark.parametrize("places", PAIRINGS, ids=lambda at: "-".join(map(str, at)))
def test_share_consumer_in_every_pairing_of_the_brokers(
    pair: Pair, places: tuple[int, int, int]
) -> None:
    of_group, of_state, leader = places
    coordinated(pair, GROUPS, of_group)
    coordinated(pair, STATES, of_state)
    topic, group = pair.create(unique("t"), [(leader, other(leader))]), unique("g")
    pair.serves(of_group, GROUP, group)
    states_served(pair, of_state, group, topic_id(pair, topic))
    starts_at_the_beginning(pair.bootstrap, group)
    produce(pair, topic, 20)
    accepted: dict[bytes, int] = {}
    deliveries: list[bytes] = []
    consumer = share_consumer(pair.bootstrap, group)

    def consumed() -> bool:
        for message in consumer.poll(0.2):
            assert message.error() is None, message.error()
            value = message.value()
            assert value is not None
            deliveries.append(value)
            kind = AcknowledgeType.ACCEPT
            if value == b"3" and deliveries.count(value) == 1:
                kind = AcknowledgeType.RELEASE
            elif value == b"5":
                kind = AcknowledgeType.REJECT
            else:
                accepted[value] = message.delivery_count()
            consumer.acknowledge(message, kind)
        return len(accepted) == 19

    try:
        consumer.subscribe([topic])
        until(consumed, "all records are consumed")
        consumer.commit_sync(30)
    finally:
        consumer.close()
    wanted = sorted([*(b"%d" % number for number in range(20)), b"3"], key=int)
    assert sorted(deliveries, key=int) == wanted
    assert {value: count for value, count in accepted.items() if count != 1} == {b"3": 2}
    (start, lag) = offsets(pair, of_group, group)[0]
    assert lag == 0
    assert start <= 20


@pytest.mark.parametrize("places", [(KAFKAS, OURS, OURS), (OURS, KAFKAS, KAFKAS)], ids=str)
def test_kafkas_console_share_consumer_gets_every_record(
    pair: Pair, tools: Tools, places: tuple[int, int, int]
) -> None:
    of_group, of_state, leader = places
    coordinated(pair, GROUPS, of_group)
    coordinated(pair, STATES, of_state)
    topic, group = pair.create(unique("t"), [(leader, other(leader))]), unique("g")
    pair.serves(of_group, GROUP, group)
    starts_at_the_beginning(pair.bootstrap, group)
    produce(pair, topic, 20)
    told = ("--bootstrap-server", pair.bootstrap, "--topic", topic, "--group", group)
    status, said = tools.run(
        CONSOLE_SHARE_CONSUMER, (*told, "--max-messages", "20", "--timeout-ms", "30000")
    )
    assert status == 0, said
    values = [line for line in said.splitlines() if line.isdigit()]
    assert sorted(values, key=int) == [str(number) for number in range(20)]
    assert offsets(pair, of_group, group)[0][1] == 0


def fetched(member: Member, topic: uuid.UUID, **fields: Any) -> Answer:
    """Fetch until the response has records, because leader and coordinator may have just moved."""

    def probe() -> Answer | None:
        part = parts_of(member.fetch({topic: {0: []}}, max_wait=500, **fields)).get(0)
        return part if part is not None and part["acquired_records"] else None

    return until(probe, "records")


@pytest.mark.parametrize("of_state", BOTH)
@pytest.mark.parametrize("leader", BOTH)
def test_leaders_of_both_brands_continue_with_each_others_outcomes(
    pair: Pair, leader: int, of_state: int
) -> None:
    """A partition moves to the other broker and back, each time with in-flight records."""
    coordinated(pair, STATES, of_state)
    topic, group = pair.create(unique("t"), [(leader, other(leader))]), unique("g")
    known = topic_id(pair, topic)
    states_served(pair, of_state, group, known)
    initialize(pair.connection(of_state), group, known)
    for number in range(10):  # batches of one record, so that each record has its own state
        produce(pair, topic, 1, number)
    first = Member(pair.connection(leader), group)
    got: list[tuple[int, int, int]] = []
    while not got or got[-1][1] < 9:
        got += acquired(fetched(first, known))
    assert {count for _, _, count in got} == {1}
    answer = first.acknowledge({known: {0: [(0, 2, ACCEPT), (3, 3, RELEASE)]}})
    assert parts_of(answer)[0]["error_code"] == "none"

    pair.elect(topic, other(leader))
    second = Member(pair.connection(other(leader)), group)
    ranges: list[tuple[int, int, int]] = []
    while not ranges or ranges[-1][1] < 9:
        ranges += acquired(fetched(second, known))
    # The delivery count of offset 3 was written; the new leader does not know acquisitions of 4 to
    # 9.
    assert ranges[0] == (3, 3, 2)
    assert {count for _, _, count in ranges[1:]} == {1}
    late = first.acknowledge({known: {0: [(4, 4, ACCEPT)]}})
    part = parts_of(late).get(0) if late["error_code"] == "none" else None
    assert part is None or part["error_code"] != "none"
    answer = second.acknowledge({known: {0: [(3, 5, ACCEPT), (6, 6, RELEASE)]}})
    assert parts_of(answer)[0]["error_code"] == "none"

    # The share coordinator moves too, and loads a state that the other broker wrote.
    pair.elect(STATES, other(of_state))
    states_served(pair, other(of_state), group, known)
    pair.elect(topic, leader)
    third = Member(pair.connection(leader), group)
    ranges = []
    while not ranges or ranges[-1][1] < 9:
        ranges += acquired(fetched(third, known))
    assert ranges[0] == (6, 6, 2)
    assert {count for _, _, count in ranges[1:]} == {1}
    answer = third.acknowledge({known: {0: [(6, 9, ACCEPT)]}})
    assert parts_of(answer)[0]["error_code"] == "none"


def test_share_coordinators_of_both_brands_load_each_others_states(pair: Pair) -> None:
    coordinated(pair, STATES, KAFKAS)
    topic, group = pair.create(unique("t"), [BOTH]), unique("g")
    known = topic_id(pair, topic)
    states_served(pair, KAFKAS, group, known)
    initialize(pair.connection(KAFKAS), group, known)
    batches = [(0, 4, 2, 1), (5, 5, 0, 3), (8, 9, 4, 2)]

    def write(node_id: int, start_offset: int, *rows: tuple[int, int, int, int]) -> None:
        part = {
            "partition": 0,
            "state_epoch": 1,
            "leader_epoch": 1,
            "start_offset": start_offset,
            "delivery_complete_count": 2,
            "state_batches": [
                {
                    "first_offset": first,
                    "last_offset": last,
                    "delivery_state": state,
                    "delivery_count": count,
                }
                for first, last, state, count in rows
            ],
        }
        topics = [{"topic_id": known, "partitions": [part]}]
        answer = pair.call(node_id, "write_share_group_state", 1, group_id=group, topics=topics)
        assert answer["results"][0]["partitions"][0]["error_code"] == "none", answer

    def read(node_id: int) -> Answer:
        part = {"partition": 0, "leader_epoch": 1}
        topics = [{"topic_id": known, "partitions": [part]}]
        answer = pair.call(node_id, "read_share_group_state", 0, group_id=group, topics=topics)
        found: Answer = answer["results"][0]["partitions"][0]
        return found

    write(KAFKAS, 0, *batches)
    for number, target in enumerate((OURS, KAFKAS, OURS, KAFKAS), 1):
        before = read(other(target))
        assert before["error_code"] == "none", before
        pair.elect(STATES, target)
        states_served(pair, target, group, known)
        assert until(lambda: read_or_none(read, target), "the state is loaded") == before  # noqa: B023
        write(target, number, (10 * number, 10 * number + 2, 2, number))


def read_or_none(read: Any, node_id: int) -> Answer | None:
    found: Answer = read(node_id)
    return found if found["error_code"] == "none" else None


def test_share_consumers_lose_nothing_while_both_brokers_are_killed(pair: Pair) -> None:
    coordinated(pair, GROUPS, KAFKAS)
    coordinated(pair, STATES, OURS)
    topic = pair.create(unique("t"), [(KAFKAS, OURS), (OURS, KAFKAS)])
    group = unique("g")
    starts_at_the_beginning(pair.bootstrap, group)

    def lag() -> int:
        for node_id in pair.running:
            found = offsets(pair, node_id, group)
            if found and all(lag >= 0 for _, lag in found.values()):
                return sum(lag for _, lag in found.values())
        return 1

    with at_work(pair.bootstrap, group, topic, lag) as work:
        work.progress(50)
        for index, node_id in enumerate((OURS, KAFKAS)):
            pair.elect(topic, node_id, index)
            pair.elect(STATES, node_id)
            work.progress(50)
        for victim in BOTH:
            pair.stop_broker(victim, "kill")
            work.progress(50)
            pair.restart_broker(victim)
            work.progress(50)
    assert not work.missing
    assert not work.accepted_twice


QUEUE_ENABLE = "errors.deadletterqueue.group.enable"
REJECTED = b"Offset rejected by client."
EXCEEDED = b"Offset delivery count exceeded the threshold."


class Archiving:
    """A share group: one broker leads the source topic, the other leads the dead-letter queue."""

    def __init__(self, pair: Pair, leader: int) -> None:
        self.pair, self.group = pair, unique("g")
        self.source = pair.create(unique("t"), [(leader, other(leader))])
        places = [(other(leader), leader)]
        self.queue = pair.create(unique("dlq.q"), places, {QUEUE_ENABLE: "true"})
        settings = {
            "errors_deadletterqueue_topic_name": self.queue,
            "errors_deadletterqueue_copy_record_enable": "true",
            "share_delivery_count_limit": "2",
        }
        for node_id in BOTH:  # each broker waits until it describes the settings
            configure(pair.connection(node_id), self.group, **settings)
        self.known = topic_id(pair, self.source)
        initialize(pair.connection(pair.leader(STATES)), self.group, self.known)
        self.member = Member(pair.connection(leader), self.group)
        self.wanted: list[tuple[int, bytes, bytes, bytes]] = []
        """Offset, value, delivery count and message of each archived record."""

    def acquire(self, first: int, last: int, count: int) -> None:
        """Fetch until a range is acquired with this delivery count."""
        offsets: list[int] = []
        while offsets[-1:] != [last]:
            topics = {self.known: {0: []}} if self.member.epoch == 0 else {}

            def probe(topics: Any = topics) -> Answer | None:
                part = parts_of(self.member.fetch(topics, max_wait=500)).get(0)
                return part if part is not None and part["acquired_records"] else None

            for start, end, number in acquired(until(probe, "records")):
                offsets += range(start, end + 1)
                assert number == count
        assert offsets == list(range(first, last + 1))

    def acknowledge(self, first: int, last: int, kind: int) -> None:
        answer = self.member.acknowledge({self.known: {0: [(first, last, kind)]}})
        assert parts_of(answer)[0]["error_code"] == "none", answer

    def archive(self, first: int, last: int) -> None:
        """Write records; reject the first record, and release the other records twice."""
        produce(self.pair, self.source, last - first + 1, first)
        self.acquire(first, last, 1)
        self.acknowledge(first, first, REJECT)
        self.acknowledge(first + 1, last, RELEASE)
        self.acquire(first + 1, last, 2)
        self.acknowledge(first + 1, last, RELEASE)
        self.wanted.append((first, b"%d" % first, b"1", REJECTED))
        self.wanted += ((at, b"%d" % at, b"2", EXCEEDED) for at in range(first + 1, last + 1))

    def found(self) -> list[tuple[int, bytes, bytes, bytes]]:
        """Return the queue's records from its leader, and check their fixed headers."""
        cluster = self.pair.connection(self.pair.leader(self.queue))
        rows = []
        for batch in cluster.read(self.queue):
            for value, headers in zip(batch.values, batch.headers, strict=True):
                told = dict(headers)
                assert told.pop(b"__dlq.errors.topic") == self.source.encode()
                assert told.pop(b"__dlq.errors.partition") == b"0"
                assert told.pop(b"__dlq.errors.group") == self.group.encode()
                at = int(told.pop(b"__dlq.errors.offset") or b"")
                count, why = (
                    told.pop(b"__dlq.errors." + x) for x in (b"delivery.count", b"message")
                )
                assert not told
                rows.append((at, value or b"", count or b"", why or b""))
        return sorted(rows)

    def is_complete(self) -> bool:
        """Return whether every record is archived, as the group coordinator describes it."""
        of_group = self.pair.leader(GROUPS)
        return offsets(self.pair, of_group, self.group, (self.source, [0]))[0][1] == 0


@pytest.mark.parametrize("leader", BOTH)
def test_dead_letter_queue_of_the_other_broker_gets_each_archived_record_once(
    pair: Pair, leader: int
) -> None:
    """The queue's leader moves to the source's broker and back between archived records."""
    work = Archiving(pair, leader)
    work.archive(0, 5)
    until(lambda: work.found() == work.wanted, "the other broker has the records")
    pair.elect(work.queue, leader)
    work.archive(6, 9)
    until(lambda: work.found() == work.wanted, "the source's broker has the records")
    pair.elect(work.queue, other(leader))
    work.archive(10, 12)
    until(lambda: work.found() == work.wanted, "the queue is at the other broker again")
    until(work.is_complete, "all records are archived")
    assert work.found() == work.wanted


@pytest.mark.parametrize("leader", BOTH)
def test_dead_letter_queue_loses_no_record_while_its_leader_moves(pair: Pair, leader: int) -> None:
    work = Archiving(pair, leader)
    for turn in range(4):
        work.archive(4 * turn, 4 * turn + 3)
        pair.elect(work.queue, (leader, other(leader))[turn % 2])
    until(lambda: set(work.found()) >= set(work.wanted), "all records have arrived")
    until(work.is_complete, "all records are archived")
    # The leader may lose leadership between an append and the response; then the write is repeated.
    assert set(work.found()) == set(work.wanted)
