"""A broker on a file system that is slow, broken or full on demand, and its clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.daemon.in_thread import BrokerThread
from tests.support.cluster import Answer, Cluster
from tests.support.faults import FaultyDisk

SETTINGS = {
    "flush.messages": "1",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.num.partitions": "1",
    "group.initial.rebalance.delay.ms": "0",
}


class Running:
    """A broker on ``disk``, and its clients."""

    def __init__(self, broker: Broker, bootstrap: str, disk: FaultyDisk) -> None:
        self.broker = broker
        self.bootstrap = bootstrap
        self.disk = disk
        self._pool = ThreadPoolExecutor(32)
        self._clients: list[Cluster] = []
        self.client = self.connect()

    def connect(self) -> Cluster:
        client = Cluster(self.bootstrap)
        self._clients.append(client)
        return client

    def begin(self, call: Callable[[], Answer]) -> Future[Answer]:
        """Make a request in a new thread."""
        return self._pool.submit(call)

    def close(self) -> None:
        self.disk.gate.set()
        self._pool.shutdown()
        for client in self._clients:
            client.close()


@contextmanager
def running(directory: Path, disk: FaultyDisk | None = None, **settings: str) -> Iterator[Running]:
    disk = disk or FaultyDisk()
    config = {**SETTINGS, **{key.replace("_", "."): value for key, value in settings.items()}}
    made: list[Broker] = []

    def make() -> Broker:
        made.append(Broker(directory, config=config, fs=disk))
        return made[0]

    with BrokerThread(make) as thread:
        system = Running(made[0], thread.bootstrap, disk)
        try:
            yield system
        finally:
            system.close()
