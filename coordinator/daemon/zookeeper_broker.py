"""This node as a broker of a cluster whose brokers elect their controller on ZooKeeper.

The controller connects to the brokers to send them metadata, so the startup order differs from that
in a KRaft cluster: load the list of this broker's partitions from ZooKeeper, open the listeners,
and then register.

Source: ``KafkaServer.startup`` and ``controlledShutdown``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog

from fencepost.cluster.image import MetadataImage
from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.config.listeners import CONTROL_PLANE, control_plane
from fencepost.coordinator.config.roles import Roles
from fencepost.coordinator.daemon.cluster_broker import ClusterBroker
from fencepost.coordinator.errors import RequestTimedOutError
from fencepost.coordinator.replication.controller_channel import ControllerChannel
from fencepost.coordinator.replication.controller_connection import NewestVersionRequest, error_name
from fencepost.coordinator.replication.errors import MembershipError
from fencepost.coordinator.replication.peers import security_of
from fencepost.coordinator.replication.quorum import QuorumConfig
from fencepost.coordinator.runtime.background import Step
from fencepost.coordinator.storage.replica_manager import ReplicaManager
from fencepost.coordinator.zookeeper.broker_store import ZooKeeperMetadata
from fencepost.coordinator.zookeeper.channels import ControllerChannelManager
from fencepost.coordinator.zookeeper.loading import ZkImage
from fencepost.coordinator.zookeeper.node import ZooKeeperNode
from fencepost.coordinator.zookeeper.request_batch import ControllerIdentity
from fencepost.coordinator.zookeeper.zk_controller import ZkController
from fencepost.logcore.checkpoints import MetaProperties
from fencepost.logcore.clock import cluster_clock
from fencepost.protocol.api import ApiKey
from fencepost.protocol.errors import WireError

if TYPE_CHECKING:
    from fencepost.coordinator.broker_services import Services
    from fencepost.logcore.clock import Clock

_log = structlog.get_logger(__name__)


SHUTDOWN_ATTEMPT_MS: Final = 5_000
"""The time limit of one attempt at a controlled shutdown, so that an unreachable controller does
not delay the shutdown for long."""


class ZooKeeperBroker(ClusterBroker):
    """A :class:`ClusterBroker` that is registered as long as its ZooKeeper session lasts."""

    def open(self, clock: Clock) -> None:
        """Create the ZooKeeper session without connecting it."""
        self._node = ZooKeeperNode(
            self._config,
            clock,
            node_id=self._config.int("node.id"),
            listener=control_plane(self._config)[0],
            on_lost=self._on_lost,
        )

    def _listeners_within(self, config: BrokerConfig) -> dict[str, str]:
        return {**super()._listeners_within(config), CONTROL_PLANE: control_plane(config)[0]}

    def _quorum_config(self, config: BrokerConfig, _roles: Roles) -> QuorumConfig:
        name, protocol = control_plane(config)
        mechanism = config.text("sasl.mechanism.inter.broker.protocol") or ""
        return QuorumConfig(
            bootstrap=(),
            voters={},
            listener=name,
            security=security_of(config, name, protocol, mechanism),
            socket_timeout_ms=config.int("controller.socket.timeout.ms"),
        )

    def _controller_takes(self, api_key: int) -> bool:
        return api_key != ApiKey.ENVELOPE or self._node.takes_envelopes

    @property
    def cluster_view(self) -> ZooKeeperNode:
        """This broker's view of its cluster."""
        return self._node

    def metadata(self, node_id: int) -> ZooKeeperMetadata:
        """See :meth:`ClusterBroker.metadata`."""
        return ZooKeeperMetadata(self._config, self._node.passwords, node_id=node_id)

    # --- start ---

    async def find_cluster_id(self) -> str:
        """Return the cluster id that ZooKeeper holds. Raises MembershipError."""
        self._cluster_id = await self._node.find_cluster_id()
        return self._cluster_id

    async def join(
        self,
        meta: MetaProperties,
        addresses: Mapping[str, tuple[str, int]],
        previous_broker_epoch: int,  # noqa: ARG002 - ZooKeeper mode has no use for it
    ) -> MetadataImage:
        """Load from ZooKeeper the image that tells which logs to open. Raises MembershipError."""
        if meta.cluster_id != self._cluster_id:
            raise MembershipError(
                f"the data directory belongs to cluster {meta.cluster_id}, but ZooKeeper has"
                f" cluster {self._cluster_id}"
            )
        return await self._node.join(self.end_points(addresses))

    async def serve(self, services: Services, image: MetadataImage) -> None:
        """Start the replicas before the broker is registered; :meth:`served` must follow."""
        services.zookeeper = self._node
        self._node.remember = services.decided
        await self._begin(services)
        self._node.follow(services.metadata.install, image)

    async def served(self, services: Services) -> None:
        """Register, now that the controller can connect. Raises MembershipError."""
        await self._node.enter(partial(self._on_controller_failover, services))
        services.logs.broker_epoch = self._node.broker_epoch
        self._ask_about_controllers(services)

    def _on_controller_failover(
        self,
        services: Services,
        loaded: ZkImage,
        controller: ControllerIdentity,
        epoch_version: int,
        on_lost: Callable[[], None],
    ) -> ZkController:
        return ZkController(
            self._config,
            self._node.session,
            cluster_clock(services.clock),
            loaded,
            lambda answered: ControllerChannelManager(
                node_id=controller.broker_id,
                listener=self._quorum.listener,
                security=self._quorum.security,
                timeout_ms=self._quorum.socket_timeout_ms,
                answered=answered,
            ),
            services.decided,
            batch=controller,
            cluster_id=self._cluster_id,
            epoch_version=epoch_version,
            on_lost=on_lost,
        )

    def _place_replicas(self, replicas: ReplicaManager, channel: ControllerChannel) -> None:
        """Do nothing: a controller on ZooKeeper does not track log directories."""

    # --- stop ---

    async def leave(self) -> None:
        """Run a controlled shutdown: move leadership away while the broker still serves."""
        node = self._node
        if node.broker_epoch < 0 or not self._config.bool("controlled.shutdown.enable"):
            return
        node.in_controlled_shutdown = True
        request = NewestVersionRequest(
            ApiKey.CONTROLLED_SHUTDOWN,
            lambda make: make.message(
                broker_id=self._config.int("node.id"), broker_epoch=node.broker_epoch
            ),
        )
        backoff_ms = self._config.int("controlled.shutdown.retry.backoff.ms")
        channel = self.channel(SHUTDOWN_ATTEMPT_MS)
        for left in reversed(range(self._config.int("controlled.shutdown.max.retries"))):
            if await self._hand_over(channel, request):
                return
            if left:
                await asyncio.sleep(backoff_ms / 1000)
        _log.warning("stops though it could not hand over everything that it leads")

    async def _hand_over(self, channel: ControllerChannel, request: NewestVersionRequest) -> bool:
        """Ask the controller to move leadership away; return whether it has moved all of it."""
        if self._node.controller is None:
            _log.info("no controller is known to take over")
            return False
        try:
            answer = await channel.send(request)
        except (WireError, OSError, RequestTimedOutError) as error:
            _log.warning("controlled shutdown not answered", cause=str(error))
            return False
        if answer.error_code:
            _log.warning("controlled shutdown refused", error=error_name(answer.error_code))
            return False
        remaining = len(answer.remaining_partitions)
        if remaining:
            _log.info("still leads partitions that no other broker can lead", partitions=remaining)
        return not remaining

    async def go_silent(self) -> None:
        """Stop sending anything to other nodes; the caller must stop the broker next."""
        await self._node.stop()
        await super().go_silent()

    def shutdown_steps(self) -> list[Step]:
        """Return the shutdown steps to run while the logs are still open."""
        return [("end the session of ZooKeeper", self._node.stop), *super().shutdown_steps()]
