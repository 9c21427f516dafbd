"""This node as a broker of a cluster whose controllers are other nodes.

As in Kafka, the broker binds its ports, registers, catches up with the metadata, and then opens the
logs, because the first image tells which partitions are this broker's. The broker then becomes
leader and follower of its partitions, is unfenced, and serves clients.

Source: ``BrokerServer.startup`` and ``shutdown``.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol
from uuid import UUID

import structlog

from fencepost.cluster.image import NO_LEADER, UNASSIGNED, MetadataImage, local_changes
from fencepost.cluster.lifecycle import RegisterBroker
from fencepost.cluster.records import BrokerEndpoint
from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.config.key import ConfigError
from fencepost.coordinator.config.listener_config import ListenerConfig, SecurityProtocol
from fencepost.coordinator.config.listeners import BETWEEN_BROKERS, between_brokers
from fencepost.coordinator.config.roles import Roles
from fencepost.coordinator.handlers.topic_creation import (
    ask_for_internal_topic,
    create_dead_letter_topic,
)
from fencepost.coordinator.metadata.kraft_metadata_cache import MEMBER_FEATURES, KRaftMetadataCache
from fencepost.coordinator.metadata.names import SHARE_GROUP_STATE
from fencepost.coordinator.metadata.publication import Subscriber
from fencepost.coordinator.replication.controller_channel import (
    FORWARDING_TIMEOUT_MS,
    ControllerChannel,
    RemoteControllerChannel,
)
from fencepost.coordinator.replication.controller_connection import (
    ControllerConnection,
    NewestVersionRequest,
    error_name,
)
from fencepost.coordinator.replication.directories import Directories
from fencepost.coordinator.replication.end_offsets import EndOffsets
from fencepost.coordinator.replication.errors import MembershipError
from fencepost.coordinator.replication.fetchers import ReplicaFetcherManager
from fencepost.coordinator.replication.history_place import HistoryPartition
from fencepost.coordinator.replication.isr_changes import IsrChanges
from fencepost.coordinator.replication.marker_sender import MarkerSender
from fencepost.coordinator.replication.membership import BrokerMembership
from fencepost.coordinator.replication.peers import Peers
from fencepost.coordinator.replication.produce_sender import ProduceSender
from fencepost.coordinator.replication.producer_ids import ControllersProducerIds
from fencepost.coordinator.replication.quorum import QuorumConfig, intervals_of
from fencepost.coordinator.replication.share_state_sender import ShareStateSender
from fencepost.coordinator.replication.verifier import RemoteVerifier
from fencepost.coordinator.runtime.background import Step
from fencepost.coordinator.storage.replica_manager import ReplicaManager
from fencepost.logcore.checkpoints import MetaProperties
from fencepost.logcore.clock import cluster_clock
from fencepost.protocol.api import ApiKey
from fencepost.protocol.errors import WireError
from fencepost.protocol.schema import Entity

if TYPE_CHECKING:
    from fencepost.coordinator.broker_services import Services

CONTROLLERS: Final = 2
"""The endpoint type of DescribeCluster on a controller's listener (KIP-919)."""

_ABOUT_CONTROLLERS: Final = NewestVersionRequest(
    ApiKey.DESCRIBE_CLUSTER, lambda make: make.message(endpoint_type=CONTROLLERS)
)

ASK_AGAIN_MS: Final = 100

_PROTOCOLS: Final = {
    SecurityProtocol.PLAINTEXT: 0,
    SecurityProtocol.SSL: 1,
    SecurityProtocol.SASL_PLAINTEXT: 2,
    SecurityProtocol.SASL_SSL: 3,
}
"""The ids of security protocols in a broker registration."""

_log = structlog.get_logger(__name__)


class ClusterView(Protocol):
    """A broker's view of its cluster; any thread may read it."""

    @property
    def controller(self) -> tuple[str, int] | None:
        """The (host, port) of the active controller, if the broker knows it."""

    @property
    def broker_epoch(self) -> int:
        """The broker epoch; -1 while the broker is not registered."""

    @property
    def in_controlled_shutdown(self) -> bool:
        """Whether the broker has asked for a controlled shutdown."""


class ClusterBroker:
    """The parts of a broker that only a member of a cluster has.

    Only the broker's event loop may use it. ``on_lost`` is called if the broker must stop because
    it has lost its membership. The constructor raises ConfigError.
    """

    def __init__(
        self,
        config: BrokerConfig,
        roles: Roles,
        listeners: Mapping[str, ListenerConfig],
        on_lost: Callable[[MembershipError], None],
    ) -> None:
        for key, name in self._listeners_within(config).items():
            if name not in listeners:
                raise ConfigError(
                    key,
                    name,
                    "it must be a listener name defined in advertised.listeners. The valid options"
                    f" based on currently configured listeners are {','.join(listeners)}",
                )
        self._config, self._listeners, self._on_lost = config, listeners, on_lost
        self._quorum = self._quorum_config(config, roles)
        self._beside_controller = roles.is_controller
        """Whether a controller runs in this process. If so, the history already has the decisions
        of the controller, and differences between images are not recorded."""
        self._membership: BrokerMembership | None = None
        self._channels: list[RemoteControllerChannel] = []
        self._peers: Peers | None = None
        self._fetchers: ReplicaFetcherManager | None = None
        self._isr_changes: IsrChanges | None = None
        self._directories: Directories | None = None
        self._directory_id = UNASSIGNED
        self._verifier: RemoteVerifier | None = None
        self._share_states: ShareStateSender | None = None

    def _listeners_within(self, config: BrokerConfig) -> dict[str, str]:
        """Return the listeners that other nodes use, by configuration key. Raises ConfigError."""
        return {BETWEEN_BROKERS: between_brokers(config)[0]}

    def _quorum_config(self, config: BrokerConfig, roles: Roles) -> QuorumConfig:
        """Return how to find the controllers and connect to them. Raises ConfigError."""
        return QuorumConfig.of(config, roles)

    @property
    def membership(self) -> BrokerMembership:
        """The broker's membership in its cluster. Raises RuntimeError before :meth:`join`."""
        if self._membership is None:
            raise RuntimeError("the broker has not joined its cluster")
        return self._membership

    @property
    def cluster_view(self) -> ClusterView:
        """This broker's view of its cluster. Raises RuntimeError before :meth:`join`."""
        return self.membership

    def metadata(self, node_id: int) -> KRaftMetadataCache:
        """Return an empty metadata cache, in which images can be installed."""
        return KRaftMetadataCache(self._config, node_id=node_id)

    # --- start ---

    async def find_cluster_id(self) -> str:
        """Return the cluster id that a controller reports. Raises MembershipError on timeout."""
        loop = asyncio.get_running_loop()
        limit_ms = self._config.int("initial.broker.registration.timeout.ms")
        until = loop.time() + limit_ms / 1000
        connection = ControllerConnection("fencepost", self._quorum.security)
        problem = logged_problem = ""
        try:
            while loop.time() < until:
                for to in self._quorum.bootstrap:
                    try:
                        answer = await connection.ask(
                            to, _ABOUT_CONTROLLERS, timeout_ms=self._quorum.request_timeout_ms
                        )
                    except (WireError, OSError) as error:
                        problem = str(error) or f"{to[0]}:{to[1]}: no answer in time"
                        continue
                    if answer.cluster_id:
                        return str(answer.cluster_id)
                    problem = f"{to[0]}:{to[1]}: {error_name(answer.error_code)}"
                if problem != logged_problem:
                    _log.warning("no controller has returned the cluster id yet", cause=problem)
                    logged_problem = problem
                await asyncio.sleep(ASK_AGAIN_MS / 1000)
        finally:
            await connection.close()
        raise MembershipError(f"no controller has returned the cluster id: {problem}")

    async def join(
        self,
        meta: MetaProperties,
        addresses: Mapping[str, tuple[str, int]],
        previous_broker_epoch: int,
    ) -> MetadataImage:
        """Register with these addresses of the listeners, and catch up with the metadata.

        Returns the first image. Raises MembershipError.
        """
        self._directory_id = meta.directory_id or UNASSIGNED
        registration = RegisterBroker(
            broker_id=meta.node_id,
            cluster_id=meta.cluster_id,
            incarnation_id=uuid.uuid4(),
            listeners=self.end_points(addresses),
            features=MEMBER_FEATURES,
            log_dirs=(meta.directory_id,),
            rack=self._config.text("broker.rack"),
            previous_broker_epoch=previous_broker_epoch,
        )
        self._membership = BrokerMembership(
            self._quorum, registration, intervals_of(self._config), self._on_lost
        )
        return await self._membership.join()

    def end_points(self, addresses: Mapping[str, tuple[str, int]]) -> tuple[BrokerEndpoint, ...]:
        """Return the endpoints that the broker registers."""
        return tuple(
            BrokerEndpoint(name, *addresses[name], _PROTOCOLS[listener.protocol])
            for name, listener in self._listeners.items()
        )

    def channel(self, retry_timeout_ms: int | None) -> ControllerChannel:
        """Open another connection to the active controller; without a timeout, retry forever."""
        connection = RemoteControllerChannel(
            lambda: self.cluster_view.controller,
            client_id=str(self._config.int("node.id")),
            retry_timeout_ms=retry_timeout_ms,
            request_timeout_ms=self._quorum.socket_timeout_ms,
            security=self._quorum.security,
            takes=self._controller_takes,
        )
        self._channels.append(connection)
        return connection

    def _controller_takes(self, _api_key: int) -> bool:
        """Return whether the active controller accepts an API that its ApiVersions lists."""
        return True

    async def serve(self, services: Services, image: MetadataImage) -> None:
        """Apply the image to this broker, subscribe to later ones, and unfence the broker.

        The broker is unfenced when this returns. Raises MembershipError.
        """
        await self._begin(services)
        if not self._beside_controller:
            services.metadata.subscribe(Subscriber.HISTORY, services.remember_cluster)
        self.membership.follow(services.metadata.install, image)
        # The connection's ApiVersions response contains the versions that the controller supports.
        self._ask_about_controllers(services)
        await self.membership.unfence()
        services.logs.broker_epoch = self.membership.broker_epoch

    async def served(self, _services: Services) -> None:
        """Finish the startup once the listeners are open. Raises MembershipError."""

    def _ask_about_controllers(self, services: Services) -> None:
        if services.controller is not None:
            services.controller.send(_ABOUT_CONTROLLERS).add_done_callback(_retrieve_exception)

    async def _begin(self, services: Services) -> None:
        """Start the replica fetchers and the coordinators for the installed image."""
        config, clock, view = self._config, cluster_clock(services.clock), self.cluster_view
        services.controller = self.channel(FORWARDING_TIMEOUT_MS)
        services.history.find_partition = HistoryPartition(
            config,
            services.metadata,
            services.replicas,
            services.controller,
            node_id=services.node_id,
        ).partition
        self._peers = Peers(config, lambda: services.metadata.image, node_id=services.node_id)
        self._fetchers = fetchers = ReplicaFetcherManager(
            config,
            self._peers,
            services.logs,
            clock,
            node_id=services.node_id,
            image=lambda: services.metadata.image,
            broker_epoch=lambda: view.broker_epoch,
            log_of=lambda local: services.logs.partition(local.topic, local.index),
            on_disk=services.flusher.after,
            remember=services.remember_replica,
        )
        services.replicas.fetchers = fetchers
        channel, replicas = self.channel(None), services.replicas
        self._isr_changes = IsrChanges(replicas, channel, clock)
        self._place_replicas(replicas, channel)
        self._coordinate(services, self._peers)
        services.metadata.subscribe(
            Subscriber.CONTROLLED_SHUTDOWN, partial(self._leave, services.replicas)
        )
        await services.start()

    def _leave(self, replicas: ReplicaManager, old: MetadataImage, image: MetadataImage) -> None:
        if self.cluster_view.in_controlled_shutdown:
            replicas.stop_following(partitions_to_stop_fetching(old, image, replicas.node_id))

    def _place_replicas(self, replicas: ReplicaManager, channel: ControllerChannel) -> None:
        """Report the log directories of replicas to the controller."""
        self._directories = Directories(replicas, channel, directory_id=self._directory_id)

    def _coordinate(self, services: Services, peers: Peers) -> None:
        """Connect the coordinators with other brokers, and with the controller.

        Other brokers receive transaction markers and dead letters, answer verification requests,
        report the end offsets of their partitions, and store the states of share partitions. The
        controller creates dead-letter queues and allocates producer ids.
        """
        storage, txns = services.storage, services.txns
        self._verifier = RemoteVerifier(storage, peers, txns.coordinator_of)
        ids = ControllersProducerIds(
            self.channel(FORWARDING_TIMEOUT_MS),
            services.node_id,
            lambda: self.cluster_view.broker_epoch,
        )
        txns.join_others(MarkerSender(peers), self._verifier.ask, ids.allocate)
        services.ask_leader = EndOffsets(peers).ask
        services.other_leaders = ProduceSender(peers)
        services.ask_for_queue = partial(create_dead_letter_topic, services)
        self._share_states = services.share_coordinator.others = ShareStateSender(peers)
        services.share_coordinator.ask_for_topic = partial(
            ask_for_internal_topic, services, SHARE_GROUP_STATE
        )

    # --- stop ---

    async def leave(self) -> None:
        """Run a controlled shutdown: move leadership away while the broker still serves."""
        if self._membership is not None and self._config.bool("controlled.shutdown.enable"):
            await self._membership.controlled_shutdown()

    async def go_silent(self) -> None:
        """Stop sending anything to other nodes; the caller must stop the broker next."""
        if self._membership is not None:
            await self._membership.stop()
        for channel in self._channels:
            await channel.close()
        if self._peers is not None:
            self._peers.close()

    def shutdown_steps(self) -> list[Step]:
        """Return the shutdown steps to run while the logs are still open."""
        steps: list[Step] = []
        if self._fetchers is not None:
            steps.append(("stop following", self._fetchers.close))
        if self._share_states is not None:
            steps.append(("stop sending share states", self._share_states.close))
        if self._verifier is not None:
            steps.append(("stop verifying transactions", self._verifier.close))
        if self._isr_changes is not None:
            steps.append(("stop ISR changes", self._isr_changes.close))
        if self._directories is not None:
            steps.append(("stop directory assignments", self._directories.close))
        if self._membership is not None:
            steps.append(("leave the cluster", self._membership.stop))
        steps += [("close a way to the controller", channel.close) for channel in self._channels]
        if self._peers is not None:
            steps.append(("close connections to brokers", self._peers.close))
        return steps


def _retrieve_exception(answer: asyncio.Future[Entity]) -> None:
    """Retrieve the exception of an ignored response, so that asyncio does not log it."""
    if not answer.cancelled():
        answer.exception()


def partitions_to_stop_fetching(
    old: MetadataImage, image: MetadataImage, broker_id: int
) -> list[tuple[UUID, int]]:
    """Return the partitions that a broker in controlled shutdown must stop fetching.

    If it continued fetching, the broker could rejoin the ISR (KAFKA-14296).
    """
    return [
        (follower.topic_id, follower.index)
        for follower in local_changes(old, image, broker_id).followers
        if follower.registration.leader == NO_LEADER or broker_id not in follower.registration.isr
    ]
