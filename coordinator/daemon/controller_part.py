"""The controller of a cluster, in the process of one of its brokers.

The controller has listeners and a server of its own, and keeps the metadata log in the broker's
directory. The broker in the same process is an ordinary member of the cluster: it registers, sends
heartbeats and reads the metadata through the controller's listener. So brokers behave the same with
and without a controller in their process.

Source: ``SharedServer``, ``ControllerServer``; the order of start and stop is
``KafkaRaftServer``'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from fencepost.cluster.image import UNASSIGNED
from fencepost.coordinator.broker_services import Services
from fencepost.coordinator.daemon.serving import Listeners
from fencepost.coordinator.handlers.controller_registry import controller_registry
from fencepost.coordinator.runtime.background import Step
from fencepost.coordinator.storage.storage import Storage

if TYPE_CHECKING:
    from fencepost.coordinator.config.broker_config import BrokerConfig
    from fencepost.coordinator.daemon.certificates import ListenerCertificates
    from fencepost.coordinator.runtime.background import Threads
    from fencepost.coordinator.server.server import Server
    from fencepost.logcore.checkpoints import MetaProperties
    from fencepost.logcore.clock import Clock
    from fencepost.logcore.fs import FileSystem

_log = structlog.get_logger(__name__)


class ControllerPart:
    """The controller of this process; only the broker's event loop may use it.

    Until the broker opens its logs, the metadata log is the only open log of ``storage``.
    """

    def __init__(self, listeners: Listeners, storage: Storage, services: Services) -> None:
        self.listeners, self.storage, self.services = listeners, storage, services
        self._server: Server | None = None

    @classmethod
    async def open(
        cls,
        fs: FileSystem,
        directory: str,
        config: BrokerConfig,
        clock: Clock,
        meta: MetaProperties,
        listeners: Listeners,
        threads: Threads,
    ) -> ControllerPart:
        """Open the metadata log. Raises MetadataError, LogError, OSError."""
        storage = await threads.run(
            lambda: Storage(
                fs,
                directory,
                config,
                clock,
                node_id=meta.node_id,
                directory_id=meta.directory_id or UNASSIGNED,
                is_broker=False,
                loads=False,
            )
        )
        services = Services(storage, cluster_id=meta.cluster_id, advertised=listeners.address_of)
        services.history.find_partition = lambda: None  # this process's broker writes the entries
        return cls(listeners, storage, services)

    async def serve(self, certificates: ListenerCertificates | None) -> None:
        """Start the active controller and accept brokers. Raises BrokerError."""
        self._server = self.listeners.prepare(self.services, controller_registry())
        await self.listeners.open(self._server, certificates)
        self.services.active_controller.start()
        host, port = self.listeners.address_of()
        _log.info("controller started", address=f"{host}:{port}")

    def share_history(self, broker: Services) -> None:
        """Have this node's broker write the controller's decisions to the history."""
        broker.history.take_over(self.services.history)
        self.services.history = broker.history

    def reset(self) -> None:
        """Reset all connections without a response."""
        if self._server is not None:
            self._server.reset()

    def shutdown_steps(self) -> list[Step]:
        """Return the shutdown steps to run after the broker's, while the logs are still open."""
        steps: list[Step] = []
        if self._server is not None:
            steps.append(("stop accepting brokers", self._server.stop_accepting))
            steps.append(("stop the controller", self.services.active_controller.stop))
        steps += self.services.shutdown_steps()
        if self._server is not None:
            steps.append(("close connections of brokers", self._server.stop))
        return steps + self.services.last_shutdown_steps()
