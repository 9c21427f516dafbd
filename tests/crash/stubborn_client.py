"""A transactional client that outlives the broker: it repeats every request until it is answered.

Raw requests, so that exactly one protocol is used: ``version 1`` adds partitions by
AddPartitionsToTxn and ends with EndTxn v4, ``version 2`` (KIP-890) does the one implicitly and the
other with v5.
"""

from __future__ import annotations

from typing import Any

from tests.support.batches import batch
from tests.support.cluster import GROUP, TRANSACTION, Cluster
from tests.support.raw import Answer, ConnectionLostError, errors_in
from tests.support.waits import until

PASSING = {
    "concurrent_transactions",
    "coordinator_load_in_progress",
    "coordinator_not_available",
    "not_coordinator",
    "not_leader_or_follower",
    "leader_not_available",
    "unknown_topic_or_partition",
    "not_enough_replicas",
    "unstable_offset_commit",
}
"""Errors that a client answers with the same request again."""


class RefusedError(Exception):
    """The broker refused for good what it must accept."""


class StubbornClient:
    """One transactional producer, one transaction at a time.

    With ``mortal`` a lost connection is the end of it: ConnectionLostError.
    """

    def __init__(
        self, bootstrap: str, transactional_id: str, *, version: int, mortal: bool = False
    ) -> None:
        self.bootstrap = bootstrap
        self.name = transactional_id
        self.version = version
        self.mortal = mortal
        self.producer_id = self.epoch = -1
        self.sequences: dict[tuple[str, int], int] = {}
        self._cluster: Cluster | None = None

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None

    def ask(self, api: str, version: int, **body: Any) -> Answer:
        """Send until an answer comes that is no passing error. RefusedError for a lasting one."""

        def attempt() -> Answer | None:
            try:
                if self._cluster is None:
                    self._cluster = Cluster(self.bootstrap, deadline_s=5)
                answer = self._cluster.call(api, version, **body)
            except (ConnectionLostError, OSError) as lost:
                self.close()
                if self.mortal:
                    raise ConnectionLostError from lost
                return None
            return None if PASSING.intersection(errors_in(answer)) else answer

        answer = until(attempt, f"an answer to {api}", deadline_s=60)
        if set(errors_in(answer)) - {"none"}:
            raise RefusedError(f"{api} v{version} {body}: {answer}")
        return answer

    def claim(self, timeout_ms: int = 60_000) -> None:
        """InitProducerId as a new instance does it."""
        for key, kind in ((self.name, TRANSACTION), (self.name, GROUP)):
            self.ask("find_coordinator", 2, key=key, key_type=kind)
        answer = self.ask(
            "init_producer_id",
            4,
            transactional_id=self.name,
            transaction_timeout=timeout_ms,
            producer_id=-1,
            producer_epoch=-1,
        )
        self.producer_id, self.epoch = answer["producer_id"], answer["producer_epoch"]
        self.sequences.clear()

    def send(self, topic: str, partition: int, value: bytes) -> None:
        """One record, in a batch of its own."""
        if self.version == 1:
            self.ask(
                "add_partitions_to_txn",
                3,
                v3_and_below_transactional_id=self.name,
                v3_and_below_producer_id=self.producer_id,
                v3_and_below_producer_epoch=self.epoch,
                v3_and_below_topics=[{"name": topic, "partitions": [partition]}],
            )
        sequence = self.sequences.get((topic, partition), 0)
        data = batch(
            [value],
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            sequence=sequence,
            transactional=True,
        )
        self.ask(
            "produce",
            12 if self.version == 2 else 9,
            transactional_id=self.name,
            acks=-1,
            timeout=5000,
            topic_data=[{"name": topic, "partition_data": [{"index": partition, "records": data}]}],
        )
        self.sequences[topic, partition] = sequence + 1

    def send_offset(self, group: str, topic: str, offset: int) -> None:
        """Commit partition 0's offset inside the transaction."""
        identity = {
            "transactional_id": self.name,
            "group_id": group,
            "producer_id": self.producer_id,
            "producer_epoch": self.epoch,
        }
        if self.version == 1:
            self.ask("add_offsets_to_txn", 3, **identity)
        self.ask(
            "txn_offset_commit",
            5 if self.version == 2 else 3,
            **identity,
            generation_id=-1,
            topics=[
                {
                    "name": topic,
                    "partitions": [
                        {
                            "partition_index": 0,
                            "committed_offset": offset,
                            "committed_leader_epoch": -1,
                            "committed_metadata": "",
                        }
                    ],
                }
            ],
        )

    def end(self, *, commit: bool) -> None:
        answer = self.ask(
            "end_txn",
            5 if self.version == 2 else 4,
            transactional_id=self.name,
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            committed=commit,
        )
        if self.version == 2:
            self.producer_id, self.epoch = answer["producer_id"], answer["producer_epoch"]
            self.sequences.clear()
