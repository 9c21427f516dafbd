"""No client gets CONCURRENT_TRANSACTIONS in ordinary use, because it would back off afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import READ_COMMITTED, Cluster, unique
from tests.support.daemon import Daemon
from tests.support.kafka import run_tool
from tests.support.quick import only
from tests.support.tap import Tap
from tests.support.targets import SETTINGS
from tests.wire.transactional import CLIENTS, transactional

TRANSACTIONS = 200
COPY_S = 300
"""Timeout in seconds for a JVM on a busy machine."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Tap]]:
    with Tap() as tap:
        settings = {**SETTINGS, "advertised.listeners": f"PLAINTEXT://{tap.address}"}
        started = Daemon(tmp_path_factory.mktemp("tapped"), settings).start()
        tap.listen_to(started.bootstrap)
        yield started, tap
        started.stop()


@pytest.fixture
def tap(daemon: tuple[Daemon, Tap]) -> Tap:
    daemon[1].answers.clear()
    return daemon[1]


def check(tap: Tap) -> None:
    ends = tap.of("none")["end_txn"]
    assert ends == TRANSACTIONS, dict(tap.answers)
    assert tap.of("concurrent_transactions") == {}


@pytest.mark.parametrize("client", only(CLIENTS, "confluent"))
async def test_two_hundred_transactions_with_offsets_get_no_error(tap: Tap, client: str) -> None:
    with Cluster(tap.address) as cluster:
        topic, group = cluster.create_topic(unique("busy"), 2), unique("g")
        cluster.coordinator(group, 0)
        async with transactional(client, tap.address, unique("id")) as producer:
            for number in range(TRANSACTIONS):
                await producer.begin()
                await producer.send(topic, b"%d" % number)
                await producer.send(topic, b"%d" % number, 1)
                if number % 20 == 0:
                    await producer.send_offsets({(topic, 0): number}, group)
                await (producer.abort() if number % 3 == 2 else producer.commit())
        check(tap)
        wanted = [b"%d" % number for number in range(TRANSACTIONS) if number % 3 != 2]
        for partition in (0, 1):
            shown = cluster.values(topic, partition=partition, isolation=READ_COMMITTED)
            assert shown == wanted


# The test checks the broker's responses, regardless of the delays of a busy machine.
@pytest.mark.slow
@pytest.mark.timeout(COPY_S + 60)
def test_two_hundred_java_copies_get_no_error(tap: Tap, java_tools: Path) -> None:
    size = 5
    with Cluster(tap.address) as cluster:
        source, target = (
            cluster.create_topic(unique("in")),
            cluster.create_topic(unique("out"), 2),
        )
        cluster.produce(source, [b"%d" % number for number in range(size * TRANSACTIONS)])
        name = unique("copier")
        run_tool(
            "org.apache.kafka.tools.TransactionalMessageCopier",
            *("--broker-list", tap.address, "--input-topic", source, "--output-topic", target),
            *("--input-partition", "0", "--consumer-group", name, "--transactional-id", name),
            *("--transaction-size", str(size), "--use-group-metadata"),
            deadline_s=COPY_S,
        )
        check(tap)
        shown = sum(
            len(cluster.values(target, partition=lane, isolation=READ_COMMITTED)) for lane in (0, 1)
        )
        assert shown == size * TRANSACTIONS


def test_tap_records_invalid_txn_state_of_an_end_txn(tap: Tap) -> None:
    """The tap must record an error if an EndTxn without a transaction is refused."""
    with Cluster(tap.address) as cluster:
        name = unique("id")
        producer_id, epoch = cluster.init_producer(name)
        cluster.call(
            "end_txn",
            4,
            transactional_id=name,
            producer_id=producer_id,
            producer_epoch=epoch,
            committed=True,
        )
    assert tap.of("invalid_txn_state") == {"end_txn": 1}
