"""Replicas that move between Apache Kafka and Fencepost, and what followers do besides fetching.

Each test runs in both directions: Java leads and Python follows, Python leads and Java follows.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition

from tests.support.batches import batch
from tests.support.cluster import EARLIEST, READ_COMMITTED, Cluster, unique
from tests.support.kafka import LOG4J, LOG4J_FILE, java_command
from tests.support.pipeline import Clients
from tests.support.processes import Child
from tests.support.raw import Answer
from tests.support.replica_cluster import (
    BROKER,
    ReplicaCluster,
    begin_write,
    cut_log,
    list_offset,
    write,
    written,
)
from tests.support.waits import until

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.usefixtures("java_tools"),
    pytest.mark.timeout(900),
]

JAVA, PYTHON = 1, 2
BOTH_WAYS = pytest.mark.parametrize(
    ("leader", "follower"), [(JAVA, PYTHON), (PYTHON, JAVA)], ids=["Java leads", "Python leads"]
)
SIDES = "leader", "follower"
CHUNK = random.Random(3).randbytes(900_000)
CHUNKS = 12
"""Size of the topic in MB, which is so large that copying it at one byte a second takes minutes.

A fetch returns one MB. After the fetch, the quota's window of eleven seconds has to pass.
"""


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicaCluster]:
    with ReplicaCluster(tmp_path_factory.mktemp("moves"), "JP") as cluster:
        yield cluster


def acked(answer: Answer, offset: int) -> None:
    assert (answer["error_code"], answer["base_offset"]) == ("none", offset), answer


def equal(mixed: ReplicaCluster, name: str) -> None:
    """Wait until both logs have the same bytes from the later log start offset on."""

    def probe() -> bool:
        logs = [mixed.batches(node_id, name) for node_id in (JAVA, PYTHON)]
        start = max(log[0][0].base_offset for log in logs)
        java, python = ([raw for head, raw in log if head.base_offset >= start] for log in logs)
        return java == python

    until(probe, f"replicas of {name} are equal", poll_s=0.1)


@BOTH_WAYS
def test_throttled_reassignment_is_cancelled_and_completes_on_a_retry(
    mixed: ReplicaCluster, leader: int, follower: int
) -> None:
    """First the leader throttles a new replica, then the follower throttles it.

    In between, the reassignment is cancelled, and the follower deletes the log.
    """
    big, small = unique("big"), unique("small")
    both = dict.fromkeys((f"{side}_replication_throttled_replicas" for side in SIDES), "*")
    mixed.create(big, (leader,), **both)
    mixed.create(small, (leader,))
    with mixed.client(leader) as client:
        for at in range(CHUNKS):
            acked(write(client, big, CHUNK), at)
        acked(write(client, small, b"small"), 0)
    copy = mixed.directory(follower, big)
    for side, broker in (("leader", leader), ("follower", follower)):
        rate = f"{side}_replication_throttled_rate"
        mixed.configure(BROKER, str(broker), **{rate: "1"})
        until(
            lambda rate=rate, broker=broker: told(mixed, broker, rate) == "1",
            f"{broker} knows its {rate}",
        )
        mixed.reassign(big, (leader, follower))
        until(copy.is_dir, f"{follower} has begun")
        # Meanwhile the same fetcher copies a replica that is not throttled.
        mixed.reassign(small, (leader, follower))
        mixed.settled(small, leader=leader, isr={leader, follower})
        mixed.settled(big, leader=leader, isr={leader}, replicas=(leader, follower))
        if side == "leader":
            mixed.reassign(big, None)
            mixed.settled(big, leader=leader, isr={leader}, replicas=(leader,))
            until(lambda: not copy.exists(), "who was added has deleted all")
            mixed.reassign(small, (leader,))
            mixed.settled(small, leader=leader, isr={leader}, replicas=(leader,))
        mixed.configure(BROKER, str(broker), **{rate: None})
    mixed.settled(big, leader=leader, isr={leader, follower})
    equal(mixed, big)
    mixed.reassign(big, (follower,))
    mixed.settled(big, leader=follower, isr={follower}, replicas=(follower,))
    until(lambda: not mixed.directory(leader, big).exists(), "the former leader has deleted all")
    acked(mixed.write(follower, big, b"more"), CHUNKS)


def told(mixed: ReplicaCluster, broker: int, key: str) -> str | None:
    """Return a setting of a broker, as the broker's own DescribeConfigs shows it."""
    asked = {"resource_type": BROKER, "resource_name": str(broker)}
    names = [key.replace("_", ".")]
    with mixed.client(broker) as client:
        answer = client.call(
            "describe_configs", 4, resources=[{**asked, "configuration_keys": names}]
        )
    values = [config["value"] for config in answer["results"][0]["configs"]]
    return values[0] if values else None


@BOTH_WAYS
def test_deleted_records_are_gone_from_every_replica(
    mixed: ReplicaCluster, leader: int, follower: int
) -> None:
    name = unique("deleted")
    mixed.create(name, (leader, follower))
    for at in range(10):
        acked(mixed.write(leader, name, b"%d" % at), at)
    parts = [{"partition_index": 0, "offset": 5}]
    with mixed.client(leader) as client, mixed.client(follower) as other:
        answer = client.call(
            "delete_records", 2, timeout=100_000, topics=[{"name": name, "partitions": parts}]
        )
        part = answer["topics"][0]["partitions"][0]
        assert (part["error_code"], part["low_watermark"]) == ("none", 5)
        assert other.fetch(name, offset=5, version=12)["log_start_offset"] == 5, "it has waited"
        assert client.fetch(name, offset=4)["error_code"] == "offset_out_of_range"
    mixed.reassign(name, (follower, leader))
    mixed.prefer(name)
    mixed.settled(name, leader=follower, isr={leader, follower})
    with mixed.client(follower) as client:
        assert list_offset(client, name, at=EARLIEST) == {"offset": 5}
        assert client.values(name) == [b"5", b"6", b"7", b"8", b"9"]
    acked(mixed.write(follower, name, b"10"), 10)


@BOTH_WAYS
def test_new_replica_starts_at_a_log_start_offset_inside_a_batch(
    mixed: ReplicaCluster, leader: int, follower: int
) -> None:
    """The leader's log start offset is inside a batch; the new replica gets the whole batch."""
    name = unique("halved")
    mixed.create(name, (leader,))
    acked(mixed.write(leader, name, *(b"%d" % number for number in range(10))), 0)
    parts = [{"partition_index": 0, "offset": 5}]
    with mixed.client(leader) as client:
        client.call(
            "delete_records", 2, timeout=100_000, topics=[{"name": name, "partitions": parts}]
        )
    mixed.reassign(name, (follower, leader))
    mixed.settled(name, leader=leader, isr={leader, follower}, replicas=(follower, leader))
    equal(mixed, name)
    mixed.prefer(name)
    mixed.settled(name, leader=follower)
    with mixed.client(follower) as client:
        assert list_offset(client, name, at=EARLIEST) == {"offset": 5}
        assert client.fetch(name, offset=4)["error_code"] == "offset_out_of_range"
        assert client.values(name)[-5:] == [b"5", b"6", b"7", b"8", b"9"]
    acked(mixed.write(follower, name, b"10"), 10)
    equal(mixed, name)


@BOTH_WAYS
def test_open_and_aborted_transactions_survive_leadership_changes(
    mixed: ReplicaCluster, leader: int, follower: int
) -> None:
    name = unique("open")
    mixed.create(name, (leader, follower), min_insync_replicas="2")
    producer = Clients(mixed.bootstrap).producer(name)

    def led_by(first: int, second: int) -> None:
        mixed.reassign(name, (first, second))
        mixed.prefer(name)
        mixed.settled(name, leader=first, isr={leader, follower})

    for value, end in (
        (b"kept", producer.commit_transaction),
        (b"not", producer.abort_transaction),
    ):
        producer.begin_transaction()
        producer.produce(name, value)
        producer.flush(60)
        with mixed.client(leader) as client:
            begin = client.lso(name)
        led_by(follower, leader)
        with mixed.client(follower) as client:
            assert client.lso(name) == begin
            assert client.offset(name) == begin + 1
        end(60)
        with mixed.client(follower) as client:
            client.settle(name)
            assert client.values(name, isolation=READ_COMMITTED) == [b"kept"]
        led_by(leader, follower)
        with mixed.client(leader) as client:
            assert client.lso(name) == begin + 2
            assert client.values(name, isolation=READ_COMMITTED) == [b"kept"]
    equal(mixed, name)


# --- fetching from the closest replica ---


@BOTH_WAYS
def test_consumers_read_from_the_replica_of_their_rack(
    mixed: ReplicaCluster, leader: int, follower: int, tmp_path: Path
) -> None:
    name, rack = unique("near"), f"rack-{follower}"
    mixed.create(name, (leader, follower))
    values = [b"%d" % number for number in range(20)]
    acked(mixed.write(leader, name, *values), 0)
    with mixed.client(leader) as client:
        until(lambda: preferred(client, name, rack) == follower, "the leader knows who is near")
        assert preferred(client, name, f"rack-{leader}") == -1
        assert preferred(client, name, "nowhere") == -1
    assert [value.decode() for value in values] == by_librdkafka(mixed, name, rack, follower)
    # Java's consumer logs its preferred read replica only at log level DEBUG.
    config = tmp_path / "log4j2.xml"
    config.write_text(LOG4J.replace('level="warn"', 'level="debug"'))
    command = java_command(
        "org.apache.kafka.tools.consumer.ConsoleConsumer",
        *("--bootstrap-server", mixed.bootstrap, "--topic", name, "--partition", "0"),
        *("--offset", "earliest", "--max-messages", str(len(values))),
        *("--command-property", f"client.rack={rack}"),
    )
    command = [word.replace(str(LOG4J_FILE), str(config)) for word in command]
    child = Child(command)
    assert child.wait(240) == 0, child.tail()
    moved = f"Updating preferred read replica for partition {name}-0 to {follower}"
    assert any(moved in line for line in child.lines), child.tail()
    assert [line for line in child.lines if line.isdigit()] == [value.decode() for value in values]


def preferred(client: Cluster, name: str, rack: str) -> int:
    """Return the preferred read replica of a consumer in ``rack``, -1 if it is the leader."""
    part = {"partition": 0, "fetch_offset": 0, "current_leader_epoch": -1}
    topics = [{"topic": name, "partitions": [{**part, "partition_max_bytes": 1 << 20}]}]
    sizes = {"max_wait": 0, "min_bytes": 1, "max_bytes": 1 << 20, "session_epoch": -1}
    answer = client.call("fetch", 11, replica_id=-1, **sizes, rack_id=rack, topics=topics)
    found = answer["responses"][0]["partitions"][0]
    assert found["error_code"] == "none"
    assert bool(found["records"]) == (found["preferred_read_replica"] == -1)
    return int(found["preferred_read_replica"])


def by_librdkafka(mixed: ReplicaCluster, name: str, rack: str, follower: int) -> list[str]:
    """Return the records that a librdkafka consumer gets once it reads from the follower."""
    seen: list[int] = []

    def note(text: str) -> None:
        topics = json.loads(text)["topics"].values()
        seen.extend(topic["partitions"]["0"]["broker"] for topic in topics)

    settings = {"client.rack": rack, "statistics.interval.ms": 100, "stats_cb": note}
    consumer = Consumer({"bootstrap.servers": mixed.bootstrap, "group.id": name, **settings})
    with closing(consumer):
        consumer.assign([TopicPartition(name, 0, 0)])
        found: list[str] = []

        def poll() -> bool:
            message = consumer.poll(0.1)
            if message is not None:
                assert message.error() is None, message.error()
                found.append(message.value().decode())
            return len(found) == 20 and bool(seen) and seen[-1] == follower

        until(poll, f"librdkafka reads from {follower}: {seen}")
    return found


# --- compaction ---


@BOTH_WAYS
def test_compaction_on_leader_and_follower_keeps_the_same_values(
    mixed: ReplicaCluster, leader: int, follower: int
) -> None:
    """The leader compacts before the follower fetches; later each replica compacts its own log."""
    name = unique("table")
    compacted = {
        "cleanup_policy": "compact",
        "min_cleanable_dirty_ratio": "0.01",
        "segment_bytes": str(1 << 20),
    }
    mixed.create(name, (leader,), **compacted)
    latest = fill(mixed, leader, name, 0)
    cleaned(mixed, leader, name, 20)
    mixed.reassign(name, (leader, follower))
    mixed.settled(name, leader=leader, isr={leader, follower})
    latest |= fill(mixed, leader, name, 40)
    for node_id in (leader, follower):
        cleaned(mixed, node_id, name, 60)
    for one, other in ((leader, follower), (follower, leader)):
        mixed.reassign(name, (one, other))
        mixed.prefer(name)
        mixed.settled(name, leader=one, isr={leader, follower})
        with mixed.client(one) as client:
            read = client.read(name)
        found = {
            key: value for part in read for key, value in zip(part.keys, part.values, strict=True)
        }
        assert found == latest, one
        assert sum(len(part.values) for part in read) < 80, "it is cleaned"


def fill(mixed: ReplicaCluster, leader: int, name: str, begin: int) -> dict[bytes, bytes]:
    """Produce 40 batches of 100 kB with seven keys; return the last value of each key."""
    latest = {}
    with mixed.client(leader) as client:
        for at in range(begin, begin + 40):
            key, value = b"k%d" % (at % 7), b"%d:" % at + CHUNK[:100_000]
            acked(client.produce(name, batch([value], key=key)), at)
            latest[key] = value
    return latest


def cleaned(mixed: ReplicaCluster, node_id: int, name: str, offset: int) -> None:
    """Wait until a broker's cleaner checkpoint has reached ``offset``."""
    file = mixed.node(node_id).data_dir / "cleaner-offset-checkpoint"

    def probe() -> bool:
        lines = file.read_text().splitlines() if file.exists() else []
        rows = [line.split() for line in lines]
        return any(row[:2] == [name, "0"] and int(row[2]) >= offset for row in rows)

    until(probe, f"{node_id} has cleaned {name} up to {offset}", deadline_s=120, poll_s=0.1)


# --- a suspended broker ---


@BOTH_WAYS
def test_suspended_broker_leaves_the_isr_and_its_late_writes_are_lost(
    mixed: ReplicaCluster, leader: int, follower: int
) -> None:
    """A broker that follows one topic and leads another gets SIGSTOP; it leads after SIGCONT, too.

    Produce requests with acks=all complete when the broker has left the ISR or caught up again.
    """
    free, bound, lost = (unique(stem) for stem in ("free", "bound", "lost"))
    mixed.create(free, (leader, follower))
    mixed.create(bound, (leader, follower), min_insync_replicas="2")
    mixed.create(lost, (follower, leader))
    acked(mixed.write(follower, lost, b"0"), 0)
    with (
        mixed.client(leader) as first,
        mixed.client(leader) as second,
        mixed.client(follower) as late,
    ):
        with mixed.frozen(follower):
            begin_write(first, free, b"0", timeout_ms=100_000)
            begin_write(second, bound, b"0", timeout_ms=100_000)
            begin_write(late, lost, b"late", acks=1, timeout_ms=1_000)
            acked(written(first), 0)

            until(lambda: mixed.list_offsets_error(leader, lost) is None, "the other one leads")
            until(lambda: mixed.state(bound, witness=leader).isr == {leader}, "it is alone")
            refused = mixed.write(leader, bound, b"refused")
            assert refused["error_code"] == "not_enough_replicas"
            acked(mixed.write(leader, lost, b"1"), 1)
        assert written(late)["error_code"] in {"none", "not_leader_or_follower"}
        acked(written(second), 0)
    for name in (free, bound, lost):
        mixed.settled(name, leader=leader, isr={leader, follower})
        equal(mixed, name)
    with mixed.client(leader) as client:
        assert client.values(lost) == [b"0", b"1"]


# --- unclean shutdown ---


@BOTH_WAYS
def test_killed_leader_with_a_lost_tail_is_not_elected(
    mixed: ReplicaCluster, leader: int, follower: int
) -> None:
    """The follower stops cleanly. The leader loses its log's tail, and restarts first.

    The leader must report an unclean shutdown when it registers. Otherwise the controller would
    elect this broker, and the follower would truncate acknowledged records.
    """
    name = unique("trusted")
    mixed.create(name, (leader, follower), min_insync_replicas="2")
    acked(mixed.write(leader, name, b"0"), 0)
    acked(mixed.write(leader, name, b"1"), 1)
    mixed.stop_all(follower)
    mixed.settled(name, leader=leader, isr={leader})
    mixed.kill(leader)
    cut_log(mixed.directory(leader, name), 1)
    mixed.start_all(leader)
    mixed.settled(name, leader=-1)
    mixed.start_all(follower)
    mixed.settled(name, leader=follower, isr={leader, follower})
    with mixed.client(follower) as client:
        assert client.values(name) == [b"0", b"1"]
    acked(mixed.write(follower, name, b"2"), 2)
    equal(mixed, name)
