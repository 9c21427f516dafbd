"""Broker processes that are killed at chosen points, and checks of their state from outside."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from fencepost.logcore.batch import iter_headers
from fencepost.logcore.errors import CorruptRecordError
from fencepost.testing import Cluster as InProcess
from fencepost.tools.sweep.daemon import Daemon, preload
from tests.crash.stubborn_client import StubbornClient
from tests.support.cluster import Cluster
from tests.support.raw import Answer, ConnectionLostError
from tests.support.waits import until

D = TypeVar("D", bound=Daemon)


@functools.cache
def preload_brokers() -> None:
    """Import all modules that a broker needs for its first requests, before processes fork."""
    with InProcess(1) as cluster:
        cluster.topic("warm")
        client = StubbornClient(cluster.bootstrap, "warm", version=2)
        client.transaction("warm", "warm", 0, [b"warm"], offset=1, commit=True)
        client.close()
    ours = ("kio.schema.", "fencepost.", "tests.crash.")
    preload(sorted(name for name in sys.modules if name.startswith(ours)))


class Brokers(Generic[D]):
    """The brokers of one cluster by node id; the data directory of each is ``home``/id/data."""

    def __init__(self, home: Path, brokers: Mapping[int, D], *, patience_s: float) -> None:
        """``patience_s`` is the deadline for every awaited state."""
        self.home, self.brokers, self._patience_s = home, brokers, patience_s
        self._connections: dict[int, Cluster] = {}

    @property
    def bootstrap(self) -> str:
        return ",".join(broker.bootstrap for broker in self.brokers.values())

    def start(self) -> Self:
        """Start all brokers, create the topics, and wait until the cluster has settled."""
        preload_brokers()
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def _start(self) -> None:
        with ThreadPoolExecutor(len(self.brokers)) as threads:
            list(threads.map(Daemon.start, self.brokers.values()))
        self._create()
        self.settle()

    def _create(self) -> None:
        """Create the topics with their replica assignments."""
        raise NotImplementedError

    def settle(self) -> None:
        """Wait until the cluster has reached its expected state on every broker."""
        raise NotImplementedError

    def close(self) -> None:
        """Kill all running brokers."""
        self.hang_up()
        for broker in self.brokers.values():
            broker.close()

    def connection(self, node_id: int) -> Cluster:
        if node_id not in self._connections:
            self._connections[node_id] = Cluster(self.brokers[node_id].bootstrap, deadline_s=5)
        return self._connections[node_id]

    def hang_up(self) -> None:
        """Close all connections; each connection is opened again when it is next needed."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def call(self, api: str, version: int, **fields: Any) -> Answer:
        """Send a request to the first broker that responds; ConnectionLostError if none does."""
        for node_id in self.brokers:
            try:
                return self.connection(node_id).call(api, version, **fields)
            except (OSError, ConnectionLostError):
                dead = self._connections.pop(node_id, None)
                if dead is not None:
                    dead.close()
        raise ConnectionLostError

    def until(self, look: Callable[[], bool], what: str) -> None:
        """Wait until ``look`` is true, across lost connections. TimeoutError has the last error."""
        why = ""

        def looked() -> bool:
            nonlocal why
            try:
                return look()
            except (ConnectionLostError, OSError, AssertionError, CorruptRecordError) as error:
                why = f"{type(error).__name__}: {error}"
                self.hang_up()
                return False

        try:
            until(looked, what, deadline_s=self._patience_s)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; {why}") from None

    def log_end(self, node_id: int, partition: tuple[str, int]) -> int:
        """Return the log end offset of a replica from its files."""
        last = self._segments(node_id, partition)[-1:]
        headers = (header for path in last for _, header in iter_headers(path.read_bytes()))
        base = int(last[0].stem) if last else 0
        return max((header.next_offset for header in headers), default=base)

    def log(self, node_id: int, partition: tuple[str, int], since: int = 0) -> bytes:
        """Return the bytes of a replica's segments, from the segment with offset ``since`` on."""
        found = self._segments(node_id, partition)
        begin = max((at for at, path in enumerate(found) if int(path.stem) <= since), default=0)
        return b"".join(path.read_bytes() for path in found[begin:])

    def _segments(self, node_id: int, partition: tuple[str, int]) -> list[Path]:
        place = self.home / str(node_id) / "data" / "{}-{}".format(*partition)
        return sorted(place.glob("*.log"))
