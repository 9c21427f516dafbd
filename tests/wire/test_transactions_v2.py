"""KIP-890 part two by raw requests, because no Python client has it.

Produce v12 and TxnOffsetCommit v5 add partitions implicitly, and EndTxn v5 bumps the epoch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tests.support.batches import batch
from tests.support.cluster import READ_COMMITTED, Cluster, unique
from tests.support.waits import until

PASSING = {"concurrent_transactions"}


@dataclasses.dataclass
class Producer:
    """A minimal TV2 producer, which uses the epoch from EndTxn's response."""

    cluster: Cluster
    name: str
    producer_id: int = -1
    epoch: int = -1
    sequence: dict[tuple[str, int], int] = dataclasses.field(default_factory=dict)

    def init(self, timeout_ms: int = 60_000) -> Producer:
        self.producer_id, self.epoch = self.cluster.init_producer(self.name, timeout_ms=timeout_ms)
        return self

    def produce(self, topic: str, value: bytes, partition: int = 0) -> str:
        sequence = self.sequence.get((topic, partition), 0)
        data = batch(
            [value],
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            sequence=sequence,
            transactional=True,
        )

        def attempt() -> str | None:
            error: str = self.cluster.produce(
                topic, data, partition=partition, version=12, transactional_id=self.name
            )["error_code"]
            return None if error in PASSING else error

        error = until(attempt, "the previous transaction's completion")
        if error == "none":
            self.sequence[topic, partition] = sequence + 1
        return error

    def commit_offset(self, group: str, topic: str, offset: int, metadata: str = "") -> str:
        body: dict[str, Any] = {
            "transactional_id": self.name,
            "group_id": group,
            "producer_id": self.producer_id,
            "producer_epoch": self.epoch,
            "generation_id": -1,
            "topics": [
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
        }

        def attempt() -> str | None:
            answer = self.cluster.call("txn_offset_commit", 5, **body)
            error: str = answer["topics"][0]["partitions"][0]["error_code"]
            return None if error in PASSING else error

        return until(attempt, "the previous transaction's completion")

    def end(self, commit: bool, *, epoch: int | None = None) -> dict[str, Any]:
        """Send EndTxn, with retries while a former one completes, and take the new id and epoch."""

        def attempt() -> dict[str, Any] | None:
            answer = self.cluster.call(
                "end_txn",
                5,
                transactional_id=self.name,
                producer_id=self.producer_id,
                producer_epoch=self.epoch if epoch is None else epoch,
                committed=commit,
            )
            return None if answer["error_code"] in PASSING else answer

        answer = until(attempt, "the end of the transaction")
        if answer["error_code"] == "none" and epoch is None:
            self.producer_id, self.epoch = answer["producer_id"], answer["producer_epoch"]
            self.sequence.clear()
        return answer


def settled(cluster: Cluster, topic: str, end: int) -> None:
    until(lambda: cluster.lso(topic) == cluster.offset(topic) == end, f"LSO = LEO = {end}")


def test_every_end_txn_bumps_the_epoch(cluster: Cluster) -> None:
    topic = cluster.create_topic(unique("tv2"))
    producer = Producer(cluster, unique("id")).init()
    first = producer.producer_id, producer.epoch
    for number, commit in enumerate((True, False, True, True, False)):
        assert producer.produce(topic, b"%d" % number) == "none"
        assert producer.produce(topic, b"%d again" % number) == "none"
        assert producer.end(commit)["error_code"] == "none"
        assert (producer.producer_id, producer.epoch) == (first[0], first[1] + number + 1)
    settled(cluster, topic, 15)
    assert cluster.values(topic, isolation=READ_COMMITTED) == [
        b"%d%s" % (n, tail) for n in (0, 2, 3) for tail in (b"", b" again")
    ]
    markers = [b.producer_epoch for b in cluster.read(topic, controls=True) if b.is_control]
    assert markers == [first[1] + n for n in (1, 2, 3, 4, 5)]


def test_retried_end_txn_returns_the_same_id_and_epoch(cluster: Cluster) -> None:
    topic = cluster.create_topic(unique("tv2-retry"))
    producer = Producer(cluster, unique("id")).init()
    before = producer.epoch
    producer.produce(topic, b"v")
    first = producer.end(True)
    settled(cluster, topic, 2)
    again = producer.end(True, epoch=before)
    assert again["error_code"] == "none"
    assert (again["producer_id"], again["producer_epoch"]) == (
        first["producer_id"],
        first["producer_epoch"],
    )
    assert producer.end(False, epoch=before)["error_code"] == "invalid_txn_state"
    assert cluster.offset(topic) == 2


def test_delayed_end_txn_cannot_end_a_later_transaction(cluster: Cluster) -> None:
    """KAFKA-17754: under TV1, EndTxn does not show which of two transactions it belongs to."""
    topic = cluster.create_topic(unique("tv2-late"))
    producer = Producer(cluster, unique("id")).init()
    before = producer.epoch
    producer.produce(topic, b"first")
    producer.end(True)
    producer.produce(topic, b"second")
    for commit in (True, False):
        assert producer.end(commit, epoch=before)["error_code"] == "producer_fenced"
    assert cluster.lso(topic) == 2
    producer.end(False)
    settled(cluster, topic, 4)
    assert cluster.values(topic, isolation=READ_COMMITTED) == [b"first"]


def test_late_batch_after_the_end_opens_no_transaction(cluster: Cluster) -> None:
    topic = cluster.create_topic(unique("tv2-stray"))
    producer = Producer(cluster, unique("id")).init()
    stale = dataclasses.replace(producer, sequence={})
    producer.produce(topic, b"v")
    producer.end(False)
    settled(cluster, topic, 2)
    assert stale.produce(topic, b"stray") == "invalid_producer_epoch"
    settled(cluster, topic, 2)


def test_empty_abort_bumps_the_epoch_and_empty_commit_is_refused(cluster: Cluster) -> None:
    producer = Producer(cluster, unique("id")).init()
    assert producer.end(True)["error_code"] == "invalid_txn_state"
    start = producer.epoch
    assert producer.end(False)["error_code"] == "none"
    assert producer.epoch == start + 1


def test_txn_offset_commit_adds_its_partition_to_the_transaction(cluster: Cluster) -> None:
    topic, group = cluster.create_topic(unique("tv2-offsets")), unique("g")
    cluster.coordinator(group, 0)
    producer = Producer(cluster, unique("id")).init()
    for commit, mark in ((True, 4), (False, 9)):
        assert producer.produce(topic, b"v") == "none"
        assert producer.commit_offset(group, topic, mark) == "none"
        producer.end(commit)
    settled(cluster, topic, 4)
    assert cluster.committed(group, topic, stable=True) == 4


def test_init_producer_id_fences_and_aborts_the_former_producer(cluster: Cluster) -> None:
    topic = cluster.create_topic(unique("tv2-fence"))
    zombie = Producer(cluster, unique("id")).init()
    assert zombie.produce(topic, b"zombie") == "none"
    newer = Producer(cluster, zombie.name).init()
    settled(cluster, topic, 2)
    assert newer.producer_id == zombie.producer_id
    assert newer.epoch > zombie.epoch
    assert zombie.produce(topic, b"late") == "invalid_producer_epoch"
    assert zombie.end(True)["error_code"] == "producer_fenced"
    assert newer.produce(topic, b"kept") == "none"
    newer.end(True)
    settled(cluster, topic, 4)
    assert cluster.values(topic, isolation=READ_COMMITTED) == [b"kept"]


def test_transaction_timeout_aborts_and_fences(cluster: Cluster) -> None:
    topic = cluster.create_topic(unique("tv2-timeout"))
    producer = Producer(cluster, unique("id")).init(timeout_ms=500)
    assert producer.produce(topic, b"forgotten") == "none"
    settled(cluster, topic, 2)
    # The abort bumped the epoch by one, so this EndTxn looks like a retry with another outcome.
    assert producer.end(True)["error_code"] == "invalid_txn_state"
    assert producer.produce(topic, b"late") == "invalid_producer_epoch"
    assert cluster.values(topic, isolation=READ_COMMITTED) == []


def test_first_batch_with_nonzero_sequence_is_refused(cluster: Cluster) -> None:
    topic = cluster.create_topic(unique("tv2-seq"))
    producer = Producer(cluster, unique("id")).init()
    producer.sequence[topic, 0] = 3
    assert producer.produce(topic, b"v") == "out_of_order_sequence_number"
    producer.sequence[topic, 0] = 0
    assert producer.produce(topic, b"v") == "none"
    assert producer.end(True)["error_code"] == "none"
    settled(cluster, topic, 2)


def test_tv1_and_tv2_transactions_interleave_in_one_partition(cluster: Cluster) -> None:
    topic = cluster.create_topic(unique("tv2-mixed"))
    new = Producer(cluster, unique("id")).init()
    old_name = unique("old")
    old_id, old_epoch = cluster.init_producer(old_name)
    for number in range(4):
        assert new.produce(topic, b"new %d" % number) == "none"
        added = until(
            lambda: [
                error
                for error in [
                    cluster.call(
                        "add_partitions_to_txn",
                        3,
                        v3_and_below_transactional_id=old_name,
                        v3_and_below_producer_id=old_id,
                        v3_and_below_producer_epoch=old_epoch,
                        v3_and_below_topics=[{"name": topic, "partitions": [0]}],
                    )["results_by_topic_v3_and_below"][0]["results_by_partition"][0][
                        "partition_error_code"
                    ]
                ]
                if error not in PASSING
            ],
            "the old transaction's completion",
        )
        assert added == ["none"]
        data = batch(
            [b"old %d" % number],
            producer_id=old_id,
            producer_epoch=old_epoch,
            sequence=number,
            transactional=True,
        )
        part = cluster.produce(topic, data, version=9, transactional_id=old_name)
        assert part["error_code"] == "none"
        ended = cluster.call(
            "end_txn",
            4,
            transactional_id=old_name,
            producer_id=old_id,
            producer_epoch=old_epoch,
            committed=number % 2 == 0,
        )
        assert ended["error_code"] == "none"
        new.end(number % 2 == 1)
    settled(cluster, topic, 16)
    assert cluster.values(topic, isolation=READ_COMMITTED) == [
        b"old 0",
        b"new 1",
        b"old 2",
        b"new 3",
    ]
