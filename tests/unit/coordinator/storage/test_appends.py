"""Produce requests that take more than one turn of the event loop: duration and order."""

from __future__ import annotations

import gc
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final

import pytest

from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.daemon.in_thread import BrokerThread
from fencepost.coordinator.storage.appends import MAX_REQUEST_RECORD_ERRORS
from fencepost.logcore.batch import HEADER_SIZE, LogRecord, encode_batch
from fencepost.logcore.compression import Codec, compress
from fencepost.logcore.record_check import MAX_RECORD_ERRORS, TURN_RECORDS
from fencepost.logcore.varint import encode
from tests.support.batches import NOW_MS, batch
from tests.support.cluster import Cluster, unique
from tests.support.raw import Answer, ConnectionLostError
from tests.support.stalls import LoopWatch, watched_loop
from tests.support.waits import until
from tests.unit.logcore.batch_driver import body, with_payload

RECORDS: Final = 250_000
"""The number of records of a slowly validated batch, below 1 MB with zstd."""

SETTINGS: Final = {
    "transaction.state.log.num.partitions": "1",
    "group.initial.rebalance.delay.ms": "0",
}


class Running:
    """A broker on a separate loop, and clients."""

    def __init__(self, broker: Broker, bootstrap: str) -> None:
        self.broker = broker
        self.bootstrap = bootstrap
        self._clients: list[Cluster] = []
        self.client = self.connect()

    def connect(self) -> Cluster:
        self._clients.append(Cluster(self.bootstrap, deadline_s=60))
        return self._clients[-1]

    def begin(self, topic: str, data: bytes, version: int = 9, **fields: object) -> Cluster:
        """Send a slowly validated batch and return the client that will get the response."""
        client = self.connect()
        topics = [{"name": topic, "partition_data": [{"index": 0, "records": data}]}]
        client.send("produce", version, **{"acks": -1, "topic_data": topics, **fields})
        until(lambda: self.broker.services.appends._last, "the check has begun")
        return client

    def close(self) -> None:
        for client in self._clients:
            client.close()


@contextmanager
def running(directory: Path, **settings: str) -> Iterator[Running]:
    made: list[Broker] = []

    def make() -> Broker:
        made.append(Broker(directory, config={**SETTINGS, **settings}))
        return made[0]

    with BrokerThread(make) as thread:
        system = Running(made[0], thread.bootstrap)
        try:
            yield system
        finally:
            system.close()


def part_of(answer: Answer) -> Answer:
    part: Answer = answer["responses"][0]["partition_responses"][0]
    return part


def sealed(
    records: bytes, count: int, codec: Codec, timestamp_ms: int = NOW_MS, **producer: int
) -> bytes:
    valid = encode_batch([LogRecord(0, timestamp_ms, b"", b"")])
    said = {"record_count": count, "last_offset_delta": count - 1}
    return with_payload(valid, compress(codec, records), attributes=int(codec), **said, **producer)


@pytest.fixture(scope="module")
def tiny() -> bytes:
    """Return the smallest records possible: no value, an empty key."""
    return b"".join(
        encode(6 + (at > 63) + (at > 8191)) + b"\0\0" + encode(at) + b"\0\1\0"
        for at in range(RECORDS)
    )


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path) as system:
        yield system


# --- duration -------------------------------------------------------------------------------------


Watch = Callable[[], AbstractContextManager[LoopWatch]]


@pytest.fixture
def turns() -> Iterator[Watch]:
    """Yield a watch on the loop without the collector's pauses.

    Garbage collections take a time that depends on all objects in the tests' process.
    """
    gc.disable()
    try:
        yield watched_loop
    finally:
        gc.enable()


def late(tiny: bytes) -> bytes:
    return sealed(tiny, RECORDS, Codec.ZSTD, NOW_MS + 10**8)


def one_value(size: int, codec: Codec) -> bytes:
    return sealed(body(0, 0, -1, size, bytes(size), 0), 1, codec)


def tiny_blocks(_tiny: bytes) -> bytes:
    block = struct.pack(">i", 3) + b"\1\0\0"
    stored = b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1) + block * 140_000
    return with_payload(batch([b"x"]), stored, attributes=int(Codec.SNAPPY))


SHAPES = {
    "times out of bounds": (late, {}, "invalid_timestamp"),
    "no key for compaction": (
        lambda tiny: sealed(tiny.replace(b"\0\1\0", b"\1\1\0"), RECORDS, Codec.ZSTD),
        {"cleanup.policy": "compact"},
        "invalid_record",
    ),
    "keys for compaction": (
        lambda tiny: sealed(tiny, RECORDS, Codec.ZSTD),
        {"cleanup.policy": "compact"},
        "none",
    ),
    "many records, plain": (lambda _: batch([b""] * 100_000), {}, "none"),
    "many headers": (
        lambda _: sealed(body(0, 0, -1, -1, 250_000, b"\0\1" * 250_000), 1, Codec.NONE),
        {},
        "none",
    ),
    "another codec": (
        lambda _: one_value(120_000_000, Codec.ZSTD),
        {"compression.type": "gzip"},
        "none",
    ),
    "large when inflated": (lambda _: one_value(4_100_000, Codec.GZIP), {}, "none"),
    "tiny blocks": (tiny_blocks, {}, "invalid_record"),
    "does not inflate": (
        lambda tiny: with_payload(late(tiny), late(tiny)[HEADER_SIZE:-9]),
        {},
        "invalid_record",
    ),
    "as many records as fit a turn": (
        lambda _: batch([b""] * TURN_RECORDS),
        {},
        "none",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_batch_of_any_shape_does_not_block_the_event_loop(
    broker: Running, turns: Watch, tiny: bytes, shape: str
) -> None:
    make, configs, code = SHAPES[shape]
    topic = broker.client.create_topic(unique("t"), configs=configs)
    data = make(tiny)
    with turns() as watch:
        part = broker.client.produce(topic, data)
    assert part["error_code"] == code, part["error_message"]
    assert len(part["record_errors"]) <= MAX_RECORD_ERRORS
    watch.check()


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False])
def test_produce_to_many_partitions_does_not_block_the_event_loop(
    broker: Running, turns: Watch, *, known: bool
) -> None:
    count = 2_000
    topic = unique("many")
    if known:
        broker.client.create_topic(topic, count)
    data = [{"index": index, "records": batch([b"x"])} for index in range(count)]
    for base in (0, 1):
        with turns() as watch:
            answer = broker.client.call(
                "produce", 9, acks=-1, topic_data=[{"name": topic, "partition_data": data}]
            )
        watch.check()
        parts = answer["responses"][0]["partition_responses"]
        assert [part["index"] for part in parts] == list(range(count))
        wanted = ("none", base) if known else ("unknown_topic_or_partition", -1)
        assert {(part["error_code"], part["base_offset"]) for part in parts} == {wanted}


def test_record_errors_of_a_produce_response_are_limited(broker: Running) -> None:
    topic = broker.client.create_topic(unique("late"), 12)
    data = batch([b"x"] * (2 * MAX_RECORD_ERRORS), timestamp_ms=NOW_MS + 10**8)
    answer = broker.client.call(
        "produce",
        9,
        acks=-1,
        topic_data=[
            {
                "name": topic,
                "partition_data": [{"index": index, "records": data} for index in range(12)],
            }
        ],
    )
    parts = answer["responses"][0]["partition_responses"]
    assert {part["error_code"] for part in parts} == {"invalid_timestamp"}
    listed = [len(part["record_errors"]) for part in parts]
    assert listed == [MAX_RECORD_ERRORS] * 10 + [0, 0]
    assert sum(listed) == MAX_REQUEST_RECORD_ERRORS


# --- order ----------------------------------------------------------------------------------------


def test_later_produce_of_another_connection_does_not_overtake(
    broker: Running, tiny: bytes
) -> None:
    topic = broker.client.create_topic(unique("order"), 2)
    large = broker.begin(topic, sealed(tiny, RECORDS, Codec.ZSTD))
    # Appends to another partition are not delayed.
    assert broker.client.produce(topic, [b"aside"], partition=1)["base_offset"] == 0
    assert broker.broker.services.appends._last
    assert broker.client.produce(topic, [b"behind"])["base_offset"] == RECORDS
    assert part_of(large.receive())["base_offset"] == 0
    assert broker.client.produce(topic, [b"last"])["base_offset"] == RECORDS + 1


def test_responses_of_a_connection_keep_the_order_of_its_requests(
    broker: Running, tiny: bytes
) -> None:
    topic = broker.client.create_topic(unique("order"))
    client = broker.begin(topic, late(tiny))
    quick = [{"name": topic, "partition_data": [{"index": 0, "records": batch([b"x"])}]}]
    client.send("produce", 9, acks=-1, topic_data=quick)
    client.send("metadata", 8, topics=[{"name": topic}])
    assert part_of(client.receive())["error_code"] == "invalid_timestamp"
    assert part_of(client.receive())["base_offset"] == 0
    assert client.receive()["topics"][0]["name"] == topic


def test_large_batch_with_acks_0_keeps_its_order_and_refusal_disconnects(
    broker: Running, tiny: bytes
) -> None:
    """The broker sends no response, but appends the batch in order."""
    topic = broker.client.create_topic(unique("acks"))
    gone = broker.begin(topic, sealed(tiny, RECORDS, Codec.ZSTD), acks=0)
    gone.close()
    assert broker.client.produce(topic, [b"behind"])["base_offset"] == RECORDS
    refused = broker.begin(topic, late(tiny), acks=0)
    with pytest.raises(ConnectionLostError):
        refused.receive_frame()
    assert broker.client.offset(topic) == RECORDS + 1


@pytest.mark.parametrize("version", [9, 12])
def test_producer_fenced_during_validation_appends_nothing(
    broker: Running, tiny: bytes, version: int
) -> None:
    """The transaction is verified in the turn of the append, not when the request arrives."""
    tid = unique("tx")
    topic = broker.client.create_topic(unique("fenced"))
    producer_id, epoch = broker.client.init_producer(tid)
    data = sealed(
        tiny, RECORDS, Codec.ZSTD, producer_id=producer_id, producer_epoch=epoch, base_sequence=0
    )
    transactional = with_payload(data, data[HEADER_SIZE:], attributes=Codec.ZSTD | 0x10)
    if version < 12:
        broker.client.call(
            "add_partitions_to_txn",
            1,
            v3_and_below_transactional_id=tid,
            v3_and_below_producer_id=producer_id,
            v3_and_below_producer_epoch=epoch,
            v3_and_below_topics=[{"name": topic, "partitions": [0]}],
        )
    large = broker.begin(topic, transactional, version, transactional_id=tid)
    assert broker.client.init_producer(tid)[1] > epoch
    assert part_of(large.receive())["error_code"] == "invalid_producer_epoch"
    # With version 9, the log has the abort marker; no record of the batch was appended.
    assert broker.client.offset(topic) == (1 if version < 12 else 0)


def test_topic_deleted_during_validation_is_unknown_and_gets_no_records(
    broker: Running, tiny: bytes
) -> None:
    topic = broker.client.create_topic(unique("deleted"))
    large = broker.begin(topic, sealed(tiny, RECORDS, Codec.ZSTD))
    broker.client.call("delete_topics", 3, topic_names=[topic], timeout=10_000)
    broker.client.create_topic(topic)
    assert part_of(large.receive())["error_code"] == "unknown_topic_or_partition"
    assert broker.client.offset(topic) == 0


def test_shutdown_during_validation_appends_the_batch_whole_or_not_at_all(
    tmp_path: Path, tiny: bytes
) -> None:
    """Shutdown does not wait for the response: the batch may or may not be appended."""
    with running(tmp_path) as system:
        topic = system.client.create_topic(unique("stopped"))
        system.client.produce(topic, [b"first"])
        system.begin(topic, sealed(tiny, RECORDS, Codec.ZSTD))
    with running(tmp_path) as again:
        assert again.broker.services.logs.was_clean
        assert again.client.offset(topic) in {1, RECORDS + 1}


def test_concurrent_producers_get_disjoint_offset_ranges_in_order(broker: Running) -> None:
    """Each of ten producers gets its own range of offsets, in the order of its batches."""
    topic = broker.client.create_topic(unique("many"))
    count = TURN_RECORDS + 1
    bases: list[list[int]] = []

    def send(cluster: Cluster) -> None:
        large, small = batch([b""] * count), batch([b""])
        bases.append([cluster.produce(topic, data)["base_offset"] for data in (large, small) * 3])

    threads = [threading.Thread(target=send, args=(broker.connect(),)) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(own == sorted(own) for own in bases)
    ends = sorted(
        (base, base + (1 if at % 2 else count)) for own in bases for at, base in enumerate(own)
    )
    assert [end for _, end in ends[:-1]] == [base for base, _ in ends[1:]]
    assert ends[-1][1] == broker.client.offset(topic) == 30 * (count + 1)
