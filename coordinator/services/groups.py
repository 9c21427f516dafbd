"""The group coordinator of this broker: ``fencepost.groups.machine`` on ``__consumer_offsets``.

Source: ``GroupCoordinatorService``: route by the hash of the group id, merge the results of
requests to all shards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from fencepost.cluster.image import (
    GROUP_RESOURCE,
    MetadataImage,
    changed_configs,
    deleted_topics,
    racks_of,
)
from fencepost.coordinator.config.group_settings import applied, warn_of_caps
from fencepost.coordinator.config.key import ConfigError
from fencepost.coordinator.metadata.metadata import GROUP_VERSION, SHARE_VERSION, InternalTopic
from fencepost.coordinator.metadata.names import CONSUMER_OFFSETS
from fencepost.coordinator.runtime.background import each_in_turn, spawn
from fencepost.coordinator.runtime.late_imports import GROUP_MODULES
from fencepost.coordinator.runtime.shard import Remember, ShardRuntime
from fencepost.coordinator.services.assignors.process import AssignorProcesses
from fencepost.coordinator.services.base import ShardedCoordinator
from fencepost.coordinator.storage.storage import Storage
from fencepost.groups.assignors.built_in import BUILT_IN, KAFKA_CLASSES
from fencepost.groups.assignors.model import AssignorRegistry
from fencepost.groups.assignors.remote import ComputeTarget, RemoteAssignor
from fencepost.groups.commands import (
    ExpireOffsets,
    Heartbeat,
    HeartbeatResult,
    ListGroups,
    ListGroupsResult,
    TopicsDeleted,
)
from fencepost.groups.consumer_commands import (
    ConsumerSettings,
    Environment,
    MigrationPolicy,
    ShareSettings,
    TopicsImage,
)
from fencepost.groups.limits import GroupLimits
from fencepost.logcore.budget import Account
from fencepost.logcore.machine import EndMarker, InvariantViolation, Machine
from fencepost.logcore.partition import Partition

if TYPE_CHECKING:
    from fencepost.groups.machine import GroupMachine

_MINUTE_MS = 60_000


ASSIGNORS = "group.consumer.assignors"
SHARE_ASSIGNORS = "group.share.assignors"
SIMPLE_ASSIGNORS = ("simple", "org.apache.kafka.coordinator.group.assignor.SimpleAssignor")
"""The names of the only assignor of share groups."""


def _registry(names: Sequence[str]) -> AssignorRegistry:
    """Return the assignors with these names.

    Raises ConfigError if there are none or too many, or if two names refer to the same assignor,
    such as its short name and its class.
    """
    try:
        return AssignorRegistry(
            BUILT_IN.get(KAFKA_CLASSES.get(name, name)) or RemoteAssignor(name) for name in names
        )
    except ValueError as error:
        raise ConfigError(ASSIGNORS, ",".join(names), str(error)) from error


def _require_simple_assignor(names: Sequence[str]) -> None:
    for name in names:
        if name not in SIMPLE_ASSIGNORS:
            raise ConfigError(SHARE_ASSIGNORS, name, "share groups have only the assignor simple")


class GroupCoordinator(ShardedCoordinator["GroupMachine"]):
    """Coordinates the groups of this broker (``services.groups``)."""

    MODULES = GROUP_MODULES

    def __init__(self, storage: Storage, remember: Remember, internal_topic: InternalTopic) -> None:
        interval = "offsets.retention.check.interval.ms"
        super().__init__(
            storage,
            remember,
            internal_topic,
            CONSUMER_OFFSETS,
            upkeep=ExpireOffsets(),
            interval=interval,
            commit_timeout="offsets.commit.timeout.ms",
        )
        self._topic_image: TopicsImage | None = None
        self._deleted: list[tuple[str, bytes | None]] = []
        """Deleted topics whose offsets remain to be deleted, by name and id."""
        self._offset_deletion: asyncio.Task[None] | None = None
        names = self._config.items(ASSIGNORS)
        self._assignor_processes = AssignorProcesses(
            name for name in names if KAFKA_CLASSES.get(name, name) not in BUILT_IN
        )
        self._assignors = _registry(names)
        _require_simple_assignor(self._config.items(SHARE_ASSIGNORS))
        self._base_settings: tuple[ConsumerSettings, ShareSettings] | None = None
        self._config.listen(self._forget_settings)
        self._group_memory = self._budget("fencepost.groups.max.bytes")
        self._offset_memory = self._budget("fencepost.offsets.max.bytes")

    async def start(self) -> None:
        """See :class:`ShardedCoordinator`; log group settings outside the broker's bounds."""
        await super().start()
        self._warn_of_caps(MetadataImage(), self._metadata.image)

    async def stop(self) -> None:
        """Close every shard; delayed requests get NOT_COORDINATOR."""
        await each_in_turn(
            (
                ("end the assignors", self._assignor_processes.close),
                ("forget deleted topics", self.forgotten),
                ("close the shards", self._shards.close),
            )
        )

    # --- requests --------------------------------------------------------------------------------

    def partition_of(self, group_id: str) -> Partition:
        """Return the open partition of ``__consumer_offsets`` that ``group_id`` belongs to.

        Raises :class:`ShardError` if it is not served here.
        """
        return self._shards.shard_for(group_id).partition

    async def list_groups(self, command: ListGroups) -> ListGroupsResult:
        """Merge the groups of all shards that are served here.

        Raises CoordinatorLoadInProgressError while any shard is loading.
        """
        results = await self._everywhere(command, ListGroupsResult)
        return ListGroupsResult(tuple(group for result in results for group in result.groups))

    # --- upkeep ----------------------------------------------------------------------------------

    def publish(self, old: MetadataImage, image: MetadataImage) -> None:
        """See :class:`ShardedCoordinator`; delete the offsets of deleted topics as well."""
        super().publish(old, image)
        self._warn_of_caps(old, image)
        gone = deleted_topics(old, image)
        if gone:
            self._deleted += [(topic.name, topic.topic_id.bytes) for topic in gone]
            if self._offset_deletion is None or self._offset_deletion.done():
                self._offset_deletion = spawn(self._delete_offsets(), "forget deleted topics")

    def _warn_of_caps(self, old: MetadataImage, image: MetadataImage) -> None:
        for kind, name in changed_configs(old, image):
            if kind == GROUP_RESOURCE:
                warn_of_caps(self._config, name, image.configs.get((kind, name), {}))

    async def _delete_offsets(self) -> None:
        # If this fails, the topics stay in the list, and the next deletion retries.
        while deleted := tuple(self._deleted):
            # Until the deletion's records are durable, a power failure may restore the topics.
            await self._replicas.durable()
            await self.on_topics_deleted(deleted)
            del self._deleted[: len(deleted)]

    async def forgotten(self) -> None:
        """Wait until all active shards have deleted the offsets of deleted topics.

        Raises LogError.
        """
        while self._offset_deletion is not None and not self._offset_deletion.done():
            await asyncio.shield(self._offset_deletion)

    async def on_topics_deleted(self, topics: Iterable[tuple[str, bytes | None]]) -> None:
        """Delete the offsets of deleted topics, given as (name, topic id).

        Share groups forget the state of their partitions; the share coordinator deletes it. A
        loading shard gets the commands once it is active.
        """
        deleted = tuple(topics)
        await self._shards.send_to_all(TopicsDeleted(deleted))
        topic_ids = frozenset(topic_id for _, topic_id in deleted if topic_id is not None)
        if topic_ids:
            from fencepost.groups.share_commands import ShareTopicsDeleted  # noqa: PLC0415 - as in _build

            await self._shards.send_to_all(ShareTopicsDeleted(topic_ids))

    def complete_transaction(self, index: int, marker: EndMarker) -> None:
        """End a transaction on one offsets partition: append the marker and update the state.

        Raises :class:`ShardError` if the shard is not active, and
        :class:`fencepost.logcore.errors.LogError` if the partition refuses the marker.
        """
        self._shards.shard_at(index).complete_transaction(marker)

    @property
    def serves_consumer_protocol(self) -> bool:
        """Return whether group.version and the configuration allow the consumer protocol."""
        allowed = self._config.items("group.coordinator.rebalance.protocols")
        return self._metadata.feature_level(GROUP_VERSION) >= 1 and "consumer" in allowed

    @property
    def serves_share_groups(self) -> bool:
        """Return whether the feature level allows share groups (KIP-932)."""
        return self._metadata.feature_level(SHARE_VERSION) >= 1

    @property
    def share_rebalances(self) -> int:
        """Return how many heartbeats in all shards required a new assignment of a share group."""
        return sum(shard.machine.share_rebalances for shard in self.shards)

    @property
    def topic_image(self) -> TopicsImage:
        """Return all topics as assignors see them; the same object until a topic changes."""
        metadata = self._metadata
        if self._topic_image is None or self._topic_image.version != metadata.topic_changes:
            topics = {
                topic.name: (topic.topic_id.bytes, len(topic.partitions))
                for topic in metadata.topics.values()
            }
            self._topic_image = TopicsImage(
                topics, metadata.topic_changes, partial(racks_of, metadata.image)
            )
        return self._topic_image

    def _build(self, partition: Partition, _coordinator_epoch: int) -> GroupMachine:
        # Imported late, so that a broker without groups starts faster.
        from fencepost.groups.machine import GroupMachine  # noqa: PLC0415

        config = self._config
        memory, offset_memory = Account(self._group_memory), Account(self._offset_memory)
        machine = GroupMachine(
            GroupLimits(
                min_session_timeout_ms=config.int("group.min.session.timeout.ms"),
                max_session_timeout_ms=config.int("group.max.session.timeout.ms"),
                max_group_size=config.int("group.max.size"),
                max_offset_metadata_bytes=config.int("offset.metadata.max.bytes"),
            ),
            initial_rebalance_delay_ms=config.int("group.initial.rebalance.delay.ms"),
            offsets_retention_ms=config.int("offsets.retention.minutes") * _MINUTE_MS,
            memory=memory,
            offset_memory=offset_memory,
            max_batch_bytes=lambda: partition.log.config.max_message_bytes,
            environment=self.environment,
        )
        self._release_with(machine, memory, offset_memory)
        return machine

    def _forget_settings(self) -> None:
        self._base_settings = None

    def _consumer_settings(self) -> ConsumerSettings:
        config = self._config
        return ConsumerSettings(
            session_timeout_ms=config.int("group.consumer.session.timeout.ms"),
            heartbeat_interval_ms=config.int("group.consumer.heartbeat.interval.ms"),
            assignment_interval_ms=self._clamped("group.consumer.assignment.interval.ms"),
            max_size=config.int("group.consumer.max.size"),
            assignors=self._assignors,
            migration_policy=MigrationPolicy(
                config.text("group.consumer.migration.policy") or "bidirectional"
            ),
        )

    def _share_settings(self) -> ShareSettings:
        config = self._config
        return ShareSettings(
            session_timeout_ms=config.int("group.share.session.timeout.ms"),
            heartbeat_interval_ms=config.int("group.share.heartbeat.interval.ms"),
            assignment_interval_ms=self._clamped("group.share.assignment.interval.ms"),
            max_size=config.int("group.share.max.size"),
            initialize_retry_ms=config.int("group.share.initialize.retry.interval.ms"),
        )

    def _clamped(self, name: str) -> int:
        """Return a dynamic setting, limited to the bounds for its kind of group.

        Source: ``DynamicBrokerConfig.clampDynamicConfigs``.
        """
        _, kind, what = name.split(".", 2)
        low, high = (self._config.int(f"group.{kind}.{bound}.{what}") for bound in ("min", "max"))
        return min(max(self._config.int(name), low), high)

    def environment(self, group_id: str) -> Environment:
        """Return the topics and settings for decisions on a group at this moment."""
        if self._base_settings is None:
            self._base_settings = self._consumer_settings(), self._share_settings()
        settings, share = self._base_settings
        overrides = self._metadata.group_settings(group_id)
        if overrides:
            settings = applied(self._config, "consumer", settings, overrides)
            share = applied(self._config, "share", share, overrides)
        return Environment(self.topic_image, settings, share)

    def _run_effect(
        self,
        shard: ShardRuntime[Machine],
        effect: object,
        _now_ms: int,
        first_attempt_done: Callable[[], None],
    ) -> None:
        if not isinstance(effect, ComputeTarget):
            raise InvariantViolation(f"the group machine has no such effect: {effect!r}")
        self._assignor_processes.compute(effect, shard.report)
        # The response contains the current assignment; the new one follows later.
        first_attempt_done()

    def _while_loading(self, command: object) -> object | None:
        # An error would make the member leave. After an empty success it stays, and sends its next
        # heartbeat. Source: GroupCoordinatorService.heartbeat.
        return HeartbeatResult() if isinstance(command, Heartbeat) else None
