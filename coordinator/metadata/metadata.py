"""The broker's metadata cache, which holds one image at a time.

A standalone broker gets the images from its own log (``log.py``); a member of a cluster gets them
from the records that it fetches from the controller.

Source: ``MetadataCache``, ``KRaftMetadataCache``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final
from uuid import UUID

from fencepost.cluster.controller.activation import ELR_VERSION, METADATA_VERSION
from fencepost.cluster.image import (
    BROKER_RESOURCE,
    CLIENT_METRICS_RESOURCE,
    GROUP_RESOURCE,
    MetadataImage,
    TopicImage,
    racks_changed,
    topics_resized,
)
from fencepost.cluster.records import MetadataRecord
from fencepost.coordinator.config.broker_config import BrokerConfig, ConfigSource
from fencepost.coordinator.errors import UnknownTopicOrPartitionError
from fencepost.coordinator.metadata.names import (
    CONSUMER_OFFSETS,
    HISTORY_TOPIC,
    SHARE_GROUP_STATE,
    TRANSACTION_STATE,
)
from fencepost.coordinator.metadata.publication import Publication, Published, Subscriber
from fencepost.coordinator.runtime.background import swallow
from fencepost.logcore.config import MAX_INT64

TRANSACTION_VERSION: Final = "transaction.version"
GROUP_VERSION: Final = "group.version"
KRAFT_VERSION: Final = "kraft.version"
SHARE_VERSION: Final = "share.version"
STREAMS_VERSION: Final = "streams.version"
FEATURES: Final[Mapping[str, tuple[int, int, int]]] = {
    ELR_VERSION: (0, 1, 0),
    GROUP_VERSION: (0, 1, 1),
    KRAFT_VERSION: (0, 0, 0),
    METADATA_VERSION: (30, 33, 30),
    SHARE_VERSION: (0, 2, 1),
    STREAMS_VERSION: (0, 1, 0),
    TRANSACTION_VERSION: (0, 2, 2),
}
"""Lowest and highest supported level of each feature, and its level on a new standalone broker.

* Eligible leader replicas (KIP-966) are useful only with several brokers. A new cluster of several
  brokers enables them.
* The consumer group protocol (KIP-848) is enabled.
* The voters of the quorum are static (KIP-853).
* ``metadata.version`` ranges from 4.3-IV0 to 4.4-IV2 (KIP-778). A new cluster begins with the
  lowest level, at which brokers and controllers of Apache Kafka 4.3 can join. A cluster cannot
  return to that level from a higher one.
* Share groups (KIP-932) are enabled at the level that Apache Kafka 4.3 supports as well.
* Streams groups (KIP-1071) are not served, but brokers of Apache Kafka in the same cluster may
  serve them, and a broker that has left such a cluster keeps its levels.
* Every transaction ends with a new producer epoch (KIP-890).
"""

DEFAULT_SETTINGS: Final = ""
"""The resource name of the dynamic default of all brokers."""

SETTINGS_OF: Final = {
    CONSUMER_OFFSETS: "offsets.topic",
    TRANSACTION_STATE: "transaction.state.log",
    SHARE_GROUP_STATE: "share.coordinator.state.topic",
}
"""The prefix of the broker's settings for a coordinator's topic."""

_HISTORY_SEGMENTS: Final = 8
_MIN_SEGMENT_BYTES: Final = 1 << 20

InternalTopic = Callable[[str], TopicImage]
"""Returns an internal topic, and creates it if this process is the controller. Raises a DomainError
if it cannot be created, or must be created by another controller."""


class Metadata:
    """The metadata cache, ``services.metadata``; passes dynamic settings on to ``config``."""

    def __init__(self, config: BrokerConfig, *, node_id: int) -> None:
        self._config = config
        self._node_id = node_id
        self._publication = Publication()
        self.image = MetadataImage()
        """The latest image; only :meth:`install` replaces it."""
        self.topic_changes = 0
        """Grows when a topic is created, deleted, or gets more partitions or replicas on other
        racks."""

    def install(self, image: MetadataImage) -> None:
        """Make this the latest image, and publish it."""
        old, self.image = self.image, image
        self.topic_changes += topics_resized(old, image) or racks_changed(old, image)
        self._configure_broker(old, image)
        self._publication.publish(old, image)

    def _configure_broker(self, old: MetadataImage, image: MetadataImage) -> None:
        for name, source in (
            (DEFAULT_SETTINGS, ConfigSource.DYNAMIC_DEFAULT_BROKER),
            (str(self._node_id), ConfigSource.DYNAMIC_BROKER),
        ):
            resource = BROKER_RESOURCE, name
            if old.configs.get(resource) is not image.configs.get(resource):
                # The image is installed, so no failure may keep a subscriber from seeing it.
                with swallow("take over dynamic settings", of=name or "all brokers"):
                    self._config.set_dynamic(source, self.plain_settings(name))

    def subscribe(self, subscriber: Subscriber, publish: Published) -> None:
        """Have ``publish`` called with each new image, in the subscriber's order."""
        self._publication.subscribe(subscriber, publish)

    # --- topics ---

    @property
    def topics(self) -> Mapping[str, TopicImage]:
        """All topics by name."""
        return self.image.topics

    def topic(self, name: str) -> TopicImage | None:
        """Return the topic with this name; None if there is none."""
        return self.image.topics.get(name)

    def topic_by_id(self, topic_id: UUID | None) -> TopicImage | None:
        """Return the topic with this id; None for the zero id, which kio decodes as None."""
        return None if topic_id is None else self.image.topics_by_id.get(topic_id)

    def known(self, name: str) -> TopicImage:
        """Return the topic with this name. Raises UnknownTopicOrPartitionError."""
        topic = self.image.topics.get(name)
        if topic is None:
            raise UnknownTopicOrPartitionError(f"there is no topic {name}")
        return topic

    def having(self, name: str, index: int) -> TopicImage:
        """Return the topic if it has this partition. Raises UnknownTopicOrPartitionError."""
        topic = self.image.topics.get(name)
        if topic is None or not 0 <= index < len(topic.partitions):
            # The error omits the name, which may be long: one request may name 100,000 partitions.
            raise UnknownTopicOrPartitionError(f"there is no partition {index} of this topic")
        return topic

    def hosts(self, topic: TopicImage, index: int) -> bool:
        """Return whether this broker is one of the partition's replicas."""
        return self._node_id in topic.partitions[index].replicas

    def colliding(self, name: str) -> str | None:
        """Return the topic whose name is equal to ``name``, or differs only in ``.`` and ``_``."""
        return self.image.colliding(name)

    def topic_configs(self, name: str) -> Mapping[str, str]:
        """Return a topic's own settings."""
        return self.image.topic_configs(name)

    def history_configs(self) -> dict[str, str]:
        """Return the settings of the history topic: small segments, for precise retention."""
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

    def internal_configs(self, name: str) -> dict[str, str]:
        """Return the fixed settings of an internal topic."""
        if name == HISTORY_TOPIC:
            return self.history_configs()
        prefix = SETTINGS_OF[name]
        configs = {
            "cleanup.policy": "compact",
            "compression.type": "producer",
            "segment.bytes": str(self._config.int(f"{prefix}.segment.bytes")),
        }
        if name != CONSUMER_OFFSETS:
            configs["min.insync.replicas"] = str(self._config.int(f"{prefix}.min.isr"))
        if name == TRANSACTION_STATE:
            configs["compression.type"] = "uncompressed"
            configs["unclean.leader.election.enable"] = "false"
        if name == SHARE_GROUP_STATE:
            # A share update adds to earlier records of the same key, so compaction would lose
            # state. The coordinator prunes the log.
            configs |= {"cleanup.policy": "delete", "retention.ms": "-1"}
        return configs

    def reason_against(self, _record: MetadataRecord) -> str | None:
        """Return why a valid change cannot be stored; None if it can."""
        return None

    def was_deleted(self, _topic_id: UUID) -> bool:
        """Return whether a topic with this id is known to have been deleted."""
        return False

    # --- settings ---

    def settings(self, name: str) -> Mapping[str, str]:
        """Return the dynamic settings of a node id, or of :data:`DEFAULT_SETTINGS`."""
        return self.image.configs.get((BROKER_RESOURCE, name), {})

    def plain_settings(self, name: str) -> Mapping[str, str]:
        """Return the dynamic settings with passwords decrypted, if they are stored encrypted."""
        return self.with_plain_passwords(name, self.settings(name))

    def with_plain_passwords(self, _name: str, settings: Mapping[str, str]) -> Mapping[str, str]:
        """Return a broker's ``settings`` with passwords decrypted."""
        return settings

    def group_settings(self, group_id: str) -> Mapping[str, str]:
        """Return a group's own settings."""
        return self.image.configs.get((GROUP_RESOURCE, group_id), {})

    def client_metrics_settings(self, subscription: str) -> Mapping[str, str]:
        """Return the settings of a client metrics subscription."""
        return self.image.configs.get((CLIENT_METRICS_RESOURCE, subscription), {})

    def configured(self, resource_type: int) -> list[str]:
        """Return the names of the resources of a type that have settings of their own."""
        return [name for kind, name in self.image.configs if kind == resource_type]

    # --- features ---

    @property
    def features(self) -> Mapping[str, tuple[int, int, int]]:
        """Lowest supported, highest supported and finalized level of each feature."""
        return {
            name: (low, high, self.feature_level(name)) for name, (low, high, _) in FEATURES.items()
        }

    @property
    def features_epoch(self) -> int:
        """The epoch of the features; it grows with every change of a finalized level."""
        return self.image.offset

    def feature_level(self, name: str) -> int:
        """Return the finalized level of a feature; 0 if it is disabled."""
        return self.image.features.get(name, 0)
