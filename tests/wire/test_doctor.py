"""``fencepost doctor``: each rule, with clients that break the rule and clients that do not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest

from fencepost.testing import Kafka
from tests.crash.stubborn_client import StubbornClient
from tests.support.cluster import Cluster, unique
from tests.support.daemon import Daemon
from tests.support.processes import Child
from tests.support.targets import SETTINGS
from tests.support.waits import DEADLINE_S, until
from tests.wire.clients import (
    aio_consumer,
    aio_producer,
    confluent_consumer,
    confluent_producer,
    dotted,
    drain,
)
from tests.wire.command_line import cli
from tests.wire.transactional import transactional

LETTERS = str.maketrans("0123456789", "ghijklmnop")
TV1 = "transaction-version-1"
"""librdkafka and aiokafka have only version 1, so the level of this finding is only `risk`."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    started = Daemon(tmp_path_factory.mktemp("doctor"), SETTINGS).start()
    yield started
    started.stop()


@pytest.fixture
def cluster(daemon: Daemon) -> Iterator[Cluster]:
    with Cluster(daemon.bootstrap) as client:
        yield client


class Copy:
    """A pipeline of librdkafka's clients with one input and one output, healthy by default."""

    def __init__(
        self, daemon: Daemon, cluster: Cluster, configs: dict[str, str] | None = None
    ) -> None:
        self.bootstrap = daemon.bootstrap
        # The doctor would assume that digits in the id are random and change with each process.
        self.name = unique("doctor").translate(LETTERS)
        self.source, self.target = f"{self.name}-in", f"{self.name}-out"
        for topic in (self.source, self.target):
            cluster.create_topic(topic, 1, configs)

    @contextlib.contextmanager
    def consumer(self, **conf: Any) -> Iterator[confluent_kafka.Consumer]:
        conf = {"client_id": self.name, "group_id": self.name, **conf}
        with confluent_consumer(self.bootstrap, **conf) as consumer:
            consumer.subscribe([self.source])
            yield consumer

    def producer(self, transactional_id: str = "", **conf: Any) -> confluent_kafka.Producer:
        settings = {
            "bootstrap_servers": self.bootstrap,
            "client_id": self.name,
            "transactional_id": transactional_id or self.name,
            "linger_ms": 0,
            **conf,
        }
        producer = confluent_kafka.Producer(dotted(settings))
        producer.init_transactions(60)
        return producer

    def feed(self, value: bytes = b"1", **conf: Any) -> None:
        with confluent_producer(self.bootstrap, client_id=f"feed-{self.name}", **conf) as producer:
            producer.produce(self.source, value)

    def run(
        self,
        consumer: confluent_kafka.Consumer,
        producer: confluent_kafka.Producer,
        *,
        sends_offsets: bool = True,
    ) -> None:
        """Copy one record in one transaction."""
        (message,) = drain(consumer, 1)
        producer.begin_transaction()
        producer.produce(self.target, message.value())
        if sends_offsets:
            producer.send_offsets_to_transaction(
                consumer.position(consumer.assignment()), consumer.consumer_group_metadata(), 60
            )
        producer.commit_transaction(60)

    def once(self, **conf: Any) -> None:
        """Feed and copy one record with the settings ``conf`` of the consumer."""
        self.feed()
        with self.consumer(**conf) as consumer:
            self.run(consumer, self.producer())


def findings(daemon: Daemon, *arguments: str, status: int | None = None) -> dict[str, Any]:
    """Return the last finding of each rule."""
    done = cli(daemon.bootstrap, "doctor", "--json", *arguments, status=status)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {row["rule"]: row for row in rows}


def awaited(daemon: Daemon, rule: str, *arguments: str) -> dict[str, Any]:
    """Return the finding of a rule, as soon as the history contains its observation."""
    found: dict[str, Any] = until(lambda: findings(daemon, *arguments).get(rule), rule)
    return found


def healthy(daemon: Daemon, transactional_id: str, *arguments: str) -> None:
    """Check that there are no findings once the end of the transaction has been recorded."""
    awaited(daemon, TV1, "--transactional-id", transactional_id)
    assert set(findings(daemon, *arguments, status=0)) <= {TV1}


def test_healthy_pipeline_has_no_finding(daemon: Daemon, cluster: Cluster) -> None:
    copy = Copy(daemon, cluster)
    copy.once()
    healthy(daemon, copy.name, "--group", copy.name)
    found = cli(daemon.bootstrap, "doctor", "--group", copy.name, "--strict", status=1)
    assert f"{TV1} (risk): {copy.name} ends its transactions" in found.stdout
    assert f"client   {copy.name}@127.0.0.1" in found.stdout
    assert "request  EndTxn at 20" in found.stdout
    assert "docs/doctor.md#transaction-version-1" in found.stdout
    assert findings(daemon, "--group", copy.name, "--since", "now", status=0) == {}


def test_healthy_pipeline_beside_other_programs_with_the_same_client_id_has_no_finding(
    daemon: Daemon, cluster: Cluster
) -> None:
    copy = Copy(daemon, cluster)
    common = {"client_id": "rdkafka"}
    copy.feed()
    with copy.consumer(**common) as consumer:
        copy.run(consumer, copy.producer(**common))
    for topic in (copy.source, copy.target):
        for level in ("read_committed", "read_uncommitted"):
            reader = {"group_id": unique("reader"), "isolation_level": level, **common}
            with confluent_consumer(copy.bootstrap, **reader) as consumer:
                consumer.subscribe([topic])
                (message,) = drain(consumer, 1)
                consumer.commit(message, asynchronous=False)
    healthy(daemon, copy.name, "--transactional-id", copy.name)


def test_new_transactional_id_at_each_start_is_found(daemon: Daemon, cluster: Cluster) -> None:
    copy = Copy(daemon, cluster)
    last = ""
    for _ in range(2):
        last = f"{copy.name}-{uuid.uuid4()}"
        producer = copy.producer(last)
        producer.begin_transaction()
        producer.produce(copy.target, b"1")
        producer.commit_transaction(60)
    found = awaited(daemon, "new-transactional-id", "--transactional-id", last)
    assert found["what"] == f"2 transactional ids {copy.name}-*, each new at one start"
    assert (found["request"], found["client_id"]) == ("InitProducerId", copy.name)


def test_stable_transactional_id_over_restarts_is_healthy(daemon: Daemon, cluster: Cluster) -> None:
    copy = Copy(daemon, cluster)
    name = f"{copy.name}-{uuid.uuid4()}"
    for _ in range(3):
        producer = copy.producer(name)
        producer.begin_transaction()
        producer.produce(copy.target, b"1")
        producer.commit_transaction(60)
    healthy(daemon, name, "--transactional-id", name)


def test_new_id_with_the_generation_of_a_member_is_healthy(
    daemon: Daemon, cluster: Cluster
) -> None:
    copy = Copy(daemon, cluster)
    name = ""
    with copy.consumer() as consumer:
        for _ in range(2):
            copy.feed()
            name = f"{copy.name}-{uuid.uuid4()}"
            copy.run(consumer, copy.producer(name))
    healthy(daemon, name, "--transactional-id", name)


def test_offsets_outside_of_the_transaction_are_found(daemon: Daemon, cluster: Cluster) -> None:
    copy = Copy(daemon, cluster)
    copy.feed()
    with copy.consumer() as consumer:
        copy.run(consumer, copy.producer(), sends_offsets=False)
        consumer.commit(asynchronous=False)
        found = awaited(daemon, "offsets-outside-transaction", "--group", copy.name)
    assert found["what"] == (
        f"group {copy.name} commits offsets outside of the transactions of {copy.name}"
    )
    assert found["request"] == "OffsetCommit"
    assert found["fields"]["topic"] == copy.source
    assert found["fields"]["member"]


def test_offsets_committed_both_in_and_outside_of_transactions_are_found(
    daemon: Daemon, cluster: Cluster
) -> None:
    copy = Copy(daemon, cluster)
    copy.feed()
    with copy.consumer() as consumer:
        copy.run(consumer, copy.producer())
        consumer.commit(asynchronous=False)
        found = awaited(daemon, "offsets-outside-transaction", "--group", copy.name)
    assert found["what"].endswith("as well as in them")


async def test_aiokafka_sends_offsets_without_member_and_reads_uncommitted(
    daemon: Daemon, cluster: Cluster
) -> None:
    copy = Copy(daemon, cluster)
    copy.feed()
    async with (
        aio_consumer(
            copy.bootstrap, copy.source, group_id=copy.name, client_id=copy.name
        ) as consumer,
        aio_producer(copy.bootstrap, transactional_id=copy.name, client_id=copy.name) as producer,
    ):
        message = await consumer.getone()
        place = next(iter(consumer.assignment()))
        async with producer.transaction():
            await producer.send(copy.target, message.value)
            await producer.send_offsets_to_transaction({place: message.offset + 1}, copy.name)
    found = awaited(daemon, "offsets-without-member", "--group", copy.name)
    assert found["fields"]["generation"] == -1
    read = awaited(daemon, "reads-uncommitted", "--group", copy.name)
    assert read["what"] == f"group {copy.name} reads {copy.source} with read_uncommitted"
    assert (read["request"], read["client_id"]) == ("Fetch", copy.name)


def test_read_uncommitted_input_is_found(daemon: Daemon, cluster: Cluster) -> None:
    copy = Copy(daemon, cluster)
    copy.once(isolation_level="read_uncommitted")
    found = awaited(daemon, "reads-uncommitted", "--transactional-id", copy.name)
    assert found["fields"]["isolation_level"] == "read_uncommitted"


async def test_offsets_of_a_group_without_members_are_healthy(
    daemon: Daemon, cluster: Cluster
) -> None:
    copy = Copy(daemon, cluster)
    async with transactional("aiokafka", copy.bootstrap, copy.name) as producer:
        await producer.begin()
        await producer.send(copy.target, b"1")
        await producer.send_offsets({(copy.source, 0): 0}, copy.name)
        await producer.commit()
    healthy(daemon, copy.name, "--group", copy.name)


def test_transaction_version_2_has_no_finding(daemon: Daemon, cluster: Cluster) -> None:
    copy = Copy(daemon, cluster)
    # Raw requests, because no Python client has transaction version 2 yet.
    for version in (2, 1):
        with contextlib.closing(
            StubbornClient(copy.bootstrap, f"{copy.name}-v{version}", version=version)
        ) as client:
            client.claim()
            client.send(copy.target, 0, b"1")
            client.end(commit=True)
    healthy(daemon, f"{copy.name}-v1", "--transactional-id", f"{copy.name}-v1")
    assert findings(daemon, "--transactional-id", f"{copy.name}-v2") == {}


def test_transaction_timeout_above_the_maximum_is_found(daemon: Daemon, cluster: Cluster) -> None:
    copy = Copy(daemon, cluster)
    with pytest.raises(confluent_kafka.KafkaException, match="TIMEOUT"):
        copy.producer(transaction_timeout_ms=900_001)
    with contextlib.closing(copy.producer(f"{copy.name}-2", transaction_timeout_ms=900_000)):
        pass
    found = awaited(daemon, "timeout-above-maximum", "--transactional-id", copy.name)
    assert found["fields"] == {"transaction_timeout_ms": 900_001}
    assert findings(daemon, "--transactional-id", f"{copy.name}-2") == {}


async def test_timeout_shorter_than_the_processing_is_found(
    daemon: Daemon, cluster: Cluster
) -> None:
    copy = Copy(daemon, cluster)
    async with transactional("confluent", copy.bootstrap, copy.name, timeout_ms=1_000) as producer:
        await producer.begin()
        await producer.send(copy.target, b"1")

        def is_aborted() -> bool:
            rows = cli(copy.bootstrap, "txns", "history", copy.name, "--format=json").stdout
            return "transaction-aborted" in rows

        until(is_aborted, "the timeout")
        assert "timeout-too-short" not in findings(daemon, "--transactional-id", copy.name)
        with contextlib.suppress(Exception):
            await producer.commit()
    found = awaited(daemon, "timeout-too-short", "--transactional-id", copy.name)
    assert found["request"] == "EndTxn"


def test_transaction_close_to_its_timeout_is_found(tmp_path: Path) -> None:
    with (
        Kafka(tmp_path) as kafka,
        contextlib.closing(StubbornClient(kafka.bootstrap, "slow", version=2)) as client,
    ):
        kafka.topic("out", 1)
        client.claim()
        for advanced_ms in (40_000, 50_000):
            client.send("out", 0, b"1")
            kafka.clock.advance(ms=advanced_ms)
            client.end(commit=True)

        def look() -> dict[str, Any] | None:
            done = cli(kafka.bootstrap, "doctor", "--since", "earliest", "--json")
            rows = {row["rule"]: row for row in map(json.loads, done.stdout.splitlines())}
            return rows.get("timeout-nearly-reached")

        found = until(look, "timeout-nearly-reached")
    assert found["level"] == "risk"
    assert 50_000 <= found["fields"]["open_ms"] < 60_000
    assert found["what"].startswith("a transaction of slow was open for 50")


def test_watched_finding_appears_and_leaves_the_interval(daemon: Daemon, cluster: Cluster) -> None:
    copy = Copy(daemon, cluster)
    copy.once()
    watched = ("doctor", "--group", copy.name, "--since", "-10s", "--watch", "0.2")
    child = Child(
        [sys.executable, "-m", "fencepost", *watched],
        env={**os.environ, "FENCEPOST_BOOTSTRAP": daemon.bootstrap},
    )
    try:
        child.wait_for_line(r"^20\d\d-", deadline_s=DEADLINE_S)
        copy.feed()
        with copy.consumer() as consumer:
            drain(consumer, 1)
            consumer.commit(asynchronous=False)
        found = r"^offsets-outside-transaction \(breaks\): "
        child.wait_for_line(found, deadline_s=DEADLINE_S)
        child.wait_for_line(r"^nothing found$", deadline_s=DEADLINE_S, since=len(child.lines))
        os.kill(child.pid, signal.SIGINT)
        assert child.wait(DEADLINE_S) == 0, child.tail()
    finally:
        child.kill()


def test_plain_producer_of_an_output_is_found(daemon: Daemon, cluster: Cluster) -> None:
    copy = Copy(daemon, cluster)
    copy.once()
    healthy(daemon, copy.name, "--topic", copy.target)
    with confluent_producer(copy.bootstrap, client_id="beside") as producer:
        producer.produce(copy.target, b"2")
    found = awaited(daemon, "plain-producer", "--topic", copy.target)
    assert (found["client_id"], found["request"]) == ("beside", "Produce")
    assert found["fields"]["transactional_id"] is None
    assert set(findings(daemon, "--topic", copy.source)) <= {TV1}


async def test_auto_commit_of_the_input_is_found(daemon: Daemon, cluster: Cluster) -> None:
    """Like Java's client, aiokafka also commits when nothing was read."""
    copy = Copy(daemon, cluster)
    copy.feed()
    conf = {"enable_auto_commit": True, "auto_commit_interval_ms": 300}
    async with (
        aio_consumer(
            copy.bootstrap, copy.source, group_id=copy.name, client_id=copy.name, **conf
        ) as consumer,
        aio_producer(copy.bootstrap, transactional_id=copy.name, client_id=copy.name) as producer,
    ):
        message = await consumer.getone()
        async with producer.transaction():
            await producer.send(copy.target, message.value)

        def look() -> dict[str, Any] | None:
            found: dict[str, Any] | None = findings(daemon, "--group", copy.name).get("auto-commit")
            return found

        found = await asyncio.to_thread(until, look, "auto-commit")
    assert found["request"] == "OffsetCommit"
    assert found["fields"]["interval_ms"] > 200
    assert found["fields"]["repeats"] is True


@pytest.mark.parametrize(
    "by_hand",
    [
        pytest.param(True, id="careful"),
        pytest.param(False, id="librdkafka", marks=pytest.mark.slow),
    ],
)
def test_timer_that_commits_only_new_offsets_is_a_risk(
    daemon: Daemon, cluster: Cluster, *, by_hand: bool
) -> None:
    """librdkafka's auto-commit looks like a client that commits only processed offsets."""
    copy = Copy(daemon, cluster)
    copy.feed()
    every_ms = 300
    auto = {"enable_auto_commit": True, "auto_commit_interval_ms": every_ms}
    with copy.consumer(**({} if by_hand else auto)) as consumer:
        copy.run(consumer, copy.producer(), sends_offsets=False)
        due = time.monotonic()

        def look() -> dict[str, Any] | None:
            nonlocal due
            copy.feed()
            processed = consumer.consume(10, timeout=0.02)
            if by_hand and processed and time.monotonic() >= due:
                consumer.commit(processed[-1], asynchronous=False)
                due += every_ms / 1000
            rows = findings(daemon, "--group", copy.name)
            assert "auto-commit" not in rows
            return rows.get("timed-commit")

        found = until(look, "timed-commit")
    assert (found["level"], found["fields"]["repeats"]) == ("risk", False)


async def test_acks_1_on_the_input_is_found(daemon: Daemon, cluster: Cluster) -> None:
    copy = Copy(daemon, cluster)
    copy.once()
    healthy(daemon, copy.name, "--topic", copy.source)
    async with aio_producer(copy.bootstrap, client_id="hasty") as producer:
        await producer.send_and_wait(copy.source, b"2")
    found = awaited(daemon, "acks-1", "--group", copy.name)
    assert found["what"] == f"{copy.source} is written with acks=1"
    assert (found["client_id"], found["fields"]["acks"]) == ("hasty", 1)


def test_unclean_election_of_an_output_is_found(daemon: Daemon, cluster: Cluster) -> None:
    copy = Copy(daemon, cluster, {"unclean.leader.election.enable": "true"})
    copy.once()
    found = awaited(daemon, "unclean-election", "--topic", copy.target)
    assert found["request"] is None
    assert found["fields"]["source"] == "topic"
    lone = Copy(daemon, cluster)
    assert findings(daemon, "--topic", lone.target, status=0) == {}


def test_unparsable_since_is_a_usage_error(daemon: Daemon) -> None:
    done = cli(daemon.bootstrap, "doctor", "--since", "half past", status=2)
    assert "--since" in done.stderr
