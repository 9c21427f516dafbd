"""A broker of Fencepost in a cluster with Apache Kafka's controller."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fencepost.cluster.image import MetadataImage
from fencepost.cluster.observer import Observer, SnapshotFetched
from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.metadata.names import HISTORY_TOPIC
from fencepost.coordinator.replication import metadata_wire
from tests.oracle.desk import Tools, tools_at_hand
from tests.oracle.tool_scenes import CONFIGS, LOG_DIRS, METADATA_QUORUM
from tests.support.cluster import Cluster, unique
from tests.support.controllers import Pretender
from tests.support.kafka import CLUSTER_ID, Kafka
from tests.support.member import Member
from tests.support.waits import until

SESSION_MS = 4_000
"""``broker.session.timeout.ms`` of the controller, short because tests wait until it expires."""

KAFKA = {
    "auto.create.topics.enable": "true",
    "broker.session.timeout.ms": str(SESSION_MS),
    "metadata.log.max.record.bytes.between.snapshots": "2000",
}


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    broker = Kafka(tmp_path_factory.mktemp("kafka"), KAFKA)
    broker.start()
    yield broker
    broker.stop()


@pytest.fixture(scope="module")
def tools() -> Iterator[Tools]:
    with tools_at_hand() as started:
        yield started


def said(tools: Tools, main: str, *words: str) -> str:
    """Run a tool that must succeed; return its output."""
    status, told = tools.run(main, words)
    assert status == 0, told
    return told


def brokers(kafka: Kafka | Member) -> dict[int, bool]:
    """Return whether each registered broker is fenced, according to DescribeCluster."""
    with Cluster(kafka.bootstrap) as client:
        answer = client.call("describe_cluster", 2, include_fenced_brokers=True)
    return {broker["broker_id"]: broker["is_fenced"] for broker in answer["brokers"]}


def until_unfenced(kafka: Kafka | Member, node_id: int) -> None:
    until(lambda: brokers(kafka).get(node_id) is False, f"broker {node_id} unfenced")


def created(bootstrap: str, name: str, replicas: list[list[int]]) -> None:
    with Cluster(bootstrap) as client:
        topic = {
            "name": name,
            "num_partitions": -1,
            "replication_factor": -1,
            "assignments": [
                {"partition_index": index, "broker_ids": ids} for index, ids in enumerate(replicas)
            ],
        }
        answer = client.call("create_topics", 5, timeout=10_000, topics=[topic])
        assert answer["topics"][0]["error_code"] == "none", answer


def partitions(bootstrap: str, name: str) -> dict[int, dict[str, object]]:
    with Cluster(bootstrap) as client:
        (topic,) = client.call("metadata", 8, topics=[{"name": name}])["topics"]
    return {row["partition_index"]: row for row in topic["partitions"]}


def leaders(bootstrap: str, name: str) -> dict[int, object]:
    return {index: row["leader_id"] for index, row in partitions(bootstrap, name).items()}


def test_joining_broker_is_registered_unfenced_and_observes_the_quorum(
    kafka: Kafka, member: Member, tools: Tools
) -> None:
    """With only a properties file, a broker is registered, unfenced and observes the quorum."""
    assert brokers(kafka) == {1: False, 101: False}
    assert member.identity["cluster.id"] == CLUSTER_ID
    assert member.identity["node.id"] == "101"
    here = ("--bootstrap-server", member.bootstrap)
    told = said(tools, METADATA_QUORUM, *here, "describe", "--replication")
    row = next(line.split() for line in told.splitlines() if line.startswith("101"))
    assert row[1] == member.identity["directory.id"]
    assert row[-1] == "Observer"
    shown = said(tools, LOG_DIRS, *here, "--broker-list", "101", "--describe")
    (described,) = json.loads(shown.splitlines()[-1])["brokers"]
    (log_dir,) = described["logDirs"]
    assert (described["broker"], log_dir["error"]) == (101, None)
    # The first broker of Fencepost creates the history topic; no other topic has a replica on it.
    assert {partition["partition"] for partition in log_dir["partitions"]} <= {f"{HISTORY_TOPIC}-0"}


def test_finalized_features_equal_those_of_the_cluster(kafka: Kafka, member: Member) -> None:
    with Cluster(member.bootstrap) as ours, Cluster(kafka.bootstrap) as theirs:
        told, wanted = (
            client.call("api_versions", 4, client_software_name="a", client_software_version="1")
            for client in (ours, theirs)
        )
    levels = [
        {feature["name"]: feature["max_version_level"] for feature in answer["finalized_features"]}
        for answer in (told, wanted)
    ]
    assert levels[0] == levels[1]
    assert told["finalized_features_epoch"] > 0


def test_requests_for_the_controller_are_forwarded(
    kafka: Kafka, member: Member, tools: Tools
) -> None:
    name = unique("t")
    created(member.bootstrap, name, [[1], [101]])
    until(lambda: leaders(kafka.bootstrap, name) == {0: 1, 1: 101}, "the topic at Kafka's broker")
    until(lambda: leaders(member.bootstrap, name) == {0: 1, 1: 101}, "the topic at our broker")
    topic = ("--bootstrap-server", member.bootstrap, "--entity-type", "topics")
    said(tools, CONFIGS, *topic, "--entity-name", name, "--alter", "--add-config", "retention.ms=7")
    assert "retention.ms=7" in said(tools, CONFIGS, *topic, "--entity-name", name, "--describe")


def test_broker_settings_of_the_metadata_override_the_file(
    kafka: Kafka, tmp_path: Path, tools: Tools
) -> None:
    """Topic settings override this broker's settings, which override cluster defaults."""
    told = {"min.insync.replicas": "2", "message.max.bytes": "500"}
    member, name = Member(tmp_path, kafka.controller, settings=told), unique("t")
    other = Pretender(kafka.controller, 103, CLUSTER_ID)
    everybody = ("--entity-type", "brokers", "--entity-default")
    it = ("--entity-type", "brokers", "--entity-name", "101")
    topic = ("--entity-type", "topics", "--entity-name", name)

    def configure(where: tuple[str, ...], key: str, value: str = "") -> None:
        action = ("--add-config", f"{key}={value}") if value else ("--delete-config", key)
        here = ("--bootstrap-server", member.bootstrap)
        said(tools, CONFIGS, *here, "--alter", *where, *action)

    def comes_to(expected: str, size: int = 10) -> None:
        def answered() -> bool:
            with Cluster(member.bootstrap) as client:
                answer = client.produce(name, [b"x" * size], acks=-1)
            return bool(answer["error_code"] == expected)

        until(answered, f"{size} bytes: {expected}")

    try:
        member.start()
        other.join()
        created(kafka.bootstrap, name, [[101, 103]])
        other.heartbeat(want_fence=True)
        until(lambda: partitions(member.bootstrap, name)[0]["isr_nodes"] == [101], "one in sync")
        comes_to("none")  # 1 is the value in the metadata, 2 the value in the file
        configure(everybody, "min.insync.replicas", "2")
        comes_to("not_enough_replicas")
        configure(topic, "min.insync.replicas", "1")
        comes_to("none")
        comes_to("message_too_large", 1_000)
        configure(everybody, "message.max.bytes", "2000")
        comes_to("none", 1_000)
        configure(it, "message.max.bytes", "900")
        comes_to("message_too_large", 1_000)
        configure(topic, "max.message.bytes", "3000")
        comes_to("none", 2_500)
        for where, key in ((topic, "max.message.bytes"), (it, "message.max.bytes")):
            configure(where, key)
        comes_to("none", 1_000)
        comes_to("message_too_large", 2_500)
        configure(everybody, "message.max.bytes")
        comes_to("message_too_large", 1_000)
    finally:
        if member.bootstrap:
            configure(everybody, "min.insync.replicas", "1")
        member.kill()
        other.controller.call("unregister_broker", 0, broker_id=103)
        other.close()


def test_metadata_request_auto_creates_the_topic(kafka: Kafka, member: Member) -> None:
    name = unique("auto")
    with Cluster(member.bootstrap) as client:

        def led() -> bool:
            asked = client.call(
                "metadata", 8, topics=[{"name": name}], allow_auto_topic_creation=True
            )
            return asked["topics"][0]["error_code"] == "none"

        until(led, "the topic")
    assert leaders(kafka.bootstrap, name)


def test_every_broker_returns_the_same_group_coordinator(kafka: Kafka, member: Member) -> None:
    with Cluster(member.bootstrap) as ours, Cluster(kafka.bootstrap) as theirs:
        for group in map("g{}".format, range(8)):

            def found(group: str = group) -> object:
                answers = [
                    client.call("find_coordinator", 2, key=group, key_type=0)
                    for client in (ours, theirs)
                ]
                places = {(answer["node_id"], answer["host"], answer["port"]) for answer in answers}
                return len(places) == 1 and answers[0]["error_code"] == "none"

            until(found, f"the coordinator of {group}")


def test_records_produced_to_the_joined_broker_can_be_read(kafka: Kafka, member: Member) -> None:
    name = unique("t")
    created(kafka.bootstrap, name, [[101]])
    until(lambda: leaders(member.bootstrap, name) == {0: 101}, "the leader")
    with Cluster(member.bootstrap) as client:
        client.produce(name, [b"a", b"b"])
        assert client.values(name) == [b"a", b"b"]


def test_controlled_shutdown_moves_leadership_and_keeps_the_epoch(
    kafka: Kafka, member: Member
) -> None:
    """The broker restarts with the same id and directory, and sends its former broker epoch."""
    name = unique("t")
    created(kafka.bootstrap, name, [[101, 1]])
    until(
        lambda: sorted(partitions(kafka.bootstrap, name)[0]["isr_nodes"]) == [1, 101],  # type: ignore[call-overload]
        "both in sync",
    )
    before = member.identity
    member.stop()
    assert partitions(kafka.bootstrap, name)[0]["leader_id"] == 1
    assert partitions(kafka.bootstrap, name)[0]["isr_nodes"] == [1]
    assert brokers(kafka) == {1: False, 101: True}
    first = member.clean_shutdown_epoch
    assert first is not None
    assert first > 0
    member.start()
    assert member.identity == before
    until(
        lambda: sorted(partitions(kafka.bootstrap, name)[0]["isr_nodes"]) == [1, 101],  # type: ignore[call-overload]
        "both in sync again",
    )
    member.stop()
    second = member.clean_shutdown_epoch
    assert second is not None
    assert second > first


def test_killed_broker_has_no_clean_shutdown_epoch(kafka: Kafka, member: Member) -> None:
    member.kill()
    assert member.clean_shutdown_epoch is None
    member.start()
    until_unfenced(kafka, 101)


def test_broker_restarted_too_early_registers_once_its_session_ends(
    kafka: Kafka, tmp_path: Path
) -> None:
    """Another process with the same id is still registered, as after a kill (KAFKA-14392)."""
    before = Pretender(kafka.controller, 104, CLUSTER_ID)
    member, over = Member(tmp_path, kafka.controller, node_id=104), threading.Event()

    def live() -> None:
        while not over.wait(0.2):
            before.heartbeat(cordoned_log_dirs=[])

    before.join()
    alive = threading.Thread(target=live)
    alive.start()
    try:
        child = member.launch()
        child.wait_for_line("DUPLICATE_BROKER_REGISTRATION", deadline_s=60)
        over.set()
        member.wait_until_listening()
        until_unfenced(kafka, 104)
    finally:
        over.set()
        alive.join(60)
        member.kill()
        before.controller.call("unregister_broker", 0, broker_id=104)
        before.close()


def test_suspended_broker_is_fenced_and_leads_again_when_resumed(
    kafka: Kafka, member: Member
) -> None:
    name = unique("t")
    created(kafka.bootstrap, name, [[101]])
    until(lambda: leaders(member.bootstrap, name) == {0: 101}, "the leader")
    with Cluster(member.bootstrap) as client:
        client.produce(name, [b"a"])
    assert member.child is not None
    os.kill(member.child.pid, signal.SIGSTOP)
    try:
        until(lambda: brokers(kafka).get(101), "it is fenced")
        assert leaders(kafka.bootstrap, name) == {0: -1}
    finally:
        os.kill(member.child.pid, signal.SIGCONT)
    until_unfenced(kafka, 101)
    until(lambda: leaders(member.bootstrap, name) == {0: 101}, "the leader again")
    with Cluster(member.bootstrap) as client:
        until(lambda: client.produce(name, [b"b"])["error_code"] == "none", "it serves")
        assert client.values(name) == [b"a", b"b"]


def test_broker_survives_a_restart_of_its_controller(tmp_path: Path) -> None:
    own = Kafka(tmp_path / "own", KAFKA)
    (tmp_path / "own").mkdir()
    own.start()
    member = Member(tmp_path / "member", own.controller)
    member.start()
    try:
        name = unique("t")
        created(own.bootstrap, name, [[101]])
        until(lambda: leaders(member.bootstrap, name) == {0: 101}, "the leader")
        own.kill()
        with Cluster(member.bootstrap) as client:
            client.produce(name, [b"a"])
            asked = {"name": "x", "num_partitions": 1, "replication_factor": 1}
            assert client.values(name) == [b"a"]
        own.start()
        until_unfenced(own, 101)
        with Cluster(member.bootstrap) as client:

            def accepted() -> bool:
                answer = client.call("create_topics", 5, timeout=1_000, topics=[asked])
                code = answer["topics"][0]["error_code"]
                return code in ("none", "topic_already_exists")

            until(accepted, "a controller again")
        assert leaders(own.bootstrap, name) == {0: 101}
        member.stop()
    finally:
        member.kill()
        own.stop()


def test_broker_whose_node_id_was_registered_again_stops(
    kafka: Kafka, member: Member, tmp_path: Path
) -> None:
    assert member.child is not None
    os.kill(member.child.pid, signal.SIGSTOP)
    other = Member(tmp_path / "other", kafka.controller)
    try:
        other.start()
        os.kill(member.child.pid, signal.SIGCONT)
        assert member.child.wait(60) == 1
        assert "another broker has registered with this node id" in member.child.tail()
        assert brokers(kafka)[101] is False
    finally:
        os.kill(member.child.pid, signal.SIGCONT) if member.child.returncode is None else None
        other.kill()


def test_broker_without_a_controller_does_not_start(tmp_path: Path) -> None:
    settings = {"initial.broker.registration.timeout.ms": "1500"}
    member = Member(tmp_path, "127.0.0.1:1", settings=settings)
    child = member.launch()
    assert child.wait(60) == 1
    assert "no controller has returned the cluster id" in child.tail()
    assert not (tmp_path / "logs" / "meta.properties").exists()


def test_snapshot_is_fetched_in_several_chunks(
    kafka: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [unique("t") for _ in range(30)]
    for name in names:
        created(kafka.bootstrap, name, [[1], [1], [1]])
    monkeypatch.setattr(metadata_wire, "MAX_FETCH_BYTES", 500)
    pieces: list[int] = []
    take = Observer.on_snapshot_fetched

    def taken(observer: Observer, answer: SnapshotFetched, now_ms: float) -> list[MetadataImage]:
        pieces.append(answer.position)
        return take(observer, answer, now_ms)

    monkeypatch.setattr(Observer, "on_snapshot_fetched", taken)
    config = {
        "process.roles": "broker",
        "node.id": "102",
        "controller.quorum.bootstrap.servers": kafka.controller,
        "controller.listener.names": "CONTROLLER",
    }
    with Broker.in_thread(tmp_path, config=config) as broker:
        until(lambda: partitions(broker.bootstrap, names[-1]), "all topics")
        for name in names:
            assert leaders(broker.bootstrap, name) == {0: 1, 1: 1, 2: 1}
    assert len(pieces) > 3
    assert sorted(pieces) == pieces
