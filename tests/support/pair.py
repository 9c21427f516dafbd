"""A broker of Apache Kafka and one of Fencepost, between which coordinators move."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fencepost.tools.ports import hold_port
from tests.support.cluster import TRANSACTION, Cluster
from tests.support.kafka import Kafka
from tests.support.member import Member
from tests.support.mixed import JAVA, PYTHON, MixedCluster, Node
from tests.support.raw import Answer, ConnectionLostError
from tests.support.waits import until

KAFKAS, OURS = 1, 2
"""The node ids of the two brokers."""

BOTH: Final = (KAFKAS, OURS)
GROUPS, TRANSACTIONS = "__consumer_offsets", "__transaction_state"
SETTINGS: Final = {
    "broker.heartbeat.interval.ms": "500",
    "broker.session.timeout.ms": "6000",
    "auto.leader.rebalance.enable": "false",
    "auto.create.topics.enable": "false",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.num.partitions": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "200",
    "offsets.retention.check.interval.ms": "500",
    "group.initial.rebalance.delay.ms": "500",
    "group.consumer.heartbeat.interval.ms": "500",
    "group.consumer.min.heartbeat.interval.ms": "500",
    "group.consumer.assignment.interval.ms": "0",
    "log.retention.ms": "-1",
    "log.cleaner.enable": "false",
}
"""Settings of all nodes: short waits, and one partition for each kind of coordinator."""


class Pair(MixedCluster):
    """Both brokers, on different racks, and a controller of either kind in a process of its own.

    Both brokers have replicas of the internal topics' partitions. With ``has_logins`` they have a
    further listener CLIENTS with SASL_PLAINTEXT.
    """

    def __init__(
        self,
        directory: Path,
        settings: Mapping[str, str] | None = None,
        *,
        controllers: str = JAVA,
        has_logins: bool = False,
    ) -> None:
        self._clients: dict[int, Cluster] = {}
        self._has_logins = has_logins
        self.logins: dict[int, str] = {}
        """Broker → address of its listener CLIENTS."""
        all_settings = {**SETTINGS, **(settings or {})}
        super().__init__(directory, JAVA + PYTHON, all_settings, controllers=controllers)

    def _broker(self, node_id: int, letter: str) -> Node:
        made = super()._broker(node_id, letter)
        if not self._has_logins:
            return made
        held = [hold_port(), hold_port()]
        for port in held:
            weakref.finalize(self, port.close)
        plain, clients = (f"127.0.0.1:{port.getsockname()[1]}" for port in held)
        self.logins[node_id] = clients
        if isinstance(made, Kafka):
            plain = f"127.0.0.1:{made._ports[0]}"
        listeners = {
            "listeners": f"PLAINTEXT://{plain},CLIENTS://{clients}",
            "advertised.listeners": f"PLAINTEXT://{plain},CLIENTS://{clients}",
            "listener.security.protocol.map": (
                "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,CLIENTS:SASL_PLAINTEXT"
            ),
        }
        if isinstance(made, Kafka):
            made.add_settings(listeners)
            return made
        settings = {"broker.rack": f"rack-{node_id}", **self._common, **listeners}
        return Member(self._room(node_id), self.quorum, node_id=node_id, settings=settings)

    def start(self) -> Pair:
        """Start all nodes, and create the coordinators' topics."""
        super().start()
        until(lambda: self.brokers() == dict.fromkeys(BOTH, False), "both are unfenced")
        for topic in (GROUPS, TRANSACTIONS):
            self.create(topic, [BOTH])
        return self

    # --- requests ---

    @property
    def quorum(self) -> str:
        """HOST:PORT of the controller."""
        return self._addresses[0]

    def connection(self, node_id: int) -> Cluster:
        """Return the connection to a broker, a new one if the last one was lost."""
        client = self._clients.get(node_id)
        if client is None:
            client = self._clients[node_id] = Cluster(self.node(node_id).bootstrap)
        return client

    def call(self, node_id: int, api: str, version: int, **body: Any) -> Answer:
        """Send a request to a broker; if the connection is lost, reconnect and send it again."""
        for attempt in range(2):
            try:
                return self.connection(node_id).call(api, version, **body)
            except (ConnectionLostError, OSError):
                self._clients.pop(node_id).close()
                if attempt:
                    raise
        raise AssertionError("not reached")

    @property
    def running(self) -> tuple[int, ...]:
        """The brokers whose processes run."""
        children = {node_id: self.node(node_id).child for node_id in BOTH}
        return tuple(
            node_id for node_id, child in children.items() if child and child.returncode is None
        )

    def brokers(self) -> dict[int, bool]:
        """Return for each registered broker whether it is fenced, by DescribeCluster."""
        answer = self.call(self.running[0], "describe_cluster", 2, include_fenced_brokers=True)
        return {broker["broker_id"]: broker["is_fenced"] for broker in answer["brokers"]}

    def partition(self, topic: str, index: int = 0, *, witness: int) -> Answer:
        """Return a partition from a broker's Metadata."""
        answer = self.call(witness, "metadata", 9, topics=[{"name": topic}])
        part: Answer = next(
            partition
            for partition in answer["topics"][0]["partitions"]
            if partition["partition_index"] == index
        )
        return part

    def leader(self, topic: str, index: int = 0) -> int:
        """Return the leader of a partition from the Metadata of the first running broker."""
        return int(self.partition(topic, index, witness=self.running[0])["leader_id"])

    def create(
        self, name: str, assignment: list[tuple[int, ...]], configs: Mapping[str, str] | None = None
    ) -> str:
        """Create a topic, and wait until both brokers know its leaders."""
        topic = {
            "name": name,
            "num_partitions": -1,
            "replication_factor": -1,
            "assignments": [
                {"partition_index": index, "broker_ids": ids}
                for index, ids in enumerate(assignment)
            ],
            "configs": [{"name": key, "value": value} for key, value in (configs or {}).items()],
        }
        answer = self.call(KAFKAS, "create_topics", 5, timeout=10_000, topics=[topic])
        assert answer["topics"][0]["error_code"] == "none", answer
        for index, replicas in enumerate(assignment):
            self.wait_for_leader(name, replicas[0], index)
        return name

    # --- moving ---

    def wait_for_leader(self, topic: str, node_id: int, index: int = 0) -> None:
        """Wait until all running brokers see this leader with all replicas in sync.

        Metadata names a leader shortly before the leader serves requests, so this method also sends
        ListOffsets to the leader.
        """

        def is_led() -> bool:
            for witness in self.running:
                answer = self.call(witness, "metadata", 9, topics=[{"name": topic}])
                parts = {
                    partition["partition_index"]: partition
                    for partition in answer["topics"][0]["partitions"]
                }
                part = parts.get(index)
                if part is None or part["leader_id"] != node_id:
                    return False
                if not set(part["isr_nodes"]) >= set(part["replica_nodes"]) & set(self.running):
                    return False
            entry = {"partition_index": index, "timestamp": -1, "current_leader_epoch": -1}
            answer = self.call(
                node_id,
                "list_offsets",
                5,
                replica_id=-1,
                topics=[{"name": topic, "partitions": [entry]}],
            )
            return bool(answer["topics"][0]["partitions"][0]["error_code"] == "none")

        until(is_led, f"{node_id} leads {topic}-{index}", poll_s=0.05)

    def reassign(self, topic: str, replicas: tuple[int, ...], index: int = 0) -> None:
        """Request a reassignment, without waiting for it to complete."""
        part = {"partition_index": index, "replicas": replicas}
        answer = self.call(
            self.running[0],
            "alter_partition_reassignments",
            0,
            timeout=10_000,
            topics=[{"name": topic, "partitions": [part]}],
        )
        assert answer["responses"][0]["partitions"][0]["error_code"] == "none", answer

    def elect(self, topic: str, node_id: int, index: int = 0) -> None:
        """Make a broker the preferred leader of a partition, and elect it."""
        other = BOTH[node_id == KAFKAS]
        self.reassign(topic, (node_id, other), index)

        def is_first() -> bool:
            nodes = self.partition(topic, index, witness=node_id)["replica_nodes"]
            return bool(nodes == [node_id, other])

        until(is_first, f"{node_id} is preferred for {topic}-{index}", poll_s=0.05)

        def is_elected() -> bool:
            answer = self.call(
                node_id,
                "elect_leaders",
                2,
                election_type=0,
                topic_partitions=[{"topic": topic, "partitions": [index]}],
                timeout=10_000,
            )
            part = answer["replica_election_results"][0]["partition_result"][0]
            return part["error_code"] in {"none", "election_not_needed"}

        until(is_elected, f"{node_id} is elected for {topic}-{index}", poll_s=0.1)
        self.wait_for_leader(topic, node_id, index)

    def move_away(self, topic: str, node_id: int) -> None:
        """Move a partition to this broker alone, and then back to both."""
        self.reassign(topic, (node_id,))
        until(
            lambda: self.partition(topic, witness=node_id)["replica_nodes"] == [node_id],
            f"{topic} is on {node_id} alone",
            poll_s=0.05,
        )
        self.wait_for_leader(topic, node_id)
        self.reassign(topic, (node_id, BOTH[node_id == KAFKAS]))
        until(
            lambda: len(self.partition(topic, witness=node_id)["isr_nodes"]) == len(BOTH),
            f"{topic} is on both again",
            poll_s=0.05,
        )
        self.wait_for_leader(topic, node_id)

    def stop_broker(self, node_id: int, how: str) -> None:
        """Stop (SIGTERM, with a controlled shutdown) or kill a broker; then the other one leads."""
        child = self.node(node_id).child
        assert child is not None
        child.kill() if how == "kill" else child.terminate()
        other = BOTH[node_id == KAFKAS]
        for topic in (GROUPS, TRANSACTIONS):
            self.wait_for_leader(topic, other)

    def restart_broker(self, node_id: int) -> None:
        """Restart a broker, and wait until its replicas are in sync."""
        self.node(node_id).start()
        other = BOTH[node_id == KAFKAS]

        def is_in_sync() -> bool:
            return all(
                len(self.partition(topic, witness=other)["isr_nodes"]) == len(BOTH)
                for topic in (GROUPS, TRANSACTIONS)
            )

        until(is_in_sync, f"{node_id} is in sync", poll_s=0.1)
        for topic in (GROUPS, TRANSACTIONS):
            self.wait_for_leader(topic, other)

    def serves(self, node_id: int, kind: int, key: str) -> None:
        """Wait until both brokers name this coordinator of ``key``, and it serves requests."""

        def is_coordinator() -> bool:
            for witness in self.running:
                coordinator = self.call(witness, "find_coordinator", 2, key=key, key_type=kind)
                if coordinator["error_code"] != "none" or coordinator["node_id"] != node_id:
                    return False
            if kind == TRANSACTION:
                answer = self.call(node_id, "list_transactions", 0)
            else:
                answer = self.call(node_id, "offset_fetch", 5, group_id=key, topics=[])
            return bool(answer["error_code"] == "none")

        until(is_coordinator, f"{node_id} coordinates {key}", poll_s=0.05)
