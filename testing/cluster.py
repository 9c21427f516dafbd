"""A cluster in one process, for tests of what happens when a broker goes.

::

    with Cluster(3) as cluster:
        ...  # any Kafka client at cluster.bootstrap
        cluster.kill(cluster.leader("orders", 0))

A controller and several brokers, each on an event loop in a thread of its own, on ports of their
own. They can be killed, stopped, paused and cut off from each other, and come back.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TypeVar

from fencepost.cluster.image import MetadataImage, PartitionRegistration
from fencepost.coordinator.cli.queries.session import Session
from fencepost.coordinator.tools.ports import hold_port
from fencepost.logcore.clock import monotonic_s
from fencepost.testing.broker import OwnBroker
from fencepost.testing.kafka import setting_texts
from fencepost.testing.network import Network

if TYPE_CHECKING:
    from fencepost.coordinator.daemon.broker import Broker

T = TypeVar("T")

CONTROLLER_ID: Final = 100
"""The node id of the controller; brokers count from 1."""

WAIT_S: Final = 30.0
"""How long any wait for a state of the cluster takes at most."""

_POLL_S: Final = 0.01

DEFAULTS: Final[Mapping[str, str]] = {
    "broker.heartbeat.interval.ms": "200",
    "broker.session.timeout.ms": "1000",
    "replica.lag.time.max.ms": "1000",
    "replica.fetch.backoff.ms": "100",
    "offsets.topic.num.partitions": "3",
    "transaction.state.log.num.partitions": "3",
}
"""Times for tests: who is dead is known after a second. ``config`` has the last word."""


class Cluster:
    """So many brokers and a controller. A context manager; all methods are for the test's thread.

    ``config`` holds settings of all nodes by Kafka's names. Replication factors are the number of
    brokers, at most three, and ``min.insync.replicas`` is one less than that, if nothing else is
    said.
    """

    def __init__(
        self,
        brokers: int = 3,
        data_dir: str | Path | None = None,
        config: Mapping[str, object] | None = None,
    ) -> None:
        if brokers < 1:
            raise ValueError("a cluster has one broker at least")
        self._own_directory = data_dir is None
        self.data_dir = Path(data_dir or tempfile.mkdtemp(prefix="kafka-cluster-"))
        self._network = Network()
        self._place = hold_port()
        port = self._place.getsockname()[1]
        replicas = min(brokers, 3)
        common = {
            "controller.listener.names": "CONTROLLER",
            "controller.quorum.bootstrap.servers": f"127.0.0.1:{port}",
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
            "default.replication.factor": str(replicas),
            "offsets.topic.replication.factor": str(replicas),
            "transaction.state.log.replication.factor": str(replicas),
            "transaction.state.log.min.isr": str(max(1, replicas - 1)),
            "min.insync.replicas": str(max(1, replicas - 1)),
            **DEFAULTS,
            **setting_texts(config or {}),
        }
        listeners = {"listeners": f"CONTROLLER://127.0.0.1:{port}", "process.roles": "controller"}
        self.controller = OwnBroker(
            self.data_dir / "controller",
            f"127.0.0.1:{port}",
            {**common, **listeners, "node.id": str(CONTROLLER_ID)},
            forces=False,
            loop_factory=self._network.loop_factory(CONTROLLER_ID),
        )
        self.brokers = {
            broker_id: OwnBroker(
                self.data_dir / f"broker-{broker_id}",
                config={**common, "process.roles": "broker", "node.id": str(broker_id)},
                forces=False,
                loop_factory=self._network.loop_factory(broker_id),
            )
            for broker_id in range(1, brokers + 1)
        }
        """By id. What can be done with one broker can be done with each of them."""

    # --- life ---

    def start(self) -> Self:
        """Start all nodes that do not run, and wait until they serve."""
        self.controller.start()
        with ThreadPoolExecutor(len(self.brokers)) as threads:
            for _ in threads.map(OwnBroker.start, self.brokers.values()):
                pass
        self._network.place(CONTROLLER_ID, self.controller.address)
        for broker_id, broker in self.brokers.items():
            self._network.place(broker_id, broker.address)
        return self

    def close(self) -> None:
        """Stop all of it at once: nobody is left to hand over to."""
        nodes = [*self.brokers.values(), self.controller]
        for node in nodes:
            node.crash()
        for node in nodes:
            node.stop()
        self._place.close()
        if self._own_directory:
            shutil.rmtree(self.data_dir, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()

    def kill(self, broker_id: int) -> None:
        """End a broker as ``kill -9`` does."""
        self.brokers[broker_id].crash()

    def stop(self, broker_id: int) -> None:
        """Stop a broker in an orderly way: it hands over what it leads (controlled shutdown)."""
        self.brokers[broker_id].stop()

    def restart(self, broker_id: int) -> None:
        """Start a broker, on the directory and the port that it had, and wait until it serves."""
        self.brokers[broker_id].restart()

    def pause(self, broker_id: int) -> None:
        """Let a broker stand still as by ``SIGSTOP``: it answers nobody, and is not gone."""
        self.brokers[broker_id].pause()

    def resume(self, broker_id: int) -> None:
        """Let a broker go on that was paused."""
        self.brokers[broker_id].resume()

    def partition_network(
        self, nodes: Iterable[int], others: Iterable[int], *, one_way: bool = False
    ) -> None:
        """Let two groups of nodes not reach each other; :data:`CONTROLLER_ID` is one of them.

        With ``one_way`` the others still reach the first. Clients reach everybody.
        """
        nodes, others = tuple(nodes), tuple(others)
        self._network.cut(nodes, others)
        if not one_way:
            self._network.cut(others, nodes)

    def heal(self) -> None:
        """Let everybody reach everybody again."""
        self._network.heal()

    def topic(
        self,
        name: str,
        partitions: int | None = None,
        config: Mapping[str, object] | None = None,
        *,
        replicas: int | None = None,
    ) -> str:
        """Create a topic, and return its name once every partition has its leader and full ISR.

        Raises ApiError.
        """
        with Session(self.bootstrap, WAIT_S, client_id="fencepost-testing") as session:
            session.create_topic(
                name,
                -1 if partitions is None else partitions,
                setting_texts(config or {}).items(),
                replication_factor=-1 if replicas is None else replicas,
            )
        for index in range(len(self.image.topics[name].partitions)):
            self.wait_for_isr(name, index)
        self.wait_for(lambda: self._have_heard_of(name), f"{name} at all brokers")
        return name

    def _have_heard_of(self, topic: str) -> bool:
        running = [one for one in self.brokers.values() if one.is_running]
        return all(topic in one.call(_image).topics for one in running)

    # --- looking ---

    @property
    def bootstrap(self) -> str:
        """The brokers as HOST:PORT,…, for ``bootstrap.servers``."""
        return ",".join(broker.bootstrap for broker in self.brokers.values())

    @property
    def image(self) -> MetadataImage:
        """What the controller has decided."""
        return self.controller.call(_image)

    def partition(self, topic: str, index: int = 0) -> PartitionRegistration:
        """What the controller has decided of a partition. KeyError without one."""
        partitions = self.image.topics[topic].partitions
        if not 0 <= index < len(partitions):
            raise KeyError(f"{topic}-{index}")
        return partitions[index]

    def leader(self, topic: str, index: int = 0) -> int:
        """The broker that leads a partition; waits until there is one that is alive."""

        def leader() -> int | None:
            found = self.partition(topic, index).leader
            alive = found in self.brokers and self.brokers[found].is_running
            return found if alive else None

        return self.wait_for(leader, f"a leader of {topic}-{index}")

    def wait_for_isr(self, topic: str, index: int = 0, *, size: int | None = None) -> None:
        """Wait until an ISR has so many members; all replicas, if nothing is said."""

        def enough() -> bool:
            found = self.partition(topic, index)
            return len(found.isr) == (len(found.replicas) if size is None else size)

        self.wait_for(enough, f"the ISR of {topic}-{index}")

    def wait_for(self, look: Callable[[], T | None], what: str) -> T:
        """Look again and again until there is something; AssertionError after 30 s."""
        until = monotonic_s() + WAIT_S
        while True:
            try:
                found = look()
            except KeyError:
                found = None
            if found:
                return found
            if monotonic_s() > until:
                raise AssertionError(f"{what}: not within {WAIT_S} s")
            time.sleep(_POLL_S)


async def _image(broker: Broker) -> MetadataImage:
    return broker.storage.metadata.image
