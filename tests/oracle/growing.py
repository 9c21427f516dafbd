"""A single broker that becomes a member of a cluster of Apache Kafka's brokers, and leaves it.

The first broker is Fencepost's or Apache Kafka's, and the steps are the same. ``fencepost cluster
promote`` makes Fencepost a member of a cluster; Apache Kafka's broker is in a cluster from the
beginning.
"""

from __future__ import annotations

import subprocess
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from fencepost.logcore.checkpoints import read_meta_properties
from fencepost.logcore.fs import OsFileSystem
from fencepost.tools.ports import hold_port
from tests.oracle.test_joining import created
from tests.support.cluster import Cluster
from tests.support.daemon import ROOT, Daemon
from tests.support.kafka import Kafka, Quorum
from tests.support.promoted import PromotedBroker, PromotedController
from tests.support.raw import Answer
from tests.support.waits import until

FIRST: Final = 1
JOINING: Final = 2, 3
CONTROLLERS: Final = 101, 102, 103
"""Node ids: the first broker, the brokers that join, and the controllers."""

COORDINATORS: Final = "__consumer_offsets", "__transaction_state"
SETTINGS: Final = {
    "broker.heartbeat.interval.ms": "500",
    "broker.session.timeout.ms": "4000",
    "replica.lag.time.max.ms": "4000",
    "offsets.topic.num.partitions": "2",
    "transaction.state.log.num.partitions": "2",
    "transaction.state.log.min.isr": "2",  # the default
    "group.initial.rebalance.delay.ms": "0",
    "auto.leader.rebalance.enable": "false",
    "log.retention.ms": "-1",
    "log.cleaner.enable": "false",  # replicas compact at different times
}
START_S: Final = 180.0
SETTLED_S: Final = 300.0
"""Deadline for a change of all partitions."""

ELECTIONS: Final = {"election_type": 0, "topic_partitions": None, "timeout": 20_000}


class Growing(ABC):
    """The brokers and the steps. When :meth:`begin` returns, the first broker serves alone."""

    name: str
    first: Kafka | Daemon
    joining: Sequence[Kafka]

    def __init__(self, directory: Path, controllers: int = 1) -> None:
        self.directory = directory
        self.controllers: list[Kafka] | list[PromotedController] = []
        self._addresses = [self._own_address() for _ in CONTROLLERS[:controllers]]

    def room(self, node_id: int) -> Path:
        """Return the folder of a node."""
        room = self.directory / str(node_id)
        room.mkdir(parents=True, exist_ok=True)
        return room

    def _own_address(self) -> str:
        held = hold_port()
        weakref.finalize(self, held.close)
        return f"127.0.0.1:{held.getsockname()[1]}"

    @abstractmethod
    def begin(self, topics: Sequence[str], partitions: int) -> None:
        """Start the first broker, and create the topics."""

    @abstractmethod
    def become_a_member(self) -> None:
        """Restart the first broker as a member of a cluster."""

    def stop(self) -> None:
        """Kill all running nodes."""
        for node in (self.first, *self.joining, *self.controllers):
            if node.child is not None:
                node.kill()

    # --- moves ---

    def join(self) -> None:
        """Start Apache Kafka's brokers."""
        for broker in self.joining:
            broker.launch()
        for broker in self.joining:
            broker.wait()

    def replicate(self) -> None:
        """Give every partition a replica on every broker."""
        self.reassign(lambda _: [FIRST, *JOINING])

    def hand_over(self) -> None:
        """Move all leaderships to Apache Kafka's brokers, and with them the coordinators."""
        self.reassign(lambda index: [*turned(JOINING, index), FIRST])
        self._elect()
        until(lambda: self.are_led_by(JOINING), "Apache Kafka's brokers lead", deadline_s=START_S)

    def _elect(self) -> None:
        with Cluster(self.joining[0].bootstrap) as client:
            answer = client.call("elect_leaders", 2, **ELECTIONS)
        assert answer["error_code"] == "none", answer

    def leave(self) -> None:
        """Shut the first broker down; the other brokers must have all its records, byte by byte."""
        assert self.first.child is not None
        self.first.child.terminate()
        assert self.are_led_by(JOINING)
        for broker in self.joining:
            assert_has_all_of(broker.data_dir, self.first.data_dir)

    def strike_off(self) -> None:
        """Remove the first broker from all replica sets, and unregister it."""
        self.reassign(lambda index: turned(JOINING, index))
        with Cluster(self.joining[0].bootstrap) as client:
            answer = client.call("unregister_broker", 0, broker_id=FIRST)
        assert answer["error_code"] == "none", answer

    # --- failures during the moves ---

    def first_is_killed(self) -> None:
        """Kill the first broker by SIGKILL, and start it again."""
        self.first.kill()
        self.first.start()

    def controller_is_killed(self) -> None:
        """Kill the active controller, and start it again."""
        with Cluster(self.first.bootstrap) as client:
            asked = {"topic_name": "__cluster_metadata", "partitions": [{"partition_index": 0}]}
            answer = client.call("describe_quorum", 0, topics=[asked])
        active = answer["topics"][0]["partitions"][0]["leader_id"]
        leader = next(controller for controller in self.controllers if controller.node_id == active)
        leader.kill()
        leader.start()

    def replicate_while_it_is_killed(self) -> None:
        """Do as :meth:`replicate` does, while the only broker with data is killed."""
        self.reassign(lambda _: [FIRST, *JOINING], meanwhile=self.first_is_killed)

    def lead_again_and_be_killed(self) -> None:
        """Make the first broker the leader of all partitions again, and kill the broker."""
        self.reassign(lambda index: [FIRST, *turned(JOINING, index)])
        self._elect()
        until(lambda: self.are_led_by([FIRST]), "the first leads", deadline_s=START_S)
        self.first.kill()
        until(lambda: self.are_led_by(JOINING), "others lead", deadline_s=START_S)
        self.first.start()

    def hand_over_without_a_controller(self) -> None:
        """Do as :meth:`hand_over` does, while the active controller is killed."""
        self.reassign(
            lambda index: [*turned(JOINING, index), FIRST], meanwhile=self.controller_is_killed
        )
        self.hand_over()

    def another_is_killed(self) -> None:
        """Kill one of Apache Kafka's brokers, which leads partitions, and start it again."""
        broker = self.joining[-1]
        broker.kill()
        until(lambda: self.are_led_by([FIRST, *JOINING[:-1]]), "others lead", deadline_s=START_S)
        broker.start()
        until(lambda: all_in_sync(self.topics()), "all in sync", deadline_s=SETTLED_S)

    # --- state ---

    def topics(self) -> list[Answer]:
        """Return the metadata of all topics according to Apache Kafka's first broker."""
        with Cluster(self.joining[0].bootstrap) as client:
            answer: list[Answer] = client.call("metadata", 8, topics=None)["topics"]
        return answer

    def are_led_by(self, brokers: Sequence[int]) -> bool:
        """Return whether only these brokers lead partitions."""
        return all(
            part["leader_id"] in brokers for topic in self.topics() for part in topic["partitions"]
        )

    def reassign(
        self, choose: Callable[[int], list[int]], meanwhile: Callable[[], object] | None = None
    ) -> None:
        """Reassign each partition to ``choose(index)``; wait until all replicas are in sync."""
        topics = [
            {
                "name": topic["name"],
                "partitions": [
                    {"partition_index": index, "replicas": choose(index)}
                    for index in (part["partition_index"] for part in topic["partitions"])
                ],
            }
            for topic in self.topics()
        ]
        with Cluster(self.joining[0].bootstrap) as client:
            answer = client.call("alter_partition_reassignments", 0, timeout=20_000, topics=topics)
        told = [part for topic in answer["responses"] for part in topic["partitions"]]
        assert all(part["error_code"] == "none" for part in (answer, *told)), answer
        if meanwhile:
            meanwhile()
        until(partial(self._have, choose), "all replicas in sync", deadline_s=SETTLED_S, poll_s=0.2)

    def _have(self, choose: Callable[[int], list[int]]) -> bool:
        topics = self.topics()
        return all_in_sync(topics) and all(
            part["replica_nodes"] == choose(part["partition_index"])
            for topic in topics
            for part in topic["partitions"]
        )


class OfKafka(Growing):
    """A broker of Apache Kafka, which is a member of a cluster from the beginning."""

    name = "kafka"

    def __init__(self, directory: Path, controllers: int = 1) -> None:
        super().__init__(directory, controllers)
        ids = CONTROLLERS[:controllers]
        made = [
            Kafka(self.room(node_id), SETTINGS, node_id=node_id, is_broker=False) for node_id in ids
        ]
        voters = ",".join(f"{controller.node_id}@{controller.controller}" for controller in made)
        for controller in made:
            controller.add_settings({"controller.quorum.voters": voters})
        self.controllers = made
        self.first, *self.joining = (
            Kafka(
                self.room(node_id),
                {**SETTINGS, "controller.quorum.voters": voters},
                node_id=node_id,
                controller=made[0],
            )
            for node_id in (FIRST, *JOINING)
        )

    def begin(self, topics: Sequence[str], partitions: int) -> None:
        """See :class:`Growing`."""
        self._start()
        for name in topics:
            created(self.first.bootstrap, name, [[FIRST]] * partitions)

    def become_a_member(self) -> None:
        """Restart all nodes, because the broker is a member already."""
        for node in (self.first, *self.controllers):
            assert node.child is not None
            node.child.terminate()
        self._start()

    def _start(self) -> None:
        for node in (*self.controllers, self.first):
            assert isinstance(node, Kafka)
            node.launch()
        for node in (*self.controllers, self.first):
            assert isinstance(node, Kafka)
            node.wait()


class OfFencepost(Growing):
    """A broker of Fencepost, which is at first a single process."""

    name = "fencepost"

    def __init__(self, directory: Path, controllers: int = 1) -> None:
        super().__init__(directory, controllers)
        self.first = Daemon(self.room(FIRST) / "logs", SETTINGS)
        bootstrap = ",".join(self._addresses)
        told = {
            **SETTINGS,
            "controller.quorum.voters": "",
            "controller.quorum.bootstrap.servers": bootstrap,
        }
        quorum = Quorum(CONTROLLERS[0], self._addresses[0])
        self.joining = [
            Kafka(self.room(node_id), told, node_id=node_id, controller=quorum)
            for node_id in JOINING
        ]

    def begin(self, topics: Sequence[str], partitions: int) -> None:
        """See :class:`Growing`."""
        self.first.start()
        with Cluster(self.first.bootstrap) as client:
            for name in topics:
                client.create_topic(name, partitions)

    def become_a_member(self) -> None:
        """Promote the broker as the documentation of `fencepost cluster promote` says."""
        before = self.first
        assert isinstance(before, Daemon)
        before.stop()
        output = self.directory / "promoted"
        named = zip(CONTROLLERS, self._addresses, strict=False)
        command = [
            *(sys.executable, "-m", "fencepost", "cluster", "promote", str(before.data_dir)),
            *("--controller", ",".join(f"{node_id}@{address}" for node_id, address in named)),
            *("--output", str(output), *before.arguments()[2:]),
        ]
        told = subprocess.run(
            command, capture_output=True, text=True, timeout=START_S, check=False, cwd=ROOT
        )
        assert told.returncode == 0, told.stdout + told.stderr
        self.controllers = [
            PromotedController(node_id, output) for node_id in CONTROLLERS[: len(self._addresses)]
        ]
        for controller in self.controllers:
            controller.launch()
        for controller in self.controllers:
            controller.wait()
        self.first = PromotedBroker(before.data_dir, output).start()
        assert self.first.bootstrap == before.bootstrap

    def join(self) -> None:
        """See :class:`Growing`; formats the storage of the new brokers with this cluster's id."""
        meta = read_meta_properties(OsFileSystem(), str(self.first.data_dir))
        assert meta is not None
        for broker in self.joining:
            broker.cluster_id = meta.cluster_id
        super().join()


def all_in_sync(topics: Sequence[Answer]) -> bool:
    """Return whether all replicas are in their ISRs."""
    return all(
        set(part["isr_nodes"]) == set(part["replica_nodes"])
        for topic in topics
        for part in topic["partitions"]
    )


def turned(brokers: Sequence[int], by: int) -> list[int]:
    """Return the brokers rotated by ``by`` positions."""
    by %= len(brokers)
    return [*brokers[by:], *brokers[:by]]


def assert_has_all_of(one: Path, other: Path) -> None:
    """Check that every log of ``other`` is a prefix of the corresponding log of ``one``."""
    logs = {path.name for path in other.iterdir() if path.is_dir() and path.name[-1].isdigit()}
    logs.discard("__cluster_metadata-0")
    assert logs
    for name in logs:
        wanted = content(other / name)
        until(partial(_has, one / name, len(wanted)), name, deadline_s=START_S)
        assert content(one / name).startswith(wanted), name


def _has(log: Path, size: int) -> bool:
    return len(content(log)) >= size


def content(log: Path) -> bytes:
    """Return the bytes of all segments of a log."""
    return b"".join(segment.read_bytes() for segment in sorted(log.glob("*.log")))
