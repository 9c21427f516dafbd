"""The services of one broker: the objects that its request handlers call; no sockets.

The services are constructed inside the event loop that they belong to, on an open
:class:`fencepost.coordinator.storage.storage.Storage`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fencepost.cluster.image import LocalPartition, MetadataImage, TopicImage
from fencepost.coordinator.config.broker_config import BrokerConfig, ConfigError
from fencepost.coordinator.errors import MetadataUnavailableError
from fencepost.coordinator.history.entries import CLUSTER, PARTITION
from fencepost.coordinator.history.observations import ClientObservations
from fencepost.coordinator.history.recorder import HistoryRecorder
from fencepost.coordinator.metadata.names import (
    CONSUMER_OFFSETS,
    SHARE_GROUP_STATE,
    TRANSACTION_STATE,
)
from fencepost.coordinator.metadata.publication import Subscriber
from fencepost.coordinator.metadata.server_secret import server_secret
from fencepost.coordinator.runtime.background import Step
from fencepost.coordinator.runtime.late_imports import (
    CONTROLLER_MODULES,
    NEW_TOPIC_MODULES,
    load,
)
from fencepost.coordinator.runtime.turns import OneAtATime
from fencepost.coordinator.security.acls import AclPublisher
from fencepost.coordinator.security.authorizer import Authorizer
from fencepost.coordinator.security.quota_table import QuotaTable
from fencepost.coordinator.security.quotas import ClientQuotas
from fencepost.coordinator.security.replication_quota import ReplicationQuota, ReplicationSide
from fencepost.coordinator.services.base import ShardedCoordinator
from fencepost.coordinator.services.groups import GroupCoordinator
from fencepost.coordinator.services.share_coordinator import ShareCoordinator
from fencepost.coordinator.services.txns import TxnCoordinator
from fencepost.coordinator.storage.appends import Appends
from fencepost.coordinator.storage.fetches import Fetches
from fencepost.coordinator.storage.storage import Storage
from fencepost.logcore.machine import Event
from fencepost.txn.ids import ProducerIdBlock

if TYPE_CHECKING:
    from fencepost.coordinator.controller.active import ActiveController
    from fencepost.coordinator.controller.metadata_log_reader import ObserverState
    from fencepost.coordinator.replication.controller_channel import ControllerChannel
    from fencepost.coordinator.runtime.origin import Origin
    from fencepost.coordinator.runtime.timers import TimerQueue
    from fencepost.coordinator.security.password_checks import PasswordChecks
    from fencepost.coordinator.security.users import ScramUsers
    from fencepost.coordinator.services.dead_letters import CreateTopic, OtherLeaders
    from fencepost.coordinator.services.share_fetches import ShareFetches
    from fencepost.coordinator.services.share_groups import AskLeader, ShareGroups
    from fencepost.coordinator.services.share_partitions import SharePartitions
    from fencepost.coordinator.services.share_persister import SharePersister
    from fencepost.coordinator.telemetry.manager import ClientTelemetry
    from fencepost.coordinator.zookeeper.node import ZooKeeperNode

Address = tuple[str, int]
"""Host and port."""


CheckCertificates = Callable[[BrokerConfig], asyncio.Future[ConfigError | None]]
"""Returns the reason why a configuration's certificates cannot be used, or None."""


def connection_id(connection: object) -> str:
    """Return a name that no other open connection has, for share sessions."""
    return str(id(connection))


class Services:
    """The services of one broker, in the order in which they start.

    ``advertised`` returns the address that the clients of a listener connect to; it is known once
    the broker listens.
    """

    other_leaders: OtherLeaders | None = None
    """Produces to dead-letter queues on other brokers; None on a standalone broker."""
    ask_for_queue: CreateTopic | None = None
    """Asks the controller to create a dead-letter queue; None if this process is the controller."""

    def __init__(
        self, storage: Storage, *, cluster_id: str, advertised: Callable[[str | None], Address]
    ) -> None:
        self.storage = storage
        self.config, self.clock = storage.config, storage.clock
        self.node_id, self.cluster_id = storage.node_id, cluster_id
        self.rack = storage.config.text("broker.rack")
        self.log_dir = str(Path(storage.directory).absolute())
        """The path of the log directory, as DescribeLogDirs returns it."""
        self.metadata = storage.metadata
        self.logs, self.flusher = storage.logs, storage.flusher
        self.commits, self.replicas = storage.commits, storage.replicas
        self._advertised = advertised
        self.authorizer = Authorizer.configured(storage.config)
        """Checks the permissions of clients; None if every client may do everything."""
        self.acls: AclPublisher | None = None
        """Applies the ACLs of each image; None without an authorizer."""
        if self.authorizer is not None:
            self.acls = AclPublisher(storage.metadata, self.authorizer)
        self.acl_requests = OneAtATime()
        """Serializes the requests that create or delete ACLs."""
        self.quotas = ClientQuotas(QuotaTable(storage.metadata), storage.config, storage.clock)
        """The quotas of users, clients and addresses."""
        self.check_certificates: CheckCertificates | None = None
        """Validates a configuration's certificates; None if no listener uses TLS."""
        self.controller: ControllerChannel | None = None
        """The channel to the active controller; None if this process is its own controller."""
        self.zookeeper: ZooKeeperNode | None = None
        """This broker's membership in a ZooKeeper cluster."""
        self._active_controller: ActiveController | None = None
        self._users: ScramUsers | None = None
        self._password_checks: PasswordChecks | None = None
        self.topics_coming: set[str] = set()
        """Topics with a CreateTopics request in flight to the controller."""
        self.fetches = Fetches(storage)
        """Serves Fetch requests."""
        self.fetches.throttle = ReplicationQuota(
            self.config, self.clock, ReplicationSide.LEADER, node_id=self.node_id
        )
        self.history = HistoryRecorder(
            self.internal_topic, storage.logs, storage.config, storage.clock
        )
        """Records the causes of changes to groups and transactions."""
        self.replicas.remember = self.remember_replica
        self.groups = GroupCoordinator(storage, self.history.remember, self.internal_topic)
        """Groups and committed offsets."""
        self._share_persister: SharePersister | None = None
        self._share_groups: ShareGroups | None = None
        self.ask_leader: AskLeader | None = None
        """Asks another broker for end offsets of partitions; None on a standalone broker."""
        self.txns = TxnCoordinator(
            storage,
            self.history.remember,
            self.internal_topic,
            self._allocate_producer_ids,
            complete_offsets=self.groups.complete_transaction,
        )
        """Transactions and producer ids."""
        self.share_coordinator = ShareCoordinator(
            storage, self.history.remember, self.internal_topic
        )
        """The state of share partitions."""
        self._shares: SharePartitions | None = None
        self._share_fetches: ShareFetches | None = None
        self.appends = Appends(storage, verify=self.txns.verify)
        """Serves Produce requests."""
        self._telemetry: ClientTelemetry | None = None
        self.observations = self._observations()
        """Records how clients use exactly-once; None without a history."""

    @property
    def coordinators(self) -> Mapping[str, ShardedCoordinator[Any]]:
        """Return the coordinators, each by the name of its internal topic."""
        return {
            CONSUMER_OFFSETS: self.groups,
            TRANSACTION_STATE: self.txns,
            SHARE_GROUP_STATE: self.share_coordinator,
        }

    def _observations(self) -> ClientObservations | None:
        if not self.storage.is_broker or not self.config.bool("fencepost.history.enable"):
            return None
        return ClientObservations(
            self.history.remember, self.metadata, self.clock, broker=self.node_id
        )

    def remember_replica(self, _local: LocalPartition, event: Event) -> None:
        """Record a replica's event and its cause; the subject is the topic and partition index."""
        self.history.remember(PARTITION, event.subject, event, None, "replication")

    def remember_cluster(self, old: MetadataImage, new: MetadataImage) -> None:
        """Record the cluster changes between two metadata images."""
        from fencepost.cluster.broker_changes import cluster_changes  # noqa: PLC0415 - only cluster members need it

        for event in cluster_changes(old, new):
            self.history.remember(CLUSTER, f"broker {self.node_id}", event, None, "metadata")

    async def start(self) -> None:
        """Start replication and load the coordinators; large logs continue to load afterwards."""
        if self.storage.is_broker:
            self.replicas.start()
            self.metadata.subscribe(Subscriber.GROUPS, self.groups.publish)
            self.metadata.subscribe(Subscriber.TRANSACTIONS, self.txns.publish)
            self.metadata.subscribe(Subscriber.SHARE_STATE, self.share_coordinator.publish)
        # Groups first: loading may complete transactions, which then commit offsets of groups.
        await self.groups.start()
        await self.txns.start()
        await self.share_coordinator.start()

    @property
    def on_zookeeper(self) -> ZooKeeperNode:
        """Return :attr:`zookeeper`; raise RuntimeError outside of a ZooKeeper cluster."""
        if self.zookeeper is None:
            raise RuntimeError("the cluster is not one on ZooKeeper")
        return self.zookeeper

    @property
    def active_controller(self) -> ActiveController:
        """Return this process's controller, which writes its decisions to its own metadata log.

        It is created on first use, because a standalone broker seldom needs it. In a process that
        has no metadata log of its own, the controller only validates requests, and a change raises
        MetadataUnavailableError.
        """
        if self._active_controller is None:
            self._active_controller = self._make_controller()
        return self._active_controller

    def _make_controller(self) -> ActiveController:
        from fencepost.coordinator.controller.active import ActiveController  # noqa: PLC0415
        from fencepost.coordinator.controller.metadata_log_reader import MetadataLogReader  # noqa: PLC0415
        from fencepost.coordinator.controller.store import ReadOnlyStore  # noqa: PLC0415
        from fencepost.coordinator.metadata.controller_settings import controller_settings  # noqa: PLC0415

        settings = controller_settings(
            self.config, node_id=self.node_id, cluster_id=self.cluster_id
        )
        own_log = self.storage.own_log
        if own_log is None:
            checks = ReadOnlyStore(self.metadata)
            return ActiveController(
                checks, settings, self.clock, None, self.decided, own_broker=False
            )
        return ActiveController(
            own_log,
            settings,
            self.clock,
            MetadataLogReader(own_log, self.storage.fs, self.clock, self.flusher),
            self.decided,
            own_broker=own_log.has_own_broker,
        )

    def internal_topic(self, name: str) -> TopicImage:
        """Return an internal topic; create it first if this process decides on topics.

        Raises PolicyViolationError, and MetadataUnavailableError if another process is the
        controller.
        """
        topic = self.metadata.topic(name)
        if topic is not None:
            return topic
        if self.storage.own_log is None:
            raise MetadataUnavailableError(f"there is no topic {name} yet")
        from fencepost.coordinator.controller.topic_decisions import create_internal_topic  # noqa: PLC0415 - needed once per broker

        create_internal_topic(self.active_controller.decide, self.metadata, self.config, name)
        return self.metadata.known(name)

    async def _create_topic(self, name: str, configs: Mapping[str, str]) -> None:
        from fencepost.cluster.controller.topics import NewTopic  # noqa: PLC0415 - most brokers have no dead-letter queue
        from fencepost.coordinator.controller.topic_decisions import create_topic  # noqa: PLC0415 - as above

        for _ in load(NEW_TOPIC_MODULES):
            await asyncio.sleep(0)
        topic = NewTopic(name, configs=dict(configs))
        create_topic(self.active_controller.decide, self.config, topic)
        await self.storage.durable()

    async def _allocate_producer_ids(self) -> ProducerIdBlock:
        """Allocate a block durably for this node's broker. Raises ProducerIdsExhaustedError."""
        for _ in load(CONTROLLER_MODULES):
            await asyncio.sleep(0)
        active, node_id = self.active_controller, self.node_id
        with active.store.unforced():
            epoch = active.store.image.brokers[node_id].epoch
            block = active.decide(
                lambda controller: controller.allocate_producer_ids(node_id, epoch)
            )
        await self.storage.durable()
        return ProducerIdBlock(block.first, block.size)

    def observers(self) -> list[ObserverState]:
        """Return the brokers that fetch the metadata log from this controller."""
        return [] if self._active_controller is None else self._active_controller.observers()

    def decided(self, event: Event, origin: Origin | None, trigger: str | None) -> None:
        """Record a decision of the controller and its cause."""
        from fencepost.cluster.controller.outcome import OF_PARTITIONS  # noqa: PLC0415 - few decisions need it

        scope = PARTITION if event.kind in OF_PARTITIONS else CLUSTER
        self.history.remember(scope, event.subject, event, origin, trigger)

    @property
    def users(self) -> ScramUsers:
        """Return the users with SCRAM credentials."""
        if self._users is None:
            from fencepost.coordinator.security.users import ScramUsers  # noqa: PLC0415 - most brokers have none

            draw_secret = partial(server_secret, self.storage.fs, self.storage.directory)
            self._users = ScramUsers(self.metadata, draw_secret)
        return self._users

    @property
    def password_checks(self) -> PasswordChecks:
        """Return the thread that hashes passwords."""
        if self._password_checks is None:
            from fencepost.coordinator.security.password_checks import PasswordChecks  # noqa: PLC0415 - most brokers check no passwords

            self._password_checks = PasswordChecks()
        return self._password_checks

    @property
    def share_persister(self) -> SharePersister:
        """Return the sender of requests to share coordinators."""
        if self._share_persister is None:
            from fencepost.coordinator.services.share_persister import SharePersister  # noqa: PLC0415 - most brokers have no share group

            self._share_persister = SharePersister(self.share_coordinator.send)
        return self._share_persister

    @property
    def shares(self) -> SharePartitions:
        """Return the share partitions that this broker leads."""
        if self._shares is None:
            from fencepost.coordinator.services.dead_letters import DeadLetterQueues  # noqa: PLC0415 - most brokers have no share group
            from fencepost.coordinator.services.share_partitions import SharePartitions  # noqa: PLC0415 - as above

            create_topic = self.ask_for_queue or self._create_topic
            queues = DeadLetterQueues(self.storage, self.appends, create_topic, self.other_leaders)
            self._shares = SharePartitions(
                self.storage, self.share_persister, queues, self.history.remember
            )
            self.metadata.subscribe(Subscriber.SHARE_PARTITIONS, self._shares.publish)
        return self._shares

    @property
    def has_shares(self) -> bool:
        """Return whether share partitions have been fetched since the broker started."""
        return self._shares is not None

    @property
    def share_fetches(self) -> ShareFetches:
        """Return the server of ShareFetch requests."""
        if self._share_fetches is None:
            from fencepost.coordinator.services.share_fetches import ShareFetches  # noqa: PLC0415 - most brokers have no share group

            self._share_fetches = ShareFetches(self.shares, self.config)
        return self._share_fetches

    @property
    def timer_queues(self) -> list[TimerQueue]:
        """Return the deadlines of all coordinators and share partitions."""
        queues = [coordinator.timers for coordinator in self.coordinators.values()]
        return queues if self._shares is None else [*queues, self._shares.timers]

    @property
    def telemetry(self) -> ClientTelemetry:
        """Return the client instances that push metrics."""
        if self._telemetry is None:
            from fencepost.coordinator.telemetry.manager import ClientTelemetry  # noqa: PLC0415 - most clients push no metrics

            self._telemetry = ClientTelemetry(
                self.metadata,
                self.clock,
                self.history.remember,
                broker=self.node_id,
                max_bytes=self.config.int("telemetry.max.bytes"),
            )
        return self._telemetry

    @property
    def has_telemetry(self) -> bool:
        """Return whether any client has requested its telemetry subscription from this process."""
        return self._telemetry is not None

    def connection_closed(self, connection: object) -> None:
        """End the share sessions and the client instance of a closed connection."""
        if self._telemetry is not None:
            self._telemetry.connection_closed(connection_id(connection))
        if self._shares is not None:
            self._shares.connection_closed(connection_id(connection))

    def _close_shares(self) -> None:
        if self._shares is not None:
            self._shares.close()
        if self._share_persister is not None:
            self._share_persister.close()

    @property
    def share_groups(self) -> ShareGroups:
        """Return the part of the group coordinator that needs the share coordinator."""
        if self._share_groups is None:
            from fencepost.coordinator.services.share_groups import ShareGroups  # noqa: PLC0415 - most brokers have no share group

            self._share_groups = ShareGroups(
                self.groups, self.share_persister, self.replicas, self.ask_leader
            )
        return self._share_groups

    async def _stop_share_groups(self) -> None:
        if self._share_groups is not None:
            await self._share_groups.stop()

    def shutdown_steps(self) -> list[Step]:
        """Return the first steps of a shutdown, during which responses are still sent."""
        return [
            ("wait for commits", self.commits.drain),
            ("drop share partitions", self._close_shares),
            ("stop the transaction coordinator", self.txns.stop),
            ("end changes of share groups", self._stop_share_groups),
            ("stop the group coordinator", self.groups.stop),
            ("stop the share coordinator", self.share_coordinator.stop),
        ]

    def last_shutdown_steps(self) -> list[Step]:
        """Return the remaining steps of a shutdown, after the last response."""
        return [
            ("stop observing clients", self._stop_observations),
            ("write the history", self.history.stop),
            ("drop unfinished appends", self.appends.close),
            ("stop replica fetchers", self.replicas.stop),
            ("end checks of passwords", self._end_password_checks),
            ("stop applying ACLs", self._stop_acls),
        ]

    def _stop_observations(self) -> None:
        if self.observations is not None:
            self.observations.stop()

    def _stop_acls(self) -> None:
        if self.acls is not None:
            self.acls.stop()

    def _end_password_checks(self) -> None:
        if self._password_checks is not None:
            self._password_checks.close()

    def advertised(self, listener: str | None = None) -> Address:
        """Return the address that clients of ``listener``, by default the first, connect to."""
        return self._advertised(listener)

    @property
    def features(self) -> Mapping[str, tuple[int, int, int]]:
        """Return the lowest supported, highest supported and finalized level of each feature."""
        return self.metadata.features

    @property
    def features_epoch(self) -> int:
        """Return the epoch of the finalized features; the epoch grows with each change."""
        return self.metadata.features_epoch

    def controller_versions(self) -> Mapping[int, tuple[int, int]]:
        """Return the active controller's API versions; empty while they are unknown."""
        return {} if self.controller is None else self.controller.versions

    # --- several services ---

    async def topics_forgotten(self) -> None:
        """Wait until deleted topics' directories are renamed and the topics' offsets deleted."""
        await self.replicas.deletions_done()
        await self.groups.forgotten()
        await self.share_coordinator.forgotten()
