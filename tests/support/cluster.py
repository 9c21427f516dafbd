"""Common operations on a broker by raw requests, without a client library."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from tests.support.batches import Batch, batch, batches
from tests.support.raw import Answer, RawClient
from tests.support.waits import DEADLINE_S, until

READ_UNCOMMITTED, READ_COMMITTED = 0, 1
GROUP, TRANSACTION = 0, 1
LATEST, EARLIEST = -1, -2


def unique(stem: str) -> str:
    """Return a name that no other test uses."""
    return f"{stem}-{uuid.uuid4().hex[:10]}"


class Cluster(RawClient):
    """A raw connection with helpers to prepare scenarios and to check their results."""

    def create_topic(
        self, name: str, partitions: int = 1, configs: Mapping[str, str] | None = None
    ) -> str:
        """Create a topic and wait until every partition has a leader."""
        answer = self.call(
            "create_topics",
            5,
            timeout=10_000,
            topics=[
                {
                    "name": name,
                    "num_partitions": partitions,
                    "replication_factor": 1,
                    "configs": [{"name": k, "value": v} for k, v in (configs or {}).items()],
                }
            ],
        )
        assert answer["topics"][0]["error_code"] == "none", answer
        until(lambda: self.leaders(name) == partitions, f"leaders of {name}")
        return name

    def leaders(self, topic: str) -> int:
        """Return the number of partitions of ``topic`` whose leaders serve.

        Apache Kafka's Metadata names a leader shortly before the leader serves requests, so this
        method also sends ListOffsets.
        """
        answer = self.call("metadata", 8, topics=[{"name": topic}])
        led = [
            part["partition_index"]
            for part in answer["topics"][0]["partitions"]
            if part["error_code"] == "none" and part["leader_id"] >= 0
        ]
        if not led:
            return 0
        topics = [
            {"partition_index": index, "timestamp": LATEST, "current_leader_epoch": -1}
            for index in led
        ]
        response = self.call(
            "list_offsets", 5, replica_id=-1, topics=[{"name": topic, "partitions": topics}]
        )
        return sum(part["error_code"] == "none" for part in response["topics"][0]["partitions"])

    def topic_id(self, topic: str) -> uuid.UUID:
        """Return the id of a topic, for fetch v13 and produce v13."""
        answer = self.call("metadata", 12, topics=[{"name": topic}])
        return uuid.UUID(answer["topics"][0]["topic_id"])

    def coordinator(self, key: str, kind: int) -> None:
        """Wait until all coordinators of this kind serve; the cluster must be a single broker.

        The first FindCoordinator creates the internal topic. ListGroups and ListTransactions fail
        while a partition of the topic is loading.
        """

        def probe() -> bool:
            answer = self.call("find_coordinator", 2, key=key, key_type=kind)
            if answer["error_code"] != "none":
                return False
            if kind == TRANSACTION:
                listed = self.call("list_transactions", 0)
                return bool(listed["error_code"] == "none")
            fetched = self.call("offset_fetch", 5, group_id=key, topics=[])
            listed = self.call("list_groups", 0)
            return fetched["error_code"] == listed["error_code"] == "none"

        until(probe, f"coordinator of {key}")

    def init_producer(
        self,
        transactional_id: str | None = None,
        *,
        timeout_ms: int = 60_000,
        producer: tuple[int, int] = (-1, -1),
        version: int = 4,
    ) -> tuple[int, int]:
        """Send InitProducerId, with retries after retriable errors; return (id, epoch)."""
        if transactional_id is not None:
            self.coordinator(transactional_id, TRANSACTION)

        def probe() -> Answer | None:
            answer = self.call(
                "init_producer_id",
                version,
                transactional_id=transactional_id,
                transaction_timeout=timeout_ms,
                producer_id=producer[0],
                producer_epoch=producer[1],
            )
            passing = {"concurrent_transactions", "coordinator_load_in_progress", "not_coordinator"}
            return None if answer["error_code"] in passing else answer

        answer = until(probe, f"producer id for {transactional_id}")
        assert answer["error_code"] == "none", answer
        return answer["producer_id"], answer["producer_epoch"]

    def produce(self, topic: str, records: bytes | Sequence[bytes | None], **how: Any) -> Answer:
        """Produce a batch (or plain values) and return the partition's response."""
        self.begin_produce(topic, records, **how)
        part: Answer = self.receive()["responses"][0]["partition_responses"][0]
        return part

    def begin_produce(
        self,
        topic: str,
        records: bytes | Sequence[bytes | None],
        *,
        partition: int = 0,
        version: int = 9,
        transactional_id: str | None = None,
        acks: int = -1,
    ) -> None:
        """Send a batch (or plain values) without receiving the response."""
        data = records if isinstance(records, bytes) else batch(records)
        self.send(
            "produce",
            version,
            transactional_id=transactional_id,
            acks=acks,
            timeout=10_000,
            topic_data=[{"name": topic, "partition_data": [{"index": partition, "records": data}]}],
        )

    def fetch(
        self,
        topic: str,
        *,
        partition: int = 0,
        offset: int = 0,
        isolation: int = READ_UNCOMMITTED,
        max_wait_ms: int = 0,
        max_bytes: int = 50_000_000,
        version: int = 11,
    ) -> Answer:
        """Fetch once and return the partition's response."""
        answer = self.call(
            "fetch",
            version,
            replica_id=-1,
            max_wait=max_wait_ms,
            min_bytes=1,
            max_bytes=max_bytes,
            isolation_level=isolation,
            session_epoch=-1,
            topics=[
                {
                    "topic": topic,
                    "partitions": [
                        {
                            "partition": partition,
                            "fetch_offset": offset,
                            "partition_max_bytes": max_bytes,
                            "current_leader_epoch": -1,
                        }
                    ],
                }
            ],
        )
        assert answer["error_code"] == "none", answer
        part: Answer = answer["responses"][0]["partitions"][0]
        return part

    def read(
        self,
        topic: str,
        *,
        partition: int = 0,
        isolation: int = READ_UNCOMMITTED,
        controls: bool = False,
        begin: int | None = None,
        end: int | None = None,
    ) -> list[Batch]:
        """Return all batches up to the end that ``isolation`` shows, without aborted batches.

        With both ``begin`` and ``end`` no ListOffsets is sent, so a follower can be read too.
        Control batches are left out unless ``controls`` is set.

        Aborted batches are skipped as a consumer does: a producer's batches from the first offset
        of an aborted transaction on, up to its next control batch.
        """
        offset = self.offset(topic, partition, EARLIEST) if begin is None else begin
        if end is None:
            end = self.offset(topic, partition, LATEST, isolation=isolation)
        all_batches: list[Batch] = []
        while offset < end:
            part = self.fetch(topic, partition=partition, offset=offset, isolation=isolation)
            assert part["error_code"] == "none", part
            aborted = sorted(
                (a["first_offset"], a["producer_id"]) for a in part["aborted_transactions"] or ()
            )
            skipping: set[int] = set()
            got = batches(part["records"] or b"")
            assert got, f"nothing at {offset} of {end} in {topic}-{partition}"
            for fetched in got:
                while aborted and aborted[0][0] <= fetched.last_offset:
                    skipping.add(aborted.pop(0)[1])
                if fetched.is_control:
                    skipping.discard(fetched.producer_id)
                    all_batches += [fetched] if controls else []
                elif not (fetched.is_transactional and fetched.producer_id in skipping):
                    all_batches.append(fetched)
                offset = fetched.last_offset + 1
        return all_batches

    def values(
        self, topic: str, *, partition: int = 0, isolation: int = READ_UNCOMMITTED
    ) -> list[bytes | None]:
        """Return the values of :meth:`read`."""
        read = self.read(topic, partition=partition, isolation=isolation)
        return [value for fetched in read for value in fetched.values]

    def offset(
        self, topic: str, partition: int = 0, at: int = LATEST, *, isolation: int = READ_UNCOMMITTED
    ) -> int:
        """Return an offset by ListOffsets; LATEST under READ_COMMITTED is the LSO."""
        answer = self.call(
            "list_offsets",
            5,
            replica_id=-1,
            isolation_level=isolation,
            topics=[
                {
                    "name": topic,
                    "partitions": [
                        {"partition_index": partition, "timestamp": at, "current_leader_epoch": -1}
                    ],
                }
            ],
        )
        part = answer["topics"][0]["partitions"][0]
        assert part["error_code"] == "none", part
        return int(part["offset"])

    def lso(self, topic: str, partition: int = 0) -> int:
        """Return the last stable offset."""
        return self.offset(topic, partition, isolation=READ_COMMITTED)

    def settle(self, topic: str, *, deadline_s: float = DEADLINE_S) -> None:
        """Wait until no transaction is open in ``topic``; TimeoutError if one stays open.

        EndTxn completes when the decision is in the log. Apache Kafka writes the markers later, and
        until then read_committed readers do not see the transaction's records.
        """
        answer = self.call("metadata", 8, topics=[{"name": topic}])
        for part in answer["topics"][0]["partitions"]:
            index = part["partition_index"]
            until(
                lambda index=index: self.lso(topic, index) == self.offset(topic, index),
                f"the markers in {topic}-{index}",
                deadline_s=deadline_s,
            )

    def committed(self, group: str, topic: str, partition: int = 0, *, stable: bool = False) -> int:
        """Return a group's committed offset, -1 if none; ``stable`` waits for open transactions."""

        def probe() -> Answer | None:
            answer = self.call(
                "offset_fetch",
                7,
                group_id=group,
                require_stable=stable,
                topics=[{"name": topic, "partition_indexes": [partition]}],
            )
            assert answer["error_code"] == "none", answer
            part: Answer = answer["topics"][0]["partitions"][0]
            return None if part["error_code"] == "unstable_offset_commit" else part

        part = until(probe, f"stable offset of {group}")
        assert part["error_code"] == "none", part
        return int(part["committed_offset"])
