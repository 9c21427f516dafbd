"""The active controller of a cluster on ZooKeeper, from its election to its resignation.

The controller first sends all metadata to every broker, and then acts whenever a watch fires. A
watch tells only that a znode may have changed, so the controller compares the znode with its image.
The controller's state machine makes decisions, the store writes them, and the channels send them.

Source: ``KafkaController.onControllerFailover``, ``onControllerResignation``, ``processXxx``;
``TopicDeletionManager``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Final, TypeVar

import structlog

from fencepost.cluster.controller.errors import NotControllerError
from fencepost.cluster.controller.machine import Controller as Machine
from fencepost.cluster.controller.outcome import ControllerResult
from fencepost.cluster.delta import replayed
from fencepost.cluster.image import (
    NEVER_LED,
    TOPIC_RESOURCE,
    MetadataImage,
    TopicImage,
    changed_topics,
)
from fencepost.cluster.records import MetadataRecord, TopicRecord
from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.controller.active import ActiveController, Remember
from fencepost.coordinator.controller.services import ControllerServices
from fencepost.coordinator.metadata.controller_settings import controller_settings
from fencepost.coordinator.metadata.log import new_topic_id
from fencepost.coordinator.runtime.background import spawn
from fencepost.coordinator.zookeeper import znodes
from fencepost.coordinator.zookeeper.admin_nodes import AdminNodes, Partition
from fencepost.coordinator.zookeeper.channels import ControllerChannelManager
from fencepost.coordinator.zookeeper.errors import NotOurFormatError, ZooKeeperError
from fencepost.coordinator.zookeeper.loading import (
    KnownTopic,
    ZkImage,
    batched,
    config_records,
    new_partitions,
    partition_records,
    read_brokers,
    read_config,
    read_states,
)
from fencepost.coordinator.zookeeper.log_dirs import LogDirs, read_log_dir_events
from fencepost.coordinator.zookeeper.request_batch import (
    EPOCH_DURING_DELETE,
    ControllerIdentity,
    alive,
    replicas_of,
    requests_after,
    stop_replica,
    stopped_partition,
)
from fencepost.coordinator.zookeeper.session import (
    Create,
    Delete,
    RefusedError,
    Set,
    Write,
    ZkSession,
)
from fencepost.coordinator.zookeeper.store import ZkMetadataStore
from fencepost.coordinator.zookeeper.watches import Changed, ZnodeWatches
from fencepost.coordinator.zookeeper.writes import assignment_of
from fencepost.logcore.machine import Event
from fencepost.protocol.api import ApiKey
from fencepost.protocol.schema import Entity

if TYPE_CHECKING:
    from fencepost.logcore.clock import Clock

_log = structlog.get_logger(__name__)

T = TypeVar("T")

NEVER_MS: Final = 10 * 365 * 86_400_000
"""A session timeout that never elapses: ZooKeeper, not the controller, expires the sessions."""

GO_ON_AT_ONCE: Final = 200
"""The maximum number of reassignments that one decision continues."""

MAX_GONE: Final = 1_000
"""The maximum number of deleted topics that are kept to be reported to brokers that register later.
"""

_BROKERS, _TOPICS, _DELETIONS, _ISRS, _GONE = "brokers", "topics", "deletions", "ISRs", "gone"
_ASSIGNMENTS, _REASSIGNMENTS, _ELECTIONS = "assignments", "reassignments", "elections"
_LOG_DIRS, _REPLICAS = "log directories", "replicas"


class ZkController:
    """The active controller. Used only on the event loop.

    ``on_lost`` is called if a write fails, because this controller must then resign.
    """

    def __init__(
        self,
        config: BrokerConfig,
        session: ZkSession,
        clock: Clock,
        loaded: ZkImage,
        channels: Callable[[Callable[[int, Entity, Entity], None]], ControllerChannelManager],
        remember: Remember,
        *,
        batch: ControllerIdentity,
        cluster_id: str,
        epoch_version: int,
        on_lost: Callable[[], None],
    ) -> None:
        self._session, self._epoch_version, self._on_lost = session, epoch_version, on_lost
        self._config, self._request_batch, self._loaded = config, batch, loaded
        self._channels = channels(self._answered)
        self._image = MetadataImage()
        """The metadata as of the last change that was passed to the brokers' channels."""
        self._remember = remember
        self._deleting: dict[str, set[int]] = {}
        """Topics under deletion, and the brokers that may still have replicas of them."""
        self._parts, self._gone = dict[str, TopicImage](), dict[str, TopicImage]()
        """The last images of topics under deletion, and of deleted topics. The deletion must also
        be sent to brokers that register later."""
        self.store = ZkMetadataStore(
            config,
            session,
            loaded,
            node_id=batch.broker_id,
            epoch=batch.epoch,
            epoch_version=epoch_version,
            on_written=self._written,
            on_refused=on_lost,
        )
        settings = replace(
            controller_settings(config, node_id=batch.broker_id, cluster_id=cluster_id),
            session_timeout_ms=NEVER_MS,
            needs_leader_epoch_bump=True,
        )
        self.active = ActiveController(
            self.store,
            settings,
            clock,
            None,
            remember,
            own_broker=True,
        )
        self._watches = ZnodeWatches()
        self._nodes = AdminNodes(
            session,
            self.store,
            self._decide,
            watches=self._watches,
            on_change=(self._marks(_REASSIGNMENTS), self._marks(_ELECTIONS)),
        )
        self._changed_topics: dict[str, None] = {}
        """Topics whose assignment another program has written."""
        self._log_dirs = LogDirs(self._decide, self._marks(_REPLICAS))
        self._dirty, self._wake = dict[str, None](), asyncio.Event()
        self._unsent: asyncio.Queue[tuple[MetadataImage, MetadataImage]] = asyncio.Queue()
        """Changes that are in ZooKeeper and not yet sent to the brokers, in order."""
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def services(self) -> ControllerServices:
        """Services for the handlers of controller requests."""
        return ControllerServices(self.active, self.store, is_elected=True)

    # --- election and resignation ---

    def start(self) -> None:
        """Send all metadata to every broker, and start deciding."""
        self.active.start()
        self._changed_topics |= dict.fromkeys((*self.store.image.topics, *self.store.deleting))
        self._dirty = dict.fromkeys(
            (
                _BROKERS,
                _TOPICS,
                _ASSIGNMENTS,
                _DELETIONS,
                _ISRS,
                _LOG_DIRS,
                _REASSIGNMENTS,
                _ELECTIONS,
            )
        )
        self._wake.set()
        self._tasks = [
            spawn(self._run_vital(self._send_everything()), "tell brokers"),
            spawn(self._run_vital(self._run()), "controller"),
        ]

    def _being_deleted(self) -> MetadataImage:
        """Return an image of only the topics under deletion, which brokers may still have.

        The first requests report the changes from this image, and therefore repeat the deletions.
        """
        records: list[MetadataRecord] = []
        for name, node in self._loaded.deleting.items():
            if node is not None:
                topic_id = node.topic_id or new_topic_id()
                records.append(TopicRecord(name, topic_id))
                records += partition_records(topic_id, node, {}, node.replicas)
        return replayed(MetadataImage(), records, 0, 0)

    def resign(self) -> None:
        """Stop deciding, writing and sending."""
        self.store.close()
        self._channels.close()
        for task in self._tasks:
            task.cancel()
        self.active.stop_timers()  # the timers would use a closed store
        spawn(self.active.stop(), "stop a controller")

    async def _run_vital(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            self._on_lost()
            if not isinstance(error, (ZooKeeperError, NotControllerError)):
                raise
            _log.warning("controller stops after an error", cause=str(error))

    async def _run(self) -> None:
        for topic in self._loaded.without_id:
            await self._adopt(topic)
        await self._resume_reassignments()
        work = {
            _BROKERS: self._process_broker_change,
            _TOPICS: self._process_topic_change,
            _ASSIGNMENTS: self._process_partition_modifications,
            _DELETIONS: self._process_topic_deletion,
            _ISRS: self._process_isr_change_notifications,
            _LOG_DIRS: self._process_log_dir_event_notifications,
            _REPLICAS: self._log_dirs.decide_on_replicas,
            _REASSIGNMENTS: self._nodes.process_partition_reassignment,
            _ELECTIONS: self._nodes.process_preferred_replica_election,
            _GONE: self._finish_deletions,
        }
        while True:
            self._wake.clear()
            while self._dirty:
                what = next(iter(self._dirty))
                del self._dirty[what]
                await work[what]()
            await self._wake.wait()

    def learn(self, records: Sequence[MetadataRecord]) -> None:
        """Apply records that another program has written, and make the decisions they require."""
        self.store.learn(records)
        self.active.replay_records(records)

    def _mark(self, what: str) -> None:
        self._dirty[what] = None
        self._wake.set()

    def _marks(self, what: str) -> Changed:
        return partial(self._mark, what)

    async def _resume_reassignments(self, partitions: Sequence[Partition] | None = None) -> None:
        """Continue the reassignments in progress of these partitions, or of all partitions."""
        reassignments = self.active.current_machine().list_partition_reassignments(partitions)
        for batch in batched([(name, index) for name, index, _ in reassignments], GO_ON_AT_ONCE):
            self._decide(methodcaller("resume_reassignments", batch))
            await asyncio.sleep(0)

    # --- watches ---

    async def _process_broker_change(self) -> None:
        changed = self._marks(_BROKERS)
        live = await read_brokers(self._session, lambda path: self._watches.once(path, changed))
        # A broker that is in an ISR, and was not registered when this controller loaded the
        # metadata, may have lost records even if it has registered meanwhile.
        for broker_id in sorted((alive(self.store.image).keys() - live.keys()) | self._in_sync()):
            gone = methodcaller("broker_gone", broker_id, "its session with ZooKeeper has ended")
            await self._decide_all(gone)
        for _, broker in sorted(live.items()):
            appeared = methodcaller("broker_discovered", broker, "registered in ZooKeeper")
            await self._decide_all(appeared)
        await self._place_new()

    def _in_sync(self) -> set[int]:
        """Return unregistered brokers that lead a partition or are in an ISR.

        They may have failed before this controller's election.
        """
        brokers = self.store.image.brokers
        return {
            member
            for topic in self.store.image.topics.values()
            for partition in topic.partitions
            for member in (*partition.isr, partition.leader)
            if member not in brokers and member >= 0
        }

    def _decide(self, decision: Callable[[Machine], ControllerResult[T]]) -> T:
        return self.active.decide(decision, trigger="watch of ZooKeeper")

    async def _decide_all(self, decision: Callable[[Machine], ControllerResult[bool]]) -> None:
        """Repeat a decision while it returns True; yield to the loop between repetitions."""
        is_more = self._decide(decision)
        while is_more:
            await asyncio.sleep(0)
            is_more = self._decide(decision)

    async def _place_new(self) -> None:
        """Elect a first leader for each partition that never had a leader."""
        for topic in [*self.store.image.topics.values()]:
            if any(partition.partition_epoch == NEVER_LED for partition in topic.partitions):
                await self._decide_all(methodcaller("elect_first_leaders", topic.topic_id))
                await asyncio.sleep(0)

    async def _process_topic_change(self) -> None:
        names = await self._session.children(znodes.TOPICS, self._marks(_TOPICS))
        new = [name for name in names if not self._watches.has(znodes.topic_path(name))]
        self._changed_topics |= dict.fromkeys(new)
        self._mark(_ASSIGNMENTS)

    def _assigned(self, name: str) -> None:
        """Handle a change of a topic's znode, or its deletion."""
        if name in self.store.image.topics or name in self.store.deleting:
            self._changed_topics[name] = None
            self._mark(_ASSIGNMENTS)

    async def _process_partition_modifications(self) -> None:
        names, self._changed_topics = [*self._changed_topics], {}
        for batch in batched(names):
            reads = [(znodes.topic_path(name), partial(self._assigned, name)) for name in batch]
            nodes = await asyncio.gather(
                *(self._session.get(path, self._watches.once(path, then)) for path, then in reads)
            )
            for name, node in zip(batch, nodes, strict=True):
                if node is None:
                    continue
                try:
                    await self._compare(name, znodes.topic_of(name, node.data))
                except NotOurFormatError as error:
                    _log.error("assignment skipped", topic=name, cause=str(error))

    async def _compare(self, name: str, node: znodes.TopicZnode) -> None:
        """Compare a topic's znode with the image, and act on the difference."""
        topic = self.store.image.topics.get(name)
        if name in self.store.deleting:
            parts = self._parts.get(name)
            if parts is not None and len(node.replicas) > len(parts.partitions):
                _log.warning("partitions added to a topic that is being deleted", topic=name)
                await self.store.do(
                    [Set(znodes.topic_path(name), znodes.topic_data(assignment_of(parts)))]
                )
        elif topic is None:
            states = await read_states(self._session, name, node.replicas)
            if name not in self.store.image.topics:
                await self._adopt(KnownTopic(name, node, states))
        else:
            more = range(len(topic.partitions), len(node.replicas))
            if more:
                await self._make_partitions(name, more)
                self.learn(await new_partitions(topic.topic_id, node, {}, more))
                await self._place_new()
            if node.topic_id != topic.topic_id:  # KAFKA-14190: older tools drop the id
                now = self.store.image.topics.get(name)
                if now is not None:
                    await self.store.do(
                        [Set(znodes.topic_path(name), znodes.topic_data(assignment_of(now)))]
                    )

    async def _adopt(self, topic: KnownTopic) -> None:
        """Add a topic that another program, such as an older tool, has created in ZooKeeper."""
        node = topic.node
        topic_id = node.topic_id or new_topic_id()
        if node.topic_id is None:
            node = replace(node, topic_id=topic_id)
            await self.store.do([Set(znodes.topic_path(topic.name), znodes.topic_data(node))])
        indexes = range(len(node.replicas))
        await self._make_partitions(
            topic.name, [index for index in indexes if index not in topic.states]
        )
        values = await read_config(self._session, TOPIC_RESOURCE, topic.name)
        settings = config_records(TOPIC_RESOURCE, topic.name, {}, values or {})
        head: list[MetadataRecord] = [TopicRecord(topic.name, topic_id), *settings]
        self.learn(await new_partitions(topic_id, node, topic.states, indexes, head))
        await self._place_new()
        self._assigned(topic.name)  # the write above may have fired the watch

    async def _make_partitions(self, name: str, indexes: Iterable[int]) -> None:
        """Create the missing parent znodes of partition states."""
        paths = [znodes.partitions_path(name)]
        paths += [znodes.partition_path(name, index) for index in indexes]
        for path in paths:
            try:
                await self.store.do([Create(path)])
            except RefusedError as refused:
                if not refused.exists:
                    raise

    async def _process_isr_change_notifications(self) -> None:
        """Read the partitions named in ISR notifications.

        Leaders of older releases write their ISR to ZooKeeper and create such a notification.
        """
        for name in await self._session.children(znodes.ISR_CHANGES, self._marks(_ISRS)):
            path = f"{znodes.ISR_CHANGES}/{name}"
            note = await self._session.get(path)
            if note is None:
                continue
            try:
                changed = znodes.partitions_of(path, note.data)
                for topic, index in changed:
                    await self._reread(topic, index)
                await self._resume_reassignments(changed)
            except NotOurFormatError as error:
                _log.error("ISR notification skipped", cause=str(error))
            await self.store.do([Delete(path)])

    async def _reread(self, name: str, index: int) -> None:
        states = await read_states(self._session, name, [index])
        topic = self.store.image.topics.get(name)
        if topic is None or index >= len(topic.partitions) or index not in states:
            return
        registration, (state, version) = topic.partitions[index], states[index]
        if version > registration.partition_epoch:
            node = assignment_of(topic)
            records = [*partition_records(topic.topic_id, node, {index: (state, version)}, [index])]
            self.learn(records)

    async def _process_log_dir_event_notifications(self) -> None:
        """Send a LeaderAndIsr with all of its replicas to each broker that lost a log directory.

        The response names the replicas that are offline.
        """
        names = await self._session.children(znodes.LOG_DIR_EVENTS, self._marks(_LOG_DIRS))
        brokers = await read_log_dir_events(self._session, names)
        for broker_id in sorted(brokers & alive(self._image).keys()):
            request = replicas_of(self._image, self._request_batch, broker_id)
            if request is not None:
                self._channels.send(broker_id, request)
        await self.store.do([Delete(f"{znodes.LOG_DIR_EVENTS}/{name}") for name in names])

    # --- deletion ---

    async def _process_topic_deletion(self) -> None:
        names = await self._session.children(znodes.DELETE_TOPICS, self._marks(_DELETIONS))
        for name in names:
            topic = self.store.image.topics.get(name)
            if name in self.store.deleting:
                continue
            if topic is None:
                await self.store.do([Delete(znodes.delete_path(name))])
                continue
            self.store.marked.add(name)
            self._decide(methodcaller("delete_topic", topic.topic_id, allows_internal=True))

    def _written(self, before: MetadataImage, after: MetadataImage) -> None:
        """Queue a change that is now in ZooKeeper, to be sent to the brokers."""
        self._unsent.put_nowait((before, after))

    async def _send_everything(self) -> None:
        """Send all metadata once restarted leaders have new epochs, and then each change."""
        before, after = self._being_deleted(), self._loaded.image
        for batch in batched(self._loaded.restarted):
            self._decide(methodcaller("elect_restarted_leaders", batch))
            await asyncio.sleep(0)
        if (written := self.store.durable()) is not None:
            await written
        while not self._unsent.empty():
            _, after = self._unsent.get_nowait()
        await self._send_changes(before, after)
        while True:
            await self._send_changes(*await self._unsent.get())

    async def _send_changes(self, before: MetadataImage, after: MetadataImage) -> None:
        self._image = after
        self._channels.follow(after)
        gone = (self._gone | self._parts).items()
        deleted = [topic for name, topic in gone if name not in after.topics]
        for broker_id, request in requests_after(before, after, self._request_batch, deleted):
            self._channels.send(broker_id, request)
            await asyncio.sleep(0)
        changed = [
            (topic, topic_id in after.topics_by_id)
            for topic_id in changed_topics(before, after)
            if (topic := before.topics_by_id.get(topic_id)) is not None
        ]
        if self._nodes.is_concerned([topic for topic, _ in changed], after):
            self._mark(_REASSIGNMENTS)
        for topic, is_there in changed:
            if not is_there:
                self._send_deletion(topic.name)
                self._parts[topic.name] = topic
                self._deleting[topic.name] = {
                    replica for partition in topic.partitions for replica in partition.replicas
                }
        came = alive(after).keys() - alive(before).keys()
        for broker_id in came:
            self._log_dirs.forget(broker_id)
        for name, waiting in self._deleting.items():
            for broker_id in waiting & came if name not in before.topics else ():
                self._stop(name, broker_id, after)

    def _send_deletion(self, name: str) -> None:
        cause = "DeleteTopics"
        if name in self._loaded.deleting:
            cause = "it was under way when the controller was elected"
        elif name in self.store.marked:
            cause = "it is marked in ZooKeeper"
        begun = Event("topic-deletion-began", f"topic {name}", {"cause": cause})
        self._remember(begun, None, None)

    def _stop(self, name: str, broker_id: int, image: MetadataImage) -> None:
        states = [
            stopped_partition(index, EPOCH_DURING_DELETE, deletes=True)
            for index, partition in enumerate(self._parts[name].partitions)
            if broker_id in partition.replicas
        ]
        request = stop_replica(self._request_batch, image.brokers[broker_id], {name: states})
        self._channels.send(broker_id, request)

    def _answered(self, broker_id: int, request: Entity, answer: Entity) -> None:
        if answer.error_code:
            return
        if request.__api_key__ == ApiKey.LEADER_AND_ISR:
            self._log_dirs.record_answer(broker_id, answer)
        if request.__api_key__ != ApiKey.STOP_REPLICA:
            return
        failed_topics = {error.topic_name for error in answer.partition_errors if error.error_code}
        for topic in request.topic_states:
            waiting = self._deleting.get(topic.topic_name)
            if topic.topic_name in failed_topics:
                continue  # the request is sent again when the broker registers again
            if waiting is not None and any(
                partition.leader_epoch == EPOCH_DURING_DELETE
                for partition in topic.partition_states
            ):
                waiting.discard(broker_id)
                if not waiting:
                    self._mark(_GONE)

    async def _finish_deletions(self) -> None:
        for name in [name for name, waiting in self._deleting.items() if not waiting]:
            writes: list[Write] = []
            for index in await self._session.children(znodes.partitions_path(name)):
                path = znodes.state_path(name, int(index))
                if await self._session.get(path) is not None:
                    writes.append(Delete(path))
                writes.append(Delete(znodes.partition_path(name, int(index))))
            settings = znodes.config_path(TOPIC_RESOURCE, name)
            others = (znodes.partitions_path(name), znodes.topic_path(name), settings or "")
            writes += [
                Delete(other) for other in others if await self._session.get(other) is not None
            ]
            await self.store.do([*writes, Delete(znodes.delete_path(name))])
            del self._deleting[name]
            self._gone[name] = self._parts.pop(name)
            if len(self._gone) > MAX_GONE:
                del self._gone[next(iter(self._gone))]
            self.store.forget(name)
            self._remember(
                Event("topic-deleted", f"topic {name}", {"cause": "every replica of it is gone"}),
                None,
                "answer StopReplica",
            )
            _log.info("topic deleted", topic=name)
