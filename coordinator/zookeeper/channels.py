"""The controller's channel to each broker: one connection, one request at a time, in order.

A request is retried until the broker responds or is no longer alive, because a broker that missed a
request would keep outdated metadata forever.

Source: ``ControllerChannelManager``, ``RequestSendThread``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

import structlog
from kio.schema.errors import ErrorCode

from fencepost.client.security import Security
from fencepost.cluster.image import BrokerRegistration, MetadataImage
from fencepost.coordinator.replication.controller_connection import ControllerConnection
from fencepost.coordinator.runtime.background import spawn
from fencepost.coordinator.zookeeper.request_batch import alive
from fencepost.protocol.errors import WireError
from fencepost.protocol.schema import Entity

_log = structlog.get_logger(__name__)

RETRY_MS: Final = 100
"""The pause between two attempts (kafka: ``RequestSendThread.doWork``)."""

Answered = Callable[[int, Entity, Entity], None]
"""Called with a broker's id, the request and the response."""


class _BrokerChannel:
    """A channel to one broker in one broker epoch."""

    def __init__(
        self,
        broker: BrokerRegistration,
        connection: ControllerConnection,
        listener: str,
        timeout_ms: int,
        answered: Answered,
    ) -> None:
        self._connection, self._timeout_ms, self._answered = connection, timeout_ms, answered
        self._listener = listener
        self.broker = broker
        """The registration, whose endpoints may change during the epoch."""
        self._queue: deque[Entity] = deque()
        self._wake = asyncio.Event()
        self._task = spawn(self._run(), f"tell broker {broker.broker_id}")

    def send(self, request: Entity) -> None:
        """Queue a request behind the earlier requests."""
        self._queue.append(request)
        self._wake.set()

    async def _run(self) -> None:
        try:
            while True:
                self._wake.clear()
                while self._queue:
                    answer = await self._ask(self._queue[0])
                    if answer is None:
                        await asyncio.sleep(RETRY_MS / 1000)
                        continue
                    self._answered(self.broker.broker_id, self._queue.popleft(), answer)
                await self._wake.wait()
        finally:
            await self._connection.close()

    async def _ask(self, request: Entity) -> Entity | None:
        at = self.broker.listeners[self._listener]
        to = at.host, at.port
        try:
            answer = await self._connection.ask(to, request, timeout_ms=self._timeout_ms)
        except (WireError, OSError) as error:
            _log.info("request to broker failed", broker=self.broker.broker_id, cause=str(error))
            return None
        if answer.error_code:
            name = ErrorCode(answer.error_code).name.upper()
            _log.warning("broker refuses the controller", broker=self.broker.broker_id, error=name)
        return answer

    def close(self) -> None:
        """Send no further requests."""
        self._task.cancel()


class ControllerChannelManager:
    """A controller's channels to the brokers; they connect to each broker's ``listener``."""

    def __init__(
        self,
        *,
        node_id: int,
        listener: str,
        security: Security,
        timeout_ms: int,
        answered: Answered,
    ) -> None:
        self._node_id, self._listener, self._security = node_id, listener, security
        self._timeout_ms, self._answered = timeout_ms, answered
        self._channels: dict[int, _BrokerChannel] = {}

    def follow(self, image: MetadataImage) -> None:
        """Open channels to newly live brokers, and close the channels of dead brokers."""
        living = alive(image)
        for broker_id, channel in [*self._channels.items()]:
            now = living.get(broker_id)
            if now is None or now.epoch != channel.broker.epoch:
                self._channels.pop(broker_id).close()
            elif self._listener in now.listeners:
                channel.broker = now
        for broker_id, broker in living.items():
            if broker_id not in self._channels and self._listener in broker.listeners:
                name = f"controller-{self._node_id}-to-broker-{broker_id}"
                self._channels[broker_id] = _BrokerChannel(
                    broker,
                    ControllerConnection(name, self._security),
                    self._listener,
                    self._timeout_ms,
                    self._answered,
                )

    def send(self, broker_id: int, request: Entity) -> None:
        """Queue a request for a broker, if it is alive."""
        channel = self._channels.get(broker_id)
        if channel is not None:
            channel.send(request)

    def close(self) -> None:
        """Close all channels."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
