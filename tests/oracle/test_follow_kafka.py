"""Fencepost follows Apache Kafka: the replicas are equal to Kafka's logs, byte by byte.

The follower registers and replays the metadata as a broker does, but it only runs replica fetchers
and serves no clients.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import uuid
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import pytest
from confluent_kafka import Producer

from fencepost.cluster.image import LocalPartition, MetadataImage
from fencepost.cluster.lifecycle import LifecycleIntervals, RegisterBroker
from fencepost.cluster.records import BrokerEndpoint
from fencepost.coordinator.config.broker_config import BrokerConfig, log_config
from fencepost.coordinator.config.listeners import parse_address
from fencepost.coordinator.metadata.kraft_metadata_cache import MEMBER_FEATURES
from fencepost.coordinator.replication.fetchers import ReplicaFetcherManager
from fencepost.coordinator.replication.membership import BrokerMembership
from fencepost.coordinator.replication.metadata_fetcher import QuorumConfig
from fencepost.coordinator.replication.peers import Peers
from fencepost.coordinator.runtime.flusher import Flusher
from fencepost.logcore.batch import LogRecord, encode_batch
from fencepost.logcore.checkpoints import read_epochs
from fencepost.logcore.clock import SystemClock
from fencepost.logcore.fs import OsFileSystem
from fencepost.logcore.partition import Partition
from fencepost.tools.ports import hold_port
from tests.support.cluster import TRANSACTION, Cluster
from tests.support.kafka import Kafka, run_tool
from tests.support.targets import SETTINGS
from tests.support.waits import until_true

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.usefixtures("java_tools"),
    pytest.mark.timeout(300),
]

LEADER, FOLLOWER = 1, 101
CLUSTER_ID = "AAAAAAAAQACAAAAAAAAAAQ"
KAFKA = {
    **SETTINGS,
    "replica.lag.time.max.ms": "5000",
    "log.cleaner.backoff.ms": "100",
    "log.segment.bytes": str(1 << 20),
    "broker.session.timeout.ms": "3000",
}


class Follower:
    """The parts of a broker that a follower needs. It is also the log manager of its fetchers."""

    def __init__(self, kafka: Kafka, directory: Path) -> None:
        self.directory = directory
        self.partitions: dict[tuple[str, int], Partition] = {}
        self.image = MetadataImage()
        self.config = BrokerConfig({"replica.fetch.backoff.ms": "100"})
        self.flusher = Flusher(SystemClock())
        self._held = hold_port()
        endpoint = BrokerEndpoint("PLAINTEXT", "127.0.0.1", self._held.getsockname()[1], 0)
        registration = RegisterBroker(
            FOLLOWER, CLUSTER_ID, uuid.uuid4(), (endpoint,), MEMBER_FEATURES, (uuid.uuid4(),)
        )
        address = parse_address(kafka.controller)
        quorum = QuorumConfig((address,), {LEADER: address}, "CONTROLLER")
        self.membership = BrokerMembership(
            quorum, registration, LifecycleIntervals(heartbeat_ms=500, session_ms=3_000), self._lost
        )
        self.peers = Peers(self.config, lambda: self.image, node_id=FOLLOWER)
        self.fetchers = ReplicaFetcherManager(
            self.config,
            self.peers,
            self,
            SystemClock(),
            node_id=FOLLOWER,
            image=lambda: self.image,
            broker_epoch=lambda: self.membership.broker_epoch,
            log_of=self.open,
            on_disk=self.flusher.after,
        )

    def _lost(self, error: Exception) -> None:
        raise AssertionError(error)

    def _publish(self, image: MetadataImage) -> None:
        self.image = image

    async def join(self) -> None:
        self._publish(await self.membership.join())
        self.membership.follow(self._publish, self.image)
        await self.membership.unfence()

    def plan_truncation(self, partition: Partition, offset: int) -> set[str]:
        partition.replica.plan_truncation(offset)
        return set()

    async def save_all(self, names: Collection[str]) -> bool:
        return not names

    def open(self, local: LocalPartition) -> Partition:
        key = local.topic, local.index
        if key not in self.partitions:
            self.partitions[key] = Partition.open(
                OsFileSystem(),
                self.directory / f"{local.topic}-{local.index}",
                topic=local.topic,
                index=local.index,
                topic_id=local.topic_id,
                config=log_config(self.config, self.image.topic_configs(local.topic)),
                clock=SystemClock(),
                clean=True,
                is_replica=True,
                is_replicated=True,
                leader_epoch=local.registration.leader_epoch,
                flusher=self.flusher,
            )
        return self.partitions[key]

    async def local(self, topic: str, newer_than: int = -1) -> LocalPartition:
        """Wait until Kafka leads in a leader epoch after ``newer_than``; return the partition."""

        def found() -> bool:
            known = self.image.topics.get(topic)
            if known is None or not known.partitions:
                return False
            partition = known.partitions[0]
            return partition.leader == LEADER and partition.leader_epoch > newer_than

        await until_true(found, f"{topic} is led")
        known = self.image.topics[topic]
        return LocalPartition(topic, known.topic_id, 0, known.partitions[0])

    async def follow(self, topic: str, newer_than: int = -1) -> Partition:
        local = await self.local(topic, newer_than)
        self.fetchers.follow([local])
        return self.partitions[topic, 0]

    async def stop(self) -> None:
        await self.fetchers.close()
        self.peers.close()
        await self.membership.stop()
        await self.flusher.close()
        self._held.close()
        for partition in self.partitions.values():
            partition.close()


def create(kafka: Kafka, topic: str, **configs: str) -> None:
    """Create a topic with one partition, which Kafka leads and Fencepost follows."""
    with Cluster(kafka.bootstrap) as cluster:
        answer = cluster.call(
            "create_topics",
            5,
            timeout=10_000,
            topics=[
                {
                    "name": topic,
                    "num_partitions": -1,
                    "replication_factor": -1,
                    "assignments": [{"partition_index": 0, "broker_ids": [LEADER, FOLLOWER]}],
                    "configs": [
                        {"name": key.replace("_", "."), "value": value}
                        for key, value in configs.items()
                    ],
                }
            ],
        )
        assert answer["topics"][0]["error_code"] == "none", answer


def produce(kafka: Kafka, topic: str, count: int, **settings: object) -> None:
    """Produce ``count`` records of 100 bytes, with ten different keys in turn."""
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "linger.ms": 5, **settings})
    for number in range(count):
        producer.produce(topic, key=f"k{number % 10}", value=f"{number:0100d}")
    assert producer.flush(60) == 0


def transactions(kafka: Kafka, topic: str) -> None:
    """Commit some transactions, abort others, and leave the last one open."""
    producer = Producer(
        {"bootstrap.servers": kafka.bootstrap, "transactional.id": f"by-{topic}", "linger.ms": 5}
    )
    producer.init_transactions(60)
    for number in range(8):
        producer.begin_transaction()
        for at in range(20):
            producer.produce(topic, key=f"k{at}", value=f"{number}-{at}")
        producer.flush(60)
        if number % 2:
            producer.abort_transaction(60)
        elif number < 7:
            producer.commit_transaction(60)


def segments(directory: Path, suffix: str = ".log") -> bytes:
    """Return the bytes of all files with a suffix, oldest first."""
    return b"".join(path.read_bytes() for path in sorted(directory.glob(f"*{suffix}")))


def assert_equal(kafka: Kafka, follower: Follower, topic: str, suffixes: Sequence[str]) -> None:
    for suffix in suffixes:
        theirs, ours = (
            segments(root / f"{topic}-0", suffix) for root in (kafka.data_dir, follower.directory)
        )
        assert ours == theirs, suffix


async def replicated(kafka: Kafka, partition: Partition) -> None:
    """Wait until the replica has all of Kafka's log, and its high watermark has reached the end."""

    def ends() -> tuple[int, int]:
        with Cluster(kafka.bootstrap) as cluster:
            return tuple(  # type: ignore[return-value]
                cluster.call(
                    "list_offsets",
                    5,
                    replica_id=-1,
                    topics=[
                        {
                            "name": partition.topic,
                            "partitions": [
                                {
                                    "partition_index": 0,
                                    "timestamp": at,
                                    "current_leader_epoch": -1,
                                }
                            ],
                        }
                    ],
                )["topics"][0]["partitions"][0]["offset"]
                for at in (-1, -2)
            )

    end, start = await asyncio.to_thread(ends)
    await until_true(lambda: partition.log_end_offset >= end, f"{partition.name} up to {end}")
    await until_true(lambda: partition.high_watermark >= end, f"{partition.name} committed")
    assert partition.log_start_offset == start


@pytest.fixture
def kafka(tmp_path: Path):
    server = Kafka(tmp_path / "kafka", KAFKA)
    (tmp_path / "kafka").mkdir()
    server.start()
    with Cluster(server.bootstrap) as cluster:
        # Create the coordinators' topics now, so that only Kafka has replicas of them.
        cluster.coordinator("any", TRANSACTION)
    yield server
    server.stop()


@pytest.fixture
async def follower(kafka: Kafka, tmp_path: Path):
    (tmp_path / "follower").mkdir()
    broker = Follower(kafka, tmp_path / "follower")
    await broker.join()
    yield broker
    await broker.stop()


async def in_thread(work: Callable[..., None], *args: object, **settings: object) -> None:
    await asyncio.to_thread(work, *args, **settings)


async def test_follower_replicas_equal_kafkas_logs(kafka: Kafka, follower: Follower) -> None:
    """Compressed batches, transactions, gaps after compaction, and a tail that is truncated."""
    await in_thread(create, kafka, "plain")
    await in_thread(create, kafka, "txn")
    compact = {"cleanup_policy": "compact", "min_cleanable_dirty_ratio": "0.01"}
    await in_thread(create, kafka, "table", segment_ms="500", **compact)
    plain, txn = await follower.follow("plain"), await follower.follow("txn")
    for codec in ("none", "gzip", "snappy", "lz4", "zstd"):
        await in_thread(
            produce, kafka, "plain", 5_000, **{"compression.type": codec, "acks": "all"}
        )
    await in_thread(produce, kafka, "plain", 500, **{"enable.idempotence": True})
    await in_thread(transactions, kafka, "txn")
    # Kafka compacts the log before the follower fetches it, so that the log has gaps.
    for _ in range(3):
        await in_thread(produce, kafka, "table", 300, acks="1")
        await asyncio.sleep(0.6)  # Kafka rolls a segment by its age at the next append
    directory = kafka.data_dir / "table-0"
    checkpoint = kafka.data_dir / "cleaner-offset-checkpoint"
    await until_true(
        lambda: checkpoint.exists() and re.search(r"table 0 [6-9]\d\d", checkpoint.read_text()),
        "cleaned",
    )
    table = await follower.follow("table")
    for partition in (plain, txn, table):
        await replicated(kafka, partition)
        partition.flushes.run(0)
    assert_equal(kafka, follower, "plain", (".log",))
    assert_equal(kafka, follower, "txn", (".log", ".txnindex"))
    bases = [base for base, _, _ in _batches(table)]
    assert bases[0] > 0 or any(b > a for a, b in _gaps(table)), "there are holes"
    assert segments(directory) == segments(follower.directory / "table-0")
    assert txn.last_stable_offset == txn.high_watermark
    kept = {producer.producer_id: producer.producer_epoch for producer in txn.producers.view()}
    assert len(kept) == 1
    dumped = run_tool(
        "org.apache.kafka.tools.DumpLogSegments",
        "--deep-iteration",
        "--files",
        ",".join(map(str, sorted((follower.directory / "txn-0").glob("*.log")))),
    )
    assert "endTxnMarker: ABORT" in dumped
    assert "isvalid: false" not in dumped

    # Kafka is killed and restarts in a later epoch. The follower has more records than Kafka.
    local = await follower.local("plain")
    epoch = local.registration.leader_epoch
    follower.fetchers.stop([(local.topic_id, 0)])
    await in_thread(produce, kafka, "plain", 50, acks="1")
    theirs, held = (segments(root / "plain-0") for root in (kafka.data_dir, follower.directory))
    plain.append_as_follower(theirs[len(held) :], epoch)
    end = plain.log_end_offset
    ours = [LogRecord(end + at, 1, None, b"never acknowledged") for at in range(3)]
    plain.append_as_follower(encode_batch(ours, leader_epoch=epoch), epoch)
    await until_true(lambda: LEADER in follower.image.brokers, "known")
    await until_true(
        lambda: follower.image.topics["plain"].partitions[0].isr == (LEADER,), "out of the ISR"
    )
    kafka.kill()
    await in_thread(kafka.start)
    plain = await follower.follow("plain", newer_than=epoch)
    await in_thread(produce, kafka, "plain", 100, acks="1")
    await replicated(kafka, plain)
    assert_equal(kafka, follower, "plain", (".log",))
    plain.flushes.run(0)
    told, known = (
        read_epochs(OsFileSystem(), str(root / "plain-0"))
        for root in (kafka.data_dir, follower.directory)
    )
    assert known == told


def _batches(partition: Partition) -> list[tuple[int, int, int]]:
    return [
        (header.base_offset, header.last_offset, header.record_count)
        for header, _ in partition.reader.read_all()
    ]


def _gaps(partition: Partition) -> list[tuple[int, int]]:
    """Return (expected, found) base offsets and record counts of batches."""
    rows = _batches(partition)
    gaps = [(before[1] + 1, after[0]) for before, after in itertools.pairwise(rows)]
    gaps += [(count, last - base + 1) for base, last, count in rows]
    return gaps
