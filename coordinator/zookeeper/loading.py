"""Reads the znodes of a cluster as metadata records, from which a broker builds its image.

Source: ``KafkaController.initializeControllerContext``, ``ZkConfigManager``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Final, TypeVar
from uuid import UUID

import structlog

from fencepost.cluster.delta import MetadataDelta
from fencepost.cluster.image import (
    BROKER_RESOURCE,
    NEVER_LED,
    NO_LEADER,
    TOPIC_RESOURCE,
    MetadataImage,
)
from fencepost.cluster.records import (
    ConfigRecord,
    MetadataRecord,
    PartitionRecord,
    ProducerIdsRecord,
    RegisterBrokerRecord,
    TopicRecord,
)
from fencepost.cluster.topic_records import TopicRecords
from fencepost.coordinator.runtime.background import Pace
from fencepost.coordinator.runtime.turns import completed
from fencepost.coordinator.zookeeper import znodes
from fencepost.coordinator.zookeeper.errors import NotOurFormatError
from fencepost.coordinator.zookeeper.session import Create, Delete, ZkSession
from fencepost.coordinator.zookeeper.watches import Changed
from fencepost.coordinator.zookeeper.writes import fenced
from fencepost.coordinator.zookeeper.znodes import PartitionStateZnode, TopicZnode
from fencepost.logcore.values import dataclass

_log = structlog.get_logger(__name__)

T = TypeVar("T")

AT_ONCE: Final = 500
"""The maximum number of reads in flight."""

_NO_INCARNATION: Final = UUID(int=0)


@dataclass(frozen=True, slots=True)
class KnownTopic:
    """A topic; ``states`` has each partition's state and the version of its znode, by index."""

    name: str
    node: TopicZnode
    states: Mapping[int, tuple[PartitionStateZnode, int]]


@dataclass(frozen=True, slots=True)
class ZkImage:
    """The whole metadata of a cluster."""

    image: MetadataImage
    without_id: tuple[KnownTopic, ...]
    """Topics without an id, which the image does not contain."""
    deleting: Mapping[str, TopicZnode | None]
    """Topics under deletion, which the image does not contain; None for a topic without a znode."""
    restarted: tuple[tuple[str, int], ...] = ()
    """Partitions whose leader has registered again since their state was written."""


async def clear_notifications(session: ZkSession, epoch_version: int) -> None:
    """Remove old notifications, since a newly elected controller reads all znodes anyway."""
    for folder in (znodes.LOG_DIR_EVENTS, znodes.ISR_CHANGES):
        names = await session.children(folder)
        for transaction in fenced([Delete(f"{folder}/{name}") for name in names], epoch_version):
            await session.do(transaction)


async def make_partitions(session: ZkSession, image: MetadataImage, epoch_version: int) -> None:
    """Create the missing parents of state znodes, for partitions that never had a leader.

    The previous controller may have created only the topic's znode. A state znode can be created
    only if its parents exist.
    """
    for topic in image.topics.values():
        parts = enumerate(topic.partitions)
        new = [index for index, partition in parts if partition.partition_epoch == NEVER_LED]
        paths = [znodes.partition_path(topic.name, index) for index in new]
        for path in (znodes.partitions_path(topic.name), *paths) if new else ():
            if await session.get(path) is None:
                for transaction in fenced([Create(path)], epoch_version):
                    await session.do(transaction)


async def load(session: ZkSession) -> ZkImage:
    """Read all metadata. Raises ZooKeeperError."""
    names, marked = await asyncio.gather(
        session.children(znodes.TOPICS), session.children(znodes.DELETE_TOPICS)
    )
    brokers = await read_brokers(session)
    topics = await read_topics(session, sorted({*names, *marked}))
    configs = await read_configs(session)
    ids = await session.get(znodes.PRODUCER_IDS)
    topics_by_name = {topic.name: topic for topic in topics}
    kept = [topic for topic in topics if topic.name not in marked]
    with_id = [topic for topic in kept if topic.node.topic_id is not None]
    there = {topic.name for topic in with_id}
    first = znodes.next_producer_id_of(b"" if ids is None else ids.data)
    others: list[MetadataRecord] = [ProducerIdsRecord(-1, first, -1)]
    for (kind, name), values in configs.items():
        # A new topic must not get the settings of a deleted topic with the same name.
        if kind != TOPIC_RESOURCE or name in there:
            others += config_records(kind, name, {}, values)
    delta, count = MetadataDelta(MetadataImage()), 0
    for record in chain(brokers.values(), *map(records_of, with_id), others):
        delta.replay(record)
        count += 1
        if count % AT_ONCE == 0:
            await asyncio.sleep(0)  # let other tasks run
    deleting = {
        name: topics_by_name[name].node if name in topics_by_name else None for name in marked
    }
    without_id = tuple(topic for topic in kept if topic.node.topic_id is None)
    restarted = tuple(
        (topic.name, index)
        for topic in with_id
        for index, (state, _) in topic.states.items()
        if state.leader in brokers and brokers[state.leader].broker_epoch > state.written_zxid
    )
    return ZkImage(delta.apply(count, 0), without_id, deleting, restarted)


def _unwatched(_path: str) -> None:
    return None


async def read_brokers(
    session: ZkSession, watch: Callable[[str], Changed | None] = _unwatched
) -> dict[int, RegisterBrokerRecord]:
    """Return the live brokers by id; log and skip a broker whose znode cannot be read.

    ``watch`` returns, for a path, the callback for its next change.
    """
    brokers = {}
    for name in await session.children(znodes.BROKER_IDS, watch(znodes.BROKER_IDS)):
        path = f"{znodes.BROKER_IDS}/{name}"
        node = await session.get(path, watch(path))
        if node is None:  # the broker may have gone away in the meantime
            continue
        try:
            broker = znodes.broker_of(int(name), node.data)
        except (NotOurFormatError, ValueError) as error:
            _log.error("broker in ZooKeeper skipped", broker=name, cause=str(error))
        else:
            brokers[broker.broker_id] = broker_record(broker, node.czxid)
    return brokers


def broker_record(node: znodes.BrokerZnode, epoch: int) -> RegisterBrokerRecord:
    """Return a live broker's record; ``epoch`` is the zxid of its registration."""
    return RegisterBrokerRecord(
        broker_id=node.broker_id,
        incarnation_id=_NO_INCARNATION,
        broker_epoch=epoch,
        end_points=node.end_points,
        features=(),
        rack=node.rack,
        fenced=False,
    )


async def read_topics(session: ZkSession, names: Sequence[str]) -> list[KnownTopic]:
    """Return the topics that exist among ``names``; log and skip those that cannot be read."""
    topics: list[KnownTopic] = []
    for batch in batched(names):
        nodes = await asyncio.gather(*(session.get(znodes.topic_path(name)) for name in batch))
        for name, node in zip(batch, nodes, strict=True):
            if node is None:
                continue
            try:
                topic = znodes.topic_of(name, node.data)
                states = await read_states(session, name, topic.replicas)
            except NotOurFormatError as error:
                _log.error("topic in ZooKeeper skipped", topic=name, cause=str(error))
                continue
            topics.append(KnownTopic(name, topic, states))
    return topics


async def read_states(
    session: ZkSession, topic: str, indexes: Iterable[int]
) -> dict[int, tuple[PartitionStateZnode, int]]:
    """Return the partition states that exist, with their versions, by index."""
    states = {}
    for batch in batched([*indexes]):
        paths = [znodes.state_path(topic, index) for index in batch]
        nodes = await asyncio.gather(*map(session.get, paths))
        for index, path, node in zip(batch, paths, nodes, strict=True):
            if node is not None:
                state = replace(znodes.state_of(path, node.data), written_zxid=node.mzxid)
                states[index] = state, node.version
    return states


def batched(items: Sequence[T], count: int = AT_ONCE) -> Iterator[Sequence[T]]:
    """Yield the items in batches of ``count``."""
    for start in range(0, len(items), count):
        yield items[start : start + count]


def records_of(topic: KnownTopic) -> Iterator[MetadataRecord]:
    """Yield the records of a topic, whose znode must name an id."""
    node = topic.node
    if node.topic_id is None:
        raise NotOurFormatError(f"the topic {topic.name} has no id")
    yield TopicRecord(topic.name, node.topic_id)
    yield from partition_records(node.topic_id, node, topic.states, node.replicas)


def partition_records(
    topic_id: UUID,
    node: TopicZnode,
    states: Mapping[int, tuple[PartitionStateZnode, int]],
    indexes: Iterable[int],
) -> Iterator[PartitionRecord]:
    """Yield records for partitions of a topic; a partition without a state never had a leader."""
    for index in sorted(indexes):
        state, version = states.get(
            index, (PartitionStateZnode(NO_LEADER, (), NEVER_LED, 0), NEVER_LED)
        )
        yield PartitionRecord(
            topic_id=topic_id,
            partition_id=index,
            replicas=node.replicas[index],
            isr=state.isr,
            removing_replicas=node.removing.get(index, ()),
            adding_replicas=node.adding.get(index, ()),
            leader=state.leader,
            leader_recovery_state=state.leader_recovery_state,
            leader_epoch=state.leader_epoch,
            partition_epoch=version,
        )


async def new_partitions(
    topic_id: UUID,
    node: TopicZnode,
    states: Mapping[int, tuple[PartitionStateZnode, int]],
    indexes: range,
    head: Sequence[MetadataRecord] = (),
) -> TopicRecords:
    """Return the records in ``head``, and the prepared records of a topic's new partitions."""
    pace, records = Pace(), list[PartitionRecord]()
    for batch in batched(indexes):
        records += partition_records(topic_id, node, states, batch)
        await pace()
    prepared = TopicRecords(head, topic_id, indexes.start, records)
    await completed(prepared.prepare())
    return prepared


async def read_configs(session: ZkSession) -> dict[tuple[int, str], dict[str, str]]:
    """Return the settings of all topics and brokers that have a znode for settings."""
    configs = {}
    for kind in (TOPIC_RESOURCE, BROKER_RESOURCE):
        for name in await session.children(znodes.config_folder(kind)):
            plain = "" if name == znodes.DEFAULT_ENTITY else name
            values = await read_config(session, kind, plain)
            if values is not None:
                configs[kind, plain] = values
    return configs


async def read_config(session: ZkSession, kind: int, name: str) -> dict[str, str] | None:
    """Return a resource's settings: None if it has no znode, empty if they cannot be parsed."""
    path = znodes.config_path(kind, name)
    node = None if path is None else await session.get(path)
    if path is None or node is None:
        return None
    try:
        return znodes.config_of(path, node.data)
    except NotOurFormatError as error:
        _log.error("settings in ZooKeeper skipped", cause=str(error))
        return {}


@dataclass(frozen=True, slots=True)
class NewTopic:
    """Properties of a topic that a broker reads in ZooKeeper, because no request contains them."""

    settings: Sequence[MetadataRecord] = ()
    """The topic's settings, as records."""
    partitions: int = 0
    """The number of partitions. A LeaderAndIsr names only partitions that the broker replicates."""


async def read_new_topics(session: ZkSession, names: Sequence[str]) -> Mapping[str, NewTopic]:
    """Return the settings and the numbers of partitions of new topics, by name."""
    if names:
        # A lagging ZooKeeper server may not have the settings yet, and the settings of a new topic
        # cause no notification.
        await session.sync()
    topics = {}
    for name in names:
        values, node = await asyncio.gather(
            read_config(session, TOPIC_RESOURCE, name), session.get(znodes.topic_path(name))
        )
        topics[name] = NewTopic(
            config_records(TOPIC_RESOURCE, name, {}, values or {}),
            0 if node is None else _partition_count(name, node.data),
        )
    return topics


def _partition_count(topic: str, data: bytes) -> int:
    """Return the number of partitions in a topic's znode, 0 if the znode is unreadable."""
    try:
        return len(znodes.topic_of(topic, data).replicas)
    except NotOurFormatError:
        return 0  # a request for this topic is older than the znode's data


def config_records(
    kind: int, name: str, now: Mapping[str, str], target: Mapping[str, str]
) -> list[ConfigRecord]:
    """Return the records that change a resource's settings from ``now`` to ``target``."""
    gone = [ConfigRecord(kind, name, key, None) for key in now if key not in target]
    changed = [
        ConfigRecord(kind, name, key, text) for key, text in target.items() if now.get(key) != text
    ]
    return gone + changed
