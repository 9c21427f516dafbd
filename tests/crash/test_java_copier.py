"""Apache Kafka's own test of exactly-once, TransactionalMessageCopier, under kill -9.

As in ``transactions_test.py`` and ``group_mode_transactions_test.py`` of its system tests, the
copier copies 100,000 records while the broker and the copier are killed repeatedly. Afterwards the
output has every record once, in each partition's order.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cluster import READ_COMMITTED, Cluster, unique
from tests.support.daemon import Daemon
from tests.support.kafka import JAVA_OPTIONS, java_command
from tests.support.processes import Child
from tests.support.waits import until
from tests.wire.clients import confluent_producer

pytestmark = [pytest.mark.crash, pytest.mark.timeout(900)]

RECORDS = 100_000
TRANSACTION_SIZE = 500
KILLS = 3
"""Number of kills of the broker, and of the copier."""
TRANSACTION_TIMEOUT_MS = 10_000


def fill(bootstrap: str, topic: str, partitions: int) -> None:
    """Produce numbers to all partitions in turn."""
    with confluent_producer(
        bootstrap, enable_idempotence=True, queue_buffering_max_messages=RECORDS, linger_ms=50
    ) as producer:
        for number in range(RECORDS):
            producer.produce(topic, b"%d" % number, partition=number % partitions)
        assert producer.flush(60) == 0


class Copier:
    """One TransactionalMessageCopier, which is restarted after each kill."""

    def __init__(self, bootstrap: str, source: str, target: str, *options: str) -> None:
        name = unique("copier")
        self._command = java_command(
            "org.apache.kafka.tools.TransactionalMessageCopier",
            *("--broker-list", bootstrap, "--input-topic", source, "--output-topic", target),
            *("--consumer-group", name, "--transactional-id", name),
            *("--transaction-size", str(TRANSACTION_SIZE)),
            *("--transaction-timeout", str(TRANSACTION_TIMEOUT_MS), "--enable-random-aborts"),
            *("--input-partition", "0"),
            *options,
            options=JAVA_OPTIONS,
        )
        self.lives: list[Child] = []

    def start(self) -> None:
        self.lives.append(Child(self._command))

    @property
    def child(self) -> Child:
        return self.lives[-1]

    def progress(self) -> dict[str, object]:
        """Return the last progress line of the present process, "" if it has printed none."""
        said = [line for line in list(self.child.lines) if line.startswith("{")]
        return json.loads(said[-1]) if said else {}

    def copied(self) -> int:
        """Return how many records the present process has committed; restart a dead copier."""
        if self.child.returncode not in {None, 0}:
            self.start()
        return int(str(self.progress().get("totalProcessed", 0)))

    def is_done(self) -> bool:
        self.copied()
        return self.child.returncode == 0

    def close(self) -> None:
        for child in self.lives:
            child.kill()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--use-group-metadata",), id="group-metadata"),
        pytest.param((), id="transactional-id-alone"),
        pytest.param(("--group-mode", "--use-group-metadata"), id="subscribed"),
    ],
)
@pytest.mark.usefixtures("java_tools")
def test_java_copier_copies_100_000_records_once_through_six_kills(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    daemon = Daemon(tmp_path / "data").start()
    partitions = 2 if "--group-mode" in options else 1
    with Cluster(daemon.bootstrap) as cluster:
        source = cluster.create_topic(unique("in"), partitions)
        target = cluster.create_topic(unique("out"), partitions)
    fill(daemon.bootstrap, source, partitions)
    copier = Copier(daemon.bootstrap, source, target, *options)
    try:
        copier.start()
        for number, victim in enumerate(["daemon", "copier"] * KILLS, 1):
            goal = copier.copied() + TRANSACTION_SIZE
            until(
                lambda goal=goal: copier.copied() >= goal,
                f"{goal} records copied before kill {number}",
                deadline_s=60,
            )
            assert copier.child.returncode is None, "it was done before its kill"
            if victim == "daemon":
                daemon.kill()
                daemon.start()
            else:
                copier.child.kill()
                copier.start()
        until(copier.is_done, "the copy", deadline_s=120)
        check(daemon.bootstrap, target, partitions)
    finally:
        copier.close()
        assert daemon.child is not None
        daemon.child.kill()


def check(bootstrap: str, target: str, partitions: int) -> None:
    """Check that the output has every number once, in the order of each input partition."""
    found = []
    with Cluster(bootstrap) as cluster:
        for partition in range(partitions):
            until(
                lambda partition=partition: (
                    cluster.lso(target, partition) == cluster.offset(target, partition)
                ),
                "the end of every transaction",
            )
            values = cluster.values(target, partition=partition, isolation=READ_COMMITTED)
            found.append([int(value or b"") for value in values])
    for values in found:
        for lane in range(partitions):
            mine = [value for value in values if value % partitions == lane]
            assert mine == sorted(mine), "out of order"
    assert sorted(value for values in found for value in values) == list(range(RECORDS))
