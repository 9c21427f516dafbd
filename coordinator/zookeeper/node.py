"""A broker's membership in a cluster on ZooKeeper: registration, election, and controller requests.

A watch or a session event only marks a kind of work as due. A single task handles the marked work,
one kind at a time, and reads the current znodes. So watches may fire late, twice or out of order.
When the session expires, the broker loses its registration, its broker epoch and its role as
controller; it registers again in the next session.

Source: ``KafkaServer.startup``, ``KafkaController.elect``, ``KafkaZkClient.registerBroker``,
``CheckedEphemeral``, ``ZkNodeChangeNotificationListener``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID, uuid4

import structlog

from fencepost.cluster.delta import replayed
from fencepost.cluster.image import TOPIC_RESOURCE, MetadataImage
from fencepost.cluster.records import BrokerEndpoint, MetadataRecord
from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.config.listeners import between_brokers
from fencepost.coordinator.controller.active import ActiveController
from fencepost.coordinator.controller.services import ControllerServices
from fencepost.coordinator.metadata.controller_settings import controller_settings
from fencepost.coordinator.metadata.names import CONTROLLER_SUBJECT
from fencepost.coordinator.replication.errors import MembershipError
from fencepost.coordinator.runtime.background import call_later, log_failure, spawn
from fencepost.coordinator.runtime.turns import completed
from fencepost.coordinator.zookeeper import znodes
from fencepost.coordinator.zookeeper.access import SecurityZnodes
from fencepost.coordinator.zookeeper.access_znodes import entity_of
from fencepost.coordinator.zookeeper.broker_store import BrokerStore, reencode
from fencepost.coordinator.zookeeper.change_notifications import ChangeNotifications
from fencepost.coordinator.zookeeper.connection import ZooKeeperConfig
from fencepost.coordinator.zookeeper.errors import NotOurFormatError, ZooKeeperError
from fencepost.coordinator.zookeeper.loading import (
    NewTopic,
    batched,
    clear_notifications,
    config_records,
    load,
    make_partitions,
    read_config,
    read_new_topics,
)
from fencepost.coordinator.zookeeper.passwords import Passwords
from fencepost.coordinator.zookeeper.registration import BrokerZnodeRegistration
from fencepost.coordinator.zookeeper.request_batch import ControllerIdentity
from fencepost.coordinator.zookeeper.requests import (
    ControllerRequestApplier,
    unknown_topics,
    without_leaders,
)
from fencepost.coordinator.zookeeper.session import (
    Create,
    Delete,
    RefusedError,
    SessionState,
    Set,
    Write,
    ZkSession,
)
from fencepost.logcore.machine import Event
from fencepost.logcore.tracebacks import without_traceback
from fencepost.protocol.schema import Entity

if TYPE_CHECKING:
    from fencepost.cluster.controller.acls import AclIndex
    from fencepost.coordinator.controller.active import Remember
    from fencepost.coordinator.runtime.origin import Origin
    from fencepost.coordinator.zookeeper.loading import ZkImage
    from fencepost.coordinator.zookeeper.zk_controller import ZkController
    from fencepost.logcore.clock import Clock

_log = structlog.get_logger(__name__)

Address = tuple[str, int]
"""Host and port."""

RETRY_MS: Final = 100
"""The pause before work is retried after an error of ZooKeeper."""

MAX_TAKEN: Final = 500
"""The maximum number of partitions of a controller request that are applied in one step."""

_REGISTRATION, _CONTROLLER, _SETTINGS = "registration", "controller", "settings"
_TOPICS: Final = "topics that may be gone"
_RULES, _ALL = "rules", "all users, quotas and rules"
_OF_A_SESSION: Final = (_REGISTRATION, _CONTROLLER, _SETTINGS, _RULES)

OnFailover = Callable[["ZkImage", ControllerIdentity, int, Callable[[], None]], "ZkController"]
"""Builds the controller. The arguments are the loaded metadata, the controller's identity in
requests to brokers, the version of ``/controller_epoch`` that fences its writes, and a callback for
a failed write."""


class ZooKeeperNode:
    """This broker's membership, in ``services.zookeeper``. Used only on the event loop.

    ``listener`` names the inter-broker listener, on which the controller and the other brokers
    reach this broker. ``on_lost`` is called if the broker must stop. Raises ConfigError.
    """

    def __init__(
        self,
        config: BrokerConfig,
        clock: Clock,
        *,
        node_id: int,
        listener: str,
        on_lost: Callable[[MembershipError], None],
    ) -> None:
        self._config, self._clock = config, clock
        self._node_id, self._listener, self._on_lost = node_id, listener, on_lost
        reach = ZooKeeperConfig.of(config)
        self._timeout_ms = reach.timeout_ms
        self.session = self._session = ZkSession(reach, self._changed)
        self._registration = BrokerZnodeRegistration(
            config, self._session, clock, node_id=node_id, timeout_ms=reach.timeout_ms
        )
        self.access = SecurityZnodes(
            self._session,
            clock,
            self._apply_records,
            has_rules=bool(config.text("authorizer.class.name")),
        )
        """Users, quotas and ACLs."""
        self.passwords = Passwords(config, node_id=node_id)
        """Encodes and decodes the passwords among this broker's settings."""
        self._notifications = ChangeNotifications(self._session, clock, znodes.CONFIG_CHANGES)
        self._request_applier = ControllerRequestApplier(node_id, partial(self._mark, _TOPICS))
        self._arriving = asyncio.Lock()
        self._image = MetadataImage()
        self._publish: Callable[[MetadataImage], None] | None = None
        self._on_failover: OnFailover | None = None
        self.elected: ZkController | None = None
        """This broker's controller, while the broker is the active controller."""
        self.controller: Address | None = None
        """The address of the active controller; None if this broker does not know it."""
        self.controller_id = -1
        self.takes_envelopes = True
        """Whether the latest controller accepts requests that other brokers forward for clients."""
        self._former: tuple[int, int] | None = None
        """The id and session of the controller that this broker saw last."""
        self.remember: Remember | None = None
        """Adds an election or resignation of the controller, with its reason, to the history."""
        self.in_controlled_shutdown = False
        """Whether this broker has asked for a controlled shutdown. If so, it must not join an ISR
        or become the leader of a partition."""
        self._dirty: dict[str, None] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_registered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def broker_epoch(self) -> int:
        """The epoch of the broker's registration; -1 while it is not registered."""
        return self._registration.epoch

    # --- start ---

    async def find_cluster_id(self) -> str:
        """Connect, create missing znodes, and return the cluster id. Raises MembershipError."""
        try:
            await self._session.start()
            for path in znodes.PERSISTENT:
                await self._session.ensure(path)
            await self._session.ensure("/cluster")
            while True:
                node = await self._session.get(znodes.CLUSTER_ID)
                if node is not None:
                    return znodes.cluster_id_of(node.data)
                data = znodes.cluster_id_data(znodes.id_to_text(uuid4()))
                await self._session.has_done([Create(znodes.CLUSTER_ID, data)])
        except ZooKeeperError as error:
            raise MembershipError(str(error)) from error

    async def join(self, end_points: Sequence[BrokerEndpoint]) -> MetadataImage:
        """Return the metadata, in which this broker's partitions have no leaders.

        Raises MembershipError.
        """
        self._registration.end_points = tuple(end_points)
        try:
            await self._notifications.skip()
            await reencode(self._session, self._node_id, self.passwords)
            loaded = await load(self._session)
            self._image = await completed(without_leaders(loaded.image, self._node_id))
            await self.access.load()
        except ZooKeeperError as error:
            raise MembershipError(str(error)) from error
        return self._image

    def follow(self, publish: Callable[[MetadataImage], None], applied: MetadataImage) -> None:
        """Call ``publish`` with each newer image."""
        self._publish, self._image = publish, applied

    async def enter(self, on_controller_failover: OnFailover) -> None:
        """Register, take part in elections, and return after the first UpdateMetadata.

        The controller connects back, so the broker must be listening. Raises MembershipError.
        """
        self._on_failover = on_controller_failover
        self._task = spawn(self._run(), "follow ZooKeeper")
        self._mark(*_OF_A_SESSION)
        await self._is_registered

    # --- stop ---

    async def stop(self) -> None:
        """Close the session, which removes the registration."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        self.access.stop()
        self._resign("the broker stops")
        self._publish = None
        self._is_registered.cancel()
        await self._session.close()

    # --- the task ---

    def _mark(self, *what: str) -> None:
        self._dirty |= dict.fromkeys(what)
        self._wake.set()

    def _mark_later(self, what: str) -> None:
        again = partial(self._mark, what)
        call_later(asyncio.get_running_loop(), RETRY_MS, f"look at the {what}", again)

    def _changed(self, state: SessionState) -> None:
        """Handle a change of the session's state."""
        if state is SessionState.CONNECTED:
            self._mark(*_OF_A_SESSION)
            return
        self._resign(f"the session is {state.value}")
        if state is SessionState.LOST:
            self._registration.lose()
            self._mark(_ALL)  # notifications may have been created and expired in the meantime

    async def _run(self) -> None:
        work: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            _REGISTRATION: self._register,
            _CONTROLLER: self._process_controller_change,
            _SETTINGS: self._process_config_changes,
            _RULES: self._process_acl_changes,
            _ALL: self.access.reload,
            _TOPICS: self._remove_deleted_topics,
        }
        while True:
            self._wake.clear()
            while self._dirty and self._session.is_connected:
                what = next(task for task in work if task in self._dirty)
                del self._dirty[what]
                try:
                    await work[what]()
                except MembershipError as error:
                    self._lost(error)
                    return
                except Exception as error:  # noqa: BLE001 - the task must go on
                    if isinstance(error, ZooKeeperError):
                        _log.warning("ZooKeeper did not answer", about=what, cause=str(error))
                    else:
                        log_failure(f"look at the {what}", error)
                    self._dirty[what] = None
                    await asyncio.sleep(RETRY_MS / 1000)
            await self._wake.wait()

    def _lost(self, error: MembershipError) -> None:
        self._resign(str(error))
        if self._is_registered.done():
            self._on_lost(error)
        else:
            self._is_registered.set_exception(without_traceback(error))

    # --- registration ---

    async def _register(self) -> None:
        """Register in this session. Raises MembershipError if another broker has the id."""
        if self._registration.is_of_this_session:
            return
        await self._registration.make()
        self._mark(_TOPICS)

    async def _remove_deleted_topics(self) -> None:
        """Remove topics whose deletion no controller has reported to this broker.

        A controller reports a deletion only to the brokers that are registered at that time, and
        drops the report when it resigns. But it completes the deletion only after every broker with
        a replica has responded, so the removal deletes no data.
        """
        async with self._arriving:
            await self._session.sync()  # a lagging server may not list the newest topics yet
            there = set(await self._session.children(znodes.TOPICS))
            gone = [
                topic
                for name, topic in self._image.topics.items()
                if name not in there
                and not any(self._node_id in part.replicas for part in topic.partitions)
            ]
            self._apply_records([self._request_applier.forget(topic.topic_id) for topic in gone])

    # --- election ---

    async def _process_controller_change(self) -> None:
        """Read which broker is the controller, and run for election if there is none."""
        changed = partial(self._mark, _CONTROLLER)
        node = await self._session.get(znodes.CONTROLLER, changed)
        if node is None:
            self._resign("there is no controller")
            await self._elect()
            return
        self._former = znodes.controller_of(node.data), node.owner
        is_own = node.owner == self._session.session_id
        if is_own and self.elected is None:
            # This broker has resigned: without its znode, an election with a new epoch follows.
            await self._session.has_done([Delete(znodes.CONTROLLER, node.version)])
            return
        if not is_own:
            self._resign("another controller was elected")
        await self._find_controller(znodes.controller_of(node.data))

    async def _find_controller(self, controller_id: int) -> None:
        node = await self._session.get(znodes.broker_path(controller_id))
        if controller_id == self._node_id and self.elected is None:
            # The broker has resigned, or the znode is of an earlier session. Either way the znode
            # will soon be read again.
            self.controller_id, self.controller = -1, None
            return
        address, takes_envelopes = None, self.takes_envelopes
        if node is not None:
            broker = znodes.broker_of(controller_id, node.data)
            takes_envelopes = broker.takes_envelopes
            for end_point in broker.end_points:
                if end_point.name == self._listener:
                    address = end_point.host, end_point.port
        self.controller_id, self.controller = controller_id, address
        self.takes_envelopes = takes_envelopes
        if address is None:
            self._mark_later(_CONTROLLER)

    async def _elect(self) -> None:
        epoch_znode = await self._session.get(znodes.CONTROLLER_EPOCH)
        if epoch_znode is None:
            await self._session.has_done([Create(znodes.CONTROLLER_EPOCH, b"0")])
            self._mark(_CONTROLLER)
            return
        epoch = int(epoch_znode.data) + 1
        data = znodes.controller_data(self._node_id, self._clock.now_ms())
        writes: list[Write] = [
            Create(znodes.CONTROLLER, data, ephemeral=True),
            Set(znodes.CONTROLLER_EPOCH, str(epoch).encode(), epoch_znode.version),
        ]
        try:
            done = await self._session.do(writes)
        except RefusedError as refused:
            _log.info("another broker was elected", cause=str(refused))
            self._mark(_CONTROLLER)
            return
        _log.info("elected controller", controller_epoch=epoch)
        former, cause = await self._why_elected(epoch)
        self._announce_election(
            "controller-elected",
            {"former": former, "controller": self._node_id, "epoch": epoch, "cause": cause},
        )
        await clear_notifications(self._session, done[1].version)
        loaded = await load(self._session)
        await make_partitions(self._session, loaded.image, done[1].version)
        batch = ControllerIdentity(self._node_id, epoch, between_brokers(self._config)[0])
        if self._on_failover is not None and self._session.is_connected:
            self.elected = self._on_failover(loaded, batch, done[1].version, self._fail)
            self.elected.start()
        self._mark(_CONTROLLER)

    async def _why_elected(self, epoch: int) -> tuple[int | None, str]:
        """Return the previous controller, if known, and the reason for this broker's election."""
        if self._former is None:
            first = "nobody was before" if epoch == 1 else "nobody was when this broker looked"
            return None, first
        former, session = self._former
        broker = await self._session.get(znodes.broker_path(former))
        if broker is not None and broker.owner == session:
            return former, f"broker {former} has given it up"
        return former, f"the session of broker {former} has ended"

    def _announce_election(self, kind: str, detail: Mapping[str, object]) -> None:
        self._note(Event(kind, CONTROLLER_SUBJECT, detail), None, "watch of ZooKeeper")

    def _fail(self) -> None:
        """Resign, and take part in the next election shortly afterwards."""
        self._resign("a decision could not be written")
        self._mark_later(_CONTROLLER)

    def _resign(self, why: str) -> None:
        elected, self.elected = self.elected, None
        if elected is not None:
            _log.info("resigns as controller", cause=why)
            detail = {"controller": self._node_id, "epoch": elected.store.epoch, "cause": why}
            self._announce_election("controller-resigned", detail)
            elected.resign()
            self.controller_id, self.controller = -1, None

    # --- settings ---

    async def _process_config_changes(self) -> None:
        """Apply settings that other brokers, tools or the controller have changed."""
        await self._apply_config_changes(partial(self._mark, _SETTINGS))

    async def _apply_config_changes(self, changed: Callable[[], object] | None = None) -> None:
        new, paths = await self._notifications.new(changed), []
        for note in new:
            try:
                entity = znodes.config_change_of(note.path, note.data)
                resource = znodes.resource_of(entity)
                if resource is not None:
                    await self._reread(*resource)
                elif entity_of(path := f"{znodes.CONFIGS}/{entity}") is not None:
                    paths.append(path)
            except NotOurFormatError as error:
                _log.error("notification in ZooKeeper skipped", cause=str(error))
        await self.access.reread(paths)
        await self._notifications.mark_handled(new)

    async def _process_acl_changes(self) -> None:
        await self.access.process_acl_changes(partial(self._mark, _RULES))

    async def catch_up(self) -> None:
        """Apply every change of users, quotas and ACLs that was acknowledged before this call.

        If ZooKeeper does not respond within the session timeout, return with only some changes
        applied. The caller will then make a change, which waits for ZooKeeper as well.
        """
        try:
            async with asyncio.timeout(self._timeout_ms / 1000):
                await self._session.sync()
                await self._apply_config_changes()
                await self.access.process_acl_changes()
        except (TimeoutError, ZooKeeperError) as error:
            _log.warning("others' changes may not be known yet", cause=str(error))

    async def own_decisions(self, resources: Collection[tuple[int, str]]) -> ControllerServices:
        """Return services that decide on one change of the settings currently in ZooKeeper.

        Raises MetadataUnavailableError, RequestTimedOutError.
        """
        store = self._own_store()
        await store.read(resources)
        return self._decided_on(store, None)

    def own_access_decisions(self, acls: AclIndex | None) -> ControllerServices:
        """Return services that decide on one change of users, quotas or ACLs.

        ``acls`` are the authorizer's ACLs. They must be those of this broker's current image, so
        the caller must not yield to the event loop between reading them and this call.
        """
        return self._decided_on(self._own_store(), acls)

    def _own_store(self) -> BrokerStore:
        return BrokerStore(
            self._config,
            self._session,
            self._image,
            self.passwords,
            self.access,
            node_id=self._node_id,
        )

    def _decided_on(self, store: BrokerStore, acls: AclIndex | None) -> ControllerServices:
        settings = controller_settings(self._config, node_id=self._node_id)
        active = ActiveController(store, settings, self._clock, None, self._note, own_broker=False)
        return ControllerServices(active, store, is_elected=False, acls=acls)

    def _note(self, event: Event, origin: Origin | None, trigger: str | None) -> None:
        if self.remember is not None:
            self.remember(event, origin, trigger)

    async def _reread(self, kind: int, name: str) -> None:
        async with self._arriving:
            values = await read_config(self._session, kind, name) or {}
            # Settings of an unknown topic are applied with the topic, or the topic was deleted.
            if kind != TOPIC_RESOURCE or name in self._image.topics:
                now = self._image.configs.get((kind, name), {})
                self._apply_records(config_records(kind, name, now, values))
            elected = self.elected
            if elected is None:
                return
            image = elected.store.image
            if kind != TOPIC_RESOURCE or name in image.topics:
                elected.learn(
                    config_records(kind, name, image.configs.get((kind, name), {}), values)
                )

    def _apply_records(self, records: Sequence[MetadataRecord]) -> None:
        """Apply records to the image, and publish it."""
        if not records:
            return
        offset = self._image.offset + len(records)
        self._image = replayed(self._image, records, offset, self._request_applier.controller_epoch)
        if self._publish is not None:
            self._publish(self._image)

    # --- requests from the controller ---

    async def leader_and_isr(
        self, body: Entity, connected_s: float
    ) -> tuple[int, dict[UUID, dict[int, int]]]:
        """Apply a LeaderAndIsr; return its error, and the errors of its partitions.

        ``connected_s``, here and below, is the time at which the controller connected.
        """
        await self._registration.made.wait()
        async with self._arriving:
            error, new_topics = await self._new_topics_of(body, connected_s)
            if error:
                return error, {}
            errors: dict[UUID, dict[int, int]] = {topic.topic_id: {} for topic in body.topic_states}

            def apply(
                image: MetadataImage, topic: Entity, parts: Sequence[Entity], count: int
            ) -> list[MetadataRecord]:
                records, codes = self._request_applier.leader_and_isr(image, topic, parts, count)
                errors[topic.topic_id] |= codes
                return records

            await self._apply_controller_records(body, apply, new_topics)
            return 0, errors

    async def _apply_controller_records(
        self,
        body: Entity,
        apply: Callable[[MetadataImage, Entity, Sequence[Entity], int], list[MetadataRecord]],
        new_topics: Mapping[str, NewTopic],
        records: Sequence[MetadataRecord] = (),
    ) -> None:
        """Apply ``records``, then the partitions in batches; yield to the loop between batches."""
        piece, count = [*records], 0
        for topic in body.topic_states:
            new = new_topics.get(topic.topic_name, NewTopic())
            for batch in batched(topic.partition_states, MAX_TAKEN):
                piece += (*apply(self._image, topic, batch, new.partitions), *new.settings)
                count += len(batch)
                if count >= MAX_TAKEN:
                    self._apply_records(piece)
                    piece, count = [], 0
                    await asyncio.sleep(0)
        self._apply_records(piece)

    async def update_metadata(self, body: Entity, connected_s: float) -> int:
        """Apply an UpdateMetadata, and return its error."""
        await self._registration.made.wait()
        async with self._arriving:
            error, new_topics = await self._new_topics_of(body, connected_s)
            if error:
                return error
            brokers = self._request_applier.live_brokers(self._image, body, self.broker_epoch)

            apply = self._request_applier.update_metadata
            await self._apply_controller_records(body, apply, new_topics, brokers)
            if not self._is_registered.done() and self._node_id in self._image.brokers:
                self._is_registered.set_result(None)
            return 0

    async def _new_topics_of(
        self, body: Entity, connected_s: float
    ) -> tuple[int, Mapping[str, NewTopic]]:
        """Return the request's error, and by name the properties of new topics.

        A new topic's log needs the topic's settings, and a coordinator needs the number of
        partitions of its topic, so both are applied together with the topic.
        """
        while True:
            if refused := self._request_applier.refuses(body, self.broker_epoch, connected_s):
                return refused, {}
            try:
                return 0, await read_new_topics(self._session, unknown_topics(body, self._image))
            except ZooKeeperError as error:
                _log.warning("new topics not read", cause=str(error))
                # Retry here, because the controller does not resend a request after an error.
                await asyncio.sleep(RETRY_MS / 1000)

    async def stop_replica(
        self, body: Entity, connected_s: float
    ) -> tuple[int, list[tuple[str, int, int]]]:
        """Apply a StopReplica; return its error, and (topic, index, error) of its partitions."""
        await self._registration.made.wait()
        async with self._arriving:
            if error := self._request_applier.refuses(body, self.broker_epoch, connected_s):
                return error, []
            records, errors = self._request_applier.stop_replica(self._image, body)
            self._apply_records(records)
            return 0, errors
