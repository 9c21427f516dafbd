"""A transactional client that survives the failures of brokers: it retries until it succeeds.

It sends raw requests, so that the test chooses the transaction protocol. With ``version`` 1 it adds
partitions by AddPartitionsToTxn and ends transactions by EndTxn v4. With ``version`` 2 (KIP-890)
partitions are added implicitly, and EndTxn v5 ends transactions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

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
    "not_enough_replicas_after_append",
    "request_timed_out",
    "unstable_offset_commit",
}
"""Retriable errors, after which the client sends the same request again."""


class Coordinator(NamedTuple):
    """The broker that coordinates ``key``."""

    key: str
    kind: int


class Leader(NamedTuple):
    """The broker that leads a partition."""

    topic: str
    index: int


class RefusedError(Exception):
    """The broker refused a valid request with an error that is not retriable."""


class StubbornClient:
    """One transactional producer with one transaction at a time.

    ``bootstrap`` is one broker, which then gets all requests, or several brokers, separated by
    commas. With ``mortal`` a lost connection raises ConnectionLostError instead of a retry.
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
        self._brokers = bootstrap.split(",")
        self._clusters: dict[str, Cluster] = {}
        self._places: dict[Coordinator | Leader, str] = {}

    def close(self) -> None:
        for cluster in self._clusters.values():
            cluster.close()
        self._clusters.clear()
        self._places.clear()

    def ask(self, where: Coordinator | Leader, api: str, version: int, **body: Any) -> Answer:
        """Send a request until its error is not retriable; RefusedError unless it succeeds."""

        def attempt() -> Answer | None:
            try:
                place = self._place(where)
                answer = None if place is None else self._cluster(place).call(api, version, **body)
            except (ConnectionLostError, OSError) as lost:
                self.close()
                if self.mortal:
                    raise ConnectionLostError from lost
                return None
            if answer is not None and PASSING.isdisjoint(errors_in(answer)):
                return answer
            self._places.pop(where, None)
            return None

        answer = until(attempt, f"an answer to {api}", deadline_s=60)
        if set(errors_in(answer)) - {"none"}:
            raise RefusedError(f"{api} v{version} {body}: {answer}")
        return answer

    def _cluster(self, place: str) -> Cluster:
        found = self._clusters.get(place)
        if found is None:
            found = self._clusters[place] = Cluster(place, deadline_s=5)
        return found

    def _place(self, where: Coordinator | Leader) -> str | None:
        """Return the present address of a coordinator or leader, None if it is unknown."""
        if len(self._brokers) == 1:
            return self.bootstrap
        if where not in self._places:
            found = self._found(where)
            if found is None:
                return None
            self._places[where] = found
        return self._places[where]

    def _found(self, where: Coordinator | Leader) -> str | None:
        """Ask the first broker for the address; move a broker that is down to the list's end."""
        place = self._brokers[0]
        try:
            asked = self._cluster(place)
        except OSError:
            self._brokers.append(self._brokers.pop(0))
            raise
        if isinstance(where, Coordinator):
            answer = asked.call("find_coordinator", 2, key=where.key, key_type=where.kind)
            return f"{answer['host']}:{answer['port']}" if answer["error_code"] == "none" else None
        answer = asked.call("metadata", 8, topics=[{"name": where.topic}])
        (leader,) = (
            part["leader_id"]
            for part in answer["topics"][0]["partitions"]
            if part["partition_index"] == where.index
        )
        known = {
            broker["node_id"]: f"{broker['host']}:{broker['port']}" for broker in answer["brokers"]
        }
        return known.get(leader)

    @property
    def _coordinator(self) -> Coordinator:
        return Coordinator(self.name, TRANSACTION)

    def claim(self, timeout_ms: int = 60_000) -> None:
        """Send InitProducerId, as a new instance of the producer does."""
        for where in (self._coordinator, Coordinator(self.name, GROUP)):
            self.ask(where, "find_coordinator", 2, key=where.key, key_type=where.kind)
        answer = self.ask(
            self._coordinator,
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
        """Produce one record in a batch of its own."""
        if self.version == 1:
            self.ask(
                self._coordinator,
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
            Leader(topic, partition),
            "produce",
            12 if self.version == 2 else 9,
            transactional_id=self.name,
            acks=-1,
            timeout=5000,
            topic_data=[{"name": topic, "partition_data": [{"index": partition, "records": data}]}],
        )
        self.sequences[topic, partition] = sequence + 1

    def send_offset(self, group: str, topic: str, offset: int) -> None:
        """Commit the offset of partition 0 in the transaction."""
        identity = {
            "transactional_id": self.name,
            "group_id": group,
            "producer_id": self.producer_id,
            "producer_epoch": self.epoch,
        }
        if self.version == 1:
            self.ask(self._coordinator, "add_offsets_to_txn", 3, **identity)
        self.ask(
            Coordinator(group, GROUP),
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
            self._coordinator,
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

    def transaction(
        self,
        group: str,
        topic: str,
        partition: int,
        values: Sequence[bytes],
        *,
        offset: int,
        commit: bool,
    ) -> None:
        """Run a whole transaction, from InitProducerId to EndTxn."""
        self.claim()
        for value in values:
            self.send(topic, partition, value)
        self.send_offset(group, topic, offset)
        self.end(commit=commit)
