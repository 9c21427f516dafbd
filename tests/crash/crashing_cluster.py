"""Three brokers and a controller as processes, one of which is killed at a named point.

Between two points the processes keep running; only a killed process is restarted. The transactional
id and the group id determine whether one broker has all roles, or different brokers have them: see
:class:`Layout`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from fencepost.coordinator.runtime.key_partition import java_string_hash
from fencepost.tools.sweep.daemon import Daemon, DaemonError, DaemonSettings
from fencepost.tools.sweep.points import CountedEvent, KillPoint
from tests.crash.brokers import Brokers
from tests.crash.named_points import Naming
from tests.support.cluster import READ_COMMITTED
from tests.support.raw import Answer

DATA, FORCED = ("out", 0), ("forced", 0)
"""Data partitions; the second one flushes each batch before it is acknowledged or confirmed."""

OFFSETS, TRANSACTIONS = "__consumer_offsets", "__transaction_state"

REPLICAS = {
    (TRANSACTIONS, 0): (1, 2, 3),
    DATA: (2, 3, 1),
    (OFFSETS, 0): (3, 1, 2),
    (TRANSACTIONS, 1): (1, 3, 2),
    FORCED: (1, 2, 3),
    (OFFSETS, 1): (1, 3, 2),
}
"""Partition → its replicas; the first one leads."""

BROKERS = 1, 2, 3
CONTROLLER = 100

COMMON = {
    "controller.listener.names": "CONTROLLER",
    "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
    "broker.heartbeat.interval.ms": "200",
    "broker.session.timeout.ms": "2000",
    "replica.lag.time.max.ms": "1000",
    "replica.fetch.backoff.ms": "50",
    "min.insync.replicas": "2",
    "group.initial.rebalance.delay.ms": "0",
    "log.retention.ms": "-1",
    "log.cleaner.enable": "false",  # replicas compact at different times
    "auto.leader.rebalance.enable": "false",
    "fencepost.history.enable": "false",
}


class Layout(NamedTuple):
    """A transaction's data partition, and its partition number in both internal topics."""

    data: tuple[str, int]
    index: int

    def named(self, stem: str) -> str:
        """Return a transactional id or a group id that hashes to this layout's partition."""
        names = (f"{stem}-{number}" for number in range(100))
        return next(name for name in names if java_string_hash(name) % 2 == self.index)

    @property
    def partitions(self) -> list[tuple[str, int]]:
        """The partitions that a transaction writes to."""
        return [(TRANSACTIONS, self.index), self.data, (OFFSETS, self.index)]


APART = Layout(DATA, 0)
"""Broker 1 is the transaction coordinator, 2 the leader of the data partition, and 3 the group
coordinator."""
TOGETHER = Layout(FORCED, 1)
"""Broker 1 has all three roles."""


class Seen:
    """The offsets up to which a partition has been checked."""

    def __init__(self) -> None:
        self.end = 0


class CrashingCluster(Brokers[Daemon]):
    """The processes, and checks of their state from outside."""

    def __init__(
        self,
        home: Path,
        settings: Mapping[str, str] | None = None,
        *,
        bug: str = "",
        patience_s: float = 60,
    ) -> None:
        """``patience_s`` is the deadline for every awaited state."""
        ports: dict[int, int] = {}
        common = {**COMMON, **(settings or {})}

        def node(node_id: int, own: Mapping[str, str]) -> Daemon:
            place = home / str(node_id)
            place.mkdir(parents=True)
            told = {**common, **own, "node.id": str(node_id)}
            log = place / "broker.log"
            return Daemon(DaemonSettings(place / "data", log, told, Naming(ports=ports, bug=bug)))

        listening = {"process.roles": "controller", "listeners": "CONTROLLER://127.0.0.1:0"}
        self.controller = node(CONTROLLER, listening)
        of_broker = {
            "process.roles": "broker",
            "controller.quorum.bootstrap.servers": self.controller.bootstrap,
        }
        brokers = {node_id: node(node_id, of_broker) for node_id in BROKERS}
        ports.update((port_of(broker), node_id) for node_id, broker in brokers.items())
        super().__init__(home, brokers, patience_s=patience_s)

    def _start(self) -> None:
        self.controller.start()
        super()._start()

    def close(self) -> None:
        super().close()
        self.controller.close()

    def _create(self) -> None:
        for topic in dict.fromkeys(name for name, _ in REPLICAS):
            self.until(lambda name=topic: self._is_created(name), f"{topic} is there")

    def _is_created(self, topic: str) -> bool:
        assignments = [
            {"partition_index": index, "broker_ids": list(replicas)}
            for (name, index), replicas in REPLICAS.items()
            if name == topic
        ]
        forced = [{"name": "flush.messages", "value": "1"}] if topic == FORCED[0] else []
        asked = {
            "name": topic,
            "num_partitions": -1,
            "replication_factor": -1,
            "assignments": assignments,
            "configs": forced,
        }
        answer = self.connection(1).call("create_topics", 5, timeout=10_000, topics=[asked])
        return answer["topics"][0]["error_code"] in {"none", "topic_already_exists"}

    # --- state ---

    def settle(self) -> None:
        """Wait until every broker sees all replicas in sync and the preferred leaders."""
        self.until(self._is_settled, "all in sync, leaders where they belong")

    def _is_settled(self) -> bool:
        parts = [self._by_name(self._metadata(node_id)) for node_id in BROKERS]
        sizes = [
            len(known.get(key, {}).get("isr_nodes", ())) for known in parts for key in REPLICAS
        ]
        if min(sizes) < len(BROKERS):
            return False
        wrong = [
            known[key]["leader_id"] != replicas[0]
            for known in parts
            for key, replicas in REPLICAS.items()
        ]
        if any(wrong):
            self.connection(1).call("elect_leaders", 2, election_type=0, timeout=5000)
            return False
        return all(
            self._ends(leader, topic, index)[0] == "none"
            for (topic, index), (leader, *_) in REPLICAS.items()
        )

    def _metadata(self, node_id: int | None = None) -> Answer:
        """Return the Metadata of a broker, by default of the first broker that responds."""
        topics = [{"name": name} for name in dict.fromkeys(topic for topic, _ in REPLICAS)]
        if node_id is None:
            return self.call("metadata", 8, topics=topics)
        return self.connection(node_id).call("metadata", 8, topics=topics)

    @staticmethod
    def _by_name(answer: Answer) -> dict[tuple[str, int], Answer]:
        return {
            (topic["name"], part["partition_index"]): part
            for topic in answer["topics"]
            for part in topic["partitions"]
        }

    def _ends(self, node_id: int, topic: str, index: int) -> tuple[str, int, int]:
        """Return the error, the high watermark and the last stable offset of a replica."""
        part = self.connection(node_id).fetch(
            topic, partition=index, offset=0, isolation=READ_COMMITTED, max_bytes=1
        )
        return part["error_code"], part["high_watermark"], part["last_stable_offset"]

    def check(self, layout: Layout, seen: Seen, values: list[bytes], offset: int) -> None:
        """Check that every replica has these new committed values, and all replicas are equal.

        No transaction may be open, and the group must be at ``offset``. Raise TimeoutError or
        AssertionError otherwise.
        """
        self.wait_for_end(layout)
        self.settle()
        topic, index = layout.data
        self.until(
            lambda: len({self._all_of(node_id, layout.data) for node_id in BROKERS}) == 1,
            "all replicas show all",
        )
        end = self.log_end(BROKERS[0], layout.data)
        for node_id in BROKERS:
            read = self.connection(node_id).read(
                topic, partition=index, isolation=READ_COMMITTED, begin=seen.end, end=end
            )
            found = [value for batch in read for value in batch.values]
            assert found == values, f"at broker {node_id}: {found}, not {values}"
        seen.end = end
        coordinator = self.connection(REPLICAS[OFFSETS, layout.index][0])
        committed = coordinator.committed(layout.named("group"), topic, stable=True)
        assert committed == offset, f"the group is at {committed}, not {offset}"
        for partition in layout.partitions:
            self.until(
                lambda partition=partition: self._are_equal(partition),
                f"equal replicas of {partition}",
            )

    def wait_for_end(self, layout: Layout) -> None:
        """Wait until no transaction is open; TimeoutError if one stays open."""
        self.until(lambda: self._is_ended(layout), "no transaction is open")

    def _is_ended(self, layout: Layout) -> bool:
        """Return whether the leaders have no open transaction and have appended all markers."""
        known = self._by_name(self._metadata())
        for partition in layout.partitions:
            self._all_of(known[partition]["leader_id"], partition)
        leader = known[layout.partitions[0]]["leader_id"]
        answer = self.connection(leader).call("list_transactions", 0)
        mine = layout.named("txn")
        states = {
            transaction["transaction_state"]
            for transaction in answer["transaction_states"]
            if transaction["transactional_id"] == mine
        }
        return answer["error_code"] == "none" and states in ({"CompleteCommit"}, {"CompleteAbort"})

    def _all_of(self, node_id: int, partition: tuple[str, int]) -> int:
        """Return a replica's log end; AssertionError if it is above high watermark or LSO."""
        error, high, stable = self._ends(node_id, *partition)
        end = self.log_end(node_id, partition)
        assert (error, high, stable) == ("none", end, end), (node_id, partition, high, stable, end)
        return end

    def _are_equal(self, partition: tuple[str, int]) -> bool:
        return len({self.log(node_id, partition) for node_id in BROKERS}) == 1

    # --- a point ---

    def counted(self, work: Callable[[], None]) -> dict[int, list[CountedEvent]]:
        """Return the events on each broker during ``work``."""
        for broker in self.brokers.values():
            broker.arm(None)
        work()
        return {node_id: broker.disarm()[1] for node_id, broker in self.brokers.items()}

    @contextlib.contextmanager
    def killed_at(
        self, node_id: int, point: KillPoint, killed: list[str], *, then: KillPoint | None = None
    ) -> Iterator[list[CountedEvent]]:
        """Within the block, kill the broker at ``point``, restart it, and kill it at ``then``.

        The event of each kill is added to ``killed``. Yield a list that is empty until the end of
        the block, when it gets the events of the last process.
        """
        broker = self.brokers[node_id]
        broker.arm(point)
        events: list[CountedEvent] = []
        problems: list[Exception] = []
        leave = threading.Event()

        def revive(what: str | None) -> None:
            while what is not None:
                killed.append(what)
                what = broker.start(then if len(killed) == 1 else None)

        def watch() -> None:
            try:
                while not leave.is_set():
                    revive(broker.killed_at(0.01))
            except DaemonError as error:
                problems.append(error)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield events
        finally:
            leave.set()
            watcher.join()
        if problems:
            raise problems[0]
        what, done = broker.disarm()
        events += done
        revive(what)


def port_of(daemon: Daemon) -> int:
    return int(daemon.bootstrap.rsplit(":", 1)[1])
