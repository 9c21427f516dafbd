"""A broker that a test may kill, of the kind that ``--target`` names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import pytest

from tests.support.daemon import Daemon
from tests.support.kafka import Kafka
from tests.support.proxy import LosingProxy
from tests.support.targets import SETTINGS


class OwnBroker(Protocol):
    """A broker that belongs to one test or module, which may kill it."""

    bootstrap: str

    def start(self) -> object: ...
    def kill(self) -> None: ...


@contextmanager
def own_broker(
    request: pytest.FixtureRequest, home: Path, settings: Mapping[str, str] | None = None
) -> Iterator[OwnBroker]:
    """Yield a broker of the kind that ``--target`` names, separate from the session's broker."""
    kind = request.config.getoption("--target")
    home.mkdir(parents=True, exist_ok=True)
    all_settings = {**SETTINGS, **(settings or {})}
    broker: OwnBroker
    if kind == "fencepost":
        broker = Daemon(home / "data", all_settings)
    elif kind == "kafka":
        broker = Kafka(home, all_settings)
    else:
        pytest.skip("a broker of the test's own is a process, not a container")
    broker.start()
    yield broker
    broker.kill()


@contextmanager
def behind_proxy(
    request: pytest.FixtureRequest, home: Path
) -> Iterator[tuple[OwnBroker, LosingProxy]]:
    """Yield a broker that advertises the address of a proxy, and the proxy."""
    proxy = LosingProxy()
    settings = {"advertised.listeners": f"PLAINTEXT://127.0.0.1:{proxy.port}"}
    with own_broker(request, home, settings) as started:
        host, port = started.bootstrap.split(":")
        proxy.target = host, int(port)
        yield started, proxy
        proxy.close()
