"""A real broker in a cluster whose controller and other brokers are simulated by tests.

Broker 1 is real. :meth:`Led.image` supplies the controller's metadata, and :attr:`Led.changes`
keeps the ISR changes that the broker requests. Tests send the other brokers' fetches as requests.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.request import urlopen

from fencepost.cluster.image import (
    TOPIC_RESOURCE,
    BrokerRegistration,
    LocalChanges,
    LocalPartition,
    MetadataImage,
    PartitionRegistration,
    TopicImage,
    local_changes,
)
from fencepost.cluster.isr import AlteredPartition, IsrChange
from fencepost.cluster.leader import ReplicaState
from fencepost.cluster.records import BrokerEndpoint
from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.daemon.in_thread import BrokerThread
from fencepost.coordinator.metadata.names import HISTORY_TOPIC
from fencepost.coordinator.storage.replica_manager import ReplicaManager
from fencepost.logcore.fs import FileSystem
from fencepost.logcore.partition import Partition
from tests.support.batches import NOW_MS, batch
from tests.support.clock import ManualClock
from tests.support.cluster import Cluster, unique
from tests.support.metadata_changes import create_topic
from tests.support.raw import Answer

T = TypeVar("T")

ME = 1
EPOCHS = {1: 101, 2: 102, 3: 103}
"""Broker id → broker epoch."""
LAG_MS = 30_000
_MANAGER = "kafka_server_replicamanager_"


def registration(broker_id: int, **how: Any) -> BrokerRegistration:
    listener = how.pop("listener", "PLAINTEXT")
    defaults: dict[str, Any] = {
        "epoch": EPOCHS[broker_id],
        "incarnation_id": uuid.UUID(int=broker_id),
        "listeners": {listener: BrokerEndpoint(listener, f"b{broker_id}", 9000 + broker_id, 0)},
        "features": {},
        "rack": f"r{broker_id}",
        "fenced": False,
        "in_controlled_shutdown": False,
        "directories": (),
    }
    return BrokerRegistration(broker_id, **(defaults | how))


class Following:
    """Records the broker's calls to start and stop following partitions."""

    def __init__(self) -> None:
        self.log: list[tuple[str, Any]] = []
        self.max_lag = 0

    def follow(self, partitions: Any) -> None:
        self.log.append(
            (
                "follow",
                [(partition.topic, partition.registration.leader) for partition in partitions],
            )
        )

    def stop(self, partitions: Any) -> None:
        self.log.append(("stop", len(partitions)))


class Led:
    """Broker 1, a topic with one partition, and clients."""

    def __init__(self, broker: Broker, thread: BrokerThread, clock: ManualClock) -> None:
        self.broker, self.thread, self.clock = broker, thread, clock
        self.changes: list[IsrChange] = []
        self.following = Following()
        self.offline: list[LocalPartition] = []
        self._image = MetadataImage()
        self._clients: list[Cluster] = []
        self.client = self.connect()

        def plug() -> None:
            replicas = self.replicas
            replicas.alter_partition = self.changes.append
            replicas.fetchers = self.following
            replicas.on_placed = self._placed
            # Creating the topic later would publish an image without the tests' changes.
            self.broker.services.internal_topic(HISTORY_TOPIC)

        self.run(plug)
        self.topic = ""
        self.renew()

    def _placed(self, local: LocalPartition, *, is_offline: bool) -> None:
        if is_offline:
            self.offline.append(local)

    def renew(self) -> None:
        """Create a new topic, and drop the recorded calls and ISR changes."""
        self.topic = self.create(unique("t"))
        self.recreate()
        for kept in (self.changes, self.following.log, self.offline):
            kept.clear()
        replicas = self.replicas
        replicas.isr_expands = replicas.isr_shrinks = replicas.failed_isr_updates = 0

    def forget(self) -> None:
        """Remove the topic and close all clients except the first."""
        self.image(is_there=False)
        for client in self._clients[1:]:
            client.close()
        del self._clients[1:]

    def create(self, name: str) -> str:
        """Create a topic that is in no image yet, and return its name."""
        self.run(lambda: create_topic(self.broker.services.metadata, name, 1, {}))
        return name

    def recreate(self) -> None:
        """Look up the topic id after the topic was created or recreated."""
        metadata = self.broker.services.metadata

        def known() -> uuid.UUID:
            topic = metadata.topic(self.topic)
            assert topic is not None
            return topic.topic_id

        self.topic_id = self.run(known)

    def configure(self, name: str, value: str) -> None:
        """Set a setting of the topic in all later images."""
        key = TOPIC_RESOURCE, self.topic
        known = self._image.configs.get(key, {})
        self._image = replace(self._image, configs={key: {**known, name: value}})

    def reconfigure(self, name: str, value: str) -> None:
        """Apply an image with one changed setting of the topic."""
        self.configure(name, value)
        self.run(lambda: self.replicas.apply(LocalChanges(), self._image))

    @property
    def replicas(self) -> ReplicaManager:
        return self.broker.services.replicas

    @property
    def directory(self) -> Path:
        return Path(self.broker.services.log_dir)

    def scraped(self) -> dict[str, float]:
        """Return short name → value of the replica manager's and the topic's metrics."""
        host, port = self.broker.metrics_address or ("", 0)
        with urlopen(f"http://{host}:{port}/metrics") as page:
            lines = page.read().decode().splitlines()
        told = {}
        for line in lines:
            name, _, value = line.rpartition(" ")
            row = re.fullmatch(r'kafka_topic_partition_(\w+){topic="([^"]+)",partition="0"}', name)
            if name == 'kafka_server_replicafetchermanager_maxlag{clientId="Replica"}':
                told["maxlag"] = float(value)
            elif name.startswith(_MANAGER):
                told[name.removeprefix(_MANAGER)] = float(value)
            elif name.startswith("fencepost_partitions_"):
                told[name.removeprefix("fencepost_")] = float(value)
            elif row is not None and row[2] == self.topic:
                told[row[1]] = float(value)
        return told

    @property
    def waiting_fetches(self) -> int:
        return len(self.broker.services.fetches.delayed)

    def follower(self, broker_id: int) -> ReplicaState:
        """Return the leader's state of a follower."""
        machine = self.replicas.led(self.topic, 0)
        assert machine is not None
        return machine.replicas[broker_id]

    @property
    def partition(self) -> Partition:
        """Return the log, for use on the broker's loop."""
        return self.broker.services.logs.partition(self.topic, 0)

    def connect(self) -> Cluster:
        self._clients.append(Cluster(self.thread.bootstrap, deadline_s=20))
        return self._clients[-1]

    def run(self, work: Callable[[], T]) -> T:
        """Run a function on the broker's loop and return its result."""

        async def on_loop() -> T:
            return work()

        return self.thread.call(on_loop)

    def close(self) -> None:
        for client in self._clients:
            client.close()

    # --- the controller ---

    def image(self, **how: Any) -> None:
        """Apply an image with this state of the topic's partition."""
        self.run(lambda: self.apply(**how))

    def apply(
        self,
        *,
        leader: int = ME,
        leader_epoch: int = 0,
        partition_epoch: int = 0,
        replicas: tuple[int, ...] = (1, 2, 3),
        isr: tuple[int, ...] = (1, 2, 3),
        brokers: Mapping[int, BrokerRegistration] | None = None,
        is_there: bool = True,
        directories: tuple[uuid.UUID, ...] = (),
        alone: str | None = None,
    ) -> None:
        """Apply the image on the broker's loop; topic ``alone`` has one replica, on broker 1."""
        part = PartitionRegistration(
            replicas, isr, leader, leader_epoch, partition_epoch, directories
        )
        topics = [TopicImage(self.topic, self.topic_id, (part,))] if is_there else []
        if alone is not None:
            known = self.broker.services.metadata.topic(alone)
            assert known is not None
            part = PartitionRegistration((ME,), (ME,), ME, 0, 0)
            topics.append(TopicImage(alone, known.topic_id, (part,)))
        now = replace(
            self._image,
            offset=self._image.offset + 1,
            brokers={broker_id: registration(broker_id) for broker_id in EPOCHS}
            if brokers is None
            else brokers,
            topics={topic.name: topic for topic in topics},
            topics_by_id={topic.topic_id: topic for topic in topics},
        )
        changes = local_changes(self._image, now, ME)
        self._image = now
        self.replicas.apply(changes, now)

    def answer(self, answer: int | AlteredPartition | None = None) -> IsrChange:
        """Answer the oldest ISR change, by default with success, and return that change."""
        change = self.changes.pop(0)
        if answer is None:
            isr = tuple(member for member, _ in change.new_isr)
            answer = AlteredPartition(change.leader_epoch, change.partition_epoch + 1, isr)
        self.run(lambda: self.replicas.alter_partition_answered(change, answer))
        return change

    # --- other brokers and clients ---

    def fetch_request(self, replica: int, offset: int, **how: Any) -> dict[str, Any]:
        """Return the body of a Fetch (version 17) of another broker, or of a client (−1)."""
        asked = {
            "partition": 0,
            "fetch_offset": offset,
            "current_leader_epoch": how.pop("leader_epoch", -1),
            "last_fetched_epoch": how.pop("last_epoch", -1),
            "log_start_offset": how.pop("log_start", 0),
            "partition_max_bytes": 1 << 20,
        }
        epoch = how.pop("broker_epoch", EPOCHS.get(replica, -1))
        topic_id = how.pop("topic_id", self.topic_id)
        defaults: dict[str, Any] = {
            "replica_state": {"replica_id": replica, "replica_epoch": epoch},
            "max_wait": 0,
            "min_bytes": 1,
            "max_bytes": 1 << 20,
            "session_epoch": -1,
            "topics": [{"topic_id": topic_id, "partitions": [asked]}],
        }
        return defaults | how

    def fetch(self, replica: int, offset: int, **how: Any) -> Answer:
        """Fetch and return the partition's result."""
        client: Cluster = how.pop("client", self.client)
        answer = client.call("fetch", 17, **self.fetch_request(replica, offset, **how))
        assert answer["error_code"] == "none", answer
        part: Answer = answer["responses"][0]["partitions"][0]
        return part | {"node_endpoints": answer["node_endpoints"]}

    def read(self, offset: int, **how: Any) -> Answer:
        """Fetch as a client."""
        return self.fetch(-1, offset, **how)

    def begin_fetch(self, replica: int, offset: int, **how: Any) -> Cluster:
        """Send a fetch and return the client that will receive the response."""
        client = self.connect()
        client.send("fetch", 17, **self.fetch_request(replica, offset, **how))
        return client

    def append(self, *values: bytes) -> int:
        """Append with acks=1 and return the base offset."""
        answer = self.client.produce(self.topic, values or (b"v",), acks=1)
        assert answer["error_code"] == "none", answer
        return int(answer["base_offset"])

    def begin_produce(
        self, *values: bytes, timeout_ms: int = 20_000, data: bytes | None = None, **how: Any
    ) -> Cluster:
        """Send a batch with acks=all and return the client that will receive the response."""
        client = self.connect()
        client.send(
            "produce", 10, **self.produce_request(*values, data=data, timeout=timeout_ms, **how)
        )
        return client

    def produce_request(self, *values: bytes, data: bytes | None = None, **how: Any) -> Any:
        records = batch(values or (b"v",)) if data is None else data
        topics = [
            {"name": self.topic, "partition_data": [{"index": 0, "records": records}]},
        ]
        return {"acks": -1, "timeout": 20_000, "topic_data": topics} | how

    def list_offset(self, timestamp: int, *, replica: int = -1, version: int = 7) -> Answer:
        asked = {"partition_index": 0, "timestamp": timestamp, "current_leader_epoch": -1}
        answer = self.client.call(
            "list_offsets",
            version,
            replica_id=replica,
            topics=[{"name": self.topic, "partitions": [asked]}],
        )
        part: Answer = answer["topics"][0]["partitions"][0]
        return part

    @property
    def marks(self) -> tuple[int, int]:
        """Return the high watermark and the log end offset."""
        return self.run(lambda: (self.partition.high_watermark, self.partition.log_end_offset))


def part_of(answer: Answer) -> Answer:
    """Return the result of the only partition of a Produce response."""
    part: Answer = answer["responses"][0]["partition_responses"][0]
    return part | {"node_endpoints": answer.get("node_endpoints", [])}


@contextmanager
def cluster_of_one(
    directory: Path, config: Mapping[str, str] | None = None, fs: FileSystem | None = None
) -> Iterator[Led]:
    """Yield broker 1 of three brokers."""
    clock = ManualClock(NOW_MS)
    made: list[Broker] = []

    def make() -> Broker:
        settings = {"node.id": "1", "broker.rack": "r1", **(config or {})}
        made.append(Broker(directory, config=settings, clock=clock, fs=fs))
        return made[0]

    with BrokerThread(make) as thread:
        led = Led(made[0], thread, clock)
        try:
            yield led
        finally:
            led.close()
