"""Apache Kafka's tools print the same for both brokers, if the brokers have the same state."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.stubborn_client import StubbornClient
from tests.oracle import tool_scenes_share
from tests.oracle.deliberate_tools import OTHERWISE, unintended
from tests.oracle.desk import Desk, Said, Tools, differences, tools_at_hand
from tests.oracle.tool_scenes import FEATURES, SCENES, Scene
from tests.oracle.traces_features import FEATURE
from tests.support.cluster import READ_COMMITTED, Cluster
from tests.support.daemon import Daemon
from tests.support.kafka import ROOT, Kafka
from tests.support.waits import until
from tests.wire.test_cli_txns import hang

pytestmark = pytest.mark.oracle

TOPIC = "tools"
TRANSACTIONS = "org.apache.kafka.tools.TransactionsCommand"

SMALL = 1000
"""The smallest producer id in these scenes.

A ``Desk`` replaces a producer id wherever the output has it as a word, so it must not equal a
partition, an offset or an epoch.
"""

REFUSED = {"acls", "delegation_tokens"}
"""Scenes in which Apache Kafka also refuses all requests, because it has no authorizer."""


def transactions(desk: Desk) -> None:
    """Run every subcommand of kafka-transactions."""
    cluster = desk.cluster
    # The raw client's records have a fixed timestamp, so retention must not delete old records.
    cluster.create_topic(TOPIC, 4, configs={"retention.ms": "-1"})
    assert any(cluster.init_producer()[0] >= SMALL for _ in range(SMALL + 1))
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
            f"{batch.base_offset}-{batch.last_offset} control {batch.is_control}"
            f" of {batch.producer_epoch}"
            for batch in cluster.read(TOPIC, partition=partition, controls=True)
        ]
        desk.said.append((f"committed in {partition}: {values}", 0, log))
    tool("list", "--transactional-id-pattern", "tools-force")
    for client in clients.values():
        client.close()


def hang_at(desk: Desk, partition: int) -> tuple[str, int]:
    """Make a transaction hang in ``partition``: no coordinator knows the transaction."""
    produce = desk.cluster.produce

    class Aimed(Cluster):
        def produce(self, topic, records, **more):  # type: ignore[no-untyped-def]
            return produce(topic, records, partition=partition, **more)

    with Aimed(desk.bootstrap) as aimed:
        return hang(aimed, TOPIC)


def features(desk: Desk) -> None:
    """Describe, upgrade, downgrade and disable a feature, each also as a dry run."""

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


@pytest.fixture(scope="module")
def tools(java_tools: Path) -> Iterator[Tools]:
    assert java_tools.is_dir()
    with tools_at_hand() as started:
        yield started


@pytest.fixture(scope="module")
def pair(
    java_tools: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Daemon, Kafka]]:
    """Yield two brokers that have no other clients, because tools list everything."""
    assert java_tools.is_dir()
    ours = Daemon(tmp_path_factory.mktemp("tools-fencepost")).start()
    theirs = Kafka(tmp_path_factory.mktemp("tools-kafka"))
    try:
        theirs.start()
        yield ours, theirs
    finally:
        theirs.stop()
        ours.stop()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "scene",
    [*SCENES, *tool_scenes_share.SCENES, transactions, features],
    ids=lambda scene: scene.__name__,
)
def test_kafka_tools_print_the_same_for_both_brokers(
    scene: Scene, pair: tuple[Daemon, Kafka], tools: Tools, tmp_path: Path
) -> None:
    ours, theirs = (said(scene, tools, broker, tmp_path) for broker in pair)
    assert any(status == 0 for _, status, _ in theirs) or scene.__name__ in REFUSED
    found = unintended(scene.__name__, differences(ours, theirs))
    assert not found, "\n".join(found)


def said(scene: Scene, tools: Tools, broker: Kafka | Daemon, scratch: Path) -> list[Said]:
    """Return the tools' output for one broker."""
    desk = Desk(tools, broker.bootstrap, broker.data_dir, scratch)
    try:
        scene(desk)
    finally:
        desk.close()
    return desk.said


def test_every_difference_of_tool_output_is_documented() -> None:
    page = (ROOT / "docs" / "compatibility-tools.md").read_text(encoding="utf-8")
    assert [entry.why for entry in OTHERWISE if entry.why not in page] == []


def test_comparison_of_tool_output_finds_differences() -> None:
    theirs = [("Tool --list", 0, ["a", "b"]), ("Tool --delete", 0, [])]
    assert differences(theirs, theirs) == []
    assert differences([("Tool --list", 1, ["b", "c"]), theirs[1]], theirs) == [
        "Tool --list: ends with 1 instead of 0",
        "Tool --list: + c",
        "Tool --list: - a",
    ]
    assert unintended("log_dirs", ["x"]) == ["x"]
    (unused,) = unintended("dump_log", [])
    assert unused.startswith("deliberate, but not to be seen")
