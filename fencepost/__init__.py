"""Fencepost: a broker that speaks the Kafka protocol, made for its coordinators.

``from fencepost import Broker`` is the way in for programs; it is imported on first use, because
the command line must not pay for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fencepost.coordinator.daemon.broker import Broker
    from fencepost.coordinator.daemon.in_thread import BrokerThread

__all__ = ["Broker", "BrokerThread"]


def __getattr__(name: str) -> object:
    if name == "Broker":
        from fencepost.coordinator.daemon.broker import Broker  # noqa: PLC0415

        return Broker
    if name == "BrokerThread":
        from fencepost.coordinator.daemon.in_thread import BrokerThread  # noqa: PLC0415

        return BrokerThread
    raise AttributeError(name)
