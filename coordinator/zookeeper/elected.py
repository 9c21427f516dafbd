"""The active controller of a cluster on ZooKeeper, from its election to its resignation.

It reads all there is, tells every broker, and from then on goes by what its watches bring: each
says only that something may have changed, and what is there is compared with what is known. The
decisions are the controller machine's; the store writes them, and the channels tell them.

Source: ``KafkaController.onControllerFailover``, ``onControllerResignation``, ``processXxx``;
``TopicDeletionManager``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Final, cast

import structlog

from fencepost.cluster.controller.errors import NotControllerError
from fencepost.cluster.controller.machine import Controller as Machine
from fencepost.cluster.controller.outcome import Outcome
from fencepost.cluster.controller.topics import NEVER_LED
from fencepost.cluster.delta import MetadataDelta
from fencepost.cluster.image import TOPIC_RESOURCE, MetadataImage, TopicImage, changed_topics
from fencepost.cluster.records import MetadataRecord, TopicRecord
from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.controller.active import ActiveController, Remember
from fencepost.coordinator.metadata.changes import new_settings
from fencepost.coordinator.metadata.controller_settings import controller_settings
from fencepost.coordinator.metadata.log import MetadataLog, new_topic_id
from fencepost.coordinator.runtime.background import spawn
from fencepost.coordinator.wire.api import ApiKey
from fencepost.coordinator.wire.schema import Entity
from fencepost.coordinator.zookeeper import znodes
from fencepost.coordinator.zookeeper.channels import Channels
from fencepost.coordinator.zookeeper.errors import ZooKeeperError
from fencepost.coordinator.zookeeper.loading import (
    KnownTopic,
    Loaded,
    partition_records,
    read_brokers,
    read_config,
    read_states,
    read_topics,
    records_of,
)
from fencepost.coordinator.zookeeper.session import (
    Create,
    Delete,
    RefusedError,
    Session,
    Set,
    Write,
)
from fencepost.coordinator.zookeeper.store import Store
from fencepost.coordinator.zookeeper.telling import (
    EPOCH_DURING_DELETE,
    alive,
    stop_replica,
    stopped_partition,
    told,
)
from fencepost.coordinator.zookeeper.telling import Controller as Teller
from fencepost.coordinator.zookeeper.writes import assignment_of, fenced

if TYPE_CHECKING:
    from fencepost.coordinator.controller.quorum_log import QuorumLog
    from fencepost.logcore.clock import Clock

_log = structlog.get_logger(__name__)

NEVER_MS: Final = 10 * 365 * 86_400_000
"""Brokers have no sessions with this controller: ZooKeeper has them."""

_BROKERS, _TOPICS, _DELETIONS, _ISRS, _GONE = "brokers", "topics", "deletions", "ISRs", "gone"


class _NoObservers:
    """Nobody reads a log of metadata here."""

    def start(self) -> None:
        """Nothing begins."""

    def stop(self) -> None:
        """Nothing ends."""

    def has_observers(self) -> bool:
        """There are none."""
        return False


class Elected:
    """Belongs to the loop. ``on_lost`` is told once, if it can not go on: it must resign then."""

    def __init__(
        self,
        config: BrokerConfig,
        session: Session,
        clock: Clock,
        loaded: Loaded,
        channels: Callable[[Callable[[int, Entity, Entity], None]], Channels],
        remember: Remember,
        *,
        teller: Teller,
        cluster_id: str,
        epoch_version: int,
        on_lost: Callable[[], None],
    ) -> None:
        self._session, self._epoch_version, self._on_lost = session, epoch_version, on_lost
        self._teller, self._loaded = teller, loaded
        self._channels = channels(self._answered)
        self._deleting: dict[str, set[int]] = {}
        """Topics that are being deleted, and the brokers that may still have something of them."""
        self._parts: dict[str, TopicImage] = {}
        """These topics as they were."""
        self.store = Store(
            config,
            session,
            loaded,
            node_id=teller.broker_id,
            epoch=teller.epoch,
            epoch_version=epoch_version,
            on_written=self._written,
            on_refused=on_lost,
        )
        settings = replace(
            controller_settings(
                config,
                node_id=teller.broker_id,
                cluster_id=cluster_id,
                max_partitions_per_request=self.store.limits.max_partitions_per_request,
            ),
            session_timeout_ms=NEVER_MS,
            tells_by_leader_epoch=True,
        )
        self.active = ActiveController(
            cast("MetadataLog", self.store),
            settings,
            clock,
            cast("QuorumLog", _NoObservers()),
            remember,
            own_broker=True,
        )
        self.metadata = cast("MetadataLog", self.store)
        self.services: Any = None
        """What handlers of requests to the controller are given."""
        self._dirty: dict[str, None] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # --- office ---

    def start(self) -> None:
        """Tell everybody all, and begin to decide."""
        before = self._being_deleted()
        self._written(before, self.store.image)
        self.active.start()
        self._dirty = dict.fromkeys((_BROKERS, _TOPICS, _DELETIONS, _ISRS))
        self._wake.set()
        self._task = spawn(self._vital(), "controller")

    def _being_deleted(self) -> MetadataImage:
        """What brokers may still know that is to go."""
        records: list[MetadataRecord] = []
        for name, node in self._loaded.deleting.items():
            if node is not None:
                topic_id = node.topic_id or new_topic_id()
                records.append(TopicRecord(name, topic_id))
                records += partition_records(topic_id, node, {}, node.replicas)
        delta = MetadataDelta(MetadataImage())
        for record in records:
            delta.replay(record)
        return delta.apply(0, 0)

    def resign(self) -> None:
        """Decide and tell nothing any more."""
        self.store.close()
        self._channels.close()
        if self._task is not None:
            self._task.cancel()
        spawn(self.active.stop(), "stop a controller")

    async def _vital(self) -> None:
        try:
            await self._run()
        except Exception as error:
            self._on_lost()
            if not isinstance(error, (ZooKeeperError, NotControllerError)):
                raise
            _log.warning("controller can not go on", cause=str(error))

    async def _run(self) -> None:
        for topic in self._loaded.nameless:
            await self._adopt(topic)
        work = {
            _BROKERS: self._look_at_brokers,
            _TOPICS: self._look_at_topics,
            _DELETIONS: self._look_at_deletions,
            _ISRS: self._look_at_isrs,
            _GONE: self._finish_deletions,
        }
        while True:
            self._wake.clear()
            while self._dirty:
                what = next(iter(self._dirty))
                del self._dirty[what]
                await work[what]()
            await self._wake.wait()

    def _mark(self, what: str) -> None:
        self._dirty[what] = None
        self._wake.set()

    # --- what watches bring ---

    async def _look_at_brokers(self) -> None:
        seen = await read_brokers(self._session, lambda: self._mark(_BROKERS))
        for broker_id in sorted((alive(self.store.image).keys() | self._in_sync()) - seen.keys()):
            gone = methodcaller("broker_gone", broker_id, "its session with ZooKeeper has ended")
            while self._decide(gone):
                pass
        for _, broker in sorted(seen.items()):
            appeared = methodcaller("broker_appeared", broker, "registered in ZooKeeper")
            while self._decide(appeared):
                pass
        self._place_new()

    def _in_sync(self) -> set[int]:
        """Brokers that are in ISRs, and may be gone since before this one was elected."""
        known = self.store.image.brokers
        return {
            member
            for topic in self.store.image.topics.values()
            for one in topic.partitions
            for member in (*one.isr, one.leader)
            if member not in known and member >= 0
        }

    def _decide(self, decision: Callable[[Machine], Outcome[Any]]) -> Any:
        return self.active.decide(decision, trigger="watch of ZooKeeper")

    def _place_new(self) -> None:
        """Begin partitions that had nobody to lead them so far."""
        for topic in [*self.store.image.topics.values()]:
            if any(one.partition_epoch == NEVER_LED for one in topic.partitions):
                self._decide(methodcaller("place_new", topic.topic_id))

    async def _look_at_topics(self) -> None:
        names = await self._session.children(znodes.TOPICS, lambda: self._mark(_TOPICS))
        known = self.store.image.topics
        new = [one for one in names if one not in known and one not in self.store.deleting]
        for topic in await read_topics(self._session, new):
            if topic.name not in self.store.image.topics:
                await self._adopt(topic)

    async def _adopt(self, topic: KnownTopic) -> None:
        """A topic that somebody else has made, as Kafka's tools did."""
        node = topic.node
        if node.topic_id is None:
            node = replace(node, topic_id=new_topic_id())
            await self._do([Set(znodes.topic_path(topic.name), znodes.topic_data(node))])
        paths = [znodes.partitions_path(topic.name)]
        paths += [
            znodes.partition_path(topic.name, index)
            for index in sorted(node.replicas)
            if index not in topic.states
        ]
        for path in paths:
            try:
                await self._do([Create(path)])
            except RefusedError as refused:
                if not refused.exists:
                    raise
        records = [*records_of(replace(topic, node=node))]
        values = await read_config(self._session, TOPIC_RESOURCE, topic.name)
        records += new_settings(TOPIC_RESOURCE, topic.name, {}, values or {})
        self.store.learn(records, configured=values is not None)
        self._place_new()

    async def _do(self, writes: Sequence[Write]) -> None:
        for transaction in fenced(writes, self._epoch_version):
            await self._session.do(transaction)

    async def _look_at_isrs(self) -> None:
        """Leaders of older releases write their ISR by themselves, and leave a note."""
        for name in await self._session.children(znodes.ISR_CHANGES, lambda: self._mark(_ISRS)):
            path = f"{znodes.ISR_CHANGES}/{name}"
            note = await self._session.get(path)
            if note is None:
                continue
            for topic, index in znodes.isr_change_of(path, note.data):
                await self._reread(topic, index)
            await self._do([Delete(path)])

    async def _reread(self, name: str, index: int) -> None:
        states = await read_states(self._session, name, [index])
        topic = self.store.image.topics.get(name)
        if topic is None or index >= len(topic.partitions) or index not in states:
            return
        known, (state, version) = topic.partitions[index], states[index]
        if version > known.partition_epoch:
            node = assignment_of(topic)
            records = [*partition_records(topic.topic_id, node, {index: (state, version)}, [index])]
            self.store.learn(records)

    # --- deletion ---

    async def _look_at_deletions(self) -> None:
        names = await self._session.children(znodes.DELETE_TOPICS, lambda: self._mark(_DELETIONS))
        for name in names:
            topic = self.store.image.topics.get(name)
            if name in self.store.deleting:
                continue
            if topic is None:
                await self._do([Delete(znodes.delete_path(name))])
                continue
            self.store.marked.add(name)
            self._decide(methodcaller("delete_topic", topic.topic_id))

    def _written(self, before: MetadataImage, after: MetadataImage) -> None:
        """A change holds: tell it."""
        self._channels.follow(after)
        for broker_id, request in told(before, after, self._teller):
            self._channels.send(broker_id, request)
        for topic_id in changed_topics(before, after):
            topic = before.topics_by_id.get(topic_id)
            if topic is not None and topic_id not in after.topics_by_id:
                self._parts[topic.name] = topic
                self._deleting[topic.name] = {
                    replica for one in topic.partitions for replica in one.replicas
                }
        came = alive(after).keys() - alive(before).keys()
        for name, waiting in self._deleting.items():
            for broker_id in waiting & came if name not in before.topics else ():
                self._stop(name, broker_id, after)

    def _stop(self, name: str, broker_id: int, image: MetadataImage) -> None:
        states = [
            stopped_partition(index, EPOCH_DURING_DELETE, deletes=True)
            for index, one in enumerate(self._parts[name].partitions)
            if broker_id in one.replicas
        ]
        request = stop_replica(self._teller, image.brokers[broker_id], {name: states})
        self._channels.send(broker_id, request)

    def _answered(self, broker_id: int, request: Entity, answer: Entity) -> None:
        if request.__api_key__ != ApiKey.STOP_REPLICA or answer.error_code:
            return
        for topic in request.topic_states:
            waiting = self._deleting.get(topic.topic_name)
            if waiting is not None and any(
                one.leader_epoch == EPOCH_DURING_DELETE for one in topic.partition_states
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
            writes += [Delete(one) for one in others if await self._session.get(one) is not None]
            await self._do([*writes, Delete(znodes.delete_path(name))])
            del self._deleting[name], self._parts[name]
            self.store.forget(name)
            _log.info("topic deleted", topic=name)
