"""Writes of many kinds to either broker, and everything that readers see of them afterwards."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from tests.support import requests
from tests.support.batches import HEADER, batch
from tests.support.cluster import (
    EARLIEST,
    GROUP,
    LATEST,
    READ_COMMITTED,
    READ_UNCOMMITTED,
    TRANSACTION,
    Cluster,
)
from tests.support.raw import Answer
from tests.support.share import (
    ACCEPT,
    FINAL,
    FULL,
    REJECT,
    RELEASE,
    Member,
    acquired,
    parts_of,
)
from tests.support.targets import SETTINGS
from tests.support.waits import until
from tests.wire.clients import confluent_consumer, confluent_producer, drain
from tests.wire.test_transactions_v2 import Producer

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
SMALL = {
    "segment.bytes": str(1 << 20),
    "index.interval.bytes": "1024",
    "retention.ms": "-1",  # raw batches have a fixed old timestamp
}
BROKER = {
    **SETTINGS,
    "log.cleaner.backoff.ms": "200",
    "log.flush.start.offset.checkpoint.interval.ms": "200",
    "log.cleaner.min.cleanable.ratio": "0.01",
    "offsets.topic.segment.bytes": str(1 << 20),
    "transaction.state.log.segment.bytes": str(1 << 20),
}
PARTITIONS = {**{f"plain-{codec}": 1 for codec in CODECS}, "txn": 2, "table": 1, "trimmed": 1}
"""The topics that :func:`write_records` creates, with their numbers of partitions."""

MAX_TIMESTAMP = -3
OPEN_TIMEOUT_MS = 600_000
IDEMPOTENT_VALUES = 3


def write_records(cluster: Cluster, bootstrap: str, data_dir: Path) -> dict[str, int]:
    """Fill the topics; return id, epoch and next sequence of the producer of ``plain-none``."""
    for topic, partitions in PARTITIONS.items():
        compacted = {"cleanup.policy": "compact"} if topic == "table" else {}
        cluster.create_topic(topic, partitions, {**SMALL, **compacted})
    for codec in CODECS:
        with confluent_producer(
            bootstrap, compression_type=codec, enable_idempotence=True, linger_ms=5
        ) as producer:
            for i in range(500):
                headers = [("h", b"v"), ("empty", None), ("", b"")]
                value = None if i % 50 == 7 else os.urandom(1500).hex()
                producer.produce(f"plain-{codec}", value, b"%d" % i, headers=headers)
                producer.poll(0)
    _write_transactions(cluster)
    with confluent_producer(bootstrap, linger_ms=5) as producer:
        for i in range(1500):
            value = None if i % 100 == 99 else os.urandom(1500)
            producer.produce("table", value, b"key-%d" % (i % 40))
            producer.poll(0)
    wait_for_cleaner(data_dir, "table")
    for _ in range(30):
        cluster.produce("trimmed", [os.urandom(100_000)])
    answer = cluster.call(
        "delete_records",
        2,
        timeout=10_000,
        topics=[{"name": "trimmed", "partitions": [{"partition_index": 0, "offset": 17}]}],
    )
    assert answer["topics"][0]["partitions"][0]["low_watermark"] == 17, answer
    producer_id, epoch = cluster.init_producer()
    for sequence in range(IDEMPOTENT_VALUES):
        data = batch(
            [b"mine"],
            producer_id=producer_id,
            producer_epoch=epoch,
            sequence=sequence,
            timestamp_ms=time.time_ns() // 1_000_000,
        )
        assert cluster.produce("plain-none", data)["error_code"] == "none"
    return {"producer_id": producer_id, "epoch": epoch, "sequence": IDEMPOTENT_VALUES}


def _write_transactions(cluster: Cluster) -> None:
    """Commit and abort transactions of two producers in turn, and leave one transaction open."""
    modern, other = Producer(cluster, "modern").init(), Producer(cluster, "other").init()
    for number in range(12):
        for partition in range(2):
            assert modern.produce("txn", os.urandom(100_000), partition) == "none"
            assert other.produce("txn", os.urandom(30_000), partition) == "none"
        modern.end(number % 3 != 0)
        if number % 4 == 3:
            other.end(number % 8 == 3)
    still = Producer(cluster, "open").init(OPEN_TIMEOUT_MS)
    assert still.produce("txn", b"open", 1) == "none"
    until(lambda: cluster.lso("txn", 1) < cluster.offset("txn", 1), "an open transaction")


def wait_for_cleaner(data_dir: Path, topic: str) -> None:
    """Wait until a partition of ``topic`` has been compacted."""

    def cleaned() -> bool:
        path = data_dir / "cleaner-offset-checkpoint"
        rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return any(row[0] == topic and int(row[2]) > 0 for row in rows if len(row) == 3)

    until(cleaned, f"a compaction of {topic}", poll_s=0.1, deadline_s=60)


def continue_producing(cluster: Cluster, known: dict[str, int]) -> None:
    """Continue an idempotent producer: a resent batch is a duplicate, and a gap is refused."""

    def send(sequence: int) -> Answer:
        data = batch(
            [b"mine"],
            producer_id=known["producer_id"],
            producer_epoch=known["epoch"],
            sequence=sequence,
            timestamp_ms=time.time_ns() // 1_000_000,
        )
        return cluster.produce("plain-none", data)

    end = cluster.offset("plain-none")
    assert send(known["sequence"] - 1)["base_offset"] == end - 1
    assert send(known["sequence"] + 5)["error_code"] == "out_of_order_sequence_number"
    assert send(known["sequence"])["base_offset"] == end


def fencepost(*arguments: object) -> str:
    """Run a command and return its output. The test fails unless the exit status is 0."""
    done = subprocess.run(
        [sys.executable, "-m", "fencepost", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# --- fetched data ---


def fingerprint(cluster: Cluster) -> dict[str, Any]:
    """Return offsets, lookups by time, batches and aborted transactions of all topics."""
    return {
        f"{topic}-{index}": _partition(cluster, topic, index)
        for topic, partitions in PARTITIONS.items()
        for index in range(partitions)
    }


def _partition(cluster: Cluster, topic: str, index: int) -> dict[str, Any]:
    plain, _ = _read(cluster, topic, index, READ_UNCOMMITTED)
    committed, aborted = _read(cluster, topic, index, READ_COMMITTED)
    times = sorted({HEADER.unpack_from(data)[8] for data in plain if data})
    return {
        "start": cluster.offset(topic, index, EARLIEST),
        "end": cluster.offset(topic, index, LATEST),
        "lso": cluster.lso(topic, index),
        "max timestamp": _at_time(cluster, topic, index, MAX_TIMESTAMP),
        "times": [
            _at_time(cluster, topic, index, timestamp)
            for timestamp in times[:: len(times) // 9 + 1]
        ],
        "batches": plain,
        "committed": committed,
        "aborted": aborted,
    }


def _read(
    cluster: Cluster, topic: str, index: int, isolation: int
) -> tuple[list[bytes], list[tuple[int, int]]]:
    """Return all batches without their leader epochs, and the responses' aborted transactions."""
    offset = cluster.offset(topic, index, EARLIEST)
    end = cluster.offset(topic, index, LATEST, isolation=isolation)
    found: list[bytes] = []
    aborted: set[tuple[int, int]] = set()
    while offset < end:
        part = cluster.fetch(topic, partition=index, offset=offset, isolation=isolation)
        assert part["error_code"] == "none", part
        aborted |= {
            (transaction["producer_id"], transaction["first_offset"])
            for transaction in part["aborted_transactions"] or ()
        }
        data, at = part["records"] or b"", 0
        while at + HEADER.size <= len(data):
            base, size, *_ = HEADER.unpack_from(data, at)
            if at + 12 + size > len(data):
                break
            last_delta = struct.unpack_from(">i", data, at + 23)[0]
            found.append(data[at : at + 12] + bytes(4) + data[at + 16 : at + 12 + size])
            at += 12 + size
            offset = base + last_delta + 1
        assert at, f"nothing at {offset} of {end} in {topic}-{index}"
    return found, sorted(aborted)


def _at_time(cluster: Cluster, topic: str, index: int, timestamp: int) -> tuple[int, int]:
    answer = cluster.call(
        "list_offsets",
        7,
        replica_id=-1,
        topics=[
            {
                "name": topic,
                "partitions": [
                    {"partition_index": index, "timestamp": timestamp, "current_leader_epoch": -1}
                ],
            }
        ],
    )
    part = answer["topics"][0]["partitions"][0]
    assert part["error_code"] == "none", part
    return part["offset"], part["timestamp"]


# --- coordinators ---


def write_groups(cluster: Cluster, bootstrap: str, data_dir: Path) -> None:
    """Create groups of both protocols, with and without members; commit offsets in every way."""
    for name, protocol in (("classic", "classic"), ("modern-group", "consumer")):
        conf = {} if protocol == "classic" else {"group_protocol": protocol}
        with _consumer(bootstrap, name, conf) as consumer:
            consumer.subscribe(["plain-none"])
            drain(consumer, 10)
            consumer.commit(asynchronous=False)
    cluster.coordinator("live", GROUP)
    answer = cluster.call(
        "consumer_group_heartbeat",
        1,
        group_id="live",
        member_id="AAAAAAAAAAAAAAAAAAAAAQ",
        member_epoch=0,
        rebalance_timeout=300_000,
        subscribed_topic_names=["plain-none"],
        server_assignor=None,
        topic_partitions=[],
    )
    assert answer["error_code"] == "none", answer
    for group in ("simple", "gone"):
        cluster.coordinator(group, GROUP)
        _commit(cluster, group, "txn", 5, "told")
    # Enough for segments to roll and be compacted.
    for number in range(900):
        _commit(cluster, "simple", "txn", number, "m" * 4000)
    assert (
        cluster.call("delete_groups", 2, groups_names=["gone"])["results"][0]["error_code"]
        == "none"
    )
    worker = Producer(cluster, "worker").init(OPEN_TIMEOUT_MS)
    cluster.coordinator("exact", GROUP)
    assert worker.commit_offset("exact", "txn", 3) == "none"
    worker.end(commit=True)
    assert worker.commit_offset("exact", "txn", 4) == "none"
    worker.end(commit=False)
    assert worker.commit_offset("exact", "table", 9) == "none"
    _write_share_groups(cluster)
    wait_for_cleaner(data_dir, "__consumer_offsets")


SHARED, SHARING = "shared", "sharing"
"""Two share groups: the first without members, the second with one member."""

FIRST_SHARED = 10
"""The first record of ``plain-none`` that the group :data:`SHARED` gets."""


def _write_share_groups(cluster: Cluster) -> None:
    """Create share groups with acknowledged records, and with a member that has an assignment."""
    for group in (SHARED, SHARING):
        cluster.coordinator(group, GROUP)
    altering = requests.alter_share_group_offsets(SHARED, "plain-none", {0: FIRST_SHARED})
    altered = cluster.call("alter_share_group_offsets", 0, **altering)
    assert altered["error_code"] == "none", altered
    found = cluster.topic_id("plain-none")
    member = Member(cluster, SHARED)
    part = until(lambda: _acquired(member, found), "records of a share group")
    last = part["acquired_records"][-1]["last_offset"]
    outcomes = [
        (FIRST_SHARED, FIRST_SHARED, ACCEPT),
        (FIRST_SHARED + 1, FIRST_SHARED + 1, RELEASE),
        (FIRST_SHARED + 2, FIRST_SHARED + 2, REJECT),
        (FIRST_SHARED + 3, last, RELEASE),
    ]
    for batches in (outcomes[1:], outcomes[:1]):
        answer = member.acknowledge({found: {0: batches}})
        assert parts_of(answer)[0]["error_code"] == "none", answer
    member.epoch = FINAL
    assert member.fetch({})["error_code"] == "none"
    body = requests.join_share_group(SHARING, "AAAAAAAAAAAAAAAAAAAAAQ", "txn")

    def is_assigned() -> bool:
        answer = cluster.call("share_group_heartbeat", 1, **body)
        body["member_epoch"] = answer["member_epoch"]
        return bool(answer["assignment"]["topic_partitions"])

    until(is_assigned, "an assignment of a share group")


def _acquired(member: Member, topic_id: uuid.UUID) -> Answer | None:
    answer = member.fetch({topic_id: {0: ()}} if member.epoch == FULL else {})
    part = parts_of(answer).get(0)
    return part if part is not None and part["acquired_records"] else None


def released_records_are_acquired_again(cluster: Cluster) -> None:
    """Fetch in the group :data:`SHARED` from the broker that now has the log."""
    member = Member(cluster, SHARED)
    found = cluster.topic_id("plain-none")
    part = until(lambda: _acquired(member, found), "records of a share group")
    ranges = acquired(part)
    assert ranges[0] == (FIRST_SHARED + 1, FIRST_SHARED + 1, 2)
    assert ranges[1][0] == FIRST_SHARED + 3
    assert ranges[1][2] == 2


def _consumer(bootstrap: str, group: str, conf: dict[str, str]) -> Any:
    if not conf:
        return confluent_consumer(bootstrap, group_id=group)
    import contextlib

    import confluent_kafka

    return contextlib.closing(
        confluent_kafka.Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": group,
                "group.protocol": "consumer",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
            }
        )
    )


def _commit(cluster: Cluster, group: str, topic: str, offset: int, metadata: str) -> None:
    answer = cluster.call(
        "offset_commit",
        8,
        group_id=group,
        generation_id_or_member_epoch=-1,
        topics=[
            {
                "name": topic,
                "partitions": [
                    {
                        "partition_index": 0,
                        "committed_offset": offset,
                        "committed_leader_epoch": -1,
                        "committed_metadata": metadata,
                    }
                ],
            }
        ],
    )
    assert answer["topics"][0]["partitions"][0]["error_code"] == "none", answer


def coordinators(cluster: Cluster) -> dict[str, Any]:
    """Return the groups and transactions that the admin APIs describe."""
    for key in ("classic", "modern-group", "live", "simple", "exact", SHARED, SHARING):
        cluster.coordinator(key, GROUP)
    cluster.coordinator("modern", TRANSACTION)
    listed = cluster.call("list_groups", 5)["groups"]
    offsets = {
        group: [
            (topic["name"], part["partition_index"], part["committed_offset"], part["metadata"])
            for topic in cluster.call("offset_fetch", 7, group_id=group, topics=None)["topics"]
            for part in topic["partitions"]
        ]
        for group in ("classic", "modern-group", "live", "simple", "exact")
    }
    stable = cluster.call(
        "offset_fetch",
        7,
        group_id="exact",
        require_stable=True,
        topics=[{"name": "table", "partition_indexes": [0]}],
    )
    transactions = cluster.call("list_transactions", 0)["transaction_states"]
    names = sorted(transaction["transactional_id"] for transaction in transactions)
    described = cluster.call("describe_transactions", 0, transactional_ids=names)
    return {
        "share groups": _described_share_groups(cluster),
        "groups": sorted(
            (group["group_id"], group["group_type"], group["group_state"]) for group in listed
        ),
        "offsets": {group: sorted(rows) for group, rows in offsets.items()},
        "pending": stable["topics"][0]["partitions"][0]["error_code"],
        "consumer groups": [
            {
                "epoch": group["group_epoch"],
                "assignment epoch": group["assignment_epoch"],
                "assignor": group["assignor_name"],
                "members": [
                    (
                        member["member_id"],
                        member["member_epoch"],
                        member["subscribed_topic_names"],
                        [p["partitions"] for p in member["assignment"]["topic_partitions"]],
                    )
                    for member in group["members"]
                ],
            }
            for group in cluster.call(
                "consumer_group_describe", 1, group_ids=["live", "modern-group"]
            )["groups"]
        ],
        "transactions": [
            {
                key: transaction[key]
                for key in (
                    "transactional_id",
                    "transaction_state",
                    "producer_id",
                    "producer_epoch",
                    "transaction_timeout",
                    "transaction_start_time",
                    "topics",
                )
                if key in transaction
            }
            for transaction in sorted(
                described["transaction_states"],
                key=lambda transaction: str(transaction["transactional_id"]),
            )
        ],
    }


def _described_share_groups(cluster: Cluster) -> list[dict[str, Any]]:
    shares = cluster.call("share_group_describe", 1, group_ids=[SHARED, SHARING])["groups"]
    return [
        {
            "epochs": (group["group_epoch"], group["assignment_epoch"], group["group_state"]),
            "members": [
                (
                    member["member_id"],
                    member["member_epoch"],
                    member["subscribed_topic_names"],
                    [p["partitions"] for p in member["assignment"]["topic_partitions"]],
                )
                for member in group["members"]
            ],
            "offsets": cluster.call(
                "describe_share_group_offsets",
                1,
                **requests.describe_share_group_offsets(group["group_id"], None),
            )["groups"][0]["topics"],
        }
        for group in sorted(shares, key=lambda group: str(group["group_id"]))
    ]
