"""``kafka-transactions`` and ``kafka-features`` on both brokers: the same state, the same words."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable

import pytest

from tests.crash.stubborn_client import StubbornClient
from tests.oracle.traces_features import FEATURE
from tests.support.cluster import READ_COMMITTED, Cluster
from tests.support.daemon import Daemon
from tests.support.kafka import Kafka, java_command
from tests.support.waits import until
from tests.wire.test_cli_txns import hang

pytestmark = pytest.mark.oracle

TOPIC = "tools"
TRANSACTIONS = "org.apache.kafka.tools.TransactionsCommand"
FEATURES = "org.apache.kafka.tools.FeatureCommand"

VARYING = re.compile(r"Ms$|Timestamp$|Duration|^CoordinatorId$|CoordinatorEpoch$")
"""Columns of instants and ages; how often the coordinator was elected or started."""


LOGGED_AT = re.compile(r"^\d\d:\d\d:\d\d\.\d{3} ", re.MULTILINE)


class Desk:
    """One broker and what was said about it. Producer ids are called by their owners' names."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self.cluster = Cluster(bootstrap)
        self.said: list[tuple[str, int, list[str]]] = []
        self._names: dict[str, str] = {}

    def close(self) -> None:
        self.cluster.close()

    def named(self, name: str, producer_id: int, called: str = "") -> None:
        """Call a producer id, and its transactional id too if that has one ``called`` for it."""
        self._names[str(producer_id)] = f"id-of-{called or name}"
        if called:
            self._names[name] = called

    def run(self, main: str, *words: str, only: str = "") -> None:
        """Run a tool and keep its exit status and its lines, or those with ``only`` in them."""
        done = subprocess.run(
            java_command(main, "--bootstrap-server", self.bootstrap, *words),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
            check=False,
        )
        shown = [self._names.get(word, word) for word in words]
        lines = [line for line in self._lines(done.stdout) if only in line]
        self.said.append((" ".join(shown), done.returncode, sorted(lines)))

    def _lines(self, text: str) -> list[str]:
        """The lines, one space between words, without stack traces and without what may vary."""
        text = LOGGED_AT.sub("", text)
        lines = [line.split() for line in text.splitlines() if not line.startswith("\tat ")]
        heads = lines[0] if lines else []
        if not any(VARYING.search(word) for word in heads):
            heads = []
        found = []
        for line in lines:
            varying = len(line) == len(heads) and line != heads
            found.append(
                " ".join(
                    "…" if varying and VARYING.search(heads[i]) else self._names.get(word, word)
                    for i, word in enumerate(line)
                )
            )
        return found


def transactions(desk: Desk) -> None:
    """Every subcommand of kafka-transactions."""
    cluster = desk.cluster
    # The raw client's records bear a fixed date, which retention would find too old in time.
    cluster.create_topic(TOPIC, 4, configs={"retention.ms": "-1"})
    clients = {}
    for partition, name in enumerate(("tools-open", "tools-done", "tools-force")):
        client = clients[name] = StubbornClient(desk.bootstrap, name, version=2)
        client.claim()
        desk.named(name, client.producer_id)
        client.send(TOPIC, partition, b"1")
        client.send(TOPIC, partition, b"2")
    clients["tools-done"].end(commit=True)
    desk.named(*hang_at(desk, 3), "stuck")

    def tool(*words: str, only: str = "") -> None:
        desk.run(TRANSACTIONS, *words, only=only)

    tool("list", "--transactional-id-pattern", "tools-.*e.*")
    tool("list", "--transactional-id-pattern", "(")
    tool("list", "--duration-filter", "1", "--transactional-id-pattern", "tools-.*")
    tool("list", "--duration-filter", "3600000")
    tool("describe", "--transactional-id", "tools-open")
    tool("describe", "--transactional-id", "tools-unknown")
    for partition in (0, 3):
        tool("describe-producers", "--topic", TOPIC, "--partition", str(partition))
    tool("list", only="tools-")
    on_broker = ("--broker-id", "1")
    tool("describe-producers", *on_broker, "--topic", TOPIC, "--partition", "3")
    find = ("find-hanging", "--max-transaction-timeout")
    tool(*find, "0", "--topic", TOPIC)
    tool(*find, "0", "--topic", TOPIC, "--partition", "3")
    tool(*find, "0", *on_broker, only=TOPIC)
    place = ("--topic", TOPIC, "--partition")
    tool("abort", *place, "3", "--start-offset", "7")
    tool("abort", *place, "3", "--start-offset", "0")
    tool(*find, "0", "--topic", TOPIC)
    opened = clients["tools-open"]
    by_hand = ("--producer-id", str(opened.producer_id), "--producer-epoch", str(opened.epoch))
    tool("abort", *place, "0", *by_hand, "--coordinator-epoch", "0")
    tool("forceTerminateTransaction", "--transactionalId", "tools-force")
    tool("forceTerminateTransaction", "--transactionalId", "tools-unknown")
    for partition in range(4):
        until(
            lambda partition=partition: (
                cluster.lso(TOPIC, partition) == cluster.offset(TOPIC, partition) > 0
            ),
            f"the end of the transaction in {partition}",
        )
        values = cluster.values(TOPIC, partition=partition, isolation=READ_COMMITTED)
        log = [
            f"{one.base_offset}-{one.last_offset} control {one.is_control} of {one.producer_epoch}"
            for one in cluster.read(TOPIC, partition=partition, controls=True)
        ]
        desk.said.append((f"committed in {partition}: {values}", 0, log))
    tool("list", "--transactional-id-pattern", "tools-force")
    for client in clients.values():
        client.close()


def hang_at(desk: Desk, partition: int) -> tuple[str, int]:
    """A transaction that no coordinator knows of, in ``partition``."""
    produce = desk.cluster.produce

    class Aimed(Cluster):
        def produce(self, topic, records, **more):  # type: ignore[no-untyped-def]
            return produce(topic, records, partition=partition, **more)

    with Aimed(desk.bootstrap) as aimed:
        return hang(aimed, TOPIC)


def features(desk: Desk) -> None:
    """Describing, raising, lowering, switching off, and each of them as a trial."""

    def tool(*words: str, only: str = "") -> None:
        desk.run(FEATURES, *words, only=only)

    def level() -> None:
        tool("describe", only=FEATURE)
        desk.said[-1] = *desk.said[-1][:2], [re.sub(r"Epoch:.*", "", x) for x in desk.said[-1][2]]

    level()
    for words in (
        ("downgrade", "--feature", f"{FEATURE}=1", "--dry-run"),
        ("downgrade", "--feature", f"{FEATURE}=1"),
        ("upgrade", "--feature", f"{FEATURE}=9"),
        ("upgrade", "--feature", "no.such.feature=1"),
        ("disable", "--feature", FEATURE),
        ("upgrade", "--feature", f"{FEATURE}=2"),
    ):
        tool(*words)
    level()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("work", [transactions, features], ids=lambda work: work.__name__)
def test_the_tools_say_the_same(
    work: Callable[[Desk], None], kafka: Kafka, fencepost: Daemon
) -> None:
    heard = []
    for broker in (kafka, fencepost):
        desk = Desk(broker.bootstrap)
        try:
            work(desk)
        finally:
            desk.close()
        heard.append(desk.said)
    theirs, ours = heard
    assert any(status == 0 for _, status, _ in theirs)
    different = [
        f"{their[0]}: {our[1:]}\n   instead of {their[1:]}"
        for our, their in zip(ours, theirs, strict=True)
        if our != their
    ]
    assert not different, "\n".join(different)
