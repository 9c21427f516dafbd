"""A mixed cluster for tests of replication: operations on its brokers, topics and files."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from fencepost.logcore.batch import BatchHeader, iter_headers
from fencepost.logcore.checkpoints import read_epochs
from fencepost.logcore.fs import OsFileSystem
from tests.support.batches import batch
from tests.support.cluster import Cluster
from tests.support.kafka import Kafka
from tests.support.mixed import MixedCluster
from tests.support.proxy import LosingProxy
from tests.support.raw import Answer
from tests.support.waits import until

TOPIC, BROKER = 2, 4
"""Resource types of settings."""

DEADLINE_S = 120.0
LAG_MS, SESSION_MS = 2_000, 6_000
SETTINGS = {
    "auto.create.topics.enable": "false",
    "auto.leader.rebalance.enable": "false",
    "broker.heartbeat.interval.ms": "500",
    "broker.session.timeout.ms": str(SESSION_MS),
    "group.initial.rebalance.delay.ms": "0",
    "log.cleaner.backoff.ms": "200",
    "log.retention.ms": "-1",
    "offsets.topic.num.partitions": "1",
    "replica.fetch.backoff.ms": "200",
    "replica.lag.time.max.ms": str(LAG_MS),
    "replica.selector.class": "org.apache.kafka.common.replica.RackAwareReplicaSelector",
    "transaction.state.log.num.partitions": "1",
}
"""Settings of all nodes, with which lagging or dead replicas are detected within seconds."""


@dataclass(frozen=True)
class State:
    """The state of a partition in a broker's metadata."""

    leader: int
    epoch: int
    isr: frozenset[int]
    replicas: tuple[int, ...]


class ReplicaCluster(MixedCluster):
    """A cluster under Apache Kafka's controller, which brokers may reach through a proxy."""

    def __init__(
        self,
        directory: Path,
        layout: str,
        settings: Mapping[str, str] | None = None,
        *,
        is_proxied: bool = False,
    ) -> None:
        self.proxy = LosingProxy() if is_proxied else None
        self.ids = frozenset(range(1, len(layout) + 1))
        """The node ids of the brokers."""
        super().__init__(directory, layout, {**SETTINGS, **(settings or {})})

    def _controllers_of_kafka(self, count: int) -> list[Kafka]:
        (made,) = super()._controllers_of_kafka(count)
        if self.proxy is not None:
            host, port = made.controller.split(":")
            self.proxy.target = host, int(port)
            self._addresses = [f"127.0.0.1:{self.proxy.port}"]
            self._voters = {"controller.quorum.voters": f"{made.node_id}@{self.quorum}"}
            made.add_settings(
                {**self._voters, "advertised.listeners": f"CONTROLLER://{self.quorum}"}
            )
        return [made]

    @property
    def quorum(self) -> str:
        """HOST:PORT at which brokers reach the controller."""
        return self._addresses[0]

    # --- processes ---

    def __enter__(self) -> Self:
        """Start all nodes, and wait until every broker knows every other."""
        try:
            self.start()
            self._await_all()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, node_id: int) -> None:
        self.node(node_id).start()

    def _await_all(self) -> None:
        for node_id in self.running:
            until(partial(self._knows_all, node_id), f"{node_id} knows all", deadline_s=DEADLINE_S)

    def _knows_all(self, witness: int) -> bool:
        return self.brokers(witness) == set(self.running)

    def start_all(self, *node_ids: int) -> None:
        """Start these brokers, and wait until all running brokers know each other."""
        with ThreadPoolExecutor(len(node_ids)) as threads:
            list(threads.map(self._start, node_ids))
        self._await_all()

    def stop_all(self, *node_ids: int) -> None:
        """Shut these brokers down in turn: each moves its leadership and flushes its logs."""
        for node_id in node_ids:
            child = self.node(node_id).child
            assert child is not None
            child.terminate(deadline_s=DEADLINE_S)

    def kill(self, node_id: int) -> None:
        """Kill a broker by SIGKILL."""
        self.node(node_id).kill()

    @contextmanager
    def frozen(self, node_id: int) -> Iterator[None]:
        """Suspend a broker by SIGSTOP within the block."""
        child = self.node(node_id).child
        assert child is not None
        os.kill(child.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(child.pid, signal.SIGCONT)

    def close(self) -> None:
        """Kill all running nodes."""
        self.stop()
        if self.proxy is not None:
            self.proxy.close()

    @property
    def running(self) -> list[int]:
        """The brokers whose processes run."""
        children = [(node.node_id, node.child) for node in self.nodes]
        return [number for number, child in children if child and child.returncode is None]

    def client(self, node_id: int) -> Cluster:
        """Return a new connection to a broker, which the caller closes."""
        return Cluster(self.node(node_id).bootstrap, deadline_s=DEADLINE_S)

    # --- topics ---

    def create(self, name: str, *assignment: Sequence[int], **configs: str) -> uuid.UUID:
        """Create a topic with these replicas, and wait until its leaders serve."""
        with self.client(self.running[0]) as client:
            answer = client.call(
                "create_topics",
                7,
                timeout=30_000,
                topics=[
                    {
                        "name": name,
                        "num_partitions": -1,
                        "replication_factor": -1,
                        "assignments": [
                            {"partition_index": index, "broker_ids": list(ids)}
                            for index, ids in enumerate(assignment)
                        ],
                        "configs": [
                            {"name": key.replace("_", "."), "value": value}
                            for key, value in configs.items()
                        ],
                    }
                ],
            )
        assert answer["topics"][0]["error_code"] == "none", answer
        for index, ids in enumerate(assignment):
            # A simulated replica does not lead or join the ISR by itself, so do not wait for it.
            real = frozenset(ids) & self.ids
            if len(real) == len(ids):
                self.settled(name, index, leader=ids[0], isr=set(ids))
            elif ids[0] in real:
                leader = ids[0]
                until(
                    lambda i=index, leader=leader: self.list_offsets_error(leader, name, i) is None,
                    f"{name} is led",
                )
        return uuid.UUID(answer["topics"][0]["topic_id"])

    def state(self, name: str, index: int = 0, *, witness: int | None = None) -> State | None:
        """Return the partition's state in the Metadata of ``witness``, None if it is missing."""
        with self.client(self.running[0] if witness is None else witness) as client:
            (topic,) = client.call("metadata", 12, topics=[{"name": name}])["topics"]
        for part in topic["partitions"]:
            if part["partition_index"] == index:
                isr, replicas = frozenset(part["isr_nodes"]), tuple(part["replica_nodes"])
                return State(part["leader_id"], part["leader_epoch"], isr, replicas)
        return None

    def settled(
        self,
        name: str,
        index: int = 0,
        *,
        leader: int | None = None,
        isr: set[int] | None = None,
        replicas: Sequence[int] | None = None,
        is_readable: bool = True,
    ) -> State:
        """Wait until all running brokers see this state of a partition, and its leader serves.

        With ``is_readable`` the leader must also know the high watermark.
        """
        fine = {None} if is_readable else {None, "offset_not_available"}

        def probe() -> State | None:
            states = {self.state(name, index, witness=node_id) for node_id in self.running}
            state = states.pop()
            if states or state is None:
                return None
            wrong = (
                (leader is not None and state.leader != leader)
                or (isr is not None and state.isr != isr)
                or (replicas is not None and state.replicas != tuple(replicas))
            )
            is_led = (
                state.leader not in self.ids
                or self.list_offsets_error(state.leader, name, index) in fine
            )
            if wrong or not is_led:
                return None
            return state

        what = f"{name}-{index}: leader {leader}, ISR {isr}, replicas {replicas}"
        try:
            return until(probe, what, deadline_s=DEADLINE_S, poll_s=0.1)
        except TimeoutError as error:
            state = {node_id: self.state(name, index, witness=node_id) for node_id in self.running}
            raise TimeoutError(f"{error}; {state}") from None

    def list_offsets_error(self, leader: int, name: str, index: int = 0) -> str | None:
        """Return the error of ListOffsets on a broker, None if it succeeds."""
        with self.client(leader) as client:
            return list_offset(client, name, index).get("error")

    def reassign(self, name: str, replicas: Sequence[int] | None, index: int = 0) -> None:
        """Reassign a partition, or cancel its reassignment with None."""
        wanted = None if replicas is None else list(replicas)
        parts = [{"partition_index": index, "replicas": wanted}]
        topics = [{"name": name, "partitions": parts}]
        with self.client(self.running[0]) as client:
            answer = client.call("alter_partition_reassignments", 0, timeout=30_000, topics=topics)
        assert answer["responses"][0]["partitions"][0]["error_code"] == "none", answer

    def prefer(self, name: str, index: int = 0, *, is_unclean: bool = False) -> None:
        """Elect the preferred leader, or with ``is_unclean`` any live replica."""
        chosen = [{"topic": name, "partitions": [index]}]
        with self.client(self.running[0]) as client:
            answer = client.call(
                "elect_leaders",
                2,
                election_type=int(is_unclean),
                timeout=30_000,
                topic_partitions=chosen,
            )
        assert answer["error_code"] == "none", answer

    def configure(self, kind: int, name: str, **values: str | None) -> None:
        """Change settings of a topic (2), or of a broker (4) by a request to it; None deletes."""
        configs = [
            {
                "name": key.replace("_", "."),
                "config_operation": 1 if value is None else 0,
                "value": value,
            }
            for key, value in values.items()
        ]
        resource = {"resource_type": kind, "resource_name": name, "configs": configs}
        with self.client(int(name) if kind == BROKER else self.running[0]) as client:
            answer = client.call("incremental_alter_configs", 1, resources=[resource])
        assert answer["responses"][0]["error_code"] == "none", answer

    def delete(self, name: str) -> None:
        """Delete a topic."""
        with self.client(self.running[0]) as client:
            answer = client.call("delete_topics", 5, topic_names=[name], timeout=30_000)
        assert answer["responses"][0]["error_code"] == "none", answer

    def write(
        self,
        node_id: int,
        name: str,
        *values: bytes,
        index: int = 0,
        acks: int = -1,
        timeout_ms: int = 60_000,
    ) -> Answer:
        """Produce one batch to a broker; return the partition's response."""
        with self.client(node_id) as client:
            return write(client, name, *values, index=index, acks=acks, timeout_ms=timeout_ms)

    def brokers(self, witness: int) -> set[int]:
        """Return the unfenced brokers in the Metadata of ``witness``."""
        with self.client(witness) as client:
            return {
                broker["node_id"] for broker in client.call("metadata", 12, topics=[])["brokers"]
            }

    # --- files ---

    def directory(self, node_id: int, name: str, index: int = 0) -> Path:
        """Return the directory of a broker's replica."""
        return self.node(node_id).data_dir / f"{name}-{index}"

    def batches(self, node_id: int, name: str, index: int = 0) -> list[tuple[BatchHeader, bytes]]:
        """Return all batches of a replica's files, oldest first."""
        return batches_in(self.directory(node_id, name, index))


def list_offset(client: Cluster, name: str, index: int = 0, at: int = -1) -> dict[str, Any]:
    """Send ListOffsets for one partition; return its ``offset``, or its ``error``."""
    entry = {"partition_index": index, "timestamp": at, "current_leader_epoch": -1}
    topics = [{"name": name, "partitions": [entry]}]
    answer = client.call("list_offsets", 5, replica_id=-1, topics=topics)
    part = answer["topics"][0]["partitions"][0]
    error = part["error_code"]
    return {"offset": part["offset"]} if error == "none" else {"error": error}


def begin_write(
    client: Cluster, name: str, *values: bytes, index: int = 0, acks: int = -1, timeout_ms: int
) -> None:
    """Send one batch without receiving the response."""
    parts = [{"index": index, "records": batch(values)}]
    topics = [{"name": name, "partition_data": parts}]
    client.send("produce", 9, acks=acks, timeout=timeout_ms, topic_data=topics)


def written(client: Cluster) -> Answer:
    """Return the response to :func:`begin_write`."""
    part: Answer = client.receive()["responses"][0]["partition_responses"][0]
    return part


def write(
    client: Cluster,
    name: str,
    *values: bytes,
    index: int = 0,
    acks: int = -1,
    timeout_ms: int = 60_000,
) -> Answer:
    """Send one batch and return the response."""
    begin_write(client, name, *values, index=index, acks=acks, timeout_ms=timeout_ms)
    return written(client)


def batches_in(directory: Path) -> list[tuple[BatchHeader, bytes]]:
    """Return all batches of a directory's segments, oldest first."""
    decoded = []
    for file in sorted(directory.glob("*.log")):
        data = file.read_bytes()
        decoded += [
            (header, data[position : position + header.size])
            for position, header in iter_headers(memoryview(data))
        ]
    return decoded


def cut_log(directory: Path, offset: int) -> None:
    """Truncate a log at ``offset``, as a power loss may, and remove its index files."""
    file = max(directory.glob("*.log"))
    data = file.read_bytes()
    at = next(p for p, header in iter_headers(memoryview(data)) if header.base_offset >= offset)
    os.truncate(file, at)
    for suffix in ("*.index", "*.timeindex", "*.snapshot"):
        for path in directory.glob(suffix):
            path.unlink()


def epochs_in(directory: Path, end: int) -> list[tuple[int, int]]:
    """Return (leader epoch, start offset) of the epochs that start below ``end``."""
    found = read_epochs(OsFileSystem(), str(directory)) or []
    return [(epoch, start) for epoch, start in found if start < end]


def write_high_watermark(data_dir: Path, name: str, offset: int, index: int = 0) -> None:
    """Write another high watermark to the checkpoint of a stopped broker."""
    file = data_dir / "replication-offset-checkpoint"
    lines = file.read_text().splitlines()
    prefix = f"{name} {index} "
    assert any(line.startswith(prefix) for line in lines), file.read_text()
    changed = [f"{prefix}{offset}" if line.startswith(prefix) else line for line in lines]
    file.write_text("".join(f"{line}\n" for line in changed))
