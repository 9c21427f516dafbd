"""The kinds of clusters whose responses are recorded; in each kind, broker 1 is Fencepost's."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from fencepost.tools.ports import hold_port
from tests.answers.asking import CONTROLLER, FIRST, OTHER, Place
from tests.oracle.authorised_brokers import GUARDED, GuardedDaemon, GuardedKafka
from tests.support.cluster import Cluster
from tests.support.member import Member
from tests.support.mixed import JAVA, PYTHON, MixedCluster, Node
from tests.support.waits import until
from tests.support.zookeeper import ZooKeeper
from tests.support.zookeeper_listeners import ListeningBrokers

LONG_MS: Final = "60000"
"""A session timeout so long that no broker is fenced while a script runs."""

SETTINGS: Final[Mapping[str, str]] = {
    **{key: value for key, value in GUARDED.items() if not key.startswith("group.consumer")},
    "broker.session.timeout.ms": LONG_MS,
    "auto.leader.rebalance.enable": "false",
    "log.cleaner.enable": "false",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.num.partitions": "1",
    "transaction.state.log.min.isr": "1",
}
PROTOCOLS: Final = "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,CLIENTS:SASL_PLAINTEXT"
Places = Mapping[str, Place]


@contextmanager
def alone(home: Path) -> Iterator[Places]:
    """Yield a single broker of Fencepost."""
    daemon = GuardedDaemon(home / "data", SETTINGS)
    daemon.start()
    try:
        yield {FIRST: Place(daemon.bootstrap, daemon.guarded)}
    finally:
        daemon.kill()


@contextmanager
def kafka_alone(home: Path) -> Iterator[Places]:
    """Yield a single broker of Apache Kafka, for the comparison with :func:`alone`."""
    kafka = GuardedKafka(home, SETTINGS)
    kafka.start()
    try:
        yield {FIRST: Place(kafka.bootstrap, kafka.guarded)}
    finally:
        kafka.stop()


class Guarded(MixedCluster):
    """Two brokers of Fencepost, with the listener CLIENTS for clients that log in."""

    def __init__(self, home: Path, controllers: str) -> None:
        self.guarded: dict[int, str] = {}
        super().__init__(home, PYTHON * 2, SETTINGS, controllers=controllers)

    def _broker(self, node_id: int, letter: str) -> Node:
        held = [hold_port(), hold_port()]
        for port in held:
            weakref.finalize(self, port.close)
        plain, clients = (f"127.0.0.1:{port.getsockname()[1]}" for port in held)
        self.guarded[node_id] = clients
        settings = {
            "broker.rack": f"rack-{node_id}",
            **self._common,
            "listeners": f"PLAINTEXT://{plain},CLIENTS://{clients}",
            "listener.security.protocol.map": PROTOCOLS,
        }
        addresses = ",".join(self._addresses)
        return Member(self._room(node_id), addresses, node_id=node_id, settings=settings)

    @property
    def quorum(self) -> str:
        """HOST:PORT of the controller."""
        return self._addresses[0]


@contextmanager
def in_a_cluster(home: Path, controllers: str) -> Iterator[Places]:
    """Yield two brokers whose controller, of either kind, is a separate process."""
    cluster = Guarded(home, controllers)
    try:
        cluster.start()
        places = {
            FIRST: Place(cluster.nodes[0].bootstrap, cluster.guarded[1]),
            OTHER: Place(cluster.nodes[1].bootstrap, cluster.guarded[2]),
        }
        if controllers == PYTHON:
            places[CONTROLLER] = Place(cluster.quorum)
        _know_each_other(places, {1, 2})
        yield places
    finally:
        cluster.stop()


ELECTED, BESIDE, LED = 1, 2, 3
"""Brokers on ZooKeeper: the elected controller (Fencepost), Apache Kafka 3.9, Fencepost."""


@contextmanager
def on_zookeeper(home: Path) -> Iterator[Places]:
    """Yield three brokers: Fencepost (the elected controller), Apache Kafka 3.9, and Fencepost."""
    zookeeper = ZooKeeper(home / "zookeeper")
    zookeeper.start()
    layout = {ELECTED: PYTHON, BESIDE: JAVA, LED: PYTHON}
    settings = {
        **SETTINGS,
        "authorizer.class.name": "kafka.security.authorizer.AclAuthorizer",
        "listener.security.protocol.map": PROTOCOLS.partition(",")[2],
        "zookeeper.session.timeout.ms": LONG_MS,
    }
    brokers = ListeningBrokers(home, zookeeper, layout, settings, ["CLIENTS"])
    try:
        brokers.start()
        until(lambda: brokers.controller == ELECTED, "the first broker is elected")
        listeners = brokers.listeners
        places = {
            name: Place(listeners[broker_id]["PLAINTEXT"], listeners[broker_id]["CLIENTS"])
            for name, broker_id in ((FIRST, ELECTED), (OTHER, LED))
        }
        _know_each_other(places, {*layout})
        yield places
    finally:
        brokers.close()
        zookeeper.stop()


def _know_each_other(places: Places, brokers: set[int]) -> None:
    for name in (FIRST, OTHER):
        with Cluster(places[name].plain) as client:

            def knows_all(client: Cluster = client) -> bool:
                answer: Any = client.call("describe_cluster", 2, include_fenced_brokers=True)
                rows = answer["brokers"]
                found = {row["broker_id"] for row in rows if not row["is_fenced"]}
                return bool(found == brokers)

            until(knows_all, f"{name} knows all brokers")


Mode = Callable[[Path], Any]
MODES: Final[Mapping[str, Mode]] = {
    "alone": alone,
    "own controller": partial(in_a_cluster, controllers=PYTHON),
    "Kafka's controller": partial(in_a_cluster, controllers=JAVA),
    "ZooKeeper": on_zookeeper,
}
WITHOUT_JAVA: Final = ("alone", "own controller")
