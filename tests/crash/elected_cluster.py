"""Three brokers on a real ZooKeeper, whose controller is held at a chosen step.

A step is an operation on ZooKeeper or a request to a broker. A broker that reaches the chosen step
waits before the step, or after the response to the step. Meanwhile the test kills the broker,
suspends it or ends its session. Between two such points the processes keep running.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, wraps
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from confluent_kafka import Producer
from kazoo.exceptions import NoNodeError

from fencepost.coordinator.zookeeper.channels import _BrokerChannel
from fencepost.coordinator.zookeeper.session import Check, Write, ZkSession
from fencepost.logcore.batch import BatchHeader, decode_records, iter_headers
from fencepost.logcore.fs import OsFileSystem
from fencepost.protocol.api import ApiKey
from fencepost.tools.sweep.daemon import CountingWrappers, Daemon, DaemonError, DaemonSettings
from fencepost.tools.sweep.points import CountedEvent, EventCounter, KillMoment, KillPoint
from tests.crash.brokers import Brokers
from tests.crash.named_points import NamedCounter
from tests.support.cluster import unique
from tests.support.epochs import check_epochs, check_runs, runs_of
from tests.support.failover import PATIENCE
from tests.support.raw import Answer
from tests.support.waits import until
from tests.support.zookeeper import ZooKeeper

BROKERS = 1, 2, 3

DATA, MOVED = "data", "moved"
ASSIGNED = {DATA: [[1, 2, 3], [2, 3, 1], [3, 1, 2]], MOVED: [[1, 2]]}
"""Topic → initial replicas of its partitions; the replicas of MOVED are reassigned."""

PARTITIONS = [(topic, index) for topic, parts in ASSIGNED.items() for index in range(len(parts))]

SETTINGS = {
    # The test ends sessions itself; none may expire because the machine is slow.
    "zookeeper.session.timeout.ms": "30000",
    "replica.lag.time.max.ms": "2000",
    "replica.fetch.backoff.ms": "50",
    "min.insync.replicas": "2",
    "auto.leader.rebalance.enable": "false",
    "log.retention.ms": "-1",
    "log.segment.bytes": "1048576",
    "log.cleaner.enable": "false",
    "fencepost.history.enable": "false",
}


# --- inside a broker's process ---


_ANY = (
    (re.compile(r"/brokers/ids/\d+"), "/brokers/ids/*"),
    (re.compile(r"\bnew-\d+"), "new-*"),
    (re.compile(r"_\d{10}"), "_*"),
)
"""Patterns of values that differ between brokers or runs, with their replacements."""


def named(what: str) -> str:
    """Return the name of a step without values that differ between brokers or runs."""
    for pattern, name in _ANY:
        what = pattern.sub(name, what)
    return what


class HeldCounter(NamedCounter):
    """Numbers concurrent steps that have the same name, to match their beginnings and ends."""

    def __init__(self, point: KillPoint | None, die: Callable[[CountedEvent], None]) -> None:
        self._numbers: dict[int, int] = {}
        super().__init__(point, die)

    def reset(self, point: KillPoint | None) -> None:
        """See :class:`EventCounter`."""
        self._numbers.clear()
        super().reset(point)

    def before(self, event: CountedEvent) -> bool:
        """See :class:`EventCounter`."""
        if self._armed:
            self._numbers[id(event)] = self._named[event.what] + 1
        return super().before(event)

    def _comes(self, where: KillMoment, event: CountedEvent) -> bool:
        wanted = self._point
        return wanted is not None and (wanted.where, wanted.kind, wanted.number) == (
            where,
            event.what,
            self._numbers.get(id(event)),
        )


@dataclass(frozen=True)
class Held(CountingWrappers):
    """Counts steps of a controller; a broker waits at the chosen step until it is released."""

    def counter(self, point: KillPoint | None, die: Callable[[CountedEvent], None]) -> HeldCounter:
        """See ``CountingWrappers``; wraps the classes of sessions and channels of this process."""
        counter = HeldCounter(point, die)
        for method, title in ((ZkSession.get, "get"), (ZkSession.children, "list")):
            _count(counter, ZkSession, method, lambda path, title=title: f"{title} {path}")
        _count(counter, ZkSession, ZkSession.do, _writes)
        _count(counter, _BrokerChannel, _BrokerChannel._ask, _asks)
        return counter

    def die(self, pipe: Connection, event: CountedEvent) -> None:
        """See ``CountingWrappers``; waits until the test has injected its fault."""
        pipe.send(("reached", event.what))
        pipe.recv()

    def file_system(self, root: str, counter: EventCounter) -> OsFileSystem:
        """See :class:`CountingWrappers`."""
        return OsFileSystem()

    def loop(self, counter: EventCounter) -> asyncio.AbstractEventLoop:
        """See :class:`CountingWrappers`."""
        return asyncio.SelectorEventLoop()


def _count(
    counter: EventCounter, kind: type, method: Callable[..., Any], title: Callable[[Any], str]
) -> None:
    @wraps(method)
    async def step(self: Any, what: Any, *more: Any) -> Any:
        event = CountedEvent(named(title(what)))
        counter.before(event)
        found = await method(self, what, *more)
        counter.after(event)
        return found

    setattr(kind, method.__name__, step)


def _writes(writes: list[Write]) -> str:
    told = [
        f"{type(write).__name__} {write.path}" for write in writes if not isinstance(write, Check)
    ]
    return ", ".join(told).lower()


def _asks(request: Any) -> str:
    return f"ask {ApiKey(request.__api_key__).name}"


class HeldDaemon(Daemon):
    """A broker that may wait at a point."""

    @property
    def pid(self) -> int:
        if self._process is None or self._process.pid is None:
            raise DaemonError("the broker does not run")
        return self._process.pid

    def reached(self) -> str | None:
        """Return the step at which the broker waits, or None; DaemonError if it has died."""
        if self._pipe is None or not self._pipe.poll(0):
            return None
        said = self._receive(0)
        if said is None or said[0] != "reached":
            raise DaemonError(f"the broker died by itself{'' if said is None else f': {said[1]}'}")
        return str(said[1])

    def go_on(self) -> None:
        """Release the broker that waits at its point."""
        with suppress(OSError):
            if self._pipe is not None:
                self._pipe.send(("go on", None))

    def disarm(self) -> tuple[str | None, list[CountedEvent]]:
        """See :class:`Daemon`; releases a broker that has just reached its point."""
        while self.reached():
            self.go_on()
        return super().disarm()

    def _receive(self, timeout_s: float) -> tuple[str, object] | None:
        said = super()._receive(timeout_s)
        if said is not None and said[0] == "reached" and timeout_s:
            self.go_on()
            return self._receive(timeout_s)
        return said


# --- outside ---


class Seen:
    """Watches znodes: no epoch may decrease, and each leader epoch must have one leader."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._leaders: dict[tuple[str, int], int] = {}
        self._highest: dict[str, tuple[int, int]] = defaultdict(lambda: (-1, -1))

    def state(self, path: str, data: bytes | None, *_: object) -> None:
        """Check a new partition state."""
        if data is None:
            return
        now = json.loads(data)
        epochs = now["leader_epoch"], now["controller_epoch"]
        if any(epoch < before for epoch, before in zip(epochs, self._highest[path], strict=True)):
            self.problems.append(f"{path}: {self._highest[path]} before {epochs}")
        self._highest[path] = epochs
        leader = self._leaders.setdefault((path, epochs[0]), now["leader"])
        if leader != now["leader"]:
            self.problems.append(f"{path}: {leader} and {now['leader']} lead in {epochs[0]}")

    def epoch(self, data: bytes, *_: object) -> None:
        """Check a new controller epoch."""
        now = (int(data), 0)
        if now < self._highest["controller"]:
            self.problems.append(f"controller epoch {now} after {self._highest['controller']}")
        self._highest["controller"] = now


class Writer(threading.Thread):
    """Writes numbers to all partitions between :meth:`begin` and :meth:`end`."""

    def __init__(self, bootstrap: str) -> None:
        super().__init__(daemon=True)
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                # With more requests in flight, librdkafka itself would more often duplicate
                # unacknowledged batches (tests/support/epochs.py).
                "max.in.flight": 1,
                "linger.ms": 1,
                "retry.backoff.ms": 50,
                **PATIENCE,
            }
        )
        self._writes, self._leave = threading.Event(), threading.Event()
        self._idle = threading.Event()
        self.sent: dict[tuple[str, int], list[bytes]] = {partition: [] for partition in PARTITIONS}
        self.refused: list[str] = []
        self._number = 0

    def run(self) -> None:
        """See :class:`threading.Thread`."""
        while not self._leave.is_set():
            if not self._writes.wait(0.05):
                self._idle.set()
                continue
            self._idle.clear()
            for topic, index in PARTITIONS:
                value = b"%d" % self._number
                self._number += 1
                self.sent[topic, index].append(value)
                self._producer.produce(topic, value, partition=index, on_delivery=self._told)
            self._producer.poll(0.05)
        self._producer.purge()

    def _told(self, error: object, _message: object) -> None:
        if error is not None:
            self.refused.append(str(error))

    def begin(self) -> None:
        """Start writing."""
        self._writes.set()

    def end(self, patience_s: float) -> None:
        """Stop writing, and wait until all records are acknowledged; AssertionError otherwise."""
        self._writes.clear()
        self._idle.clear()
        assert self._idle.wait(patience_s)
        assert self._producer.flush(patience_s) == 0, "not acknowledged"
        assert not self.refused, self.refused

    def close(self) -> None:
        """End the thread."""
        self._leave.set()
        self.join(60)


class ElectedCluster(Brokers[HeldDaemon]):
    """The processes, and their state in ZooKeeper."""

    def __init__(self, home: Path, zookeeper: ZooKeeper, *, patience_s: float = 60) -> None:
        self._zookeeper = zookeeper
        chroot = f"/{unique('sweep')}"
        common = {**SETTINGS, "zookeeper.connect": zookeeper.connect + chroot}

        def node(node_id: int) -> HeldDaemon:
            place = home / str(node_id)
            place.mkdir(parents=True)
            told = {**common, "node.id": str(node_id)}
            return HeldDaemon(DaemonSettings(place / "data", place / "broker.log", told, Held()))

        super().__init__(
            home, {node_id: node(node_id) for node_id in BROKERS}, patience_s=patience_s
        )
        self.znodes = zookeeper.client()
        self.znodes.chroot = chroot
        self.writer = Writer(self.bootstrap)
        self.seen = Seen()
        self._checked = dict.fromkeys(PARTITIONS, 0)
        self._checks = 0
        self._epochs: set[tuple[int, int]] = set()
        """The producer ids and epochs of the writer."""

    def _start(self) -> None:
        super()._start()
        self._watch()
        self.writer.start()

    def _create(self) -> None:
        for topic, replicas in ASSIGNED.items():
            self.until(lambda topic=topic, parts=replicas: self.create(topic, parts), "created")

    def close(self) -> None:
        if self.writer.is_alive():
            self.writer.close()
        super().close()
        self.znodes.stop()
        self.znodes.close()

    # --- requests ---

    def create(self, topic: str, replicas: list[list[int]]) -> bool:
        """Request the creation of a topic; return whether it exists."""
        rows = [
            {"partition_index": at, "broker_ids": replica} for at, replica in enumerate(replicas)
        ]
        asked = {
            "name": topic,
            "num_partitions": -1,
            "replication_factor": -1,
            "assignments": rows,
        }
        answer = self.call("create_topics", 5, timeout=5_000, topics=[asked])
        return answer["topics"][0]["error_code"] in {"none", "topic_already_exists"}

    def delete(self, topic: str) -> bool:
        """Request the deletion of a topic; return whether it is gone."""
        answer = self.call("delete_topics", 5, topic_names=[topic], timeout=5_000)
        error = answer["responses"][0]["error_code"]
        return error == "unknown_topic_or_partition" or (
            error == "none" and self.node(f"/brokers/topics/{topic}") is None
        )

    def reassign(self, topic: str, replicas: list[int]) -> bool:
        """Request a reassignment of partition 0, if necessary; return whether it is complete."""
        node = self.node(f"/brokers/topics/{topic}")
        if node["partitions"]["0"] == replicas and not node["adding_replicas"]:
            return not node["removing_replicas"]
        if not node["adding_replicas"] and not node["removing_replicas"]:
            part = {"partition_index": 0, "replicas": replicas}
            topics = [{"name": topic, "partitions": [part]}]
            self.call("alter_partition_reassignments", 0, timeout=5_000, topics=topics)
        return False

    # --- znodes ---

    def node(self, path: str) -> Any:
        """Return the parsed JSON of a znode, None if it does not exist."""
        try:
            data = self.znodes.get(path)[0]
        except NoNodeError:
            return None
        return json.loads(data) if data else {}

    def names(self, path: str) -> list[str]:
        """Return the sorted names of a znode's children."""
        return sorted(self.znodes.get_children(path))

    @property
    def controller(self) -> int | None:
        node = self.node("/controller")
        return None if node is None else int(node["brokerid"])

    def end_session(self, node_id: int) -> None:
        """End the session of a broker, as ZooKeeper does after the session timeout."""
        stat = self.znodes.exists(f"/brokers/ids/{node_id}")
        if stat is not None:
            with suppress(OSError, struct.error):
                self._zookeeper.end(stat.ephemeralOwner)
            self.until(
                lambda: not self._is_owned(node_id, stat.ephemeralOwner), "the session has ended"
            )

    def _is_owned(self, node_id: int, session: int) -> bool:
        stat = self.znodes.exists(f"/brokers/ids/{node_id}")
        return stat is not None and stat.ephemeralOwner == session

    def _watch(self) -> None:
        for topic, index in PARTITIONS:
            path = f"/brokers/topics/{topic}/partitions/{index}/state"
            self.znodes.DataWatch(path, partial(self.seen.state, path))
        self.znodes.DataWatch("/controller_epoch", self.seen.epoch)

    # --- state ---

    def settle(self) -> None:
        """Wait until no change is pending, all replicas are in sync, and all brokers agree."""
        self.until(self._is_settled, "settled")

    def _is_settled(self) -> bool:
        controller = self.controller
        assert controller in BROKERS, "a controller"
        assert self.names("/brokers/ids") == [str(node_id) for node_id in BROKERS], "registered"
        for path in ("/admin/delete_topics", "/isr_change_notification"):
            assert self.names(path) == [], path
        assert self.names("/brokers/topics") == sorted(ASSIGNED), "topics"
        assert self.names("/config/topics") == sorted(ASSIGNED), "their settings"
        wanted = {}
        for topic in ASSIGNED:
            node = self.node(f"/brokers/topics/{topic}")
            assert (node["adding_replicas"], node["removing_replicas"]) == ({}, {}), node
            for index, replicas in node["partitions"].items():
                state = self.node(f"/brokers/topics/{topic}/partitions/{index}/state")
                assert set(state["isr"]) == set(replicas), (topic, index, state)
                wanted[topic, int(index)] = replicas, state
        for node_id in BROKERS:
            self._knows(node_id, controller, wanted)
            # A broker that lost a replica while it was down moves the log aside when it restarts.
            known = {
                path.name
                for path in (self.home / str(node_id) / "data").glob("*-*")
                if path.is_dir() and not path.name.endswith("-stray")
            }
            mine = {
                f"{topic}-{index}"
                for (topic, index), (replicas, _) in wanted.items()
                if node_id in replicas
            }
            assert known == mine, f"broker {node_id} has {known ^ mine}"
        return True

    def _knows(
        self, node_id: int, controller: int, wanted: Mapping[tuple[str, int], tuple[Any, Any]]
    ) -> None:
        """Raise AssertionError unless a broker's Metadata has ``controller`` and ``wanted``."""
        answer = self.connection(node_id).call("metadata", 9, topics=None)
        assert {broker["node_id"] for broker in answer["brokers"]} == set(BROKERS), node_id
        assert answer["controller_id"] == controller, (node_id, answer["controller_id"])
        told: dict[tuple[str, int], Answer] = {
            (topic["name"], part["partition_index"]): part
            for topic in answer["topics"]
            for part in topic["partitions"]
        }
        assert told.keys() == wanted.keys(), (node_id, told.keys() ^ wanted.keys())
        for key, (replicas, state) in wanted.items():
            part = told[key]
            assert part["error_code"] == "none", (node_id, key, part)
            assert part["leader_id"] == state["leader"], (node_id, key, part, state)
            assert part["leader_epoch"] == state["leader_epoch"], (node_id, key, part, state)
            assert part["replica_nodes"] == list(replicas), (node_id, key, part)
            assert set(part["isr_nodes"]) == set(state["isr"]), (node_id, key, part, state)
            if state["leader"] == node_id:
                end = self.log_end(node_id, key)
                fetched = self.connection(node_id).fetch(
                    key[0], partition=key[1], offset=end, max_bytes=1
                )
                assert fetched["error_code"] == "none", (node_id, key, fetched)
                assert fetched["high_watermark"] == end, (node_id, key, fetched, end)

    def rest(self) -> None:
        """Stop the writer, and wait until the cluster has settled."""
        self.writer.end(self._patience_s)
        self.settle()

    def check(self) -> None:
        """Check that every replica has every acknowledged record: AssertionError, TimeoutError.

        The log may have a record twice only if the writer resent it under another epoch.
        """
        self.rest()
        self._checks += 1
        for topic, index in PARTITIONS:
            node = self.node(f"/brokers/topics/{topic}")
            replicas = node["partitions"][str(index)]

            def equal(key: tuple[str, int] = (topic, index), on: list[int] = replicas) -> bool:
                return len({self.log(node_id, key) for node_id in on}) == 1

            self.until(equal, f"replicas of {topic}-{index} are equal")
            found = runs_of(self._new(replicas[0], (topic, index)))
            sent = self.writer.sent[topic, index]
            check_runs(f"{topic}-{index}", found.values(), sent)
            sent.clear()
            self._epochs |= found.keys()
        check_epochs("the writer", len(self._epochs), self._checks)
        assert not self.seen.problems, self.seen.problems

    def _new(
        self, node_id: int, partition: tuple[str, int]
    ) -> Iterator[tuple[BatchHeader, list[bytes]]]:
        """Yield the batches since the last check, with their values."""
        since = self._checked[partition]
        data = self.log(node_id, partition, since)
        self._checked[partition] = self.log_end(node_id, partition)
        for position, header in iter_headers(data):
            if header.base_offset >= since:
                yield (
                    header,
                    [record.value or b"" for record in decode_records(data, position, header)],
                )

    # --- a point ---

    def arm(self, brokers: list[int], point: KillPoint | None) -> None:
        """Start counting steps on these brokers, each of which waits when it reaches the point."""
        for node_id in brokers:
            self.brokers[node_id].arm(point)

    def fault(self, node_id: int, fault: str) -> None:
        """Inject a fault into a broker that waits at its point."""
        broker = self.brokers[node_id]
        if fault == "kill":
            os.kill(broker.pid, signal.SIGKILL)
            self.end_session(node_id)
            broker.kill()
            broker.start()
        elif fault == "sleep":
            os.kill(broker.pid, signal.SIGSTOP)
            try:
                self.end_session(node_id)
                until(lambda: self.controller not in {None, node_id}, "another is controller")
            finally:
                broker.go_on()
                os.kill(broker.pid, signal.SIGCONT)
        else:
            self.end_session(node_id)
            broker.go_on()
