"""Late requests of paused, delayed or duplicate producers must have no effect.

The protocol has one gap: an EndTxn request below version 5 identifies its producer, but not which
of the producer's transactions it should end (KAFKA-17754).
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.stubborn_client import RefusedError, StubbornClient
from tests.support.batches import batch
from tests.support.cluster import READ_COMMITTED, Cluster, unique
from tests.support.processes import Child
from tests.support.quick import only
from tests.support.waits import until
from tests.wire.test_fenced_offsets import commit_offset
from tests.wire.test_transactions import settled
from tests.wire.transactional import CLIENTS

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_MS = 2_500
LATE_BY = range(1, 6)
CLAIMS = 4
"""How often each of two processes sends InitProducerId for the same id."""


def process(*arguments: object) -> Child:
    words = [str(argument) for argument in arguments]
    return Child([sys.executable, "-m", "tests.wire.zombie_process", *words], cwd=ROOT)


@pytest.fixture
def client(bootstrap: str, request: pytest.FixtureRequest) -> Iterator[StubbornClient]:
    """Yield a raw producer of TV1 or TV2, by the parameter, before InitProducerId."""
    made = StubbornClient(bootstrap, unique("zombie"), version=getattr(request, "param", 2))
    yield made
    made.close()


old_protocol = pytest.mark.parametrize("client", [1], indirect=True, ids=["tv1"])
new_protocol = pytest.mark.parametrize("client", [2], indirect=True, ids=["tv2"])
both_protocols = pytest.mark.parametrize("client", [1, 2], indirect=True, ids=["tv1", "tv2"])


class Held:
    """A delayed EndTxn on a separate connection."""

    def __init__(self, client: StubbornClient, *, commit: bool) -> None:
        self._connection = Cluster(client.bootstrap)
        self._version = 5 if client.version == 2 else 4
        self._body = {
            "transactional_id": client.name,
            "producer_id": client.producer_id,
            "producer_epoch": client.epoch,
            "committed": commit,
        }

    def deliver(self) -> str:
        """Send the EndTxn; return its error."""
        with self._connection as connection:
            error: str = connection.call("end_txn", self._version, **self._body)["error_code"]
        return error


@new_protocol
@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
@pytest.mark.parametrize("late_by", LATE_BY)
def test_kafka_17754_end_txn_late_by_k_transactions_is_fenced(
    cluster: Cluster, client: StubbornClient, late_by: int, commit: bool
) -> None:
    topic = cluster.create_topic(unique("late"))
    client.claim()
    client.send(topic, 0, b"0")
    held = Held(client, commit=commit)
    client.end(commit=True)
    for number in range(1, late_by):
        client.send(topic, 0, b"%d" % number)
        client.end(commit=True)
    client.send(topic, 0, b"first half")
    assert held.deliver() == "producer_fenced"
    client.send(topic, 0, b"second half")
    client.end(commit=True)
    settled(cluster, topic, 2 * late_by + 3)
    assert cluster.values(topic, isolation=READ_COMMITTED) == [
        *(b"%d" % number for number in range(late_by)),
        b"first half",
        b"second half",
    ]


@old_protocol
@pytest.mark.parametrize("late_by", LATE_BY)
def test_kafka_17754_late_commit_below_tv2_tears_a_later_transaction(
    cluster: Cluster, client: StubbornClient, late_by: int
) -> None:
    topic = cluster.create_topic(unique("hole"))
    client.claim()
    client.send(topic, 0, b"0")
    held = Held(client, commit=True)
    client.end(commit=True)
    for number in range(1, late_by):
        client.send(topic, 0, b"%d" % number)
        client.end(commit=True)
    client.send(topic, 0, b"first half")
    assert held.deliver() == "none"
    settled(cluster, topic, 2 * late_by + 2)
    # The late EndTxn has committed the transaction, so the producer cannot abort it.
    with pytest.raises(RefusedError, match="invalid_txn_state"):
        client.end(commit=False)
    assert cluster.values(topic, isolation=READ_COMMITTED)[-1] == b"first half"


def written_late(client: StubbornClient, topic: str, identity: tuple[int, int], first: int) -> str:
    """Produce a delayed batch; return its error."""
    data = batch(
        [b"late"],
        producer_id=identity[0],
        producer_epoch=identity[1],
        sequence=first,
        transactional=True,
    )
    version = 12 if client.version == 2 else 9
    with Cluster(client.bootstrap) as other:

        def attempt() -> str | None:
            error: str = other.produce(topic, data, version=version, transactional_id=client.name)[
                "error_code"
            ]
            # Retry while the markers of the former transaction are being written.
            return None if error == "not_enough_replicas" else error

        return until(attempt, "an answer for good")


@both_protocols
@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
def test_kip_890_late_batch_after_the_end_opens_no_transaction(
    cluster: Cluster, client: StubbornClient, commit: bool
) -> None:
    topic = cluster.create_topic(unique("late-batch"))
    client.claim()
    identity = client.producer_id, client.epoch
    client.send(topic, 0, b"in time")
    client.end(commit=commit)
    settled(cluster, topic, 2)
    # TV2 has bumped the epoch; under TV1 the partition is in no transaction.
    refusal = "invalid_producer_epoch" if client.version == 2 else "invalid_txn_state"
    assert written_late(client, topic, identity, 1) == refusal
    settled(cluster, topic, 2)


@both_protocols
def test_batch_of_an_older_epoch_is_refused_even_as_a_duplicate(
    cluster: Cluster, client: StubbornClient
) -> None:
    topic = cluster.create_topic(unique("older"))
    client.claim()
    identity = client.producer_id, client.epoch
    client.send(topic, 0, b"late")
    successor = StubbornClient(client.bootstrap, client.name, version=client.version)
    successor.claim()
    successor.send(topic, 0, b"newer")
    for first in (0, 1):
        assert written_late(client, topic, identity, first) == "invalid_producer_epoch"
    successor.end(commit=True)
    successor.close()
    settled(cluster, topic, 4)
    assert cluster.values(topic, isolation=READ_COMMITTED) == [b"newer"]
    assert cluster.values(topic) == [b"late", b"newer"]


@both_protocols
def test_end_txn_sent_before_the_takeover_is_fenced(
    cluster: Cluster, client: StubbornClient
) -> None:
    topic = cluster.create_topic(unique("taken-over"))
    client.claim()
    client.send(topic, 0, b"zombie's")
    held = Held(client, commit=True)
    successor = StubbornClient(client.bootstrap, client.name, version=client.version)
    successor.claim()
    successor.send(topic, 0, b"kept")
    assert held.deliver() == "producer_fenced"
    successor.end(commit=True)
    successor.close()
    settled(cluster, topic, 4)
    assert cluster.values(topic, isolation=READ_COMMITTED) == [b"kept"]


@pytest.mark.parametrize("client", only(CLIENTS, "aiokafka"))
def test_producer_paused_past_its_timeout_has_no_effect_when_resumed(
    bootstrap: str, cluster: Cluster, client: str, tmp_path: Path
) -> None:
    topic, name, go = cluster.create_topic(unique("paused")), unique("id"), tmp_path / "go"
    child = process("paused", client, bootstrap, topic, name, TIMEOUT_MS, go)
    try:
        child.wait_for_line("^open$", deadline_s=60)
        os.kill(child.pid, signal.SIGSTOP)
        settled(cluster, topic, 2)
        successor = StubbornClient(bootstrap, name, version=1)
        successor.claim()
        successor.send(topic, 0, b"successor's")
        # kafka-python sends InitProducerId after a refused write, and so fences the successor.
        if takes_back := client == "kafka-python":
            successor.end(commit=True)
        go.touch()
        os.kill(child.pid, signal.SIGCONT)
        child.wait_for_line("^refused commit|^committed", deadline_s=60)
        if not takes_back:
            successor.end(commit=True)
        successor.close()
    finally:
        child.kill()
    assert "committed" not in child.lines
    settled(cluster, topic, 4)
    assert cluster.values(topic, isolation=READ_COMMITTED) == [b"successor's"]
    assert cluster.values(topic) == [b"before the pause", b"successor's"]


@both_protocols
def test_kafka_19690_expired_producer_gets_the_error_of_its_epoch(
    cluster: Cluster, client: StubbornClient
) -> None:
    """After this error Kafka Streams aborts and continues; after INVALID_TXN_STATE it ends."""
    topic = cluster.create_topic(unique("expired"), partitions=2)
    client.claim(timeout_ms=500)
    client.send(topic, 0, b"before the pause")
    settled(cluster, topic, 2)
    for partition in (0, 1):
        data = batch(
            [b"after it"],
            producer_id=client.producer_id,
            producer_epoch=client.epoch,
            sequence=client.sequences.get((topic, partition), 0),
            transactional=True,
        )
        answer = cluster.produce(
            topic,
            data,
            partition=partition,
            version=12 if client.version == 2 else 11,
            transactional_id=client.name,
        )
        assert answer["error_code"] == "invalid_producer_epoch"
    assert commit_offset(cluster, client, unique("group"), topic) == ["invalid_producer_epoch"]
    client.claim()
    client.send(topic, 1, b"next transaction")
    client.end(commit=True)
    settled(cluster, topic, 2, partition=1)
    assert cluster.values(topic, isolation=READ_COMMITTED) == []
    found = cluster.values(topic, partition=1, isolation=READ_COMMITTED)
    assert found == [b"next transaction"]


@pytest.mark.parametrize("client", only(CLIENTS, "confluent"))
def test_two_processes_with_one_transactional_id_tear_no_transaction(
    bootstrap: str, cluster: Cluster, client: str, tmp_path: Path
) -> None:
    topic, name, stop = cluster.create_topic(unique("rivals"), 2), unique("id"), tmp_path / "stop"
    rivals = [process("rival", client, bootstrap, topic, name, who, stop) for who in "ab"]
    try:
        for child in rivals:
            # Each producer has fenced the other producer by another InitProducerId.
            until(
                lambda child=child: child.lines.count("claimed") >= CLAIMS,
                f"{CLAIMS} claims in {child.lines[-9:]}",
                deadline_s=60,
            )
        stop.touch()
        for child in rivals:
            child.wait_for_line("^done$", deadline_s=60)
    finally:
        for child in rivals:
            child.kill()
    said = [line.split() for child in rivals for line in child.lines]
    committed = {words[1] for words in said if words[0] == "committed"}
    unknown = {words[1] for words in said if words[0] == "unknown"}
    # Abort the last open transaction, which would hold the last stable offset back.
    last = StubbornClient(bootstrap, name, version=1)
    last.claim()
    last.close()
    found = []
    for partition in (0, 1):
        until(
            lambda partition=partition: (
                cluster.lso(topic, partition) == cluster.offset(topic, partition)
            ),
            "the end of every transaction",
        )
        found.append(cluster.values(topic, partition=partition, isolation=READ_COMMITTED))
    assert found[0] == found[1], "torn, or in another order"
    times = Counter((value or b"").decode() for value in found[0])
    assert set(times.values()) <= {1}
    assert committed <= times.keys() <= committed | unknown
