"""A broker's registration: the ephemeral znode with its listeners, and the broker epoch.

Source: ``KafkaZkClient.registerBroker``, ``CheckedEphemeral``, and ``KafkaServer.startup``, which
serves requests only after the registration.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from fencepost.coordinator.replication.errors import MembershipError
from fencepost.coordinator.zookeeper import znodes
from fencepost.coordinator.zookeeper.session import Create, Delete, RefusedError, Set, ZkSession

if TYPE_CHECKING:
    from fencepost.cluster.records import BrokerEndpoint
    from fencepost.coordinator.config.broker_config import BrokerConfig
    from fencepost.logcore.clock import Clock

_log = structlog.get_logger(__name__)


class BrokerZnodeRegistration:
    """This broker's registration. Used only on the event loop."""

    def __init__(
        self,
        config: BrokerConfig,
        session: ZkSession,
        clock: Clock,
        *,
        node_id: int,
        timeout_ms: int,
    ) -> None:
        self._config, self._session, self._clock = config, session, clock
        self._node_id, self._timeout_ms = node_id, timeout_ms
        self.end_points: tuple[BrokerEndpoint, ...] = ()
        """The endpoints of the broker."""
        self.epoch = -1
        """The broker epoch; -1 while the broker is not registered."""
        self.made = asyncio.Event()
        """Set once this process has registered.

        The controller's requests wait for the registration. An earlier request may be meant for
        this broker's previous process, which may have had records that this process has lost.
        """
        self._made_by = 0
        """The session that created the registration."""

    @property
    def is_of_this_session(self) -> bool:
        """Whether the broker is registered in the current session."""
        return self._made_by == self._session.session_id and self.epoch >= 0

    def lose(self) -> None:
        """Forget the registration, which ended with its session."""
        self.epoch = -1

    async def make(self) -> None:
        """Register in this session. Raises MembershipError if another broker has the id."""
        session_id = self._session.session_id
        path = znodes.broker_path(self._node_id)
        rack = self._config.text("broker.rack")
        node = znodes.BrokerZnode(self._node_id, self.end_points, rack, takes_envelopes=True)
        data = znodes.broker_data(node, self._clock.now_ms())
        gone = asyncio.Event()
        deadline = self._clock.monotonic_ms() + 2 * self._timeout_ms
        while True:
            try:
                results = await self._session.do([Create(path, ephemeral=True), Set(path, data, 0)])
            except RefusedError as refused:
                if not refused.exists:
                    raise
            else:
                self._on_created(session_id, int(results[1].czxid))
                return
            gone.clear()
            registered = await self._session.get(path, gone.set)
            if registered is None:
                continue
            if (
                registered.owner == session_id
            ):  # an earlier attempt succeeded, but its response was lost
                self._on_created(session_id, registered.czxid)
                return
            # ZOOKEEPER-2985: the znode of this broker's expired session may still exist.
            if registered.owner == self._made_by:
                await self._session.has_done([Delete(path, registered.version)])
                continue
            left_ms = deadline - self._clock.monotonic_ms()
            if left_ms <= 0:
                raise MembershipError(f"broker {self._node_id} is registered by another process")
            _log.info("waits for the end of another session of this broker id")
            try:
                async with asyncio.timeout(left_ms / 1000):
                    await gone.wait()
            except TimeoutError:
                continue

    def _on_created(self, session_id: int, epoch: int) -> None:
        self._made_by, self.epoch = session_id, epoch
        self.made.set()
        _log.info("registered in ZooKeeper", broker_epoch=epoch, session=hex(session_id))
