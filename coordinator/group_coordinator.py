"""The group coordinator of this broker: ``groups.machine.GroupMachine`` on ``__consumer_offsets``.

Source: ``GroupCoordinatorService``: route by the hash of the group id, merge what goes to all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING

from coordinator.history import Origin
from coordinator.metadata import CONSUMER_OFFSETS, GROUP_VERSION
from coordinator.runtime import Shard
from coordinator.shard_errors import (
    CoordinatorLoadInProgressError,
    CoordinatorNotAvailableError,
    ShardError,
)
from coordinator.shards import ShardSet
from groups.assignors.model import Assignor, AssignorRegistry
from groups.assignors.range import RangeAssignor
from groups.assignors.uniform import UniformAssignor
from groups.commands import (
    ExpireOffsets,
    Heartbeat,
    HeartbeatResult,
    ListedGroup,
    ListGroups,
    ListGroupsResult,
    TopicsDeleted,
)
from groups.consumer_commands import ConsumerSettings, TopicImage
from groups.limits import GroupLimits
from groups.machine import GroupMachine
from logcore.machine import DomainError, ProducerStamp
from logcore.partition import Partition

if TYPE_CHECKING:
    from coordinator.broker import Broker

_MINUTE_MS = 60_000
_EXPIRE = "expire offsets"


ASSIGNORS: Mapping[str, Callable[[], Assignor]] = {
    "uniform": UniformAssignor,
    "range": RangeAssignor,
}
"""The server-side assignors by their names in ``group.consumer.assignors``."""


class GroupCoordinator:
    """``broker.groups``: every group of this broker.

    The topic, and with it the shards, come into being with the first FindCoordinator; until then a
    broker without groups has neither 50 directories nor 50 machines.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._shards = ShardSet(
            CONSUMER_OFFSETS,
            broker.clock,
            build=self._build,
            perform=self._perform,
            while_loading=_while_loading,
            remember=broker.history.remember,
        )
        self._topic_image: TopicImage | None = None

    async def start(self) -> None:
        """Open the shards if the topic exists; large logs go on loading after the return."""
        self._shards.bind(asyncio.get_running_loop())
        self._upkeep = self._shards.timers.timers(self._expire_offsets)
        self._set_upkeep()
        topic = self._broker.metadata.topic(CONSUMER_OFFSETS)
        if topic is not None:
            self._shards.open(self._broker.replicas, topic.partitions)
            await self._shards.loaded()

    async def stop(self) -> None:
        """Close every shard; parked requests are answered NOT_COORDINATOR."""
        await self._shards.close()

    def ensure_open(self) -> None:
        """Create the topic and its shards if they are not there (FindCoordinator).

        Raises CoordinatorNotAvailableError if the topic can't be made.
        """
        if self._shards.is_open:
            return
        try:
            topic = self._broker.metadata.ensure_internal_topic(CONSUMER_OFFSETS)
            self._shards.open(self._broker.replicas, topic.partitions)
        except DomainError as error:
            raise CoordinatorNotAvailableError(f"{CONSUMER_OFFSETS}: {error}") from error

    # --- requests --------------------------------------------------------------------------------

    def submit(
        self, group_id: str, command: object, origin: Origin | None = None
    ) -> asyncio.Future[object]:
        """Send a command of ``groups.commands`` to the shard of ``group_id``."""
        return self._shards.submit(group_id, command, origin)

    def partition_for(self, group_id: str) -> int:
        """The partition of ``__consumer_offsets`` that ``group_id`` lives on.

        Raises NotCoordinatorError where the topic does not exist.
        """
        return self._shards.index_for(group_id)

    def partition_of(self, group_id: str) -> Partition:
        """The same, as the open partition."""
        return self._shards.shards[self.partition_for(group_id)].partition

    async def list_groups(self, command: ListGroups) -> ListGroupsResult:
        """Merge what all shards list; one that does not serve here has none to list.

        Raises CoordinatorLoadInProgressError while any shard loads.
        """
        groups: list[ListedGroup] = []
        for shard in self._shards.shards:
            try:
                result = await shard.submit(command)
            except CoordinatorLoadInProgressError:
                raise
            except ShardError:
                continue
            if isinstance(result, ListGroupsResult):
                groups += result.groups
        return ListGroupsResult(tuple(groups))

    # --- upkeep ----------------------------------------------------------------------------------

    def on_topics_deleted(self, topics: Iterable[tuple[str, bytes | None]]) -> None:
        """Forget the offsets of topics, given as (name, topic id), that are gone.

        A shard that is loading is told as soon as it serves.
        """
        command = TopicsDeleted(tuple(topics))
        for shard in self._shards.shards:
            self._shards.send(shard, command, insist=True)

    def complete_transaction(
        self,
        index: int,
        stamp: ProducerStamp,
        *,
        commit: bool,
        coordinator_epoch: int,
        transaction_version: int,
    ) -> None:
        """End ``stamp``'s transaction on one offsets partition: marker and state together.

        Raises :class:`ShardError` where the shard does not serve now, and
        :class:`logcore.errors.LogError` where the partition refuses the marker.
        """
        if index >= len(self._shards.shards):
            raise CoordinatorNotAvailableError(f"{CONSUMER_OFFSETS}-{index} is not open")
        self._shards.shards[index].complete_transaction(
            stamp,
            commit=commit,
            coordinator_epoch=coordinator_epoch,
            transaction_version=transaction_version,
        )

    def _expire_offsets(self, _key: Hashable, _now_ms: int) -> None:
        for shard in self._shards.shards:
            self._shards.send(shard, ExpireOffsets())
        self._set_upkeep()

    def _set_upkeep(self) -> None:
        interval_ms = self._broker.config.int("offsets.retention.check.interval.ms")
        self._upkeep.set(_EXPIRE, self._broker.clock.now_ms() + interval_ms)

    @property
    def serves_consumer_protocol(self) -> bool:
        """Whether ``group.version`` and ``group.coordinator.rebalance.protocols`` allow it."""
        broker = self._broker
        allowed = broker.config.items("group.coordinator.rebalance.protocols")
        return broker.metadata.feature_level(GROUP_VERSION) >= 1 and "consumer" in allowed

    @property
    def topic_image(self) -> TopicImage:
        """All topics as assignments see them: the same object until a topic changes."""
        metadata = self._broker.metadata
        if self._topic_image is None or self._topic_image.version != metadata.topic_changes:
            topics = {
                topic.name: (topic.topic_id.bytes, topic.partitions)
                for topic in metadata.topics.values()
            }
            self._topic_image = TopicImage(topics, metadata.topic_changes)
        return self._topic_image

    def _build(self, _partition: Partition) -> GroupMachine:
        config = self._broker.config
        return GroupMachine(
            GroupLimits(
                min_session_timeout_ms=config.int("group.min.session.timeout.ms"),
                max_session_timeout_ms=config.int("group.max.session.timeout.ms"),
                max_group_size=config.int("group.max.size"),
                max_offset_metadata_bytes=config.int("offset.metadata.max.bytes"),
            ),
            initial_rebalance_delay_ms=config.int("group.initial.rebalance.delay.ms"),
            offsets_retention_ms=config.int("offsets.retention.minutes") * _MINUTE_MS,
            consumer=ConsumerSettings(
                session_timeout_ms=config.int("group.consumer.session.timeout.ms"),
                heartbeat_interval_ms=config.int("group.consumer.heartbeat.interval.ms"),
                assignment_interval_ms=config.int("group.consumer.assignment.interval.ms"),
                max_size=config.int("group.consumer.max.size"),
                assignors=AssignorRegistry(
                    ASSIGNORS[name]() for name in config.items("group.consumer.assignors")
                ),
            ),
        )

    def _perform(self, _shard: Shard, effect: object, _now_ms: int) -> None:
        raise TypeError(f"groups ask nothing of the world, yet: {effect!r}")


def _while_loading(command: object) -> object | None:
    # A member that is told of the loading would leave; one that hears nothing stays and comes
    # again. Source: GroupCoordinatorService.heartbeat.
    return HeartbeatResult() if isinstance(command, Heartbeat) else None
