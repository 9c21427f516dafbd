"""Brokers of Fencepost and of Apache Kafka 3.9 that elect their controller on one ZooKeeper."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kazoo.exceptions import KazooException, NoNodeError

from tests.support.cluster import Cluster, unique
from tests.support.kafka39 import Kafka39
from tests.support.member import Member
from tests.support.mixed import PYTHON
from tests.support.waits import until
from tests.support.zookeeper import ZooKeeper

Node = Member | Kafka39

SAID_LINES, SAID_CHARACTERS = 25, 240
"""Limits of a broker's output in :meth:`Brokers.describe`."""

SIGTERM_OF_JAVA = 143
"""The exit status of a JVM after a clean stop by SIGTERM."""


class Brokers:
    """Brokers on one ZooKeeper, each in a process of its own, and their znodes.

    ``layout`` maps a broker's id to its kind, ``J`` or ``P``.
    """

    def __init__(
        self,
        home: Path,
        zookeeper: ZooKeeper,
        layout: Mapping[int, str],
        settings: Mapping[str, str],
        *,
        of_each: Callable[[int], Mapping[str, str]] = lambda _: {},
    ) -> None:
        """``of_each`` returns further settings of a broker by its id."""
        self.zookeeper = zookeeper
        chroot = f"/{unique('brokers')}"
        self.connect = zookeeper.connect + chroot
        """The ``zookeeper.connect`` of brokers and of Kafka's tools: HOST:PORT/PATH."""
        common = {**settings, "zookeeper.connect": self.connect}
        self.nodes: dict[int, Node] = {}
        for node_id, maker in layout.items():
            at, node_settings = home / str(node_id), {**common, **of_each(node_id)}
            self.nodes[node_id] = (
                Member(at, None, node_id=node_id, settings=node_settings)
                if maker == PYTHON
                else Kafka39(at, self.connect, node_id=node_id, settings=node_settings)
            )
        self.znodes = zookeeper.client()
        self.znodes.chroot = chroot

    def start(self) -> Brokers:
        """Start the first broker, which becomes the controller, and then the others at once."""
        first, *others = self.nodes.values()
        first.start()
        for other in others:
            other.launch()
        for other in others:
            other.wait_until_listening()
        return self

    def close(self) -> None:
        self.znodes.stop()
        self.znodes.close()
        for node in self.nodes.values():
            if node.child is not None:
                node.child.kill()

    # --- znodes ---

    def node(self, path: str) -> Any:
        """Return the parsed JSON of a znode, None if it does not exist."""
        try:
            data = self.znodes.get(path)[0]
        except NoNodeError:
            return None
        return json.loads(data) if data else {}

    def state(self, topic: str, index: int = 0) -> Any:
        return self.node(f"/brokers/topics/{topic}/partitions/{index}/state")

    def leaders(self, topic: str) -> list[int]:
        count = len(self.node(f"/brokers/topics/{topic}")["partitions"])
        return [self.state(topic, index)["leader"] for index in range(count)]

    def isrs(self, topic: str) -> list[set[int]]:
        count = len(self.node(f"/brokers/topics/{topic}")["partitions"])
        return [set(self.state(topic, index)["isr"]) for index in range(count)]

    @property
    def controller(self) -> int | None:
        node = self.node("/controller")
        return None if node is None else node["brokerid"]

    @property
    def controller_epoch(self) -> int:
        return int(self.znodes.get("/controller_epoch")[0])

    def describe(self) -> str:
        """Return the state of the cluster and the last output of each broker, for failed tests."""
        lines = []
        for node_id, node in self.nodes.items():
            child = node.child
            status = "is not started" if child is None else f"status {child.returncode}, said last:"
            lines += [f"broker {node_id} ({type(node).__name__}): {status}"]
            lines += [] if child is None else _cut(child.tail(SAID_LINES))
        if not self.znodes.connected:
            return "\n".join([*lines, "there is no session with ZooKeeper"])
        try:
            return "\n".join([*lines, *self._held()])
        except KazooException as error:
            return "\n".join([*lines, f"ZooKeeper cannot be read: {error!r}"])

    def _held(self) -> Iterator[str]:
        """Yield the controller, the broker epochs, and each partition that is not as preferred.

        As preferred, the first replica leads and all replicas are in sync.
        """
        yield f"controller {self.controller}, epoch {self.node('/controller_epoch')}"
        yield (
            "epochs of the brokers:"
            f" { {node_id: self.registered(node_id) for node_id in self.nodes} }"
        )
        for topic in sorted(self.znodes.get_children("/brokers/topics")):
            node = self.node(f"/brokers/topics/{topic}") or {"partitions": {}}
            for index, replicas in node["partitions"].items():
                state = self.state(topic, int(index))
                found = None if state is None else (state["leader"], {*state["isr"]})
                if found != (replicas[0], {*replicas}):
                    yield f"{topic}-{index} of {replicas}: {state}"

    # --- operations ---

    def elect(self, *candidates: int) -> None:
        """Delete the controller znode until one of these brokers is elected."""

        def is_elected() -> bool:
            controller = self.controller
            if controller is not None and controller not in candidates:
                with suppress(NoNodeError):
                    self.znodes.delete("/controller")
            return controller in candidates

        def has_taken_office() -> bool:
            if not is_elected() or (controller := self.controller) not in candidates:
                return False
            with self.client(controller) as client:
                return client.call("describe_cluster", 0)["controller_id"] == controller

        until(has_taken_office, f"one of {candidates} is the controller")

    def write(self, path: str, value: Any) -> None:
        """Create a znode with this JSON, as tools of older releases do."""
        self.znodes.create(path, json.dumps(value).encode())

    def client(self, node_id: int) -> Cluster:
        return Cluster(self.nodes[node_id].bootstrap)

    def create(self, *assignment: Sequence[int], via: int | None = None) -> str:
        """Create a topic, by default through the first broker; wait until all brokers know it."""
        name = unique("zk")
        with self.client(next(iter(self.nodes)) if via is None else via) as client:
            rows = [
                {"partition_index": index, "broker_ids": replicas}
                for index, replicas in enumerate(assignment)
            ]
            topic = {
                "name": name,
                "num_partitions": -1,
                "replication_factor": -1,
                "assignments": rows,
            }
            answer = client.call("create_topics", 7, timeout=30_000, topics=[topic])
            assert answer["topics"][0]["error_code"] == "none", answer
        for node_id, node in self.nodes.items():
            assert node.child is not None
            if node.child.returncode is None:
                until(
                    lambda node_id=node_id: self.leaders_and_epochs(node_id, name),  # type: ignore[misc]
                    f"broker {node_id} knows of {name}",
                )
        return name

    def leaders_and_epochs(self, node_id: int, topic: str) -> list[tuple[int, int]]:
        """Return leader and leader epoch of each partition without an error in the Metadata."""
        with self.client(node_id) as client:
            body = {"topics": [{"name": topic}], "allow_auto_topic_creation": False}
            answer = client.call("metadata", 9, **body)["topics"][0]
        return [
            (part["leader_id"], part["leader_epoch"])
            for part in sorted(
                answer["partitions"], key=lambda partition: partition["partition_index"]
            )
            if part["error_code"] == "none"
        ]

    def live_brokers(self, node_id: int) -> set[int]:
        """Return the live brokers in a broker's DescribeCluster."""
        with self.client(node_id) as client:
            rows = client.call("describe_cluster", 0)["brokers"]
        return {row["broker_id"] for row in rows}

    def stop(self, node_id: int) -> None:
        """Stop a broker with a controlled shutdown."""
        child = self.nodes[node_id].child
        assert child is not None
        assert child.terminate() in {0, SIGTERM_OF_JAVA}

    def all_in_sync(self, topic: str) -> None:
        replicas = self.node(f"/brokers/topics/{topic}")["partitions"]
        full = [set(replicas[str(index)]) for index in range(len(replicas))]
        until(lambda: self.isrs(topic) == full, f"every replica of {topic} is in sync")

    @contextmanager
    def frozen(self, node_id: int) -> Iterator[None]:
        """Suspend a broker by SIGSTOP within the block."""
        child = self.nodes[node_id].child
        assert child is not None
        os.kill(child.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(child.pid, signal.SIGCONT)

    def registered(self, node_id: int) -> int:
        """Return the broker epoch (the znode's czxid), -1 while the broker is not registered."""
        node = self.znodes.exists(f"/brokers/ids/{node_id}")
        return -1 if node is None else node.czxid

    def all_equal(self, topic: str) -> None:
        """Wait until all replicas are in sync, and their files have the same bytes."""
        self.all_in_sync(topic)
        replicas = self.node(f"/brokers/topics/{topic}")["partitions"]
        for index, brokers in replicas.items():
            folders = [self.nodes[broker].data_dir / f"{topic}-{index}" for broker in brokers]
            until(
                lambda folders=folders: len({*map(_bytes, folders)}) == 1,  # type: ignore[misc]
                f"replicas of {topic}-{index} are equal",
                poll_s=0.1,
            )


def _cut(text: str) -> list[str]:
    return [f"    {line[:SAID_CHARACTERS]}" for line in text.splitlines()]


def _bytes(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.log")))
