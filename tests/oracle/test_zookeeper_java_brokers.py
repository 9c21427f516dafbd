"""Apache Kafka 3.9 brokers with a controller of Fencepost, while tools write to ZooKeeper.

Controllers of both kinds react to znodes that tools write, in the same scenarios.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer

from tests.support.cluster import unique
from tests.support.kafka39 import Kafka39
from tests.support.mixed import JAVA, PYTHON
from tests.support.waits import until
from tests.support.zookeeper import ZooKeeper
from tests.support.zookeeper_brokers import Brokers

P, J, K = 1, 2, 3
"""A broker of Fencepost, two of Apache Kafka."""

TOPIC, BROKER = 2, 4
"""Resource types of settings."""

SETTINGS = {
    # Kafka's default, long enough that no session expires only because the machine is busy.
    "zookeeper.session.timeout.ms": "18000",
    "offsets.topic.num.partitions": "1",
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.num.partitions": "1",
    "transaction.state.log.replication.factor": "3",
    "auto.leader.rebalance.enable": "false",
    "auto.create.topics.enable": "false",
    "group.initial.rebalance.delay.ms": "0",
    "replica.high.watermark.checkpoint.interval.ms": "200",
}


@pytest.fixture(scope="module")
def brokers(zookeeper: ZooKeeper, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    home = tmp_path_factory.mktemp("brokers")
    found = Brokers(home, zookeeper, {P: PYTHON, J: JAVA, K: JAVA}, SETTINGS)
    found.nodes[J].add_settings({"controlled.shutdown.retry.backoff.ms": "300"})
    found.start()
    yield found
    found.close()


@pytest.fixture(scope="module", params=[[P], [J, K]], ids=["fencepost", "kafka"])
def either(brokers: Brokers, request: pytest.FixtureRequest) -> Brokers:
    """Return the brokers under a controller of Fencepost, and under one of Apache Kafka."""
    brokers.elect(*request.param)
    return brokers


def _replicas(brokers: Brokers, topic: str) -> Any:
    return brokers.node(f"/brokers/topics/{topic}")


def _is_known_to_all(brokers: Brokers, topic: str, leaders: list[int]) -> None:
    for node_id in brokers.nodes:
        until(
            lambda node_id=node_id: (
                [leader for leader, _ in brokers.leaders_and_epochs(node_id, topic)] == leaders
            ),  # type: ignore[misc]
            f"broker {node_id} knows that {leaders} lead {topic}",
        )


def test_reassignment_written_by_a_tool_is_executed(either: Brokers):
    name = either.create([P, J], [J, K], via=either.controller)
    with either.client(P) as client:
        until(lambda: client.leaders(name) >= 1, "it leads")
        assert client.produce(name, [b"%d" % number for number in range(20)], acks=-1)[
            "error_code"
        ] == ("none")
    rows = [
        {"topic": name, "partition": 0, "replicas": [K, J]},
        {"topic": name, "partition": 1, "replicas": [J, K]},
        {"topic": name, "partition": 7, "replicas": [P]},
        {"topic": unique("unknown"), "partition": 0, "replicas": [P]},
    ]
    either.write("/admin/reassign_partitions", {"version": 1, "partitions": rows})
    until(lambda: either.node("/admin/reassign_partitions") is None, "all of it is done or refused")
    node = _replicas(either, name)
    assert node["partitions"] == {"0": [K, J], "1": [J, K]}
    assert (node["adding_replicas"], node["removing_replicas"]) == ({}, {})
    _is_known_to_all(either, name, either.leaders(name))
    assert set(either.leaders(name)) <= {J, K}
    until(lambda: not (either.nodes[P].data_dir / f"{name}-0").exists(), "its replica is gone")


def test_preferred_election_written_by_a_tool_is_executed(either: Brokers):
    name = either.create([J, P, K], [K, P, J], via=either.controller)
    either.all_in_sync(name)
    either.stop(J)
    until(lambda: either.leaders(name) == [P, K], "the next one leads")
    either.nodes[J].start()
    either.all_in_sync(name)
    either.write(
        "/admin/preferred_replica_election",
        {
            "version": 1,
            "partitions": [
                {"topic": name, "partition": 0},
                {"topic": name, "partition": 1},
                {"topic": unique("unknown"), "partition": 0},
            ],
        },
    )
    until(lambda: either.node("/admin/preferred_replica_election") is None, "it was held")
    assert either.leaders(name) == [J, K]
    _is_known_to_all(either, name, [J, K])


def test_partitions_added_by_a_tool_are_created(either: Brokers):
    name = either.create([P, J], via=either.controller)
    node = _replicas(either, name)
    node["partitions"] |= {"1": [J, K], "2": [P]}
    either.znodes.set(f"/brokers/topics/{name}", json.dumps(node).encode())
    _is_known_to_all(either, name, [P, J, P])
    assert either.state(name, 1)["isr"] == [J, K]
    assert _replicas(either, name)["topic_id"] == node["topic_id"]


def test_partitions_added_to_a_topic_in_deletion_are_removed(either: Brokers):
    name = either.create([P, K], via=either.controller)
    either.stop(K)
    until(lambda: either.isrs(name) == [{P}], "it has left")
    either.znodes.create(f"/admin/delete_topics/{name}")
    until(lambda: not either.leaders_and_epochs(P, name), "nobody serves it")
    node = _replicas(either, name)
    more = {**node, "partitions": {"0": [P, K], "1": [P]}}
    either.znodes.set(f"/brokers/topics/{name}", json.dumps(more).encode())
    until(lambda: _replicas(either, name)["partitions"] == {"0": [P, K]}, "they were taken away")
    either.nodes[K].start()
    until(lambda: _replicas(either, name) is None, "it is gone")
    until(lambda: either.node(f"/admin/delete_topics/{name}") is None, "and so is the mark")


def test_topic_without_topic_id_gets_one(either: Brokers):
    name = unique("nameless")
    either.write(f"/brokers/topics/{name}", {"version": 1, "partitions": {"0": [J, P]}})
    _is_known_to_all(either, name, [J])
    assert len(_replicas(either, name)["topic_id"]) == 22


def test_changed_broker_endpoint_reaches_every_broker(either: Brokers):
    path = f"/brokers/ids/{K}"
    before = either.node(path)
    port = int(before["endpoints"][0].rpartition(":")[2])
    moved = {**before, "endpoints": [f"PLAINTEXT://localhost:{port}"], "host": "localhost"}

    def is_at(node_id: int, host: str) -> bool:
        with either.client(node_id) as client:
            rows = client.call("describe_cluster", 0)["brokers"]
        return [row["host"] for row in rows if row["broker_id"] == K] == [host]

    for value, host in ((moved, "localhost"), (before, "127.0.0.1")):
        either.znodes.set(path, json.dumps(value).encode())
        for node_id in either.nodes:
            until(partial(is_at, node_id, host), f"broker {node_id} knows")


@pytest.fixture
def under_ours(brokers: Brokers) -> Brokers:
    """Return the brokers under the controller of Fencepost."""
    brokers.elect(P)
    return brokers


@pytest.mark.parametrize("name", ["reassign_partitions", "preferred_replica_election"])
def test_malformed_admin_znode_is_deleted(under_ours: Brokers, name: str):
    """Fencepost deletes all of these znodes; Kafka's controller leaves the first of them."""
    path, epoch = f"/admin/{name}", under_ours.controller_epoch
    for nonsense in (b"", b"{", b'{"version":1,"partitions":[{"topic":"t","partition":1e999}]}'):
        under_ours.znodes.create(path, nonsense)
        until(lambda: under_ours.znodes.exists(path) is None, "it is gone")
    assert under_ours.controller_epoch == epoch, "and the controller is not"


def test_malformed_notification_znodes_are_deleted(under_ours: Brokers):
    epoch = under_ours.controller_epoch
    for folder in ("/log_dir_event_notification", "/isr_change_notification"):
        under_ours.znodes.create(f"{folder}/note_", b"{", sequence=True)
        until(lambda folder=folder: not under_ours.znodes.get_children(folder), "it is gone")  # type: ignore[misc]
    under_ours.znodes.create("/brokers/ids/77", b"{", ephemeral=True)
    name = under_ours.create([P, J])
    under_ours.znodes.delete("/brokers/ids/77")
    assert under_ours.state(name)["controller_epoch"] == epoch


def test_topic_id_removed_by_an_old_tool_is_restored(under_ours: Brokers):
    """KAFKA-14190: kafka-topics before 2.8 wrote the assignment without the topic id."""
    name = under_ours.create([J, P])
    node = _replicas(under_ours, name)
    old = {"version": 1, "partitions": {"0": [J, P], "1": [K, J]}}
    under_ours.znodes.set(f"/brokers/topics/{name}", json.dumps(old).encode())
    _is_known_to_all(under_ours, name, [J, K])
    until(lambda: _replicas(under_ours, name)["topic_id"] == node["topic_id"], "it is there again")
    assert _replicas(under_ours, name)["partitions"] == old["partitions"]


def test_log_dir_and_isr_notifications_are_consumed(either: Brokers):
    for folder, stem, value in (
        ("/log_dir_event_notification", "log_dir_event_", {"version": 1, "broker": K, "event": 1}),
        ("/isr_change_notification", "isr_change_", {"version": 1, "partitions": []}),
    ):
        data = json.dumps(value).encode()
        either.znodes.create(f"{folder}/{stem}", data, sequence=True)
        until(lambda folder=folder: not either.znodes.get_children(folder), f"{folder} is empty")  # type: ignore[misc]


# --- Apache Kafka's brokers under a controller of Fencepost ---


def _config(brokers: Brokers, node_id: int, kind: int, name: str, key: str, value: str) -> None:
    with brokers.client(node_id) as client:
        change = {"name": key, "config_operation": 0, "value": value}
        answer = client.call(
            "incremental_alter_configs",
            0,
            resources=[{"resource_type": kind, "resource_name": name, "configs": [change]}],
            validate_only=False,
        )
    assert answer["responses"][0]["error_code"] == "none", answer


def _value(brokers: Brokers, node_id: int, kind: int, name: str, key: str) -> str | None:
    with brokers.client(node_id) as client:
        asked = {"resource_type": kind, "resource_name": name, "configuration_keys": [key]}
        answer = client.call("describe_configs", 1, resources=[asked])
    found = answer["results"][0]["configs"]
    return found[0]["value"] if found else None


def test_transactions_and_groups_span_brokers_of_both_kinds(under_ours: Brokers):
    """Fencepost allocates the producer ids; brokers of both kinds are coordinators."""
    name = under_ours.create([J, K, P], [K, P, J], [P, J, K])
    servers = under_ours.nodes[K].bootstrap
    producer = Producer({"bootstrap.servers": servers, "transactional.id": unique("tx")})
    producer.init_transactions(60)
    for ends in (producer.abort_transaction, producer.commit_transaction):
        producer.begin_transaction()
        for number in range(90):
            producer.produce(name, b"%d" % number, partition=number % 3)
        ends(60)
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": unique("group"),
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,  # otherwise the last commit might have no new offsets
            "isolation.level": "read_committed",
        }
    )
    consumer.subscribe([name])
    seen: list[int] = []

    def all_read() -> bool:
        message = consumer.poll(0.2)
        if message is not None and message.error() is None:
            seen.append(int(message.value()))
        return len(seen) == 90

    until(all_read, "the group has read all", deadline_s=120)
    assert sorted(seen) == list(range(90))
    consumer.commit(asynchronous=False)
    consumer.close()
    assert under_ours.node("/latest_producer_id_block")["version"] == 1
    under_ours.all_in_sync(name)


def test_settings_apply_on_every_broker_whichever_broker_changed_them(under_ours: Brokers):
    name = under_ours.create([J, P, K])

    def holds(node_id: int, kind: int, resource: str, key: str, value: str) -> bool:
        return _value(under_ours, node_id, kind, resource, key) == value

    for via, value in ((P, "60000"), (J, "70000")):
        _config(under_ours, via, TOPIC, name, "retention.ms", value)
        for node_id in under_ours.nodes:
            has = partial(holds, node_id, TOPIC, name, "retention.ms", value)
            until(has, f"broker {node_id} has {value}, set at {via}")
    for via, value in ((P, "900000"), (K, "800000")):
        _config(under_ours, via, BROKER, "", "message.max.bytes", value)
        for node_id in under_ours.nodes:
            has = partial(holds, node_id, BROKER, str(node_id), "message.max.bytes", value)
            until(has, f"broker {node_id} has {value}, set at {via}")


def test_deleted_topic_is_gone_from_every_broker_and_can_be_recreated(under_ours: Brokers):
    name = under_ours.create([J, K, P], [K, P, J])
    first = _replicas(under_ours, name)["topic_id"]
    with under_ours.client(P) as client:
        client.produce(name, [b"first"], acks=-1)
        answer = client.call("delete_topics", 5, topic_names=[name], timeout=30_000)
        assert answer["responses"][0]["error_code"] == "none", answer
    until(lambda: _replicas(under_ours, name) is None, "it is gone")
    for node in under_ours.nodes.values():
        until(lambda node=node: not [*node.data_dir.glob(f"{name}-?")], "its records are gone")  # type: ignore[misc]
    under_ours.write(f"/brokers/topics/{name}", {"version": 1, "partitions": {"0": [K, P]}})
    _is_known_to_all(under_ours, name, [K])
    assert _replicas(under_ours, name)["topic_id"] != first
    with under_ours.client(K) as client:
        until(lambda: client.leaders(name) == 1, "it leads")
        assert client.produce(name, [b"second"], acks=-1)["error_code"] == "none"
        assert client.values(name) == [b"second"]


def test_shutting_down_broker_leads_its_last_replica_until_it_stops(under_ours: Brokers):
    """One broker is killed. The other broker sends ControlledShutdown three times, then stops."""
    name = under_ours.create([J, K])
    under_ours.nodes[K].kill()
    until(lambda: under_ours.isrs(name) == [{J}], "its session has ended")
    left = sum(
        under_ours.state(topic, int(index))["isr"] == [J] and len(replicas) > 1
        for topic in under_ours.znodes.get_children("/brokers/topics")
        for index, replicas in _replicas(under_ours, topic)["partitions"].items()
    )
    child = under_ours.nodes[J].child
    assert child is not None
    since = len(child.lines)
    under_ours.stop(J)
    answers = rf"Controlled shutdown request returned .* with {left} partitions remaining"
    said = [line for line in child.lines[since:] if re.search(answers, line)]
    assert len(said) == 3, child.tail()
    until(lambda: under_ours.state(name)["leader"] == -1, "nobody leads it")
    assert under_ours.state(name)["isr"] == [J]
    under_ours.nodes[K].start()
    assert under_ours.state(name)["leader"] == -1, "it lacks records"
    under_ours.nodes[J].start()
    under_ours.all_in_sync(name)
    assert under_ours.leaders(name) == [J]


@pytest.mark.parametrize("order", [(P, J, P), (J, P, J)], ids=["ours", "theirs"])
def test_reassignment_and_deletion_are_completed_by_later_controllers(
    brokers: Brokers, order: tuple[int, ...]
):
    """A reassignment and a deletion wait for a broker; meanwhile the controller changes."""
    brokers.elect(order[0])
    moved = brokers.create([J, P], via=order[0])
    deleted = brokers.create([P, K], via=order[0])
    brokers.stop(K)
    rows = [{"topic": moved, "partition": 0, "replicas": [P, K]}]
    brokers.write("/admin/reassign_partitions", {"version": 1, "partitions": rows})
    brokers.znodes.create(f"/admin/delete_topics/{deleted}")
    waits = {"partitions": {"0": [P, K, J]}, "adding_replicas": {"0": [K]}}
    for controller in order:
        brokers.elect(controller)
        until(lambda: _replicas(brokers, moved).items() >= waits.items(), "it is begun")
        until(lambda: brokers.state(moved)["controller_epoch"] == brokers.controller_epoch, "so")
        until(lambda: not brokers.leaders_and_epochs(P, deleted), "nobody serves it")
    assert _replicas(brokers, deleted) is not None
    assert brokers.node("/admin/reassign_partitions")["partitions"] == rows
    brokers.nodes[K].start()
    until(lambda: brokers.node("/admin/reassign_partitions") is None, "the reassignment is done")
    assert _replicas(brokers, moved)["partitions"] == {"0": [P, K]}
    assert set(brokers.state(moved)["isr"]) == {P, K}
    until(lambda: _replicas(brokers, deleted) is None, "the topic is gone")
    assert brokers.controller == order[-1]
    _is_known_to_all(brokers, moved, [P])


def test_replicas_in_a_failed_log_directory_lead_nothing(under_ours: Brokers):
    """An Apache Kafka broker with two log directories writes a notification when one fails."""
    broker = under_ours.nodes[K]
    lost = broker.data_dir.parent / "lost"
    under_ours.stop(K)
    assert isinstance(broker, Kafka39)
    broker.add_settings({"log.dirs": f"{broker.data_dir},{lost}"})
    broker.start()
    name = under_ours.create([K, P])
    under_ours.all_in_sync(name)
    assert (lost / f"{name}-0").exists(), "an empty directory is the first to get replicas"
    away = lost.rename(lost.with_name("away"))
    lost.write_text("no directory")
    until(lambda: under_ours.leaders(name) == [P], "the other one leads")
    until(lambda: under_ours.isrs(name) == [{P}], "it has left the ISR")
    assert under_ours.node(f"/brokers/ids/{K}") is not None, "the broker lives"
    assert not under_ours.znodes.get_children("/log_dir_event_notification")
    _is_known_to_all(under_ours, name, [P])
    under_ours.stop(K)
    lost.unlink()
    away.rename(lost)
    broker.start()
    under_ours.all_in_sync(name)
