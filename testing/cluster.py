"""A cluster in one process, for tests of broker failures.

::

    with Cluster(3) as cluster:
        ...  # any Kafka client at cluster.bootstrap
        cluster.kill(cluster.leader("orders", 0))

A controller and several brokers run in one thread each, with event loops and ports of their own. A
test can kill, stop, pause, disconnect and restart them.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from fencepost.cluster.image import MetadataImage, PartitionRegistration
from fencepost.coordinator.config.key import nearest
from fencepost.coordinator.config.logs import only_errors
from fencepost.testing.access import BrokerAccess
from fencepost.testing.aio import Aio, beside
from fencepost.testing.arguments import checked, setting_texts
from fencepost.testing.broker import OwnBroker
from fencepost.testing.clock import TestClock
from fencepost.testing.faults import Faults
from fencepost.testing.levels import SETTINGS
from fencepost.testing.network import Network
from fencepost.testing.positions import FetchPositions
from fencepost.testing.under_test import KafkaUnderTest
from fencepost.testing.views import Partition
from fencepost.testing.waiting import TIMEOUT_S, BrokerDownError, wait
from fencepost.tools.ports import hold_port

if TYPE_CHECKING:
    from fencepost.coordinator.daemon.broker import Broker

T = TypeVar("T")

CONTROLLER_ID: Final = 100
"""The node id of the controller; brokers count from 1."""

WAIT_S: Final = TIMEOUT_S
"""The time limit of each wait for a state of the cluster."""

DEFAULTS: Final[Mapping[str, str]] = {
    "broker.heartbeat.interval.ms": "200",
    "broker.session.timeout.ms": "1000",
    "replica.lag.time.max.ms": "1000",
    "replica.fetch.backoff.ms": "100",
    "offsets.topic.num.partitions": "3",
    "transaction.state.log.num.partitions": "3",
    "share.coordinator.state.topic.num.partitions": "3",
}
"""Short timeouts (a dead broker is fenced after a second) and few partitions of internal topics.
``config`` overrides them."""


@checked
class Cluster(KafkaUnderTest):
    """Several brokers and a controller, as a context manager.

    Call all methods from the test's thread. ``config`` holds settings of all nodes by Kafka's
    names. By default, replication factors are the number of brokers, at most three, and
    ``min.insync.replicas`` is one less. ``users``, ``tls``, ``acls``, ``now_ms`` and ``rename`` are
    as for ``Kafka``. Brokers use the clients' listener for each other; the controller's listener
    has neither TLS nor authentication.

    ``faults`` apply to clients' requests to any broker, ``brokers[1].faults`` to all requests to
    that broker. All brokers share ``clock``; heartbeats and fetches between nodes stay on real
    time. Warnings of brokers are not logged, because the test causes most of them.
    """

    look_s = 2.0
    """The time limit of a request within a wait: short, so that a wait soon turns from a dead
    broker to the new leader."""

    def __init__(
        self,
        brokers: int = 3,
        data_dir: str | Path | None = None,
        config: Mapping[str, object] | None = None,
        *,
        users: Mapping[str, str] | None = None,
        tls: bool = False,
        acls: Sequence[str] | None = None,
        now_ms: int | None = None,
        rename: Callable[[str], str] = str,
    ) -> None:
        super().__init__(BrokerAccess(users, tls=tls, acls=acls), rename)
        given = setting_texts(config or {})
        self._has_rules = self._is_closed = False
        self._open = ExitStack()
        self._own_directory = data_dir is None
        self.data_dir = Path(data_dir or tempfile.mkdtemp(prefix="kafka-cluster-"))
        self.clock = TestClock(now_ms, auto=True)
        self.faults = Faults()
        self._positions = FetchPositions()
        self._network = Network()
        self._place = hold_port()
        port = self._place.getsockname()[1]
        protocol = self._access.protocol
        common = {
            "controller.listener.names": "CONTROLLER",
            "controller.quorum.bootstrap.servers": f"127.0.0.1:{port}",
            "listener.security.protocol.map": f"CONTROLLER:PLAINTEXT,{protocol}:{protocol}",
            **_replication(brokers),
            **DEFAULTS,
            **SETTINGS,
        }
        self.config = {**common, **self._access.settings, **self._access.between_brokers, **given}
        """Settings of every broker, read at each start."""
        self.controller = OwnBroker(
            self.data_dir / "controller",
            f"127.0.0.1:{port}",
            {
                **common,
                **self._access.of_controller,
                **given,
                "listeners": f"CONTROLLER://127.0.0.1:{port}",
                "process.roles": "controller",
                "node.id": str(CONTROLLER_ID),
            },
            forces=False,
            add_scram=self._access.added,
            loop_factory=self._network.loop_factory(CONTROLLER_ID),
        )
        self.brokers = {
            broker_id: OwnBroker(
                self.data_dir / f"broker-{broker_id}",
                config={**self.config, "process.roles": "broker", "node.id": str(broker_id)},
                clock=self.clock,
                forces=False,
                faults=Faults(of_all=self.faults),
                positions=self._positions,
                loop_factory=self._network.loop_factory(broker_id),
            )
            for broker_id in range(1, brokers + 1)
        }
        """The brokers by node id."""

    # --- life ---

    def start(self) -> Self:
        """Start all nodes that are down, and wait until they serve."""
        if self._is_closed:
            raise BrokerDownError("the cluster is closed; Cluster(…) makes another")
        self._open.enter_context(only_errors())
        self.controller.start()
        with ThreadPoolExecutor(len(self.brokers)) as threads:
            for _ in threads.map(OwnBroker.start, self.brokers.values()):
                pass
        self._network.place(CONTROLLER_ID, self.controller.address)
        for broker_id, broker in self.brokers.items():
            self._network.place(broker_id, broker.address)
        if not self._has_rules:
            with self._session() as session:
                self._access.make_rules(session)
            self._has_rules = True
        return self

    def close(self) -> None:
        """Crash all nodes: controlled shutdowns would move leadership to brokers that end next."""
        self._clients.close()
        self._is_closed = True
        self._close_sessions()
        nodes = [*self.brokers.values(), self.controller]
        for node in nodes:
            node.crash()
        for node in nodes:
            node.stop()
        self._place.close()
        self._access.close()
        self._open.close()
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

    def __repr__(self) -> str:
        down = [str(node_id) for node_id, broker in self.brokers.items() if not broker.is_running]
        return f"<Cluster {self.bootstrap}{f', down: {chr(44).join(down)}' if down else ''}>"

    @cached_property
    def aio(self) -> ClusterAio:
        """The methods of this object as coroutines, for asyncio and trio."""
        return ClusterAio(self)

    def kill(self, broker_id: int) -> None:
        """Kill a broker like ``kill -9``. Raises ValueError for an unknown id."""
        self._broker(broker_id).crash()

    def stop(self, broker_id: int) -> None:
        """Stop a broker with a controlled shutdown, in which it hands over leadership."""
        self._broker(broker_id).stop()

    def restart(self, broker_id: int) -> None:
        """Start a broker on its directory and port again, and wait until it serves."""
        self._broker(broker_id).restart()

    def pause(self, broker_id: int) -> None:
        """Suspend a broker like ``SIGSTOP``: it answers no request, but keeps its connections."""
        broker = self._broker(broker_id)
        if not broker.is_running:
            raise BrokerDownError(f"broker {broker_id} is down; restart({broker_id}) starts it")
        broker.pause()

    def resume(self, broker_id: int) -> None:
        """Resume a paused broker."""
        self._broker(broker_id).resume()

    def _broker(self, broker_id: int) -> OwnBroker:
        if self._is_closed:
            raise BrokerDownError("the cluster is closed")
        if broker_id not in self.brokers:
            broker_ids = ", ".join(map(str, self.brokers))
            hint = "; 100 is the controller, cluster.controller" * (broker_id == CONTROLLER_ID)
            raise ValueError(f"there is no broker {broker_id}; this cluster has {broker_ids}{hint}")
        return self.brokers[broker_id]

    def partition_network(
        self, nodes: Iterable[int], others: Iterable[int], *, one_way: bool = False
    ) -> None:
        """Separate two groups of nodes; :data:`CONTROLLER_ID` may be in one of them.

        With ``one_way`` only the connections that ``nodes`` open are cut. Clients still reach every
        broker. Raises ValueError for an unknown id.
        """
        nodes, others = self._nodes(nodes), self._nodes(others)
        self._network.cut(nodes, others)
        if not one_way:
            self._network.cut(others, nodes)

    def _nodes(self, ids: Iterable[int]) -> tuple[int, ...]:
        if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
            raise TypeError(f"nodes are a list of their ids, [1], not {ids!r}")
        nodes = tuple(ids)
        if not nodes:
            raise ValueError("nodes are a list of their ids, [1], which is empty")
        for node in nodes:
            if node != CONTROLLER_ID:
                self._broker(node)
        return nodes

    def heal(self) -> None:
        """Let every node reach every other again."""
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
        full = self._create(name, partitions, config, replicas)
        for index in range(len(self.image.topics[full].partitions)):
            self.wait_for_isr(full, index)
        self.wait_for(lambda: self._all_know_topic(full), f"{full} at all brokers")
        return full

    def _all_know_topic(self, topic: str) -> bool:
        return all(topic in call(_image).topics for call in self._running())

    # --- queries ---

    @property
    def bootstrap(self) -> str:
        """The brokers as HOST:PORT,…, for ``bootstrap.servers``."""
        return ",".join(broker.bootstrap for broker in self.brokers.values())

    @property
    def is_running(self) -> bool:
        """Whether any broker serves."""
        return any(self._running())

    @property
    def image(self) -> MetadataImage:
        """The controller's metadata image."""
        if not self.controller.is_running:
            raise BrokerDownError("the controller is down; cluster.controller.restart() starts it")
        return self.controller.call(_image)

    def partition(self, topic: str, index: int = 0) -> PartitionRegistration:
        """Return a partition from the controller's image. Raises ValueError if there is none."""
        registration = self._find(topic, index)
        if isinstance(registration, str):
            raise ValueError(registration)  # noqa: TRY004 - a sentence that there is none
        return registration

    def _find(self, topic: str, index: int) -> PartitionRegistration | str:
        """Return a partition, or a sentence saying that it does not exist."""
        topics = self.image.topics
        if topic not in topics:
            return f"there is no topic {topic!r}{nearest(topic, topics)}"
        partitions = topics[topic].partitions
        if not 0 <= index < len(partitions):
            return f"{topic} has no partition {index}, but {len(partitions)}"
        return partitions[index]

    def leader(self, topic: str, index: int = 0, *, timeout: float = WAIT_S) -> int:
        """Return the leader of a partition; wait until there is one that is alive."""

        def leader(registration: PartitionRegistration) -> int | None:
            alive = (
                registration.leader in self.brokers and self.brokers[registration.leader].is_running
            )
            return registration.leader if alive else None

        return self._wait_for_partition((topic, index), leader, "a leader of", timeout)

    def wait_for_isr(
        self, topic: str, index: int = 0, *, size: int | None = None, timeout: float = WAIT_S
    ) -> None:
        """Wait until the ISR has this many members, by default all replicas."""

        def enough(registration: PartitionRegistration) -> bool:
            return len(registration.isr) == (len(registration.replicas) if size is None else size)

        self._wait_for_partition((topic, index), enough, "the ISR of", timeout)

    def _wait_for_partition(
        self,
        place: Partition,
        look: Callable[[PartitionRegistration], T | None],
        what: str,
        timeout: float,
    ) -> T:
        __tracebackhide__ = True
        topic, index = place
        last: PartitionRegistration | str = ""

        def attempt(_limit_s: float) -> T | None:
            nonlocal last
            last = self._find(topic, index)
            return None if isinstance(last, str) else look(last)

        def describe() -> str:
            if isinstance(last, str):
                return f"{what} {topic}-{index}{f': {last}' if last else ''}"
            down = [node_id for node_id, broker in self.brokers.items() if not broker.is_running]
            return (
                f"{what} {topic}-{index}: its leader is {last.leader}, its replicas"
                f" {list(last.replicas)}, its ISR {list(last.isr)}; brokers down: {down or 'none'}"
            )

        return self._until(attempt, describe, timeout)

    def wait_for(self, look: Callable[[], T | None], what: str, timeout: float = WAIT_S) -> T:
        """Repeat ``look`` until its result is true; raise AssertionError after ``timeout`` seconds.

        A LookupError counts as false.
        """
        __tracebackhide__ = True
        trouble = ""

        def attempt(_limit_s: float) -> T | None:
            nonlocal trouble
            try:
                trouble, found = "", look()
            except LookupError as error:
                trouble, found = f"; the last look raised {error!r}", None
            return found

        return self._until(attempt, lambda: f"{what}{trouble}", timeout)

    def _until(
        self, look: Callable[[float], T | None], describe: Callable[[], str], timeout: float
    ) -> T:
        __tracebackhide__ = True
        if self._is_closed:
            raise BrokerDownError("the cluster is closed")
        try:
            return wait(look, timeout, describe)
        except TimeoutError as error:
            raise AssertionError(str(error)) from None

    def serve_again(self) -> None:
        """Heal the network, and start or resume the brokers that are down or paused."""
        self.heal()
        for broker in [self.controller, *self.brokers.values()]:
            broker.resume()
            if not broker.is_running:
                broker.restart()

    @property
    def trouble(self) -> str:
        """The nodes that are down or paused, as a text; empty if none is."""
        problems = []
        for node, broker in {**self.brokers, CONTROLLER_ID: self.controller}.items():
            called = "the controller" if node == CONTROLLER_ID else f"broker {node}"
            if broker.is_paused or not broker.is_running:
                problems.append(f"{called} is {'paused' if broker.is_paused else 'down'}")
        return ", ".join(problems)

    # --- inside ---

    @property
    def _ends(self) -> int:
        return sum(broker.ends for broker in self.brokers.values())

    def _check_running(self) -> None:
        if self._is_closed:
            raise BrokerDownError("the cluster is closed")
        if not self.is_running:
            raise BrokerDownError("no broker of the cluster runs; cluster.restart(1) starts one")

    def _running(self) -> list[Callable[[Callable[[Broker], Any]], Any]]:
        return [
            broker.call
            for broker in self.brokers.values()
            if broker.is_running and not broker.is_paused
        ]


class ClusterAio(Aio[Cluster]):
    """``kafka_cluster.aio``."""

    topic = beside(Cluster.topic)
    kill = beside(Cluster.kill)
    stop = beside(Cluster.stop)
    restart = beside(Cluster.restart)
    pause = beside(Cluster.pause)
    resume = beside(Cluster.resume)
    leader = beside(Cluster.leader)
    wait_for_isr = beside(Cluster.wait_for_isr)


def _replication(brokers: int) -> dict[str, str]:
    """Return replication settings that tolerate the loss of one of the brokers."""
    replicas = min(brokers, 3)
    return {
        "default.replication.factor": str(replicas),
        "offsets.topic.replication.factor": str(replicas),
        "transaction.state.log.replication.factor": str(replicas),
        "transaction.state.log.min.isr": str(max(1, replicas - 1)),
        "min.insync.replicas": str(max(1, replicas - 1)),
    }


async def _image(broker: Broker) -> MetadataImage:
    return broker.storage.metadata.image
