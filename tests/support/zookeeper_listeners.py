"""Brokers on one ZooKeeper with listeners besides PLAINTEXT, whose ports are chosen in advance."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fencepost.tools.ports import hold_port
from tests.support.zookeeper import ZooKeeper
from tests.support.zookeeper_brokers import Brokers


class ListeningBrokers(Brokers):
    """Brokers that also listen on each of ``names``; tests use their PLAINTEXT listeners."""

    def __init__(
        self,
        home: Path,
        zookeeper: ZooKeeper,
        layout: Mapping[int, str],
        settings: Mapping[str, str],
        names: Sequence[str],
        *,
        of_each: Callable[[int], Mapping[str, str]] = lambda _: {},
    ) -> None:
        self.listeners: dict[int, dict[str, str]] = {}
        """Broker → listener → address."""
        for node_id in layout:
            held = {name: hold_port() for name in ("PLAINTEXT", *names)}
            for port in held.values():
                weakref.finalize(self, port.close)
            self.listeners[node_id] = {
                name: f"127.0.0.1:{port.getsockname()[1]}" for name, port in held.items()
            }

        def told(node_id: int) -> Mapping[str, str]:
            addresses = self.listeners[node_id].items()
            listeners = ",".join(f"{name}://{address}" for name, address in addresses)
            return {"listeners": listeners, **of_each(node_id)}

        super().__init__(home, zookeeper, layout, settings, of_each=told)
        for node_id, addresses in self.listeners.items():
            self.nodes[node_id].bootstrap = addresses["PLAINTEXT"]
