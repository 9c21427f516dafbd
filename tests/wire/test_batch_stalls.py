"""No accepted batch blocks the event loop or the interpreter lock, whichever API reads it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest

from fencepost.coordinator.daemon.in_thread import BrokerThread
from fencepost.logcore.compression import Codec
from fencepost.logcore.config import LogConfig
from fencepost.protocol.api import ApiKey
from fencepost.protocol.messages import request_factory
from tests.support.cluster import Cluster
from tests.support.stalls import LockWatch, watched_loop
from tests.support.worst_batches import (
    FIRST_MS,
    MAX_MESSAGE_BYTES,
    MOST_BYTES,
    MOST_RECORDS,
    most_bytes,
    most_records,
    one_snappy_block,
)
from tests.wire.test_stalls import MOST_ASKED, Client, LikeTheDaemon, framed

CODECS = list(Codec)[1:]
COUNTS = {"records": MOST_RECORDS, "bytes": MOST_BYTES // 1_000_000}
SHAPES: dict[str, Callable[[Codec], bytes]] = {"records": most_records, "bytes": most_bytes}
DEFAULT_MAX_MESSAGE_BYTES = LogConfig().max_message_bytes
LEVELS = {"gzip": (1, 9), "lz4": (1, 9, 12, 17), "zstd": (1, 19, 22)}


def produce(topic: str, records: bytes) -> bytes:
    make = request_factory(ApiKey.PRODUCE, 9)
    part = make.PartitionProduceData(index=0, records=records)
    return framed(
        ApiKey.PRODUCE,
        9,
        transactional_id=None,
        acks=-1,
        timeout_ms=60_000,
        topic_data=[make.TopicProduceData(name=topic, partition_data=[part])],
    )


def create(topics: dict[str, dict[str, str]]) -> bytes:
    make = request_factory(ApiKey.CREATE_TOPICS, 4)
    return framed(
        ApiKey.CREATE_TOPICS,
        4,
        topics=[
            make.CreatableTopic(
                name=name,
                num_partitions=1,
                replication_factor=1,
                configs=[
                    make.CreatableTopicConfig(name=key, value=value)
                    for key, value in {
                        "max.message.bytes": str(MAX_MESSAGE_BYTES),
                        **configs,
                    }.items()
                ],
            )
            for name, configs in topics.items()
        ],
        timeout_ms=60_000,
    )


def list_offsets(topic: str, timestamp: int) -> bytes:
    make = request_factory(ApiKey.LIST_OFFSETS, 11)
    part = make.ListOffsetsPartition(
        partition_index=0, current_leader_epoch=-1, timestamp=timestamp
    )
    topics = [make.ListOffsetsTopic(name=topic, partitions=[part])]
    return framed(
        ApiKey.LIST_OFFSETS, 11, replica_id=-1, isolation_level=0, topics=topics, timeout_ms=60_000
    )


def fetch(topic: str) -> bytes:
    make = request_factory(ApiKey.FETCH, 4)
    part = make.FetchPartition(
        partition=0, fetch_offset=MOST_RECORDS // 2, partition_max_bytes=1 << 20
    )
    return framed(
        ApiKey.FETCH,
        4,
        replica_id=-1,
        max_wait_ms=0,
        min_bytes=1,
        max_bytes=50 << 20,
        isolation_level=1,
        topics=[make.FetchTopic(topic=topic, partitions=[part])],
    )


def delete_records(topic: str) -> bytes:
    make = request_factory(ApiKey.DELETE_RECORDS, 2)
    part = make.DeleteRecordsPartition(partition_index=0, offset=50)
    topics = [make.DeleteRecordsTopic(name=topic, partitions=[part])]
    return framed(ApiKey.DELETE_RECORDS, 2, topics=topics, timeout_ms=60_000)


def leader_epoch(topic: str) -> bytes:
    make = request_factory(ApiKey.OFFSET_FOR_LEADER_EPOCH, 4)
    part = make.OffsetForLeaderPartition(partition=0, current_leader_epoch=-1, leader_epoch=0)
    topics = [make.OffsetForLeaderTopic(topic=topic, partitions=[part])]
    return framed(ApiKey.OFFSET_FOR_LEADER_EPOCH, 4, replica_id=-1, topics=topics)


READS: dict[str, Callable[[str], bytes]] = {
    "fetch": fetch,
    **{
        f"offsets at {timestamp}": functools.partial(list_offsets, timestamp=timestamp)
        for timestamp in range(-6, 2)
    },
    "offset of the last record's time": functools.partial(list_offsets, timestamp=FIRST_MS + 1),
    "deletion within the batch": delete_records,
    "largest time behind the log start": functools.partial(list_offsets, timestamp=-3),
    "first time behind the log start": functools.partial(list_offsets, timestamp=1),
    "end of an epoch": leader_epoch,
}
"""The requests in order; after DeleteRecords, reads begin in the middle of the batch."""


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerThread]:
    """Yield a broker with a log for each of the worst batches, and topics that recompress."""
    config = {"message.max.bytes": str(MAX_MESSAGE_BYTES)}
    with LikeTheDaemon.in_thread(tmp_path_factory.mktemp("full"), config=config) as broker:
        client = Client(broker)
        logs = {f"{codec.name}-{shape}": {} for codec in CODECS for shape in SHAPES}
        other = {
            f"{codec}-{level}": {
                "compression.type": codec,
                f"compression.{codec}.level": str(level),
            }
            for codec, levels in LEVELS.items()
            for level in levels
        }
        client.ask(create(logs | other | {"snappy-block": {}}))
        yield broker


def check(broker: BrokerThread, frame: bytes, label: str) -> None:
    """Send the request until it blocks loop and lock only for a short time; fail if it never does.

    A busy machine prolongs both times, so a request that seems too long is repeated.
    """
    client, seen = Client(broker), []
    while not seen or (len(seen) < MOST_ASKED and not all(watch.is_short for watch in seen[-1])):
        with watched_loop() as loop, LockWatch() as lock:
            client.ask(frame)
            client.ask(framed(ApiKey.API_VERSIONS, 0))
        print(f"{label}: {loop.cpu.cpu_ms:.1f} ms on the loop, lock {lock.longest_ms:.1f} ms")
        seen.append((loop, lock))
    min((loop for loop, _ in seen), key=lambda watch: watch.cpu.judged_ms).check()
    shortest = min((lock for _, lock in seen), key=lambda watch: watch.longest_ms)
    assert shortest.is_short, f"{shortest.where} kept the lock for {shortest.longest_ms:.0f} ms"


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name.lower())
def test_every_api_reads_the_worst_batch_in_short_turns(
    full: BrokerThread, codec: Codec, shape: str
) -> None:
    topic = f"{codec.name}-{shape}"
    check(full, produce(topic, SHAPES[shape](codec)), "produce")
    for label, read in READS.items():
        check(full, read(topic), label)
    with Cluster(full.bootstrap) as cluster:
        part = {"partition_index": 0, "current_leader_epoch": -1, "timestamp": -3}
        topics = [{"name": topic, "partitions": [part]}]
        (found,) = cluster.call("list_offsets", 7, replica_id=-1, topics=topics)["topics"]
    last = COUNTS[shape] - 1
    assert found["partitions"][0]["offset"] == (last if shape == "records" else 50)


@pytest.mark.slow
def test_every_api_reads_the_largest_block_of_snappy_in_short_turns(full: BrokerThread) -> None:
    batch = one_snappy_block()
    assert len(batch) <= DEFAULT_MAX_MESSAGE_BYTES
    check(full, produce("snappy-block", batch), "produce")
    for label, read in READS.items():
        check(full, read("snappy-block"), label)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("codec", "level"),
    [(codec, level) for codec, levels in LEVELS.items() for level in levels],
)
def test_batch_is_recompressed_in_short_turns(
    full: BrokerThread, codec: str, level: int, shape: str
) -> None:
    check(full, produce(f"{codec}-{level}", SHAPES[shape](Codec.SNAPPY)), f"{codec} {level}")
