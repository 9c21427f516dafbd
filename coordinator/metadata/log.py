"""What the broker knows of the cluster: topics, dynamic settings, producer-id blocks.

All of it is a log, the partition ``__cluster_metadata-0``: one record per change (``records.py``).
They add up to the image (``image.py``), which ``records.apply`` alone changes, live and at load.
Every change is forced to disk before it is answered, as Kafka's
controllers do: changes are rare, and a topic must not vanish with the power.

A topic's directories follow its record: created when a partition is first opened, removed after
the tombstone. A kill in between leaves a directory without a topic, which the next start finds
(:meth:`was_deleted`), or a topic without directories, which are created on demand.

Source: the tasks are those of ``QuorumController`` with ``ReplicationControlManager``,
``ConfigurationControlManager`` and ``ProducerIdControlManager``; the records are our own.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from fencepost.coordinator.config.broker_config import BrokerConfig, ConfigSource
from fencepost.coordinator.errors import TopicLimitExceededError, UnknownTopicOrPartitionError
from fencepost.coordinator.metadata.image import MetadataImage, Topic
from fencepost.coordinator.metadata.names import (
    CONSUMER_OFFSETS,
    HISTORY_TOPIC,
    TRANSACTION_STATE,
)
from fencepost.coordinator.metadata.records import (
    SETTINGS,
    apply,
    change_table,
    feature_record,
    live_records,
    producer_ids_record,
    settings_record,
    starts_record,
    table_record,
    topic_record,
    topic_tombstone,
    unpack_key,
)
from fencepost.logcore.batch import decode_records
from fencepost.logcore.clock import Clock
from fencepost.logcore.config import MAX_INT64, LogConfig
from fencepost.logcore.machine import Record
from fencepost.logcore.partition import Partition

_SETTINGS_OF = {
    CONSUMER_OFFSETS: "offsets.topic",
    TRANSACTION_STATE: "transaction.state.log",
}
"""How the broker's settings for a coordinator's topic begin."""

PRODUCER_ID_BLOCK = 1000
"""Producer ids in one durable reservation, as in Kafka."""

METADATA_LOG_CONFIG = LogConfig(segment_bytes=16 << 20, retention_ms=-1, cleanup_policy=frozenset())
"""The log of changes is never cleaned by time or size; :meth:`MetadataLog.compact` cuts it."""

COMPACT_SLACK_RECORDS = 2_000
COMPACT_FACTOR = 4
"""A start rewrites the log when it holds more records than this many times the live ones, plus the
slack. So it replays in milliseconds."""

_RECORDS_PER_BATCH = 500

_HISTORY_SEGMENTS = 8
_MIN_SEGMENT_BYTES = 1 << 20

TRANSACTION_VERSION = "transaction.version"
GROUP_VERSION = "group.version"
METADATA_VERSION = "metadata.version"
KRAFT_VERSION = "kraft.version"
FEATURES: Mapping[str, tuple[int, int, int]] = {
    GROUP_VERSION: (0, 1, 1),
    KRAFT_VERSION: (0, 0, 0),
    METADATA_VERSION: (30, 30, 30),
    TRANSACTION_VERSION: (0, 2, 2),
}
"""Lowest and highest supported level of each feature, and the level until another one is finalized:
the consumer protocol (KIP-848), a quorum whose voters stay the same (KIP-853), the requests and
settings of Apache Kafka 4.3-IV0, by which tools tell what a broker can do (KIP-778), and
transactions with an epoch of their own (KIP-890). There is no other metadata.version: ours are not
the records whose form it is in Apache Kafka."""

GROUP_SCOPE = "group:"
"""Leads the name under which a group's own settings are kept."""

DEFAULT_SETTINGS = ""
"""The name under which the dynamic default of all brokers is kept."""


@dataclass(frozen=True, slots=True)
class MetadataLimits:
    """How many topics and partitions one broker takes."""

    max_topics: int = 10_000
    """Topics. Each takes about a kilobyte here and in every full Metadata answer."""

    max_configured_groups: int = 10_000
    """Groups with settings of their own. They outlive the group, so nothing else removes them."""

    max_partitions: int = 20_000
    """Partitions of all topics. Each that is in use takes some open files and 10 KiB of memory."""

    max_partitions_per_request: int = 10_000
    """Partitions that one CreateTopics or CreatePartitions may add, as in Kafka's controller."""


class MetadataLog:
    """The state, and the log behind it.

    ``partition`` is the open ``__cluster_metadata-0``; ``config`` hears of dynamic settings.
    Raises :class:`MetadataError` for a log it does not understand. A failed append raises
    :class:`fencepost.logcore.errors.LogError`, and nothing has changed.
    """

    def __init__(
        self,
        partition: Partition,
        config: BrokerConfig,
        clock: Clock,
        *,
        node_id: int,
        limits: MetadataLimits | None = None,
    ) -> None:
        self.partition = partition
        self.limits = MetadataLimits() if limits is None else limits
        self._config = config
        self._clock = clock
        self._node_id = node_id
        self._state = MetadataImage()
        self._records = 0
        self._forces = True
        self._listeners: list[Callable[[Topic], None]] = []
        self._table_listeners: dict[str, list[Callable[[], None]]] = {}
        self._load()

    def _load(self) -> None:
        for header, batch in self.partition.reader.read_all():
            if header.is_control:
                continue
            for record in decode_records(batch, 0, header):
                if record.key is not None:
                    self._apply(Record(record.key, record.value))
        for scope in self._state.settings:
            self._tell_config(scope)

    # --- looking ---------------------------------------------------------------------------------

    @property
    def topics(self) -> Mapping[str, Topic]:
        """All topics by name."""
        return self._state.topics

    @property
    def topic_changes(self) -> int:
        """Grows whenever a topic comes, goes or changes."""
        return self._state.topic_changes

    @property
    def starts(self) -> int:
        """How often this data directory has been started."""
        return self._state.starts

    def topic(self, name: str) -> Topic | None:
        """The topic of that name."""
        return self._state.topics.get(name)

    def topic_by_id(self, topic_id: uuid.UUID | None) -> Topic | None:
        """The topic of that id; None for the zero id, which kio reads as None."""
        return None if topic_id is None else self._state.by_id.get(topic_id)

    def colliding(self, name: str) -> str | None:
        """The topic whose name differs from ``name`` in ``.`` and ``_`` alone, or is the same."""
        return self._state.colliding(name)

    def leader_epoch(self, topic: Topic) -> int:
        """The leader epoch of the topic's partitions: it grows with every start of the broker.

        What a start finds cut off after a power loss was written in an earlier epoch, so consumers
        can tell.
        """
        return self._state.starts - topic.first_start

    def was_deleted(self, topic_id: uuid.UUID) -> bool:
        """Whether a topic of this id was deleted, as far as the log remembers."""
        return topic_id in self._state.deleted

    def settings(self, scope: str) -> Mapping[str, str]:
        """Dynamic broker settings of a node id, or of :data:`DEFAULT_SETTINGS`."""
        return self._state.settings.get(scope, {})

    @property
    def features(self) -> Mapping[str, tuple[int, int, int]]:
        """Lowest, highest supported and finalized level of each feature."""
        levels = self._state.levels
        return {
            name: (low, high, levels.get(name, default))
            for name, (low, high, default) in FEATURES.items()
        }

    @property
    def features_epoch(self) -> int:
        """How often a finalized level was changed; clients keep what came with the highest."""
        return self._state.features_epoch

    def feature_level(self, name: str) -> int:
        """The finalized level of a feature; 0 stands for off."""
        level = self._state.levels.get(name)
        return FEATURES[name][2] if level is None else level

    def listen(self, callback: Callable[[Topic], None]) -> None:
        """Have ``callback`` called with every topic whose settings or partitions changed."""
        self._listeners.append(callback)

    # --- changing --------------------------------------------------------------------------------

    def create_topic(self, name: str, partitions: int, configs: Mapping[str, str]) -> Topic:
        """Create a topic; the caller has checked name and settings.

        Raises TopicLimitExceededError.
        """
        self.check_room(1, partitions)
        topic = Topic(name, _new_topic_id(), partitions, dict(configs), self._state.starts)
        self._append([topic_record(topic)])
        return self._state.topics[name]

    def adopt_topic(self, topic: Topic) -> None:
        """Write down a topic that came with its directories; its name and id are free.

        Raises TopicLimitExceededError.
        """
        self.check_room(1, topic.partitions)
        self._append([topic_record(topic)])

    def check_room(self, topics: int, partitions: int) -> None:
        """Raise TopicLimitExceededError if that many more do not fit."""
        limits, state = self.limits, self._state
        if len(state.topics) + topics > limits.max_topics:
            raise TopicLimitExceededError(f"there may be {limits.max_topics} topics (max_topics)")
        if state.partitions + partitions > limits.max_partitions:
            raise TopicLimitExceededError(
                f"there may be {limits.max_partitions} partitions of all topics (max_partitions)"
            )

    def set_partitions(self, name: str, partitions: int) -> Topic:
        """Give a topic more partitions. Raises TopicLimitExceededError."""
        topic = self.known(name)
        self.check_room(0, partitions - topic.partitions)
        return self._replace(replace(topic, partitions=partitions))

    def set_topic_configs(self, name: str, configs: Mapping[str, str]) -> Topic:
        """Replace a topic's own settings; the caller has checked them."""
        return self._replace(replace(self.known(name), configs=dict(configs)))

    def delete_topic(self, name: str) -> Topic:
        """Remove a topic; its directories are the caller's to remove."""
        topic = self.known(name)
        self._append([topic_tombstone(name)])
        return topic

    def ensure_internal_topic(self, name: str) -> Topic:
        """The internal topic of that name, created with its fixed settings if it is not there.

        Source: ``AutoTopicCreationManager.creatableTopic``.
        """
        topic = self._state.topics.get(name)
        if topic is not None:
            return topic
        if name == HISTORY_TOPIC:
            return self.create_topic(name, 1, self._history_configs())
        partitions = self._config.int(f"{_SETTINGS_OF[name]}.num.partitions")
        return self.create_topic(name, partitions, self.internal_configs(name))

    def internal_configs(self, name: str) -> dict[str, str]:
        """The fixed settings of a coordinator's topic."""
        prefix = _SETTINGS_OF[name]
        configs = {
            "cleanup.policy": "compact",
            "segment.bytes": str(self._config.int(f"{prefix}.segment.bytes")),
        }
        if name == CONSUMER_OFFSETS:
            configs["compression.type"] = "producer"
        else:
            configs["compression.type"] = "uncompressed"
            configs["unclean.leader.election.enable"] = "false"
        return configs

    def _history_configs(self) -> dict[str, str]:
        """Segments small enough for the bounds to be kept to; never forced to disk by itself."""
        retention_bytes = self._config.int("fencepost.history.retention.bytes")
        retention_ms = self._config.int("fencepost.history.retention.ms")
        return {
            "cleanup.policy": "delete",
            "retention.bytes": str(retention_bytes),
            "retention.ms": str(retention_ms),
            "segment.bytes": str(max(_MIN_SEGMENT_BYTES, retention_bytes // _HISTORY_SEGMENTS)),
            "segment.ms": str(max(1, retention_ms // _HISTORY_SEGMENTS)),
            "flush.messages": str(MAX_INT64),
            "flush.ms": str(MAX_INT64),
        }

    def set_settings(self, scope: str, settings: Mapping[str, str]) -> None:
        """Replace the dynamic broker settings of a node id or of all; the caller checked them."""
        self._append([settings_record(scope, settings)])

    def group_settings(self, group_id: str) -> Mapping[str, str]:
        """A group's own settings."""
        return self.settings(GROUP_SCOPE + group_id)

    def configured_groups(self) -> list[str]:
        """The groups that have settings of their own."""
        return [
            scope.removeprefix(GROUP_SCOPE)
            for scope in self._state.settings
            if scope.startswith(GROUP_SCOPE)
        ]

    def set_group_settings(self, group_id: str, settings: Mapping[str, str]) -> None:
        """Replace a group's own settings; the caller has checked them.

        Raises TopicLimitExceededError for one group too many.
        """
        scope, limit = GROUP_SCOPE + group_id, self.limits.max_configured_groups
        groups = len(self.configured_groups())
        if settings and scope not in self._state.settings and groups >= limit:
            raise TopicLimitExceededError(f"{limit} groups have settings (max_configured_groups)")
        self.set_settings(scope, settings)

    def table(self, kind: str) -> Mapping[str, Mapping[str, Any]]:
        """The entries of one of ``records.TABLES`` by name."""
        return self._state.tables.get(kind, {})

    def change_table(self, kind: str, changes: Mapping[str, Mapping[str, Any] | None]) -> None:
        """Let entries of a table be as this says, None for gone; the caller has checked them."""
        self._append([table_record(kind, name, value) for name, value in changes.items()])
        for listener in self._table_listeners.get(kind, ()):
            listener()

    def change_table_in_steps(
        self, kind: str, changes: Mapping[str, Mapping[str, Any] | None]
    ) -> Generator[None, None, None]:
        """The same for many changes, which are made all at once behind the last step.

        It does not wait for the disk: whoever answers them does. Raises ``LogError``.
        """
        records = []
        for name, value in changes.items():
            records.append(table_record(kind, name, value))
            yield
        self.partition.append_records(records, now_ms=self._clock.now_ms())
        self._records += len(records)
        change_table(self._state, kind, changes)
        for listener in self._table_listeners.get(kind, ()):
            listener()

    def listen_to_table(self, kind: str, callback: Callable[[], None]) -> None:
        """Have ``callback`` called after every change of a table."""
        self._table_listeners.setdefault(kind, []).append(callback)

    def finalize_features(self, levels: Mapping[str, int]) -> None:
        """Give features other levels, all or none; the caller has checked them."""
        epoch = self._state.features_epoch + 1
        self._append([feature_record(name, level, epoch) for name, level in levels.items()])

    def allocate_producer_ids(self) -> tuple[int, int]:
        """Reserve a block of producer ids; returns its first id and its length."""
        first = self._state.next_producer_id
        self._append([producer_ids_record(first + PRODUCER_ID_BLOCK)])
        return first, PRODUCER_ID_BLOCK

    def reserve_producer_ids(self, below: int) -> None:
        """Never give out a producer id under ``below``: somebody else has."""
        if below > self._state.next_producer_id:
            self._append([producer_ids_record(below)])

    def count_start(self) -> int:
        """Note that the broker starts, which begins a new leader epoch everywhere."""
        self._append([starts_record(self._state.starts + 1)])
        return self._state.starts

    def compact(self) -> None:
        """Rewrite the log as its live records, if it has grown far beyond them.

        The new records go to the end, then the log start moves up to them. After a kill in between
        the next start replays old and new records, which gives the same state.
        """
        live = list(live_records(self._state))
        if self._records <= COMPACT_FACTOR * len(live) + COMPACT_SLACK_RECORDS:
            return
        begin = self.partition.log_end_offset
        for at in range(0, len(live), _RECORDS_PER_BATCH):
            self._append(live[at : at + _RECORDS_PER_BATCH])
        self.partition.cleanup.delete_records_before(begin)
        self._records = len(live)
        self._state.deleted.clear()

    def known(self, name: str) -> Topic:
        """The topic of that name; raises UnknownTopicOrPartitionError."""
        topic = self._state.topics.get(name)
        if topic is None:
            raise UnknownTopicOrPartitionError(f"there is no topic {name}")
        return topic

    def having(self, name: str, index: int) -> Topic:
        """The topic that has this partition; raises UnknownTopicOrPartitionError."""
        topic = self._state.topics.get(name)
        if topic is None or not 0 <= index < topic.partitions:
            # Not with the name: that may be long, and one request may ask 100,000 times.
            raise UnknownTopicOrPartitionError(f"there is no partition {index} of this topic")
        return topic

    def _replace(self, topic: Topic) -> Topic:
        self._append([topic_record(topic)])
        for listener in self._listeners:
            listener(topic)
        return topic

    @contextmanager
    def unforced(self) -> Iterator[None]:
        """Do not wait for the disk with each change made inside; :meth:`force` must follow.

        For one answer on many changes. Nothing may give way to others inside.
        """
        self._forces = False
        try:
            yield
        finally:
            self._forces = True

    def force(self) -> None:
        """Have all changes on disk. Raises ``LogError``: answer none then."""
        if self.partition.recovery_point < self.partition.log_end_offset:
            self.partition.flushes.run(self._clock.now_ms())

    def _append(self, records: list[Record]) -> None:
        self.partition.append_records(records, now_ms=self._clock.now_ms())
        if self._forces:
            self.partition.flushes.run(self._clock.now_ms())
        for record in records:
            self._apply(record)
            kind, name = unpack_key(record.key)
            if kind == SETTINGS:
                self._tell_config(name)

    def _apply(self, record: Record) -> None:
        self._records += 1
        apply(self._state, record)

    def _tell_config(self, scope: str) -> None:
        if scope == DEFAULT_SETTINGS:
            source = ConfigSource.DYNAMIC_DEFAULT_BROKER
        elif scope == str(self._node_id):
            source = ConfigSource.DYNAMIC_BROKER
        else:
            return
        self._config.set_dynamic(source, self.settings(scope))


def _new_topic_id() -> uuid.UUID:
    """A random id that does not look like an option of Kafka's tools when written in base64.

    Source: ``Uuid.randomUuid``, which avoids the reserved ids and a leading dash.
    """
    topic_id = uuid.uuid4()
    while topic_id.bytes[0] >> 2 == _BASE64_DASH:
        topic_id = uuid.uuid4()
    return topic_id


_BASE64_DASH = 62
