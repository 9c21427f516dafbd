"""A simulated leader with real logs, and the storage of a follower that is connected to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from uuid import UUID

from fencepost.cluster.divergence import diverging_epoch
from fencepost.cluster.image import (
    TOPIC_RESOURCE,
    LocalPartition,
    MetadataImage,
    PartitionRegistration,
)
from fencepost.coordinator.replication.fetchers import ReplicaFetcherManager
from fencepost.coordinator.replication.followed_log import FollowedLog
from fencepost.coordinator.replication.peers import Peers
from fencepost.logcore.clock import SystemClock
from fencepost.logcore.errors import OffsetOutOfRangeError
from fencepost.logcore.fs import FileSystem, OsFileSystem
from fencepost.logcore.machine import Event
from fencepost.logcore.partition import Partition
from fencepost.logcore.reading import Isolation
from fencepost.protocol.api import ApiKey
from fencepost.protocol.codec import Request
from fencepost.protocol.messages import response_factory
from fencepost.protocol.schema import Entity
from tests.support.metadata_changes import create_topic
from tests.support.partitions import fetch_bytes
from tests.support.waits import until_true
from tests.unit.cluster.replicas import registration
from tests.unit.coordinator.replication.other_broker import OtherBroker, image_of
from tests.unit.coordinator.services.coordinators import storage
from tests.unit.logcore.partition_driver import append, open_partition

Key = tuple[UUID, int]
TOPIC = "t"
LEADER, FOLLOWER = 1, 2


class Leader(OtherBroker):
    """A broker that answers replicas' Fetch and ListOffsets requests, without fetch sessions."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.logs: dict[Key, Partition] = {}
        self.names: dict[tuple[str, int], Partition] = {}
        self.errors: dict[Key, int] = {}
        """Partition → the error code to return instead of records."""
        self.bodies: list[Entity] = []
        """The bodies of all requests."""
        self.on_asked: Callable[[], object] = lambda: None
        """A function called for each request."""
        self.tamper: Callable[[bytes], bytes] = lambda data: data
        """A function that alters records before they are sent."""
        self._news = asyncio.Event()

    def add(self, topic: str, key: Key, partition: Partition) -> None:
        self.logs[key] = self.names[topic, key[1]] = partition
        partition.marks.listen(self._news.set)

    async def _answer(self, request: Request) -> Entity | None:
        self.bodies.append(request.body)
        self.on_asked()
        if request.api_key == ApiKey.FETCH:
            return await self._fetch(request)
        return self._list(request)

    async def _fetch(self, request: Request) -> Entity:
        body = request.body
        make = response_factory(ApiKey.FETCH, request.api_version)
        until = asyncio.get_running_loop().time() + body.max_wait.total_seconds()
        while True:
            self._news.clear()
            rows = {
                (topic.topic_id, partition.partition): self._read(make, topic.topic_id, partition)
                for topic in body.topics
                for partition in topic.partitions
            }
            left = until - asyncio.get_running_loop().time()
            if left <= 0 or any(r.records or r.error_code or _parts(r) for r in rows.values()):
                break
            try:
                async with asyncio.timeout(left):
                    await self._news.wait()
            except TimeoutError:
                continue
        topics: dict[UUID, list[Entity]] = {}
        for (topic_id, _), row in rows.items():
            topics.setdefault(topic_id, []).append(row)
        return make.message(
            responses=[
                make.FetchableTopicResponse(topic_id=topic_id, partitions=parts)
                for topic_id, parts in topics.items()
            ]
        )

    def _read(self, make, topic_id: UUID, asked: Entity) -> Entity:
        log = self.logs[topic_id, asked.partition]
        row = {"partition_index": asked.partition, "preferred_read_replica": -1}
        row |= {"high_watermark": log.high_watermark, "log_start_offset": log.log_start_offset}
        ours = log.marks.leader_epoch
        error = self.errors.get((topic_id, asked.partition), 0)
        if not error and asked.current_leader_epoch != ours:
            error = 74 if asked.current_leader_epoch < ours else 75
        if error:
            return make.PartitionData(**row, error_code=error, records=b"")
        try:
            epoch, offset = asked.last_fetched_epoch, asked.fetch_offset
            end = FollowedLog(log).end_of_epoch(epoch)
            parts = diverging_epoch(end, epoch, offset, log.log_start_offset)
            if parts is not None:
                epoch = make.EpochEndOffset(epoch=parts[0], end_offset=parts[1])
                return make.PartitionData(**row, diverging_epoch=epoch, records=b"")
            size = asked.partition_max_bytes
            read = fetch_bytes(log, asked.fetch_offset, size, Isolation.READ_UNCOMMITTED)
        except OffsetOutOfRangeError:
            return make.PartitionData(**row, error_code=1, records=b"")
        return make.PartitionData(**row, records=self.tamper(bytes(read.records)))

    def _list(self, request: Request) -> Entity:
        make = response_factory(ApiKey.LIST_OFFSETS, request.api_version)
        assert request.body.replica_id == FOLLOWER

        def row(topic: str, asked: Entity) -> Entity:
            log = self.names[topic, asked.partition_index]
            end = log.log_end_offset if asked.timestamp == -1 else log.log_start_offset
            return make.ListOffsetsPartitionResponse(
                partition_index=asked.partition_index, timestamp=-1, offset=end
            )

        return make.message(
            topics=[
                make.ListOffsetsTopicResponse(
                    name=topic.name,
                    partitions=[row(topic.name, partition) for partition in topic.partitions],
                )
                for topic in request.body.topics
            ]
        )

    def asked_of(self, index: int = 0) -> list[Entity]:
        """Return a partition's entries in Fetch requests, in order."""
        return [
            partition
            for body in self.bodies
            if body.__api_key__ == ApiKey.FETCH
            for topic in body.topics
            for partition in topic.partitions
            if partition.partition == index
        ]


def _parts(row: Entity) -> bool:
    return row.diverging_epoch is not None and row.diverging_epoch.end_offset >= 0


class Pair:
    """A simulated leader with its logs, and a real broker that follows the leader."""

    def __init__(
        self,
        directory: Path,
        partitions: int = 1,
        *,
        config: Mapping[str, str] | None = None,
        topic_config: Mapping[str, str] | None = None,
        fs: FileSystem | None = None,
    ) -> None:
        settings = {"replica.fetch.backoff.ms": "20", **(config or {})}
        for name in ("leader", "follower"):
            (directory / name).mkdir(exist_ok=True)
        self.directory = directory
        self.storage = storage(
            directory / "follower", settings, fs=fs or OsFileSystem(), clock=SystemClock()
        )
        self.topic = create_topic(
            self.storage.metadata, TOPIC, partitions, dict(topic_config or {})
        )
        self.topic_id = self.topic.topic_id
        self.leader = Leader()
        self.led: list[Partition] = []
        for index in range(partitions):
            log = open_partition(directory / "leader", name=f"p{index}")
            log.marks.leader_epoch = 5
            self.leader.add(TOPIC, (self.topic_id, index), log)
            self.led.append(log)
        self.image: MetadataImage = MetadataImage()
        self.causes: list[Event] = []
        self.peers = Peers(self.storage.config, lambda: self.image, node_id=FOLLOWER)
        self.fetchers = ReplicaFetcherManager(
            self.storage.config,
            self.peers,
            self.storage.logs,
            SystemClock(),
            node_id=FOLLOWER,
            image=lambda: self.image,
            broker_epoch=lambda: 77,
            log_of=lambda local: self.log(local.index),
            on_disk=self.storage.flusher.after,
            remember=lambda _, event: self.causes.append(event),
        )

    async def start(self) -> None:
        await self.leader.start()
        self.image = replace(
            image_of(b1=self.leader.port),
            configs={(TOPIC_RESOURCE, TOPIC): self.storage.metadata.topic_configs(TOPIC)},
        )

    async def stop(self) -> None:
        await self.fetchers.close()
        self.peers.close()
        await self.leader.stop()
        await self.storage.flusher.close()
        self.storage.logs.close()
        for log in self.led:
            log.close()

    def log(self, index: int = 0) -> Partition:
        """Return the replica, whose high watermark comes from the leader."""
        found = self.storage.logs.partition(TOPIC, index)
        if not found.marks.is_replicated:
            found.marks.replicate(found.log_start_offset)
        return found

    def local(self, index: int = 0, **registered: int) -> LocalPartition:
        found: PartitionRegistration = registration((LEADER, FOLLOWER), **registered)
        return LocalPartition(TOPIC, self.topic_id, index, found)

    def follow(self, indexes: Sequence[int] = (0,), **registered: int) -> None:
        self.fetchers.follow([self.local(index, **registered) for index in indexes])

    def put(self, count: int = 1, index: int = 0, **fields: object) -> None:
        append(self.led[index], count, **fields)

    async def equal(self, index: int = 0) -> None:
        """Wait until the replica has the leader's whole log and high watermark."""
        led, log = self.led[index], self.log(index)

        def is_equal() -> bool:
            return (
                log.log_end_offset == led.log_end_offset
                and log.high_watermark == led.high_watermark
            )

        await until_true(is_equal, f"partition {index} is replicated")
