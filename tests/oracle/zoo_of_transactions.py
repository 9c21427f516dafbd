"""Transactions of both versions, by raw requests, while their coordinator moves.

A producer of TV1 sends AddPartitionsToTxn before it writes to a partition, and the leader verifies
the transaction with the coordinator. For a producer of TV2 the leader adds the partition. The
recorded responses have names instead of random ids, so that the responses of two clusters can be
compared.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from tests.support.batches import batch
from tests.support.cluster import READ_COMMITTED, Cluster
from tests.support.pair import GROUPS, KAFKAS, OURS, TRANSACTIONS, Pair
from tests.support.raw import Answer
from tests.support.waits import until

DATA: Final = "data"
"""Apache Kafka leads the first partition, Fencepost the second."""

LEADERS: Final = (KAFKAS, OURS)
PASSING: Final = {
    "concurrent_transactions",
    "coordinator_load_in_progress",
    "not_coordinator",
    "coordinator_not_available",
}
TIMEOUT_MS: Final = 600_000

Errors = list[str]


class Producer:
    """A transactional producer of TV1 or TV2 that finds coordinator and leaders by itself."""

    def __init__(self, pair: Pair, name: str, version: int, topic: str = DATA) -> None:
        self.pair, self.name, self.version, self.topic = pair, name, version, topic
        self.producer_id = self.epoch = -1
        self.sequences: dict[tuple[str, int], int] = {}

    def ask(self, api: str, version: int, **body: Any) -> Answer:
        """Send a request to the coordinator, and retry while it is busy, loading or moving."""

        def attempt() -> Answer | None:
            leader = self.pair.leader(TRANSACTIONS)
            answer = self.pair.call(leader, api, version, **body)
            return None if passes(answer) else answer

        return until(attempt, f"{api} of {self.name}", poll_s=0.05)

    def init(
        self, *, timeout_ms: int = TIMEOUT_MS, as_known: bool = False, keep: bool = False
    ) -> Answer:
        """Send InitProducerId, and keep the producer id and epoch of the response.

        With ``as_known``, send the present id and epoch, as a recovering producer does. With
        ``keep``, keep a prepared transaction (KIP-939).
        """
        more = {"enable2_pc": True, "keep_prepared_txn": True} if keep else {}
        answer = self.ask(
            "init_producer_id",
            6 if keep else 5,
            transactional_id=self.name,
            transaction_timeout=timeout_ms,
            producer_id=self.producer_id if as_known else -1,
            producer_epoch=self.epoch if as_known else -1,
            **more,
        )
        if answer["error_code"] == "none":
            self.producer_id, self.epoch = answer["producer_id"], answer["producer_epoch"]
            self.sequences.clear()
        return answer

    @property
    def _identity(self) -> dict[str, Any]:
        return {"producer_id": self.producer_id, "producer_epoch": self.epoch}

    def add(self, topic: str, *indexes: int) -> str:
        """Send AddPartitionsToTxn, as a client of TV1 does; return the error's name."""
        answer = self.ask(
            "add_partitions_to_txn",
            3,
            v3_and_below_transactional_id=self.name,
            v3_and_below_producer_id=self.producer_id,
            v3_and_below_producer_epoch=self.epoch,
            v3_and_below_topics=[{"name": topic, "partitions": indexes}],
        )
        rows = answer["results_by_topic_v3_and_below"][0]["results_by_partition"]
        (found,) = {row["partition_error_code"] for row in rows}
        return str(found)

    def append(self, index: int, value: bytes) -> str:
        """Produce one record, without any request before it; return the error's name."""
        topic = self.topic
        sequence = self.sequences.get((topic, index), 0)
        data = batch([value], sequence=sequence, transactional=True, **self._identity)

        def attempt() -> str | None:
            error: str = self.pair.connection(self.pair.leader(topic, index)).produce(
                topic,
                data,
                partition=index,
                version=12 if self.version == 2 else 11,
                transactional_id=self.name,
            )["error_code"]
            return None if error in {*PASSING, "not_enough_replicas"} else error

        error = until(attempt, f"a record of {self.name}", poll_s=0.05)
        if error == "none":
            self.sequences[topic, index] = sequence + 1
        return error

    def write(self, value: str) -> Errors:
        """Write a record to each partition; a producer of TV1 first adds the partition."""
        errors = [self.add(self.topic, 0, 1)] if self.version == 1 else []
        return [*errors, *(self.append(index, value.encode()) for index in range(len(LEADERS)))]

    def commit_offset(self, group: str, offset: int, *, unasked: bool = False) -> Errors:
        """Commit an offset in the transaction; with ``unasked``, send no AddOffsetsToTxn."""
        errors = []
        if self.version == 1 and not unasked:
            answer = self.ask(
                "add_offsets_to_txn",
                3,
                transactional_id=self.name,
                group_id=group,
                **self._identity,
            )
            errors.append(answer["error_code"])
        body = {
            "transactional_id": self.name,
            "group_id": group,
            "generation_id": -1,
            "topics": [
                {
                    "name": self.topic,
                    "partitions": [
                        {
                            "partition_index": 0,
                            "committed_offset": offset,
                            "committed_leader_epoch": -1,
                            "committed_metadata": self.name,
                        }
                    ],
                }
            ],
            **self._identity,
        }

        def attempt() -> str | None:
            leader = self.pair.leader(GROUPS)
            version = 5 if self.version == 2 else 4
            answer = self.pair.call(leader, "txn_offset_commit", version, **body)
            error: str = answer["topics"][0]["partitions"][0]["error_code"]
            return None if error in PASSING else error

        return [*errors, until(attempt, f"an offset of {self.name}", poll_s=0.05)]

    def end(self, *, commit: bool) -> str:
        """Send EndTxn; return the error's name."""
        answer = self.ask(
            "end_txn",
            5 if self.version == 2 else 4,
            transactional_id=self.name,
            committed=commit,
            **self._identity,
        )
        if answer["error_code"] == "none" and self.version == 2:
            self.producer_id, self.epoch = answer["producer_id"], answer["producer_epoch"]
            self.sequences.clear()
        return str(answer["error_code"])

    def state(self) -> str:
        """Return the transaction's state, as DescribeTransactions shows it."""
        return str(described(self.pair, self.pair.leader(TRANSACTIONS), self.name)["state"])

    def completes(self) -> None:
        """Wait until the transaction is complete: all its markers are written."""
        until(lambda: self.state().startswith(("Complete", "Empty")), f"{self.name} completes")


def history(pair: Pair, mark: str, version: int, topic: str) -> dict[str, Any]:
    """Run a producer; return all responses of partition leaders and coordinators."""
    found: dict[str, Any] = {}
    producer, group = (
        Producer(pair, f"one-{version}-{mark}", version, topic),
        f"of-{version}-{mark}",
    )
    producer.init()
    if version == 1:
        found["not added"] = [producer.append(index, b"early") for index in (0, 1)]
        found["offsets not added"] = producer.commit_offset(group, 1, unasked=True)
    for commit in (True, False):
        found[f"written, {commit}"] = producer.write(f"{mark}-{commit}")
        found[f"offsets, {commit}"] = producer.commit_offset(group, 5 + commit)
        found[f"again, {commit}"] = [producer.append(index, b"more") for index in (0, 1)]
        found[f"ended, {commit}"] = producer.end(commit=commit)
        producer.completes()
    found["offset"] = pair.connection(pair.leader(GROUPS)).committed(group, topic, stable=True)
    if version == 1:
        found["after the end"] = [producer.append(index, b"late") for index in (0, 1)]
    stranger = Producer(pair, producer.name, version, topic)
    stranger.producer_id, stranger.epoch = producer.producer_id + 100_000, 0
    found["a stranger"] = [stranger.append(index, b"no") for index in (0, 1)]
    found["a stranger's offset"] = stranger.commit_offset(group, 9, unasked=True)
    old, new = producer.epoch, Producer(pair, producer.name, version, topic)
    producer.write("left open")
    found["claimed"] = new.init()["error_code"]
    found["fenced"] = [producer.append(index, b"zombie") for index in (0, 1)]
    found["fenced offset"] = producer.commit_offset(group, 9, unasked=True)
    found["fenced end"] = producer.end(commit=True)
    assert new.epoch > old
    new.write("goes on")
    found["zombie coordinator"] = [zombie_marker(new, index) for index in (0, 1)]
    found["goes on"] = new.end(commit=True)
    new.completes()
    return found


def zombie_marker(producer: Producer, index: int) -> str:
    """Return the leader's error for a marker with an old coordinator epoch."""
    marker = {
        "producer_id": producer.producer_id,
        "producer_epoch": producer.epoch,
        "transaction_result": False,
        "topics": [{"name": producer.topic, "partition_indexes": [index]}],
        "coordinator_epoch": 0,
    }
    leader = producer.pair.leader(producer.topic, index)
    answer = producer.pair.call(leader, "write_txn_markers", 1, markers=[marker])
    return str(answer["markers"][0]["topics"][0]["partitions"][0]["error_code"])


def passes(answer: Answer) -> bool:
    rows = answer.get("results_by_topic_v3_and_below") or [{}]
    parts = rows[0].get("results_by_partition") or [{}]
    found = answer.get("error_code") or parts[0].get("partition_error_code")
    return found in PASSING


def described(pair: Pair, node_id: int, name: str) -> dict[str, Any]:
    answer = pair.call(node_id, "describe_transactions", 0, transactional_ids=[name])
    (transaction,) = answer["transaction_states"]
    topics = {row["topic"]: sorted(row["partitions"]) for row in transaction["topics"]}
    if transaction["transaction_state"].startswith("Prepare"):
        topics = {}  # not compared: partitions without a marker; after a load, all partitions
    return {
        "error": transaction["error_code"],
        "state": transaction["transaction_state"],
        "producer": (transaction["producer_id"], transaction["producer_epoch"]),
        "timeout": transaction["transaction_timeout"],
        "start": transaction["transaction_start_time"],
        "topics": topics,
    }


def picture(pair: Pair, node_id: int) -> dict[str, Any]:
    """Return a coordinator's descriptions of all transactions, by transactional id."""
    listed = pair.call(node_id, "list_transactions", 0)
    assert listed["error_code"] == "none", listed
    names = sorted(transaction["transactional_id"] for transaction in listed["transaction_states"])
    return {name: described(pair, node_id, name) for name in names}


def committed_values(pair: Pair) -> list[list[str]]:
    """Return the committed values of each partition, once no transaction is open."""
    found = []
    for index, leader in enumerate(LEADERS):
        at = pair.connection(leader)
        until(partial(_is_settled, at, index), f"the markers in {DATA}-{index}")
        read = at.read(DATA, partition=index, isolation=READ_COMMITTED)
        found.append([(value or b"").decode() for fetched in read for value in fetched.values])
    return found


def _is_settled(at: Cluster, index: int) -> bool:
    return at.lso(DATA, index) == at.offset(DATA, index)


class Zoo:
    """Transactions in every state, of TV1 and of TV2."""

    STATES: Final = ("empty", "committed", "aborted", "open", "offsets", "claimed", "prepared")

    def __init__(self, pair: Pair, mark: str, stuck: str) -> None:
        """The partitions of ``stuck`` accept no markers, because too few replicas are in sync."""
        self.pair, self.mark, self.stuck = pair, mark, stuck
        self.expected: list[str] = []
        self.all = {
            (state, version): Producer(pair, f"{state}-{version}-{mark}", version)
            for version in (1, 2)
            for state in self.STATES
        }
        for producer in self.all.values():
            assert producer.init()["error_code"] == "none"
        for version in (1, 2):
            for state in self.STATES[1:6]:
                self.write(self.all[state, version])
            self.all["committed", version].end(commit=True)
            self.expected.append(self.all["committed", version].name)
            self.all["aborted", version].end(commit=False)
            for state in ("committed", "aborted"):
                self.all[state, version].completes()
            pending = self.all["offsets", version]
            assert set(pending.commit_offset(self.group(version), 5)) == {"none"}
            pending = self.all["prepared", version]
            self.write(pending)
            assert pending.add(stuck, 0) == "none"
            # A producer of TV2 gets its new epoch with the next transaction.
            assert pending.end(commit=True) == "none"
            self.expected.append(pending.name)

    def group(self, version: int) -> str:
        return f"group-{version}-{self.mark}"

    def write(self, producer: Producer) -> None:
        assert set(producer.write(producer.name)) == {"none"}, producer.name

    def go_on(self) -> None:
        """Continue after the move: end the open transactions in every way, and begin new ones."""
        for version in (1, 2):
            empty, claimed = self.all["empty", version], self.all["claimed", version]
            self.write(empty)
            assert empty.end(commit=True) == "none"
            self.expected.append(empty.name)
            self.write(self.all["open", version])
            assert self.all["open", version].end(commit=True) == "none"
            self.expected += [self.all["open", version].name] * 2
            offsets = self.all["offsets", version]
            assert set(offsets.commit_offset(self.group(version), 6)) == {"none"}
            assert offsets.end(commit=True) == "none"
            self.expected.append(offsets.name)
            self.claim(claimed)
            again = self.all["committed", version]
            before = again.epoch
            assert again.init(as_known=True)["error_code"] == "none"
            assert again.epoch > before
            self.write(again)
            assert again.end(commit=False) == "none"
            prepared = self.all["prepared", version]
            state = prepared.state()
            assert state == "PrepareCommit", (prepared.name, state)

    def claim(self, old: Producer) -> None:
        """Send InitProducerId as another process: the transaction aborts, and ``old`` is fenced."""
        fresh = Producer(self.pair, old.name, old.version)
        assert fresh.init()["error_code"] == "none"
        assert (fresh.producer_id, fresh.epoch > old.epoch) == (old.producer_id, True)
        answers = old.append(0, b"zombie"), old.end(commit=True)
        assert answers == ("invalid_producer_epoch", "producer_fenced")
        self.write(fresh)
        assert fresh.end(commit=True) == "none"
        self.expected.append(fresh.name)

    def finish(self) -> None:
        """Wait until all transactions are complete, once ``stuck`` accepts markers again."""
        for producer in self.all.values():
            producer.completes()
