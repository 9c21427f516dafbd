"""The daemon: sockets, handlers, shards, configuration, command line.

``from coordinator import Broker`` is the way in for programs; it is imported on first use, because
the command line must not pay for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coordinator.broker import Broker
    from coordinator.thread import BrokerThread

__all__ = ["Broker", "BrokerThread"]


def __getattr__(name: str) -> object:
    if name == "Broker":
        from coordinator.broker import Broker  # noqa: PLC0415

        return Broker
    if name == "BrokerThread":
        from coordinator.thread import BrokerThread  # noqa: PLC0415

        return BrokerThread
    raise AttributeError(name)
