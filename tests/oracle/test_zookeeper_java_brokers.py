"""Brokers of Apache Kafka 3.9 under a controller of Fencepost, and what others write in ZooKeeper.

What anybody may write there is obeyed by both makers' controllers: one set of scenarios for both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.support.cluster import unique
from tests.support.mixed import JAVA, PYTHON
from tests.support.waits import until
from tests.support.zookeeper import ZooKeeper
from tests.support.zookeeper_brokers import Brokers

P, J, K = 1, 2, 3
"""A broker of Fencepost, two of Apache Kafka."""

SETTINGS = {
    "zookeeper.session.timeout.ms": "18000",
    "offsets.topic.num.partitions": "1",
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.num.partitions": "1",
    "transaction.state.log.replication.factor": "3",
    "auto.leader.rebalance.enable": "false",
    "group.initial.rebalance.delay.ms": "0",
    "replica.high.watermark.checkpoint.interval.ms": "200",
}


@pytest.fixture(scope="module")
def brokers(zookeeper: ZooKeeper, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    home = tmp_path_factory.mktemp("brokers")
    found = Brokers(home, zookeeper, {P: PYTHON, J: JAVA, K: JAVA}, SETTINGS)
    found.start()
    yield found
    found.close()


@pytest.fixture(scope="module", params=[[P], [J, K]], ids=["fencepost", "kafka"])
def either(brokers: Brokers, request: pytest.FixtureRequest) -> Brokers:
    """These brokers under a controller of each maker."""
    brokers.elect(*request.param)
    return brokers


def _replicas(brokers: Brokers, topic: str) -> Any:
    return brokers.node(f"/brokers/topics/{topic}")


def _is_known_to_all(brokers: Brokers, topic: str, leaders: list[int]) -> None:
    for node_id in brokers.nodes:
        until(
            lambda node_id=node_id: [one for one, _ in brokers.known(node_id, topic)] == leaders,  # type: ignore[misc]
            f"broker {node_id} knows that {leaders} lead {topic}",
        )


def test_a_reassignment_that_a_tool_has_written_is_carried_out(either: Brokers):
    name = either.create([P, J], [J, K], via=either.controller)
    with either.client(P) as client:
        until(lambda: client.leaders(name) >= 1, "it leads")
        assert client.produce(name, [b"%d" % one for one in range(20)], acks=-1)["error_code"] == (
            "none"
        )
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


def test_a_preferred_election_that_a_tool_has_written_is_held(either: Brokers):
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


def test_partitions_that_a_tool_has_added_are_begun(either: Brokers):
    name = either.create([P, J], via=either.controller)
    node = _replicas(either, name)
    node["partitions"] |= {"1": [J, K], "2": [P]}
    either.znodes.set(f"/brokers/topics/{name}", json.dumps(node).encode())
    _is_known_to_all(either, name, [P, J, P])
    assert either.state(name, 1)["isr"] == [J, K]
    assert _replicas(either, name)["topic_id"] == node["topic_id"]


def test_partitions_are_not_added_to_a_topic_that_is_being_deleted(either: Brokers):
    name = either.create([P, K], via=either.controller)
    either.stop(K)
    until(lambda: either.isrs(name) == [{P}], "it has left")
    either.znodes.create(f"/admin/delete_topics/{name}")
    until(lambda: not either.known(P, name), "nobody serves it")
    node = _replicas(either, name)
    more = {**node, "partitions": {"0": [P, K], "1": [P]}}
    either.znodes.set(f"/brokers/topics/{name}", json.dumps(more).encode())
    until(lambda: _replicas(either, name)["partitions"] == {"0": [P, K]}, "they were taken away")
    either.nodes[K].start()
    until(lambda: _replicas(either, name) is None, "it is gone")
    until(lambda: either.node(f"/admin/delete_topics/{name}") is None, "and so is the mark")


def test_a_topic_without_an_id_gets_one(either: Brokers):
    name = unique("nameless")
    either.write(f"/brokers/topics/{name}", {"version": 1, "partitions": {"0": [J, P]}})
    _is_known_to_all(either, name, [J])
    assert len(_replicas(either, name)["topic_id"]) == 22


def test_everybody_hears_where_a_broker_listens_now(either: Brokers):
    path = f"/brokers/ids/{K}"
    before = either.node(path)
    port = int(before["endpoints"][0].rpartition(":")[2])
    moved = {**before, "endpoints": [f"PLAINTEXT://localhost:{port}"], "host": "localhost"}

    def is_at(node_id: int, host: str) -> bool:
        with either.client(node_id) as client:
            rows = client.call("describe_cluster", 0)["brokers"]
        return [one["host"] for one in rows if one["broker_id"] == K] == [host]

    for value, host in ((moved, "localhost"), (before, "127.0.0.1")):
        either.znodes.set(path, json.dumps(value).encode())
        for node_id in either.nodes:
            until(partial(is_at, node_id, host), f"broker {node_id} knows")


@pytest.fixture
def under_ours(brokers: Brokers) -> Brokers:
    """These brokers under the controller of Fencepost."""
    brokers.elect(P)
    return brokers


@pytest.mark.parametrize("name", ["reassign_partitions", "preferred_replica_election"])
def test_what_no_tool_writes_is_taken_away(under_ours: Brokers, name: str):
    """Apache Kafka's controller leaves the first of them where it is."""
    path, epoch = f"/admin/{name}", under_ours.controller_epoch
    for nonsense in (b"", b"{", b'{"version":1,"partitions":[{"topic":"t","partition":1e999}]}'):
        under_ours.znodes.create(path, nonsense)
        until(lambda: under_ours.znodes.exists(path) is None, "it is gone")
    assert under_ours.controller_epoch == epoch, "and the controller is not"


def test_notes_that_cannot_be_read_are_taken_away(under_ours: Brokers):
    epoch = under_ours.controller_epoch
    for folder in ("/log_dir_event_notification", "/isr_change_notification"):
        under_ours.znodes.create(f"{folder}/note_", b"{", sequence=True)
        until(lambda folder=folder: not under_ours.znodes.get_children(folder), "it is gone")  # type: ignore[misc]
    under_ours.znodes.create("/brokers/ids/77", b"{", ephemeral=True)
    name = under_ours.create([P, J])
    under_ours.znodes.delete("/brokers/ids/77")
    assert under_ours.state(name)["controller_epoch"] == epoch


def test_a_tool_that_knows_no_topic_ids_does_not_take_one_away(under_ours: Brokers):
    """KAFKA-14190: kafka-topics before 2.8 added partitions so."""
    name = under_ours.create([J, P])
    node = _replicas(under_ours, name)
    old = {"version": 1, "partitions": {"0": [J, P], "1": [K, J]}}
    under_ours.znodes.set(f"/brokers/topics/{name}", json.dumps(old).encode())
    _is_known_to_all(under_ours, name, [J, K])
    until(lambda: _replicas(under_ours, name)["topic_id"] == node["topic_id"], "it is there again")
    assert _replicas(under_ours, name)["partitions"] == old["partitions"]


def test_notes_of_lost_directories_and_of_isrs_are_taken(either: Brokers):
    for folder, stem, value in (
        ("/log_dir_event_notification", "log_dir_event_", {"version": 1, "broker": K, "event": 1}),
        ("/isr_change_notification", "isr_change_", {"version": 1, "partitions": []}),
    ):
        data = json.dumps(value).encode()
        either.znodes.create(f"{folder}/{stem}", data, sequence=True)
        until(lambda folder=folder: not either.znodes.get_children(folder), f"{folder} is empty")  # type: ignore[misc]
