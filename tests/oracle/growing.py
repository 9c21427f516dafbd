"""One broker, alone at first, that grows into a cluster of Apache Kafka's brokers, and goes.

The same moves for Fencepost, which ``fencepost cluster promote`` makes one of a cluster, and for an
Apache Kafka that was one of a cluster from the beginning.
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

from fencepost.coordinator.tools.ports import hold_port
from fencepost.logcore.checkpoints import read_meta_properties
from fencepost.logcore.fs import OsFileSystem
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
"""Numbers of who serves alone at first, of those that join it, and of the controllers."""

COORDINATORS: Final = "__consumer_offsets", "__transaction_state"
SETTINGS: Final = {
    "broker.heartbeat.interval.ms": "500",
    "broker.session.timeout.ms": "4000",
    "replica.lag.time.max.ms": "4000",
    "offsets.topic.num.partitions": "2",
    "transaction.state.log.num.partitions": "2",
    "transaction.state.log.min.isr": "2",  # what it is if nobody says
    "group.initial.rebalance.delay.ms": "0",
    "auto.leader.rebalance.enable": "false",
    "log.retention.ms": "-1",
    "log.cleaner.enable": "false",  # each replica cleans when it likes
}
START_S: Final = 180.0
SETTLED_S: Final = 300.0
"""Patience for the moves of all partitions."""

ELECTIONS: Final = {"election_type": 0, "topic_partitions": None, "timeout": 20_000}


class Growing(ABC):
    """The brokers, and what is done to them. The first serves alone once :meth:`begin` returns."""

    name: str
    first: Kafka | Daemon
    joining: Sequence[Kafka]

    def __init__(self, directory: Path, controllers: int = 1) -> None:
        self.directory = directory
        self.controllers: list[Kafka] | list[PromotedController] = []
        self._addresses = [self._own_address() for _ in CONTROLLERS[:controllers]]

    def room(self, node_id: int) -> Path:
        """The folder of a node."""
        room = self.directory / str(node_id)
        room.mkdir(parents=True, exist_ok=True)
        return room

    def _own_address(self) -> str:
        held = hold_port()
        weakref.finalize(self, held.close)
        return f"127.0.0.1:{held.getsockname()[1]}"

    @abstractmethod
    def begin(self, topics: Sequence[str], partitions: int) -> None:
        """Start the first, and make the topics."""

    @abstractmethod
    def become_a_member(self) -> None:
        """The first is started again, from now on as one of a cluster."""

    def stop(self) -> None:
        """Kill all that run."""
        for one in (self.first, *self.joining, *self.controllers):
            if one.child is not None:
                one.kill()

    # --- what is done ---

    def join(self) -> None:
        """Apache Kafka's brokers come."""
        for one in self.joining:
            one.launch()
        for one in self.joining:
            one.wait()

    def replicate(self) -> None:
        """Every partition gets replicas on all."""
        self.reassign(lambda _: [FIRST, *JOINING])

    def hand_over(self) -> None:
        """Apache Kafka's brokers lead in turn, and with the partitions coordinators move."""
        self.reassign(lambda index: [*turned(JOINING, index), FIRST])
        self._elect()
        until(lambda: self.are_led_by(JOINING), "Apache Kafka's brokers lead", deadline_s=START_S)

    def _elect(self) -> None:
        with Cluster(self.joining[0].bootstrap) as client:
            answer = client.call("elect_leaders", 2, **ELECTIONS)
        assert answer["error_code"] == "none", answer

    def leave(self) -> None:
        """The first is stopped in order; all that it had is there, byte by byte."""
        assert self.first.child is not None
        self.first.child.terminate()
        assert self.are_led_by(JOINING)
        for one in self.joining:
            assert_has_all_of(one.data_dir, self.first.data_dir)

    def strike_off(self) -> None:
        """Nothing is expected of the first any more."""
        self.reassign(lambda index: turned(JOINING, index))
        with Cluster(self.joining[0].bootstrap) as client:
            answer = client.call("unregister_broker", 0, broker_id=FIRST)
        assert answer["error_code"] == "none", answer

    # --- and what goes wrong meanwhile ---

    def first_is_killed(self) -> None:
        """Kill -9, and a new start."""
        self.first.kill()
        self.first.start()

    def controller_is_killed(self) -> None:
        """The active one, if there are several, goes and comes back."""
        with Cluster(self.first.bootstrap) as client:
            asked = {"topic_name": "__cluster_metadata", "partitions": [{"partition_index": 0}]}
            answer = client.call("describe_quorum", 0, topics=[asked])
        active = answer["topics"][0]["partitions"][0]["leader_id"]
        one = next(one for one in self.controllers if one.node_id == active)
        one.kill()
        one.start()

    def replicate_while_it_is_killed(self) -> None:
        """As :meth:`replicate`, and the only one that has anything is killed."""
        self.reassign(lambda _: [FIRST, *JOINING], meanwhile=self.first_is_killed)

    def lead_again_and_be_killed(self) -> None:
        """The first leads everything once more, and is killed."""
        self.reassign(lambda index: [FIRST, *turned(JOINING, index)])
        self._elect()
        until(lambda: self.are_led_by([FIRST]), "the first leads", deadline_s=START_S)
        self.first.kill()
        until(lambda: self.are_led_by(JOINING), "others lead", deadline_s=START_S)
        self.first.start()

    def hand_over_without_a_controller(self) -> None:
        """As :meth:`hand_over`, and the active controller is killed."""
        self.reassign(
            lambda index: [*turned(JOINING, index), FIRST], meanwhile=self.controller_is_killed
        )
        self.hand_over()

    def another_is_killed(self) -> None:
        """One of Apache Kafka's brokers, which leads."""
        one = self.joining[-1]
        one.kill()
        until(lambda: self.are_led_by([FIRST, *JOINING[:-1]]), "others lead", deadline_s=START_S)
        one.start()
        until(lambda: all_in_sync(self.topics()), "all in sync", deadline_s=SETTLED_S)

    # --- looking ---

    def topics(self) -> list[Answer]:
        """All topics, as Apache Kafka's first broker knows them."""
        with Cluster(self.joining[0].bootstrap) as client:
            answer: list[Answer] = client.call("metadata", 8, topics=None)["topics"]
        return answer

    def are_led_by(self, brokers: Sequence[int]) -> bool:
        """Whether nobody else leads a partition."""
        return all(
            part["leader_id"] in brokers for topic in self.topics() for part in topic["partitions"]
        )

    def reassign(
        self, choose: Callable[[int], list[int]], meanwhile: Callable[[], object] | None = None
    ) -> None:
        """Give every partition other replicas, by its number, and wait until they are in sync."""
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
    """Apache Kafka, one of a cluster from the beginning."""

    name = "kafka"

    def __init__(self, directory: Path, controllers: int = 1) -> None:
        super().__init__(directory, controllers)
        ids = CONTROLLERS[:controllers]
        made = [Kafka(self.room(one), SETTINGS, node_id=one, is_broker=False) for one in ids]
        voters = ",".join(f"{one.node_id}@{one.controller}" for one in made)
        for controller in made:
            controller.tell({"controller.quorum.voters": voters})
        self.controllers = made
        self.first, *self.joining = (
            Kafka(
                self.room(one),
                {**SETTINGS, "controller.quorum.voters": voters},
                node_id=one,
                controller=made[0],
            )
            for one in (FIRST, *JOINING)
        )

    def begin(self, topics: Sequence[str], partitions: int) -> None:
        """See :class:`Growing`."""
        self._start()
        for name in topics:
            created(self.first.bootstrap, name, [[FIRST]] * partitions)

    def become_a_member(self) -> None:
        """It has been one; what is left of it is the new start of all that there is."""
        for one in (self.first, *self.controllers):
            assert one.child is not None
            one.child.terminate()
        self._start()

    def _start(self) -> None:
        for one in (*self.controllers, self.first):
            assert isinstance(one, Kafka)
            one.launch()
        for one in (*self.controllers, self.first):
            assert isinstance(one, Kafka)
            one.wait()


class OfFencepost(Growing):
    """Fencepost, alone, with no process beside it."""

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
            Kafka(self.room(one), told, node_id=one, controller=quorum) for one in JOINING
        ]

    def begin(self, topics: Sequence[str], partitions: int) -> None:
        """See :class:`Growing`."""
        self.first.start()
        with Cluster(self.first.bootstrap) as client:
            for name in topics:
                client.create_topic(name, partitions)

    def become_a_member(self) -> None:
        """As the documentation of `fencepost cluster promote` has it."""
        before = self.first
        assert isinstance(before, Daemon)
        before.stop()
        output = self.directory / "promoted"
        named = zip(CONTROLLERS, self._addresses, strict=False)
        command = [
            *(sys.executable, "-m", "fencepost", "cluster", "promote", str(before.data_dir)),
            *("--controller", ",".join(f"{one}@{address}" for one, address in named)),
            *("--output", str(output), *before.arguments()[2:]),
        ]
        told = subprocess.run(
            command, capture_output=True, text=True, timeout=START_S, check=False, cwd=ROOT
        )
        assert told.returncode == 0, told.stdout + told.stderr
        self.controllers = [
            PromotedController(one, output) for one in CONTROLLERS[: len(self._addresses)]
        ]
        for one in self.controllers:
            one.launch()
        for one in self.controllers:
            one.wait()
        self.first = PromotedBroker(before.data_dir, output).start()
        assert self.first.bootstrap == before.bootstrap

    def join(self) -> None:
        """See :class:`Growing`. Their storage is formatted for the cluster that there is now."""
        meta = read_meta_properties(OsFileSystem(), str(self.first.data_dir))
        assert meta is not None
        for one in self.joining:
            one.cluster_id = meta.cluster_id
        super().join()


def all_in_sync(topics: Sequence[Answer]) -> bool:
    """Whether no replica is missing from an ISR."""
    return all(
        set(part["isr_nodes"]) == set(part["replica_nodes"])
        for topic in topics
        for part in topic["partitions"]
    )


def turned(brokers: Sequence[int], by: int) -> list[int]:
    """The same, another one first."""
    by %= len(brokers)
    return [*brokers[by:], *brokers[:by]]


def assert_has_all_of(one: Path, other: Path) -> None:
    """Every log of ``other`` is the beginning of that in ``one``."""
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
    """All that is in the segments of a log."""
    return b"".join(segment.read_bytes() for segment in sorted(log.glob("*.log")))
