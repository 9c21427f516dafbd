"""Apache Kafka's tools on a mixed cluster print the same through either broker.

Apache Kafka's controller is a separate process. One broker is Apache Kafka's, one Fencepost's.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.oracle.desk import Desk, Tools, differences, tools_at_hand
from tests.oracle.test_joining import brokers, created, partitions, until_unfenced
from tests.oracle.tool_scenes import (
    API_VERSIONS,
    CLUSTER,
    CONFIGS,
    CONSOLE_SHARE_CONSUMER,
    DELETE_RECORDS,
    DUMP_LOG,
    FEATURES,
    GET_OFFSETS,
    GROUPS,
    LEADER_ELECTION,
    LOG_DIRS,
    METADATA_QUORUM,
    PACKAGE,
    REASSIGN,
    REPLICA_VERIFICATION,
    STREAMS_GROUPS,
    TOPICS,
    VERIFIABLE_CONSUMER,
    VERIFIABLE_PRODUCER,
)
from tests.support.cluster import READ_COMMITTED, Cluster, unique
from tests.support.controllers import Pretender
from tests.support.kafka import CLUSTER_ID, Kafka, java_command
from tests.support.member import Member
from tests.support.mixed import MixedCluster
from tests.support.processes import Child
from tests.support.waits import until

pytestmark = [pytest.mark.oracle, pytest.mark.usefixtures("java_tools")]

COPIER = PACKAGE + "TransactionalMessageCopier"
TRANSACTIONS = PACKAGE + "TransactionsCommand"
JAVA, OURS, GONE = 1, 2, 103
WRITTEN = 100
"""How many records each verifiable producer writes, to partitions that it chooses."""
TRIMMED = 5
"""How many earlier records each partition has; they are deleted."""


SETTINGS = {
    "broker.session.timeout.ms": "4000",
    "log.retention.ms": "-1",  # the raw client's records have a fixed old timestamp
    "offsets.topic.num.partitions": "2",
    "transaction.state.log.num.partitions": "2",
}


class Mixed:
    """The cluster, with a desk for each broker; :meth:`tool` uses the desks in turn."""

    def __init__(self, directory: Path, tools: Tools) -> None:
        self.cluster = MixedCluster(directory, "JP", SETTINGS).start()
        self.controller = self.cluster.address(self.cluster.controllers[0])
        kafka, ours = self.cluster.nodes
        assert isinstance(kafka, Kafka)
        assert isinstance(ours, Member)
        self.kafka, self.ours = kafka, ours
        until_unfenced(self.kafka, OURS)
        for name in ("__consumer_offsets", "__transaction_state"):
            created(self.kafka.bootstrap, name, [[JAVA, OURS], [OURS, JAVA]])
        self.bootstrap = self.cluster.bootstrap
        scratch = directory / "scratch"
        scratch.mkdir()
        self.desks = [
            Desk(tools, broker.bootstrap, broker.data_dir, scratch)
            for broker in (self.kafka, self.ours)
        ]

    def tool(self, main: str, *words: str, where: str = "--bootstrap-server", **how: int) -> str:
        """Run a tool on the next broker in turn, check that it succeeds, and return its output."""
        self.desks.reverse()
        text = self.desks[0].run(main, *words, where=where, **how)  # type: ignore[arg-type]
        assert self.desks[0].said[-1][1] == 0, text
        return text

    def both(self, main: str, *words: str, where: str = "--bootstrap-server", **how: bool) -> str:
        """Run a tool on both brokers, and check that it succeeds and prints the same."""
        text = ""
        for desk in self.desks:
            text = desk.run(main, *words, where=where, **how)  # type: ignore[arg-type]
        one, other = (desk.said[-1:] for desk in self.desks)
        assert one[0][1] == 0, text
        assert differences(one, other) == []
        return text

    def file(self, name: str, content: object) -> str:
        """Write a JSON file for a tool; return its path."""
        return self.desks[0].file(name, json.dumps(content))

    def topic(self, *replicas: list[int]) -> str:
        """Create a topic, and wait until both brokers know it with all replicas in sync."""
        name = unique("t")
        created(self.ours.bootstrap, name, list(replicas))
        for index, ids in enumerate(replicas):
            self.settled(name, ids[0], *ids, index=index)
        return name

    def settled(self, name: str, leader: int, *isr: int, index: int = 0) -> None:
        """Wait until this leader and this ISR are in both brokers' Metadata."""
        for broker in (self.kafka, self.ours):

            def told(bootstrap: str = broker.bootstrap) -> bool:
                part = partitions(bootstrap, name).get(index, {"leader_id": None})
                return part["leader_id"] == leader and set(part["isr_nodes"]) == set(isr)  # type: ignore[call-overload]

            until(told, f"{leader} leads {name}-{index} with {isr}")

    def write(self, name: str, leader: int, *values: bytes, index: int = 0) -> None:
        """Write a batch to the leader, once it serves."""
        broker = self.kafka if leader == JAVA else self.ours

        def written() -> bool:
            with Cluster(broker.bootstrap) as client:
                answer = client.produce(name, values, partition=index, acks=-1)
            return bool(answer["error_code"] == "none")

        until(written, f"{leader} takes records of {name}")

    def stop(self) -> None:
        for desk in self.desks:
            desk.close()
        self.cluster.stop()


@pytest.fixture(scope="module")
def mixed(java_tools: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mixed]:
    assert java_tools.is_dir()
    with tools_at_hand() as tools:
        cluster = Mixed(tmp_path_factory.mktemp("mixed"), tools)
        yield cluster
        cluster.stop()


def test_cluster_tools_print_the_same_through_either_broker(mixed: Mixed) -> None:
    status = mixed.both(METADATA_QUORUM, "describe", "--status", figures=False)
    assert "CurrentObservers:" in status
    rows = mixed.both(METADATA_QUORUM, "describe", "--replication", figures=False)
    assert [row.split()[-1] for row in rows.splitlines()[1:4]] == ["Leader", *["Observer"] * 2]
    for words in (("cluster-id",), ("list-endpoints",), ("list-endpoints", "--include-fenced")):
        for desk in mixed.desks:
            desk.run(CLUSTER, words[0], "--bootstrap-server", desk.bootstrap, *words[1:], where="")
        one, other = (desk.said[-1:] for desk in mixed.desks)
        assert one[0][1] == 0
        assert differences(one, other) == []
    # The tool describes any broker of the cluster, and Fencepost supports the levels of 4.4 as
    # well.
    level = re.compile(r"Feature: (\S+)\s.*FinalizedVersionLevel: (\S+)")
    one, other = (level.findall(desk.run(FEATURES, "describe")) for desk in mixed.desks)
    assert one == other != []
    for desk in mixed.desks:
        told = desk.run(LOG_DIRS, "--describe", "--broker-list", f"{JAVA},{OURS}")
        (row,) = (json.loads(line) for line in told.splitlines() if line.startswith("{"))
        assert {broker["broker"] for broker in row["brokers"]} == {JAVA, OURS}
        assert {log_dir["error"] for broker in row["brokers"] for log_dir in broker["logDirs"]} == {
            None
        }
    for kind, name in (("brokers", str(JAVA)), ("brokers", str(OURS)), ("topics", "")):
        named = ("--entity-name", name) if name else ()
        mixed.both(CONFIGS, "--describe", "--entity-type", kind, *named)
    versions = mixed.tool(API_VERSIONS)
    assert f"(id: {JAVA} " in versions
    assert f"(id: {OURS} " in versions


def test_unregistered_broker_disappears_from_both_brokers(mixed: Mixed) -> None:
    with closing(Pretender(mixed.controller, GONE, CLUSTER_ID)) as gone:
        gone.join()
        gone.heartbeat(want_fence=True)
    until(lambda: brokers(mixed.ours).get(GONE), "it is fenced")
    here = ("--bootstrap-server", mixed.ours.bootstrap)
    told = mixed.tool(CLUSTER, "unregister", *here, "--id", str(GONE), where="")
    assert f"Broker {GONE} is no longer registered" in told
    for broker in (mixed.kafka, mixed.ours):
        until(lambda broker=broker: set(brokers(broker)) == {JAVA, OURS}, "it is forgotten")


def test_topics_are_created_and_described_alike_by_both_brokers(mixed: Mixed) -> None:
    name = unique("made")
    replicas = ("--replica-assignment", f"{JAVA}:{OURS},{OURS}:{JAVA}")
    mixed.tool(TOPICS, "--create", "--topic", name, *replicas, "--config", "retention.ms=1000")
    mixed.settled(name, JAVA, JAVA, OURS)
    mixed.settled(name, OURS, JAVA, OURS, index=1)
    assert f"Replicas: {JAVA},{OURS}" in mixed.both(TOPICS, "--describe", "--topic", name)
    mixed.both(TOPICS, "--list")
    for only in ("under-replicated", "unavailable", "under-min-isr", "at-min-isr"):
        mixed.both(TOPICS, "--describe", f"--{only}-partitions", "--exclude-internal")
    mixed.tool(TOPICS, "--delete", "--topic", name)


def test_produced_records_are_consumed_and_identical_in_both_logs(mixed: Mixed) -> None:
    name = mixed.topic([JAVA, OURS], [OURS, JAVA])
    for index, node in enumerate((JAVA, OURS)):
        mixed.write(name, node, *[b"0"] * TRIMMED, index=index)
    sent = ("--topic", name, "--max-messages", str(WRITTEN), "--acks", "-1")
    for number in range(2):
        numbered = ("--value-prefix", str(number), "--throughput", "-1")
        told = mixed.tool(VERIFIABLE_PRODUCER, *sent, *numbered, limit_ms=3_000, stays=True)
        assert told.count('"name":"producer_send_success"') == WRITTEN
    total = 2 * (WRITTEN + TRIMMED)
    for protocol in ("classic", "consumer"):
        told = mixed.tool(
            *(VERIFIABLE_CONSUMER, "--topic", name, "--group-id", unique(protocol)),
            *("--group-protocol", protocol, "--reset-policy", "earliest"),
            *("--max-messages", str(total), "--verbose"),
        )
        assert told.count('"name":"record_data"') == total
    mixed.both(GROUPS, "--list")
    for time in ("earliest", "latest", "max-timestamp"):
        mixed.both(GET_OFFSETS, "--topic", name, "--time", time)
    _trim(mixed, name)
    _verify(mixed, name)
    for index in (0, 1):
        for desk in mixed.desks:
            segment = desk.data_dir / f"{name}-{index}" / f"{0:020}.log"
            desk.run(DUMP_LOG, "--print-data-log", "--files", str(segment), where="")
        one, other = (desk.said[-1:] for desk in mixed.desks)
        assert one[0][1] == 0
        assert sum("| offset:" in line for line in one[0][2])
        assert differences(one, other) == []


def _verify(mixed: Mixed, name: str) -> None:
    """Wait until kafka-replica-verification, which never ends, reports equal replicas."""
    words = ("--topics-include", name, "--report-interval-ms", "200")
    child = Child(java_command(REPLICA_VERIFICATION, "--broker-list", mixed.bootstrap, *words))
    try:
        child.wait_for_line(f"max lag is 0 for partition {name}-", deadline_s=90)
    finally:
        child.kill()


def _trim(mixed: Mixed, name: str) -> None:
    """Delete records of both partitions, and check on both brokers that they are gone."""
    parts = [{"topic": name, "partition": index, "offset": TRIMMED} for index in (0, 1)]
    plan = mixed.file("trim.json", {"version": 1, "partitions": parts})
    told = mixed.tool(DELETE_RECORDS, "--offset-json-file", plan)
    assert told.count(f"low_watermark: {TRIMMED}") == len(parts)
    told = mixed.both(GET_OFFSETS, "--topic", name, "--time", "earliest")
    assert told.split() == [f"{name}:{index}:{TRIMMED}" for index in (0, 1)]


def test_transaction_tools_copy_exactly_once_and_print_the_same(mixed: Mixed) -> None:
    source, target = (
        mixed.topic([JAVA, OURS], [OURS, JAVA]),
        mixed.topic([JAVA, OURS], [OURS, JAVA]),
    )
    for index, node in enumerate((JAVA, OURS)):
        mixed.write(source, node, *(b"%d-%d" % (index, at) for at in range(30)), index=index)
        mixed.tool(
            *(COPIER, "--input-topic", source, "--input-partition", str(index)),
            *("--output-topic", target, "--transactional-id", f"copier-{index}"),
            *("--consumer-group", f"copiers-{index}", "--transaction-size", "7"),
            *(("--use-group-metadata",) if index else ()),
            where="--broker-list",
        )
    for index in (0, 1):
        named = ("--transactional-id", f"copier-{index}")
        # The last commit's response may precede its markers.
        until(
            lambda named=named: "CompleteCommit" in mixed.tool(TRANSACTIONS, "describe", *named),
            "the markers",
        )
        mixed.both(TRANSACTIONS, "describe", *named, figures=False)
        place = ("--topic", target, "--partition", str(index))
        mixed.both(TRANSACTIONS, "describe-producers", *place)
    mixed.both(TRANSACTIONS, "list")

    def copied() -> bool:
        found = []
        for index, broker in enumerate((mixed.kafka, mixed.ours)):
            with Cluster(broker.bootstrap) as client:
                found += client.values(target, partition=index, isolation=READ_COMMITTED)
        return sorted(found) == sorted(b"%d-%d" % (i, at) for i in (0, 1) for at in range(30))

    until(copied, "the copies, once each")
    for node in (JAVA, OURS):
        mixed.both(TRANSACTIONS, "find-hanging", "--broker-id", str(node))


def test_reassignment_tool_throttles_cancels_and_completes(mixed: Mixed) -> None:
    name = mixed.topic([JAVA])
    for _ in range(6):
        mixed.write(name, JAVA, b"x" * 900_000)
    there = {"topic": name, "partition": 0, "replicas": [OURS]}
    plan = mixed.file("there.json", {"version": 1, "partitions": [there]})
    command = (REASSIGN, "--reassignment-json-file", plan)
    mixed.tool(*command, "--execute", "--throttle", "1000")
    for desk in mixed.desks:
        desk.run(REASSIGN, "--list")
        assert any(f"{name}-0: replicas: {OURS},{JAVA}" in line for line in desk.said[-1][2])
    assert "is still in progress" in mixed.tool(*command, "--verify")
    assert "Successfully cancelled" in mixed.tool(*command, "--cancel", "--preserve-throttles")
    mixed.settled(name, JAVA, JAVA)
    mixed.tool(*command, "--execute", "--throttle", "100000000")
    until(lambda: "is completed" in mixed.tool(*command, "--verify"), "the move")
    mixed.settled(name, OURS, OURS)
    for kind, entity in (("brokers", str(JAVA)), ("brokers", str(OURS)), ("topics", name)):
        shown = ("--describe", "--entity-type", kind, "--entity-name", entity)
        for _ in mixed.desks:
            until(lambda shown=shown: "throttled" not in mixed.tool(CONFIGS, *shown), "no throttle")
    with Cluster(mixed.ours.bootstrap) as client:
        assert client.offset(name) == 6
    back = mixed.file("back.json", {"version": 1, "partitions": [{**there, "replicas": [JAVA]}]})
    mixed.tool(REASSIGN, "--reassignment-json-file", back, "--execute")
    mixed.settled(name, JAVA, JAVA)


def _group(mixed: Mixed, coordinator: int) -> str:
    """Return the name of a group that this broker coordinates."""
    with Cluster(mixed.kafka.bootstrap) as client:

        def found() -> str | None:
            name = unique("g")
            place = client.call("find_coordinator", 2, key=name, key_type=0)
            return name if place["node_id"] == coordinator else None

        return until(found, f"a group of {coordinator}")


def test_share_groups_are_served_by_both_and_streams_groups_by_kafka(mixed: Mixed) -> None:
    """Coordinator, partition leader and share coordinator may each be on either broker."""
    created(mixed.kafka.bootstrap, "__share_group_state", [[JAVA], [OURS]])
    groups = [_group(mixed, JAVA), _group(mixed, OURS)]

    def shared(topic: str, of: str) -> str:
        asked = ("--topic", topic, "--group", of, "--max-messages", "1", "--timeout-ms", "30000")
        whole = ("--bootstrap-server", mixed.bootstrap)
        return mixed.desks[0].run(CONSOLE_SHARE_CONSUMER, *whole, *asked, where="")

    for group in groups:
        named = ("--entity-type", "groups", "--entity-name", group)
        mixed.tool(CONFIGS, "--alter", *named, "--add-config", "share.auto.offset.reset=earliest")
        for leader in (JAVA, OURS):
            topic = mixed.topic([leader])
            mixed.write(topic, leader, b"shared")
            assert "shared" in shared(topic, group).splitlines()
    streams = ("--describe", "--group", groups[1])
    assert "UnsupportedVersionException" in mixed.desks[0].run(STREAMS_GROUPS, *streams)
    with Cluster(mixed.ours.bootstrap) as client:
        (found,) = client.call(
            "find_coordinator", 6, key_type=2, coordinator_keys=[f"g:{uuid.UUID(int=7)}:0"]
        )["coordinators"]
    assert found["error_code"] == "invalid_request"
    for name in ("share.version", "streams.version"):
        mixed.tool(FEATURES, "downgrade", "--feature", f"{name}=0")
    for group in groups:
        assert "UnsupportedVersionException" in shared(topic, group)


def test_leader_election_tool_elects_unclean_and_preferred_leaders(mixed: Mixed) -> None:
    """This is the last test, because both brokers restart.

    An unclean leader loses the records that only the other broker had.
    """
    name = mixed.topic([OURS, JAVA])
    elect = (LEADER_ELECTION, "--topic", name, "--partition", "0", "--election-type")
    mixed.ours.stop()
    until(lambda: partitions(mixed.kafka.bootstrap, name)[0]["leader_id"] == JAVA, "it leads")
    mixed.write(name, JAVA, b"lost")
    mixed.kafka.kill()
    mixed.ours.start()
    until_unfenced(mixed.ours, OURS)
    until(lambda: partitions(mixed.ours.bootstrap, name)[0]["leader_id"] == -1, "nobody leads")
    desk = next(other for other in mixed.desks if other.bootstrap == mixed.ours.bootstrap)
    assert f"Topic: {name}" in desk.run(TOPICS, "--describe", "--unavailable-partitions")
    assert "PreferredLeaderNotAvailable" in desk.run(*elect, "preferred")
    assert "Successfully completed leader election (UNCLEAN)" in desk.run(*elect, "unclean")
    until(lambda: partitions(mixed.ours.bootstrap, name)[0]["leader_id"] == OURS, "it leads")
    mixed.write(name, OURS, b"kept")
    mixed.kafka.start()
    mixed.settled(name, OURS, OURS, JAVA)
    order = {"topic": name, "partition": 0, "replicas": [JAVA, OURS]}
    plan = mixed.file("order.json", {"version": 1, "partitions": [order]})
    mixed.tool(REASSIGN, "--reassignment-json-file", plan, "--execute")
    until(
        lambda: (
            "Successfully completed leader election (PREFERRED)" in mixed.tool(*elect, "preferred")
        ),
        "the election",
    )
    mixed.settled(name, JAVA, OURS, JAVA)
    with Cluster(mixed.kafka.bootstrap) as client:
        until(lambda: client.values(name) == [b"kept"], "the log of the unclean leader")
