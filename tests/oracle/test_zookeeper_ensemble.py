"""Brokers on an ensemble of three ZooKeeper servers, which are killed one after the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
from confluent_kafka import Producer

from tests.support.cluster import Cluster, unique
from tests.support.kafka import served
from tests.support.mixed import PYTHON
from tests.support.raw import Answer, ConnectionLostError
from tests.support.waits import until
from tests.support.zookeeper import Ensemble
from tests.support.zookeeper_brokers import Brokers

SETTINGS = {
    "zookeeper.session.timeout.ms": "18000",
    "offsets.topic.replication.factor": "3",
    "min.insync.replicas": "2",
    "auto.leader.rebalance.enable": "false",
    "fencepost.history.enable": "false",
}

PATIENCE_S = 120.0
"""Deadline for three JVMs on a busy machine."""


@pytest.fixture
def ensemble(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ensemble]:
    yield from served(Ensemble(tmp_path_factory.mktemp("ensemble")), "ZooKeeper")


@pytest.fixture
def brokers(ensemble: Ensemble, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    layout = dict.fromkeys((1, 2, 3), PYTHON)
    found = Brokers(tmp_path_factory.mktemp("brokers"), ensemble, layout, SETTINGS)
    found.start()
    yield found
    found.close()


class Load(threading.Thread):
    """A producer that writes all the time, and its acknowledged values."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        super().__init__(daemon=True)
        self._producer = Producer(
            {"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 5}
        )
        self._topic, self._leave = topic, threading.Event()
        self.sent = 0
        self.acknowledged: list[bytes] = []
        self.refused: list[str] = []

    def run(self) -> None:
        while not self._leave.wait(0.01):
            value = b"%d" % self.sent
            self.sent += 1
            self._producer.produce(self._topic, value, partition=0, on_delivery=self._told)
            self._producer.poll(0)
        self._producer.flush(PATIENCE_S)

    def _told(self, error: object, message: object) -> None:
        if error is not None:
            self.refused.append(str(error))
        else:
            self.acknowledged.append(message.value())  # type: ignore[attr-defined]

    def goes_on(self) -> None:
        """Wait until a record that is sent from now on is acknowledged."""
        next_one = b"%d" % self.sent
        until(lambda: next_one in self.acknowledged[-1000:], "written", deadline_s=PATIENCE_S)

    def finish(self) -> None:
        self._leave.set()
        self.join(2 * PATIENCE_S)
        assert self.refused == []
        assert len(self.acknowledged) == self.sent


def _can_create(brokers: Brokers) -> bool:
    with suppress(ConnectionLostError, OSError), Cluster(brokers.nodes[1].bootstrap) as client:
        answer = client.call("create_topics", 7, timeout=10_000, topics=[_topic(unique("made"))])
        return bool(answer["topics"][0]["error_code"] == "none")
    return False


def _topic(name: str) -> Answer:
    return {"name": name, "num_partitions": 1, "replication_factor": 3}


def _controllers(brokers: Brokers) -> set[int]:
    """Return the brokers that name themselves as the controller."""
    found = set()
    for node_id in brokers.nodes:
        with brokers.client(node_id) as client:
            if client.call("describe_cluster", 0)["controller_id"] == node_id:
                found.add(node_id)
    return found


def test_brokers_survive_ensemble_failures_without_losing_records(
    ensemble: Ensemble, brokers: Brokers
) -> None:
    topic = brokers.create([1, 2, 3])
    load = Load(",".join(node.bootstrap for node in brokers.nodes.values()), topic)
    load.start()
    load.goes_on()

    ensemble.leader.stop()
    load.goes_on()
    until(lambda: _can_create(brokers), "the other two have a leader", deadline_s=PATIENCE_S)
    epoch = until(lambda: brokers.controller and brokers.controller_epoch, "a controller")
    assert brokers.state(topic)["leader"] in {1, 2, 3}

    ensemble.leader.stop()
    until(lambda: not _controllers(brokers), "the controller has resigned", deadline_s=PATIENCE_S)
    later = unique("later")
    with Cluster(brokers.nodes[1].bootstrap, deadline_s=PATIENCE_S) as waiting:
        waiting.send("create_topics", 7, timeout=10_000, topics=[_topic(later)])
        load.goes_on()
        assert all(not brokers.leaders_and_epochs(node_id, later) for node_id in brokers.nodes)
        assert not _controllers(brokers)

        ensemble.start()
        until(lambda: _can_create(brokers), "a controller again", deadline_s=PATIENCE_S)
        answer = waiting.receive()["topics"][0]["error_code"]
    assert brokers.controller_epoch > epoch
    # A client may have sent a request twice if it got no response in time.
    exists = brokers.node(f"/brokers/topics/{later}") is not None
    assert exists == (answer in {"none", "topic_already_exists"}), answer
    load.goes_on()
    load.finish()
    brokers.all_in_sync(topic)
    leader = brokers.state(topic)["leader"]
    with brokers.client(leader) as client:
        until(lambda: client.leaders(topic) == 1, "it can be read")
        assert client.values(topic) == [b"%d" % number for number in range(load.sent)]
