"""Brokers that elect their controller on a real ZooKeeper."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer

from fencepost.cluster.image import TOPIC_RESOURCE
from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.metadata.names import HISTORY_TOPIC
from tests.support import requests
from tests.support.cluster import READ_COMMITTED, unique
from tests.support.growing_group import rebalances_as_it_grows
from tests.support.mixed import PYTHON
from tests.support.raw import RawClient
from tests.support.waits import until, until_true
from tests.support.zookeeper import ZooKeeper
from tests.support.zookeeper_brokers import Brokers
from tests.wire.command_line import cli

A, B, C, D = 1005, 1011, 1012, 1013
"""The broker ids of the example in Kafka's documentation."""

SESSION_MS = 18_000
"""Kafka's default, long enough that no session expires only because the machine is busy."""

SETTINGS = {
    "zookeeper.session.timeout.ms": str(SESSION_MS),
    "offsets.topic.num.partitions": "1",
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.num.partitions": "1",
    "transaction.state.log.replication.factor": "3",
    "auto.leader.rebalance.enable": "false",
    "group.initial.rebalance.delay.ms": "0",
}


@pytest.fixture(scope="module")
def brokers(zookeeper: ZooKeeper, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    layout = dict.fromkeys((A, B, C, D), PYTHON)
    found = Brokers(tmp_path_factory.mktemp("brokers"), zookeeper, layout, SETTINGS)
    found.start()
    yield found
    found.close()


def test_first_broker_is_controller_and_every_broker_is_registered(brokers: Brokers):
    assert (brokers.controller, brokers.controller_epoch) == (A, 1), "who came first"
    node = brokers.node("/controller")
    assert node.keys() == {"version", "brokerid", "timestamp", "kraftControllerEpoch"}
    for node_id, broker in brokers.nodes.items():
        told = brokers.node(f"/brokers/ids/{node_id}")
        assert told["endpoints"] == [f"PLAINTEXT://{broker.bootstrap}"]
        until(
            lambda node_id=node_id: brokers.live_brokers(node_id) == {A, B, C, D}, "all are known"
        )  # type: ignore[misc]
        with brokers.client(node_id) as client:
            cluster = client.call("describe_cluster", 0)
        assert cluster["controller_id"] == A
        assert cluster["cluster_id"] == brokers.node("/cluster/id")["id"]


def test_topic_znodes_are_written_as_kafka_does(brokers: Brokers):
    name = brokers.create([B, C, D], [C, D, A], via=D)
    node = brokers.node(f"/brokers/topics/{name}")
    assert node["version"] == 3
    assert node["partitions"] == {"0": [B, C, D], "1": [C, D, A]}
    assert (node["adding_replicas"], node["removing_replicas"]) == ({}, {})
    state = brokers.state(name)
    epoch = brokers.controller_epoch
    assert state == {
        "version": 1,
        "leader": B,
        "leader_epoch": 0,
        "isr": [B, C, D],
        "controller_epoch": epoch,
        "leader_recovery_state": 0,
    }
    with brokers.client(A) as client:
        topic_id = client.topic_id(name)
    assert node["topic_id"] == urlsafe_b64encode(topic_id.bytes).rstrip(b"=").decode()


def test_replicated_records_and_transactions_are_read_by_a_group(brokers: Brokers):
    name = brokers.create([A, B, C], [B, C, D], [C, D, A])
    servers = brokers.nodes[D].bootstrap
    producer = Producer({"bootstrap.servers": servers, "enable.idempotence": True})
    for number in range(300):
        producer.produce(name, b"%d" % number, partition=number % 3)
    assert producer.flush(60) == 0
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": unique("group"),
            "auto.offset.reset": "earliest",
        }
    )
    consumer.subscribe([name])
    seen: set[int] = set()

    def all_read() -> bool:
        message = consumer.poll(0.2)
        if message is not None and message.error() is None:
            seen.add(int(message.value()))
        return len(seen) == 300

    until(all_read, "the group has read all", deadline_s=120)
    consumer.close()
    transactional = Producer({"bootstrap.servers": servers, "transactional.id": unique("tx")})
    transactional.init_transactions(60)
    for ends in (transactional.abort_transaction, transactional.commit_transaction):
        transactional.begin_transaction()
        for index in range(3):
            transactional.produce(name, b"in a transaction", partition=index)
        ends(60)

    def committed() -> list[int]:
        counts = []
        for index, leader in enumerate(brokers.leaders(name)):
            with brokers.client(leader) as client:
                values = client.values(name, partition=index, isolation=READ_COMMITTED)
            counts.append(len(values))
        return counts

    # The markers are written after the response.
    until(lambda: committed() == [101] * 3, "one was aborted, one was committed")
    block = brokers.node("/latest_producer_id_block")
    assert int(block["block_end"]) - int(block["block_start"]) == 999
    brokers.all_in_sync(name)


def test_next_live_in_sync_replica_of_the_assignment_becomes_leader(
    brokers: Brokers,
):
    """The example in Kafka's documentation; today the result of the last step differs."""
    name = brokers.create([A, B, C], [B, C, D], [C, D, A])
    brokers.all_in_sync(name)
    assert brokers.leaders(name) == [A, B, C]

    brokers.stop(B)
    until(lambda: brokers.leaders(name) == [A, C, C], "the second replica leads")
    brokers.nodes[B].start()
    brokers.all_in_sync(name)
    assert brokers.leaders(name) == [A, C, C], "who comes back takes nothing"

    # In the documentation, the first replica became the leader again when a follower stopped.
    # Today a controlled shutdown only moves partitions that the broker leads; D leads none.
    brokers.stop(D)
    until(lambda: all(D not in isr for isr in brokers.isrs(name)), "it has left the ISRs")
    assert brokers.leaders(name) == [A, C, C]
    brokers.nodes[D].start()
    brokers.all_in_sync(name)

    brokers.stop(C)
    until(lambda: brokers.leaders(name) == [A, B, D], "the next of each assignment leads")
    brokers.nodes[C].start()
    brokers.all_in_sync(name)
    for node_id in brokers.nodes:
        until(
            lambda node_id=node_id: (
                [led for led, _ in brokers.leaders_and_epochs(node_id, name)] == [A, B, D]
            ),  # type: ignore[misc]
            f"broker {node_id} was told",
        )
    with brokers.client(D) as client:
        asked = [{"topic": name, "partitions": [2]}]
        answer = client.call(
            "elect_leaders", 1, election_type=0, topic_partitions=asked, timeout=30_000
        )
    assert answer["error_code"] == "none", answer
    assert brokers.leaders(name) == [A, B, C], "the preferred leaders"


def test_reassignment_copies_before_it_removes_replicas(brokers: Brokers):
    name = brokers.create([A, B])
    with brokers.client(A) as client:
        client.produce(name, [b"%d" % number for number in range(50)], acks=-1)
        answer = client.call(
            "alter_partition_reassignments",
            0,
            timeout=30_000,
            topics=[{"name": name, "partitions": [{"partition_index": 0, "replicas": [C, D]}]}],
        )
    assert answer["error_code"] == "none", answer
    assert answer["responses"][0]["partitions"][0]["error_code"] == "none", answer
    until(
        lambda: brokers.node(f"/brokers/topics/{name}")["partitions"] == {"0": [C, D]},
        "the new replicas are all",
    )
    node = brokers.node(f"/brokers/topics/{name}")
    assert (node["adding_replicas"], node["removing_replicas"]) == ({}, {})
    state = brokers.state(name)
    assert state["leader"] in {C, D}
    assert set(state["isr"]) == {C, D}
    for node_id in (A, B):
        folder = brokers.nodes[node_id].data_dir / f"{name}-0"
        until(lambda folder=folder: not folder.exists(), f"{folder} is gone")  # type: ignore[misc]
    with brokers.client(state["leader"]) as client:
        until(lambda: client.leaders(name) == 1, "it can be read")
        assert len(client.values(name)) == 50


def test_topic_is_deleted_once_every_replica_is_deleted(brokers: Brokers):
    name = brokers.create([A, C], [C, D])
    brokers.all_in_sync(name)
    brokers.stop(D)
    with brokers.client(B) as client:
        answer = client.call("delete_topics", 5, topic_names=[name], timeout=30_000)
        assert answer["responses"][0]["error_code"] == "none", answer
        refused = client.call(
            "create_topics",
            7,
            timeout=30_000,
            topics=[{"name": name, "num_partitions": 1, "replication_factor": 1}],
        )
    assert refused["topics"][0]["error_code"] == "topic_already_exists", "it is not yet gone"
    assert brokers.node(f"/admin/delete_topics/{name}") == {}
    assert brokers.node(f"/brokers/topics/{name}") is not None
    until(lambda: not brokers.leaders_and_epochs(A, name), "nobody serves it")
    brokers.nodes[D].start()
    until(lambda: brokers.node(f"/brokers/topics/{name}") is None, "it is gone")
    until(lambda: brokers.node(f"/admin/delete_topics/{name}") is None, "and so is its mark")
    assert brokers.node(f"/config/topics/{name}") is None
    for node_id, node in brokers.nodes.items():
        until(
            lambda node=node: not [*node.data_dir.glob(f"{name}-?")], f"broker {node_id} has none"
        )  # type: ignore[misc]


def test_topic_settings_are_stored_and_applied_on_every_broker(brokers: Brokers):
    name = brokers.create([A, B, C])
    with brokers.client(D) as client:
        answer = client.call(
            "incremental_alter_configs",
            0,
            resources=[
                {
                    "resource_type": 2,
                    "resource_name": name,
                    "configs": [{"name": "retention.ms", "config_operation": 0, "value": "60000"}],
                }
            ],
            validate_only=False,
        )
        assert answer["responses"][0]["error_code"] == "none", answer
    assert brokers.node(f"/config/topics/{name}") == {
        "version": 1,
        "config": {"retention.ms": "60000"},
    }

    def holds(node_id: int) -> bool:
        with brokers.client(node_id) as client:
            answer = client.call(
                "describe_configs",
                1,
                resources=[
                    {
                        "resource_type": 2,
                        "resource_name": name,
                        "configuration_keys": ["retention.ms"],
                    }
                ],
            )
        return bool(answer["results"][0]["configs"][0]["value"] == "60000")

    for node_id in brokers.nodes:
        until(lambda node_id=node_id: holds(node_id), f"it holds on broker {node_id}")  # type: ignore[misc]


def test_describe_configs_at_any_broker_shows_acknowledged_changes(brokers: Brokers):
    name = brokers.create([A, B])
    with brokers.client(B) as changing, brokers.client(D) as describing:
        for retention_ms in map(str, range(1_000, 1_030)):
            change = requests.config_op("retention.ms", retention_ms)
            resource = requests.altered_resource(TOPIC_RESOURCE, name, change)
            body = requests.incremental_alter_configs(resource, validate_only=False)
            answer = changing.call("incremental_alter_configs", 1, **body)
            assert answer["responses"][0]["error_code"] == "none"
            wanted = requests.described_resource(TOPIC_RESOURCE, name, "retention.ms")
            answer = describing.call("describe_configs", 4, **requests.describe_configs(wanted))
            assert answer["results"][0]["configs"][0]["value"] == retention_ms


def test_topic_written_by_a_tool_is_created_and_deleted(brokers: Brokers):
    """``kafka-topics --zookeeper`` writes only an assignment, in the format of version 1."""
    name = unique("written")
    brokers.znodes.create(
        f"/brokers/topics/{name}",
        json.dumps({"version": 1, "partitions": {"0": [D, A], "1": [B, A]}}).encode(),
    )
    until(lambda: brokers.state(name, 1) is not None, "it has leaders")
    assert brokers.leaders(name) == [D, B]
    assert len(brokers.node(f"/brokers/topics/{name}")["topic_id"]) == 22
    with brokers.client(D) as client:
        until(lambda: client.leaders(name) >= 1, "it can be written to")
        assert client.produce(name, [b"x"], acks=-1)["error_code"] == "none"
    brokers.znodes.create(f"/admin/delete_topics/{name}")
    until(lambda: brokers.node(f"/brokers/topics/{name}") is None, "it was deleted the same way")


def test_isr_written_by_a_leader_is_read_and_propagated(brokers: Brokers):
    """Before Kafka 2.7 leaders wrote state and notification; now they send AlterPartition."""
    name = brokers.create([A, B, C])
    brokers.all_in_sync(name)
    path, notes = f"/brokers/topics/{name}/partitions/0/state", "/isr_change_notification"

    def told(*isr: int) -> None:
        for node_id in brokers.live_brokers(A):
            until(
                lambda node_id=node_id: _isr(brokers, node_id, name) == {*isr},  # type: ignore[misc]
                f"broker {node_id} was told of {isr}",
            )

    told(A, B, C)
    state = brokers.state(name) | {"isr": [A, B]}
    version = brokers.znodes.set(path, json.dumps(state).encode()).version
    note = {"version": 1, "partitions": [{"topic": name, "partition": 0}]}
    brokers.znodes.create(f"{notes}/isr_change_", json.dumps(note).encode(), sequence=True)
    told(A, B)
    until(lambda: not brokers.znodes.get_children(notes), "the note is gone")
    assert brokers.znodes.exists(path).version == version

    # The leader learns of the smaller ISR with its next epoch, and expands the ISR again.
    brokers.stop(B)
    until(lambda: B not in brokers.live_brokers(A), "it has gone")
    told(A, C)
    brokers.nodes[B].start()
    told(A, B, C)
    brokers.all_in_sync(name)
    assert brokers.znodes.get_children(notes) == []


def _isr(brokers: Brokers, node_id: int, topic: str) -> set[int]:
    with brokers.client(node_id) as client:
        answer = client.call("metadata", 9, topics=[{"name": topic}])["topics"][0]
    return set(answer["partitions"][0]["isr_nodes"])


def test_group_rebalances_when_its_topic_grows(brokers: Brokers):
    name = brokers.create([A, B, C], [B, C, D])
    rebalances_as_it_grows(brokers.nodes[D].bootstrap, name, protocol="classic")
    assert sorted(brokers.node(f"/brokers/topics/{name}")["partitions"]) == ["0", "1", "2"]


def test_killed_controller_is_replaced_by_another_broker(brokers: Brokers):
    _each_writes_history(brokers)
    old, epoch = brokers.controller, brokers.controller_epoch
    assert old is not None
    others = [node_id for node_id in brokers.nodes if node_id != old]
    name = brokers.create([old, others[1], others[0]])
    brokers.all_in_sync(name)
    with brokers.client(old) as client:
        client.produce(name, [b"%d" % number for number in range(100)], acks=-1)
    child = brokers.nodes[old].child
    assert child is not None
    child.kill()
    until(lambda: brokers.controller not in {None, old}, "another one is the controller")
    assert brokers.controller_epoch > epoch
    later = brokers.controller_epoch
    until(lambda: brokers.leaders(name) == [others[1]], "the next of the assignment leads")
    assert brokers.state(name)["controller_epoch"] > epoch
    with brokers.client(others[1]) as client:
        until(lambda: client.leaders(name) == 1, "it knows of its office")
        assert client.produce(name, [b"after"], acks=-1)["error_code"] == "none"
        assert len(client.values(name)) == 101, "what was acknowledged is there"
    brokers.nodes[old].start()
    brokers.all_in_sync(name)

    def causes() -> list[str]:
        told = _history(brokers, "controller-elected")
        return [event["why"] for event in told if event["detail"]["epoch"] == later]

    why = until(causes, "the history tells of it", poll_s=0.5)
    assert why == [f"the session of broker {old} has ended"]


def test_resumed_former_controller_makes_no_decisions(brokers: Brokers):
    old, epoch = brokers.controller, brokers.controller_epoch
    assert old is not None
    others = [node_id for node_id in brokers.nodes if node_id != old]
    child = brokers.nodes[old].child
    assert child is not None
    registered = brokers.znodes.exists(f"/brokers/ids/{old}").czxid
    os.kill(child.pid, signal.SIGSTOP)
    try:
        until(lambda: brokers.controller not in {None, old}, "another one is the controller")
    finally:
        os.kill(child.pid, signal.SIGCONT)
    assert brokers.controller_epoch > epoch

    def is_back() -> bool:
        node = brokers.znodes.exists(f"/brokers/ids/{old}")
        return node is not None and node.czxid > registered

    until(is_back, "it has registered again, with a later epoch")
    for node_id in (old, others[0]):
        until(lambda node_id=node_id: old in brokers.live_brokers(node_id), "it is taken for alive")  # type: ignore[misc]
    name = brokers.create([old, others[0]], via=old)
    assert brokers.state(name)["controller_epoch"] == brokers.controller_epoch
    assert brokers.state(name)["leader"] == old


def test_history_lists_controllers_with_epoch_and_cause(brokers: Brokers):
    # The entry is written once its broker leads a partition of the history topic.
    elections = until(lambda: _history(brokers, "controller-elected"), "is told", poll_s=0.5)
    first = elections[0]
    assert (first["detail"]["controller"], first["detail"]["epoch"]) == (A, 1)
    assert (first["change"], first["why"]) == (f"controller {A}, epoch 1", "nobody was before")
    epochs = [election["detail"]["epoch"] for election in elections]
    assert epochs == sorted(set(epochs)), "each came later than the one before"

    _each_writes_history(brokers)
    old, epoch = brokers.controller, brokers.controller_epoch
    brokers.znodes.delete("/controller")  # as administrators do when they force an election
    until(lambda: brokers.controller is not None and brokers.controller_epoch > epoch, "elected")
    epoch = brokers.controller_epoch

    def told() -> Any:
        shown = json.loads(_cli(brokers, "cluster", "describe", "--format", "json"))
        return shown if shown["controller_epoch"] == epoch else None

    shown = until(told, "the history tells of it", poll_s=0.5)
    assert shown["controller"] == brokers.controller
    assert shown["controller_cause"] == f"broker {old} has given it up"
    roles = {broker["broker"]: broker["controller"] for broker in shown["brokers"]}
    assert roles == {role: "active" if role == shown["controller"] else None for role in roles}
    head = _cli(brokers, "cluster", "describe").splitlines()[0]
    assert (
        f"controller {shown['controller']} in epoch {epoch} since {shown['controller_since']}"
        in head
    )

    def resigned() -> list[Any]:
        told = [event["detail"] for event in _history(brokers, "controller-resigned")]
        return [
            fields for fields in told if (fields["controller"], fields["epoch"]) == (old, epoch - 1)
        ]

    (detail,) = until(resigned, "who was it tells of its end", poll_s=0.5)
    # When the former controller reads the znode, another controller may have been elected.
    assert detail["cause"] in {"there is no controller", "another controller was elected"}
    assert detail.keys() == {"controller", "epoch", "cause"}


def test_history_lists_deleted_topics_with_their_cause(brokers: Brokers):
    _each_writes_history(brokers)
    name, marked = brokers.create([A, B]), brokers.create([B, C])
    with brokers.client(B) as client:
        answer = client.call("delete_topics", 5, topic_names=[name], timeout=30_000)
        assert answer["responses"][0]["error_code"] == "none", answer
    brokers.znodes.create(f"/admin/delete_topics/{marked}")
    causes = {name: "DeleteTopics", marked: "it is marked in ZooKeeper"}

    def told() -> bool:
        gone = {event["subject"] for event in _history(brokers, "topic-deleted")}
        return {f"topic {topic}" for topic in causes} <= gone

    until(told, "the history tells of it", poll_s=0.5)
    began = {event["subject"]: event["why"] for event in _history(brokers, "topic-deletion-began")}
    assert {topic: began[f"topic {topic}"] for topic in causes} == causes


def _cli(brokers: Brokers, *arguments: str) -> str:
    return cli(brokers.nodes[A].bootstrap, *arguments).stdout


def _each_writes_history(brokers: Brokers) -> None:
    """Elect leaders so that every broker leads a partition of the history topic.

    A broker that leads no such partition, for example after a restart, cannot write its entries
    yet.
    """
    until(lambda: brokers.node(f"/brokers/topics/{HISTORY_TOPIC}"), "there is a history")
    brokers.all_in_sync(HISTORY_TOPIC)
    with brokers.client(A) as client:
        client.call("elect_leaders", 2, election_type=0, topic_partitions=None, timeout=30_000)
    assigned = brokers.node(f"/brokers/topics/{HISTORY_TOPIC}")["partitions"]
    preferred = [assigned[str(index)][0] for index in range(len(assigned))]
    until(lambda: brokers.leaders(HISTORY_TOPIC) == preferred, "each leads its own")


def _history(brokers: Brokers, what: str) -> list[Any]:
    """Return the history entries of a kind, oldest first."""
    rows = json.loads(_cli(brokers, "cluster", "history", "--format", "json"))
    return [row for row in rows if row["what"] == what]


# --- brokers in this process, whose sessions the test can end ---


def test_expired_session_ends_controllership_and_registration(zookeeper: ZooKeeper, tmp_path: Path):
    """The server expires the sessions, so the test does not wait for session timeouts."""

    chroot = f"/{unique('two')}"

    async def scenario() -> None:
        both = [
            Broker(
                tmp_path / str(node_id),
                "127.0.0.1:0",
                {
                    **SETTINGS,
                    "node.id": node_id,
                    "zookeeper.connect": zookeeper.connect + chroot,
                    "default.replication.factor": 2,
                },
            )
            for node_id in (1, 2)
        ]
        for broker in both:
            await broker.start()
        first, second = (broker.services.on_zookeeper for broker in both)
        try:
            assert first.elected is not None
            assert second.elected is None
            zombie, epoch = first.elected, first.broker_epoch
            session = first.session._client.client_id
            await asyncio.to_thread(zookeeper.expire, session)
            await until_true(lambda: first.broker_epoch > epoch, "it has registered again")
            await until_true(
                lambda: (first.elected is None) != (second.elected is None), "one was elected"
            )
            elected = first.elected or second.elected
            assert elected is not None
            assert elected is not zombie
            assert elected.store.epoch > zombie.store.epoch

            def knows_the_new_one() -> bool:
                known = elected.store.image.brokers.get(1)
                return known is not None and known.is_active and known.epoch == first.broker_epoch

            await until_true(knows_the_new_one, "the controller takes it for alive")
            bootstrap = both[1].bootstrap
            made = await asyncio.to_thread(_create, bootstrap, "after")
            assert made == "none"
            for broker in both:
                await until_true(
                    lambda broker=broker: "after" in broker.services.metadata.topics,  # type: ignore[misc]
                    "both know of it",
                )
        finally:
            for broker in reversed(both):
                await broker.stop()

    asyncio.run(scenario())


def _create(bootstrap: str, name: str) -> str:
    with RawClient(bootstrap) as client:
        topic = {"name": name, "num_partitions": 1, "replication_factor": 2}
        answer = client.call("create_topics", 7, timeout=30_000, topics=[topic])
    return str(answer["topics"][0]["error_code"])
