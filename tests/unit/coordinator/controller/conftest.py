"""Fixtures: a controller without partitions, and simulated brokers that only send requests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self, TypeVar

import pytest

from fencepost.coordinator.broker_services import Services
from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.daemon.in_thread import BrokerThread
from tests.support.controllers import Pretender

CONFIG = {
    "process.roles": "controller",
    "node.id": "3000",
    "controller.listener.names": "CONTROLLER",
    "listener.security.protocol.map": "CONTROLLER:PLAINTEXT",
    "metadata.max.idle.interval.ms": "0",
}
T = TypeVar("T")
_ids = itertools.count(101)

Enter = Callable[..., Pretender]


class Node:
    """A controller in a thread."""

    def __init__(self, directory: Path, **config: str) -> None:
        listeners = {"listeners": f"CONTROLLER://127.0.0.1:{config.pop('port', '0')}"}
        settings = {key.replace("_", "."): value for key, value in config.items()}
        self.broker = Broker(directory, config={**CONFIG, **listeners, **settings})
        self.thread = BrokerThread(lambda: self.broker)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.stop()

    @property
    def bootstrap(self) -> str:
        return self.thread.bootstrap

    def ask(self, question: Callable[[Services], T]) -> T:
        """Evaluate ``question`` on the broker's loop and return the result."""

        async def ask() -> T:
            return question(self.broker.services)

        return self.thread.call(ask)

    def pretender(self, broker_id: int, *, joins: bool = True) -> Pretender:
        """Return a simulated broker that knows the quorum's epoch, registered if ``joins``."""
        cluster_id = self.ask(lambda services: services.cluster_id)
        pretender = Pretender(self.bootstrap, broker_id, cluster_id)
        pretender.learn_epoch()
        if joins:
            pretender.join()
        return pretender


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with Node(tmp_path_factory.mktemp("controller")) as running:
        yield running


@pytest.fixture
def enter(node: Node) -> Iterator[Enter]:
    """Return a function that makes simulated brokers, registered unless ``joins`` is false."""
    made: list[Pretender] = []

    def enter(*, joins: bool = True, broker_id: int | None = None) -> Pretender:
        pretender = node.pretender(next(_ids) if broker_id is None else broker_id, joins=joins)
        made.append(pretender)
        return pretender

    yield enter
    for pretender in made:
        pretender.close()
