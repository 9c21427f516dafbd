"""A broker of Fencepost is promoted: Apache Kafka's controllers start with the broker's metadata.

test_growth.py runs clients of all kinds while a broker is promoted and its cluster grows, and
tests/unit/tools/test_promotion.py checks the files after an interrupted promotion.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import Producer

from fencepost.tools.ports import hold_port
from tests.crash.stubborn_client import StubbornClient
from tests.oracle.desk import Tools, tools_at_hand
from tests.oracle.interchange import fencepost
from tests.oracle.test_joining_levels import LATEST
from tests.oracle.test_joining_levels import levels as finalized_levels
from tests.oracle.test_metadata_dumps import by_fencepost, by_kafka, types
from tests.oracle.tool_scenes import (
    ACLS,
    CONFIGS,
    CONSUMER_GROUPS,
    FEATURES,
    METADATA_QUORUM,
    TOPICS,
)
from tests.support import kafka43
from tests.support.cluster import READ_COMMITTED, READ_UNCOMMITTED, Cluster
from tests.support.daemon import Daemon
from tests.support.kafka import START_S, Libs, jars, run_tool
from tests.support.pipeline import QUIET
from tests.support.promoted import PromotedBroker, PromotedController
from tests.support.waits import until

pytestmark = [pytest.mark.oracle, pytest.mark.usefixtures("java_tools"), pytest.mark.timeout(600)]

BLOCK = 1000
"""Size of a block of producer ids."""

SETTINGS = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS",
    "offsets.topic.num.partitions": "3",
    "transaction.state.log.num.partitions": "3",
    "broker.session.timeout.ms": "4000",
    "initial.broker.registration.timeout.ms": "300000",
}
_ALTER = "--alter --entity-type"
_ALICE = f"{_ALTER} users --entity-name alice"
CHANGES = (
    (TOPICS, "--create --topic orders.eu --partitions 3 --config retention.ms=-1"),
    (TOPICS, "--create --topic plain --config cleanup.policy=compact"),
    (CONFIGS, f"{_ALTER} brokers --entity-default --add-config log.retention.ms=200000000"),
    (CONFIGS, f"{_ALTER} brokers --entity-name 1 --add-config log.retention.ms=100000000"),
    (CONFIGS, f"{_ALTER} groups --entity-name g --add-config consumer.session.timeout.ms=50000"),
    (CONFIGS, f"{_ALICE} --add-config SCRAM-SHA-512=[password=secret]"),
    (CONFIGS, f"{_ALICE} --add-config SCRAM-SHA-256=[password=secret]"),
    (CONFIGS, f"{_ALICE} --entity-type clients --entity-default --add-config request_percentage=9"),
    (ACLS, "--add --allow-principal User:alice --producer --topic x"),
    (ACLS, "--add --deny-principal User:bob --deny-host 10.0.0.1 --operation Read --group *"),
    (FEATURES, "downgrade --feature transaction.version=1"),
)
QUESTIONS = (
    (TOPICS, "--describe --exclude-internal"),
    (CONFIGS, "--describe --entity-type topics --entity-name orders.eu"),
    (CONFIGS, "--describe --entity-type brokers --entity-default"),
    (CONFIGS, "--describe --entity-type brokers --entity-name 1"),
    (CONFIGS, "--describe --entity-type groups"),
    (CONFIGS, "--describe --entity-type users"),
    (CONFIGS, "--describe --entity-type users --entity-type clients"),
    (ACLS, "--list"),
    (CONSUMER_GROUPS, "--describe --all-groups"),
)
CREATE = "--create --topic"


class Grown:
    """A single broker, its address, and the output folder of its promotion."""

    def __init__(self, directory: Path, *controllers: int, libs: Libs = jars) -> None:
        self.directory, self.output = directory, directory / "out"
        self.libs = libs
        held = [hold_port() for _ in (0, *controllers)]
        for port in held:
            weakref.finalize(self, port.close)
        self.address, *at = (f"127.0.0.1:{port.getsockname()[1]}" for port in held)
        self.named = dict(zip(controllers, at, strict=True))
        self.data_dir = directory / "data"
        self.broker = Daemon(self.data_dir, SETTINGS, listen=self.address)
        self.controllers: list[PromotedController] = []

    def promote(self, *options: str) -> None:
        """Stop the broker, and write the directories of the controllers."""
        self.broker.stop()
        pairs = (item for pair in SETTINGS.items() for item in ("--config", "=".join(pair)))
        at = ",".join(f"{node_id}@{address}" for node_id, address in self.named.items())
        told = ("--controller", at, "--output", self.output, "--listen", self.address)
        fencepost("cluster", "promote", self.data_dir, *told, *pairs, *options)
        self.controllers = [
            PromotedController(node_id, self.output, self.libs) for node_id in self.named
        ]

    def start(self) -> None:
        """Start the controllers, and then the broker as a member of their cluster."""
        for controller in self.controllers:
            controller.launch()
        self.broker = PromotedBroker(self.data_dir, self.output)
        self.broker.launch()
        for controller in self.controllers:
            controller.wait()
        self.broker.wait_until_listening(START_S)

    def kill(self) -> None:
        """Kill all running nodes."""
        for node in (self.broker, *self.controllers):
            if node.child is not None:
                node.kill()


@contextmanager
def grown(directory: Path, *controllers: int, libs: Libs = jars) -> Iterator[Grown]:
    """Yield a running broker, and kill all nodes at the end; controllers use the jars ``libs``."""
    cluster = Grown(directory, *controllers, libs=libs)
    cluster.broker.start()
    try:
        yield cluster
    finally:
        cluster.kill()


def told(tools: Tools, address: str, main: str, words: str) -> list[str]:
    """Return the sorted output lines of a tool."""
    ended, text = tools.run(main, ["--bootstrap-server", address, *words.split()])
    assert ended == 0, text
    return sorted(" ".join(line.split()) for line in text.splitlines())


def levels(tools: Tools, address: str) -> dict[str, str]:
    """Return the finalized level of each feature."""
    pattern = re.compile(r"Feature: (\S+)\s.*FinalizedVersionLevel: (\S+)")
    found = (pattern.match(line) for line in told(tools, address, FEATURES, "describe"))
    return {match[1]: match[2] for match in found if match is not None}


def committed_values(address: str, isolation: int = READ_COMMITTED) -> list[bytes | None]:
    with Cluster(address) as cluster:
        return cluster.values("orders.eu", partition=0, isolation=isolation)


def new_producer_id(address: str) -> int:
    with Cluster(address) as cluster:
        return cluster.init_producer()[0]


def test_promotion_and_its_reversal_keep_metadata_and_records(tmp_path: Path) -> None:
    with grown(tmp_path, 100) as grown_cluster, tools_at_hand() as tools:
        for change in CHANGES:
            told(tools, grown_cluster.address, *change)
        client = StubbornClient(grown_cluster.address, "open", version=1)
        client.claim(timeout_ms=900_000)  # longer than slow JVMs take to start
        client.send("orders.eu", 0, b"open 1")
        producer = Producer(
            {"bootstrap.servers": grown_cluster.address, "enable.idempotence": True, **QUIET}
        )
        producer.produce("orders.eu", b"before", partition=1)
        assert producer.flush(60) == 0
        with Cluster(grown_cluster.address) as cluster:
            cluster.coordinator("g", 0)
            place = {"partition_index": 1, "committed_offset": 1, "committed_leader_epoch": -1}
            topics = [{"name": "orders.eu", "partitions": [place]}]
            how = {"generation_id_or_member_epoch": -1, "topics": topics}
            cluster.call("offset_commit", 8, group_id="g", **how)
        ids = [new_producer_id(grown_cluster.address) for _ in range(3)]
        said = [told(tools, grown_cluster.address, *question) for question in QUESTIONS]
        had = levels(tools, grown_cluster.address)
        assert had["transaction.version"] == "1"

        grown_cluster.promote()
        files = sorted(grown_cluster.controllers[:1][0].metadata.rglob("*.checkpoint"))
        ours = by_fencepost(files)
        assert ours == by_kafka(files)
        assert types(ours) >= {"KRAFT_VERSION", "KRAFT_VOTERS", "PRODUCER_IDS_RECORD"}
        grown_cluster.start()
        check_all_is_there(tools, grown_cluster, said, had)
        client.send("orders.eu", 0, b"open 2")
        producer.produce("orders.eu", b"after", partition=1)
        assert producer.flush(60) == 0
        assert committed_values(grown_cluster.address) == []
        client.end(commit=True)
        until(
            lambda: committed_values(grown_cluster.address) == [b"open 1", b"open 2"],
            "what was committed",
        )
        assert b"open 2" in committed_values(grown_cluster.address, READ_UNCOMMITTED)
        with Cluster(grown_cluster.address) as cluster:
            assert cluster.values("orders.eu", partition=1) == [b"before", b"after"]
        first = new_producer_id(grown_cluster.address)
        assert {first // BLOCK}.isdisjoint(
            producer_id // BLOCK for producer_id in [client.producer_id, *ids]
        )
        told(tools, grown_cluster.address, TOPICS, f"{CREATE} meanwhile")

        back(grown_cluster)
        assert "Topic: meanwhile" in "\n".join(told(tools, grown_cluster.address, *QUESTIONS[0]))
        told(tools, grown_cluster.address, TOPICS, "--delete --topic meanwhile")
        check_all_is_there(tools, grown_cluster, said, had, but=(CONSUMER_GROUPS,))
        last = new_producer_id(grown_cluster.address)
        assert last // BLOCK not in {id_ // BLOCK for id_ in [client.producer_id, *ids, first]}
        producer.produce("orders.eu", b"alone", partition=1)
        assert producer.flush(60) == 0
        assert committed_values(grown_cluster.address) == [b"open 1", b"open 2"]

        grown_cluster.output = tmp_path / "again"
        grown_cluster.promote("--static-voters")
        grown_cluster.start()
        check_all_is_there(tools, grown_cluster, said, had, but=(CONSUMER_GROUPS,))
        producer.produce("orders.eu", b"again", partition=1)
        assert producer.flush(60) == 0
        with Cluster(grown_cluster.address) as cluster:
            assert cluster.values("orders.eu", partition=1) == [
                *(b"before", b"after", b"alone", b"again")
            ]
        client.close()


def test_promotion_to_a_finalized_4_4_quorum_and_back_keeps_the_levels(
    tmp_path: Path,
) -> None:
    """The cluster's finalized levels are kept, even when the broker is alone again."""
    with grown(tmp_path, 100) as grown_cluster:
        values: list[bytes | None] = []

        def produce(value: bytes) -> None:
            values.append(value)
            with Cluster(grown_cluster.address) as cluster:
                until(lambda: cluster.produce("t", [value])["error_code"] == "none", "a record")
                assert cluster.values("t") == values

        with Cluster(grown_cluster.address) as cluster:
            cluster.create_topic("t")
        produce(b"before")
        grown_cluster.promote()
        grown_cluster.start()
        produce(b"in the cluster")
        words = ("--bootstrap-server", grown_cluster.address, "upgrade", "--release-version", "4.4")
        run_tool(FEATURES, *words)
        until(
            lambda: finalized_levels(grown_cluster.address) == LATEST,
            "the broker knows the new levels",
        )
        back(grown_cluster)
        assert finalized_levels(grown_cluster.address) == LATEST
        for direction, level in (("downgrade", 1), ("upgrade", 2)):
            wanted = (direction, "--feature", f"share.version={level}")
            run_tool(FEATURES, *words[:2], *wanted)
            assert finalized_levels(grown_cluster.address) == {**LATEST, "share.version": level}
        produce(b"alone")
        grown_cluster.output = tmp_path / "again"
        grown_cluster.promote()
        grown_cluster.start()
        assert finalized_levels(grown_cluster.address) == LATEST
        produce(b"again")


def check_all_is_there(
    tools: Tools,
    grown_cluster: Grown,
    said: list[list[str]],
    had: dict[str, str],
    but: tuple[str, ...] = (),
) -> None:
    """Check that Kafka's tools print the same as before the promotion."""
    for question, before in zip(QUESTIONS, said, strict=True):
        if question[0] not in but:
            assert told(tools, grown_cluster.address, *question) == before, question
    now = levels(tools, grown_cluster.address)
    assert {name: now[name] for name in had if name != "kraft.version"} == {
        name: level for name, level in had.items() if name != "kraft.version"
    }


def back(grown_cluster: Grown) -> None:
    """Let the broker serve alone again, with its controllers' metadata."""
    grown_cluster.broker.stop()
    for controller in grown_cluster.controllers:
        controller.stop()
    told_to = ("cluster", "stand-alone", grown_cluster.data_dir, "--execute")
    fencepost(*told_to, *(f"--from={each.metadata}" for each in grown_cluster.controllers))
    grown_cluster.broker = Daemon(
        grown_cluster.data_dir, SETTINGS, listen=grown_cluster.address
    ).start()


def test_promotion_to_three_controllers_survives_loss_of_the_active_one(tmp_path: Path) -> None:
    """One controller starts with only an identity, and fetches the metadata from the others.

    The controllers run Apache Kafka 4.3, which supports the levels of a new broker too.
    """
    with (
        grown(tmp_path, 101, 102, 103, libs=kafka43.jars) as grown_cluster,
        tools_at_hand() as tools,
    ):
        told(tools, grown_cluster.address, *CHANGES[0])
        said = told(tools, grown_cluster.address, *QUESTIONS[0])
        grown_cluster.promote()
        (snapshot,) = grown_cluster.controllers[2].metadata.rglob("*.checkpoint")
        snapshot.unlink()
        grown_cluster.start()
        assert told(tools, grown_cluster.address, *QUESTIONS[0]) == said
        active = by_status(tools, grown_cluster)
        next(each for each in grown_cluster.controllers if each.node_id == active).kill()
        told(tools, grown_cluster.address, TOPICS, f"{CREATE} after --partitions 2")
        now = told(tools, grown_cluster.address, *QUESTIONS[0])
        assert set(said) < set(now)
        assert by_status(tools, grown_cluster) not in (active, -1)
        with Cluster(grown_cluster.address) as cluster:
            cluster.produce("after", [b"1"])
            assert cluster.values("after") == [b"1"]


def by_status(tools: Tools, grown_cluster: Grown) -> int:
    """Return the active controller of a dynamic quorum, according to kafka-metadata-quorum."""
    lines = told(tools, grown_cluster.address, METADATA_QUORUM, "describe --status")
    text = "\n".join(lines)
    assert text.count('"directoryId"') == 1 + len(grown_cluster.named), text
    found = re.search(r"LeaderId: (-?\d+)", text)
    assert found is not None
    return int(found[1])
